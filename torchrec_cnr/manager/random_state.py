"""The state of the random number generators, so that a resumed job draws the numbers that it would have drawn.

Dropout, negative sampling and shuffling draw from them. Each rank has its own generators. Their states are in the
checkpoint under a name that contains the rank and the number of ranks, as bytes, like the data loader state.
"""

import io
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch

from torchrec_cnr.arguments import check_choice
from torchrec_cnr.errors import DamagedError, StateMismatchError
from torchrec_cnr.format.safe_pickle import unpickled
from torchrec_cnr.loading.fitting import ranked_name
from torchrec_cnr.manager.reader_state import own_place

logger = logging.getLogger(__name__)

OtherWorldSize = Literal["refuse", "keep"]
_WHERE = "the state of random number generators"


@dataclass(frozen=True)
class RandomState:
    """The global random number generators of this rank, as a ``Stateful`` to save together with the model.

    These are the generators of Python's ``random``, of numpy's legacy functions (``numpy.random.rand``), of PyTorch on
    CPUs, and of PyTorch on this process's current GPU if it has used one. Generators that a program makes itself, such
    as ``numpy.random.default_rng()``, are not included.

    Attributes:
        other_world_size: What a load does if another number of ranks has saved the checkpoint, so that the streams of
            numbers cannot go on: "refuse" it, or "keep" the generators as they are, with a warning. Then seed them
            by rank and step.

    Raises:
        ConfigurationError: ``other_world_size`` is neither.
        StateMismatchError: While loading, if another number of ranks saved the checkpoint.
        DamagedError: While loading, if the saved object is not the state of generators.

    Examples:
        >>> randomness = cnr.RandomState()
        >>> saved = randomness.state_dict()
        >>> first = torch.rand(1)
        >>> randomness.load_state_dict(saved)
        >>> bool(first == torch.rand(1))
        True
    """

    other_world_size: OtherWorldSize = "refuse"

    def __post_init__(self) -> None:
        check_choice("other_world_size", self.other_world_size, get_args(OtherWorldSize))

    def state_dict(self) -> dict[str, bytes]:
        """Return the states of this rank's generators."""
        name, numbers, position, has_normal, normal = np.random.get_state(legacy=True)
        state = {
            "python": random.getstate(),
            "numpy": [name, torch.from_numpy(np.asarray(numbers).astype(np.int64)), position, has_normal, normal],
            "torch": torch.get_rng_state(),
        }
        if _uses_gpu():
            state["cuda"] = torch.cuda.get_rng_state()
        stream = io.BytesIO()
        torch.save(state, stream)
        return {ranked_name(*own_place()): stream.getvalue()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the generators of this rank go on as they would have when the state was saved.

        Raises:
            StateMismatchError: Another number of ranks saved it, and ``other_world_size`` is "refuse".
            DamagedError: It is not the state of generators.
        """
        rank, world_size = own_place()
        saved_state = state_dict[ranked_name(rank, world_size)]
        if isinstance(saved_state, list):
            self._meet_other_world_size(len(saved_state), world_size)
        elif isinstance(saved_state, bytes):
            _apply(unpickled(saved_state, _WHERE))
        else:
            raise DamagedError(f"{_WHERE} must be bytes (got {type(saved_state).__name__}); use another checkpoint")

    def _meet_other_world_size(self, saved: int, now: int) -> None:
        what = f"{_WHERE} was saved by {saved} ranks, and there are {now} now, so their streams of numbers cannot go on"
        if self.other_world_size == "refuse":
            raise StateMismatchError(
                f'{what}: load with as many ranks, or pass RandomState(other_world_size="keep") and seed them by rank '
                "and step"
            )
        logger.warning("%s: they stay as they are", what)


def _uses_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _apply(state: Any) -> None:
    """Set all generators, or none if the state does not fit one of them."""
    before = random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state()
    try:
        name, numbers, *rest = state["numpy"]
        random.setstate(state["python"])
        np.random.set_state((name, numbers.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(state["torch"])
        if "cuda" in state and _uses_gpu():
            torch.cuda.set_rng_state(state["cuda"])
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        raise DamagedError(f"{_WHERE} cannot be set: {error}; use another checkpoint") from error
