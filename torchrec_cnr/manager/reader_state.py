"""Reader state: where a data reader stands, counted in batches that were trained rather than handed out.

A pipeline holds batches that it has taken and not trained yet. A job that resumed behind them would never train them;
one that resumed at an older place would train some twice. So a position is remembered with every batch that is handed
out, and the one that counts is that of the last batch whose training was reported.

Each rank has a reader of its own, and its position lies in the checkpoint under a name of its own, with the number of
ranks in it. It is stored as bytes, because a reader may have other things to say when it is asked before a load.
"""

import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist

from torchrec_cnr.errors import ConfigurationError, DamagedError, StateMismatchError
from torchrec_cnr.format.safe_pickle import unpickled
from torchrec_cnr.loading.fitting import ranked_name

Batch = TypeVar("Batch")
Output = TypeVar("Output")
OutputCo = TypeVar("OutputCo", covariant=True)

_MAX_POSITION = 2**62  # passes, or batches
_MAX_IN_FLIGHT = 64  # of a pipeline's batches; more were handed out because nobody reported that they are trained


@runtime_checkable
class StatefulLoader(Protocol):
    """A loader that knows its position, such as torchdata's ``StatefulDataLoader``."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> Mapping[str, Any]:
        """Its position, after the batch that it handed out last."""
        ...

    def load_state_dict(self, state_dict: Any) -> None:
        """Its next pass begins there."""
        ...


class _Counted(Generic[Batch]):
    """A position for readers that have none: how many batches of which pass were handed out."""

    def __init__(self, batches: Iterable[Batch] | Callable[[int], Iterable[Batch]]) -> None:
        self._batches = batches
        self._num_passes = 0
        self._num_batches = 0
        self._first = 0

    def __iter__(self) -> Iterator[Batch]:
        self._num_batches, self._first = self._first, 0
        if callable(self._batches):
            found = iter(self._batches(self._num_batches))
        else:
            found = islice(iter(self._batches), self._num_batches, None)
        for batch in found:
            self._num_batches += 1
            yield batch
        self._num_passes, self._num_batches = self._num_passes + 1, 0

    def state_dict(self) -> Mapping[str, int]:
        return {"num_passes": self._num_passes, "num_batches": self._num_batches}

    def load_state_dict(self, state_dict: object) -> None:
        match state_dict:
            case {"num_passes": int(passes), "num_batches": int(batches)} if _may_be(passes) and _may_be(batches):
                self._num_passes, self._first, self._num_batches = passes, batches, batches
            case _:
                raise StateMismatchError(
                    "the position of a reader does not count passes and batches, so that another kind of loader saved "
                    "it; pass ReaderState a loader of that kind"
                )


def _may_be(position: int) -> bool:
    return 0 <= position <= _MAX_POSITION


class Pipeline(Protocol[OutputCo]):
    """What trains the next batch of an iterator, as TorchRec's train pipelines do."""

    def progress(self, dataloader_iter: Iterator[Any]) -> OutputCo:
        """Train a batch; raises StopIteration when none is left."""
        ...


class ReaderState(Generic[Batch]):
    """The position of this rank's data reader; a ``Stateful`` to be saved with the model.

    Iterate over it in the reader's place, and report every batch that was trained, or let :meth:`train` do both. Saved
    then is the position behind the last batch trained, whatever a pipeline has taken beyond it.

    Args:
        loader: A loader with ``state_dict`` and ``load_state_dict``; or a function that returns the batches from a
            position on, counted in batches; or any iterable, whose batches up to the position are skipped after a load.
        reshard: Makes the state of a rank's reader from those of all ranks that saved: called with their states, this
            rank, and how many ranks there are now. By default, a checkpoint of another number of ranks is refused.

    Raises:
        ConfigurationError: While iterating, if batches are handed out and none is reported as trained, or if a position
            was loaded since the iteration began.
        StateMismatchError: While loading, if the checkpoint is of another number of ranks and ``reshard`` is missing.
    """

    def __init__(
        self,
        loader: StatefulLoader | Callable[[int], Iterable[Batch]] | Iterable[Batch],
        *,
        reshard: Callable[[Sequence[Any], int, int], Any] | None = None,
    ) -> None:
        self._loader: Any = loader if isinstance(loader, StatefulLoader) else _Counted(loader)
        self._reshard = reshard
        self._ahead: deque[Any] = deque()
        self._trained: Any = None
        self._passing: Iterator[Batch] | None = None
        self._num_loads = 0

    @property
    def num_in_flight(self) -> int:
        """Batches that were handed out and not trained yet."""
        return len(self._ahead)

    def __repr__(self) -> str:
        return f"ReaderState(batches in flight: {self.num_in_flight})"

    def __iter__(self) -> Iterator[Batch]:
        if self._trained is None:
            self._trained = self._loader.state_dict()
        num_loads = self._num_loads
        for batch in self._loader:
            if len(self._ahead) >= _MAX_IN_FLIGHT:
                raise ConfigurationError(
                    f"{_MAX_IN_FLIGHT} batches were handed out, and none was reported as trained: call trained() after "
                    "each step, or iterate over train(pipeline)"
                )
            self._ahead.append(self._loader.state_dict())
            yield batch
            self._check_loads(num_loads)

    def quota(self, num_batches: int) -> Iterator[Batch]:
        """The next batches, and no more of them, so that a pipeline has none left in flight when they are trained.

        This is how Check-N-Run's reader works for a checkpoint interval (section 4). The next quota goes on behind
        this one; before it, ``TrainPipelineBase`` wants a ``reset()``. A quota with fewer batches, or none, is the last
        of its pass, and the next quota begins another pass. After a load, the next quota begins where the load says.
        """
        if num_batches < 1:
            raise ConfigurationError(f"'num_batches' must be at least 1 (got {num_batches})")
        if self._passing is None:
            self._passing = iter(self)
        passing = self._passing
        for _ in range(num_batches):
            try:
                batch = next(passing)
            except StopIteration:
                if self._passing is passing:
                    self._passing = None
                return
            yield batch

    def trained(self, num_batches: int = 1) -> None:
        """So many batches more were trained, in the order in which they were handed out.

        Raises:
            ConfigurationError: They were not handed out.
        """
        if not 0 <= num_batches <= len(self._ahead):
            raise ConfigurationError(
                f"{num_batches} batches cannot have been trained: {len(self._ahead)} were handed out since the last"
            )
        for _ in range(num_batches):
            self._trained = self._ahead.popleft()

    def train(self, pipeline: Pipeline[Output]) -> Iterator[Output]:
        """Train all batches of a pass with a pipeline: what each step returns, once it is done and reported."""
        batches, num_loads = iter(self), self._num_loads
        while True:
            self._check_loads(num_loads)  # a pipeline may hold batches that it took before the load
            try:
                output = pipeline.progress(batches)
            except StopIteration:
                return
            self.trained()
            yield output

    def state_dict(self) -> dict[str, bytes]:
        """This rank's position, behind the last batch trained."""
        stream = io.BytesIO()
        torch.save(self._loader.state_dict() if self._trained is None else self._trained, stream)
        return {ranked_name(*_own_place()): stream.getvalue()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on behind the last batch that had been trained when this was saved.

        Raises:
            StateMismatchError: It was saved by another number of ranks, and there is no ``reshard``; or by another kind
                of loader.
            DamagedError: It is no position that was saved.
        """
        rank, world_size = _own_place()
        saved = state_dict[ranked_name(rank, world_size)]
        if isinstance(saved, bytes):
            state = unpickled(saved, "the position of a reader")
        elif not isinstance(saved, list):
            raise DamagedError(
                f"the position of a reader is no bytes, but {type(saved).__name__}; use another checkpoint"
            )
        elif self._reshard is None:
            raise StateMismatchError(
                f"positions of readers were saved by {len(saved)} ranks, and there are {world_size} now: pass "
                "ReaderState a 'reshard' that divides them, or load with as many ranks"
            )
        else:
            positions = [unpickled(position, "the position of a reader") for position in saved]
            state = self._reshard(positions, rank, world_size)
        self._loader.load_state_dict(state)
        self._passing = None
        self._ahead.clear()
        self._trained = state
        self._num_loads += 1

    def _check_loads(self, num_loads: int) -> None:
        if self._num_loads != num_loads:
            raise ConfigurationError(
                "a position was loaded after this iteration began, so its next batch would not follow that position: "
                "leave the loop after a load and iterate again, with a pipeline that holds no earlier batches"
            )


def _own_place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
