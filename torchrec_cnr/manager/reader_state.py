"""The data loader state: the position of a data loader after the last batch that was trained.

A training pipeline holds batches that it has taken from the loader and not trained yet. If a job resumed after them, it
would never train them. If it resumed too early, it would train some batches twice. So ``ReaderState`` records the
loader's position with every batch, and saves the position of the last batch whose training was reported.

Each rank has its own loader. Its position is in the checkpoint under a name that contains the rank and the number of
ranks. It is stored as bytes: DCP would otherwise match it to the structure of the state that the loader has before the
load, which may be different.
"""

import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
_MAX_IN_FLIGHT = 64  # batches; no pipeline holds more, so the caller does not report which batches are trained


@runtime_checkable
class StatefulLoader(Protocol):
    """A data loader that can save and load its position, such as torchdata's ``StatefulDataLoader``."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> Mapping[str, Any]:
        """Return the position after the last batch that the loader returned."""
        ...

    def load_state_dict(self, state_dict: Any) -> None:
        """Let the next iteration begin at this position."""
        ...


class _Counted(Generic[Batch]):
    """A loader for iterables without a position. It counts the batches of the current pass."""

    def __init__(self, batches: Iterable[Batch] | Callable[[int], Iterable[Batch]]) -> None:
        self._batches = batches
        self._num_batches = 0
        self._first = 0

    def __iter__(self) -> Iterator[Batch]:
        self._num_batches, self._first = self._first, 0
        if callable(self._batches):
            batches = iter(self._batches(self._num_batches))
        else:
            batches = islice(iter(self._batches), self._num_batches, None)
        for batch in batches:
            self._num_batches += 1
            yield batch
        self._num_batches = 0

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # without a length: TypeError

    def state_dict(self) -> Mapping[str, int]:
        return {"num_batches": self._num_batches}

    def load_state_dict(self, state_dict: object) -> None:
        match state_dict:
            case {"num_batches": int(num_batches)} if 0 <= num_batches <= _MAX_POSITION:
                self._first = self._num_batches = num_batches
            case _:
                raise StateMismatchError(
                    "the data loader state is not a number of batches, so another kind of loader saved it; pass "
                    "ReaderState a loader of that kind"
                )


@dataclass(frozen=True)
class _Position:
    """A position in a training.

    Attributes:
        num_passes: Number of passes before this one.
        of_loader: The loader's state.
    """

    num_passes: int
    of_loader: Any

    def saved(self) -> bytes:
        """Return the position as bytes."""
        stream = io.BytesIO()
        torch.save({"num_passes": self.num_passes, "loader": self.of_loader}, stream)
        return stream.getvalue()

    @classmethod
    def read(cls, saved: object) -> "_Position":
        """Read a position.

        Raises:
            DamagedError: It is none.
        """
        if not isinstance(saved, bytes):
            raise DamagedError(
                f"the data loader state must be bytes (got {type(saved).__name__}); use another checkpoint"
            )
        match unpickled(saved, "the data loader state"):
            case {"num_passes": int(num_passes), "loader": of_loader} if 0 <= num_passes <= _MAX_POSITION:
                return cls(num_passes, of_loader)
        raise DamagedError("the data loader state has no number of passes; use another checkpoint")


class Pipeline(Protocol[OutputCo]):
    """An object that trains the next batch of an iterator, such as TorchRec's train pipelines."""

    def progress(self, dataloader_iter: Iterator[Any]) -> OutputCo:
        """Train a batch; raise ``StopIteration`` if none is left."""
        ...


class ReaderState(Generic[Batch]):
    """The position of this rank's data loader, as a ``Stateful`` to save together with the model.

    Iterate over this object instead of the loader, and report every trained batch with :meth:`trained`. Or let
    :meth:`train` do both. The saved position is that after the last trained batch, even if a pipeline has taken more.

    Args:
        loader: A loader with ``state_dict`` and ``load_state_dict``. Or a function that returns the batches that
            follow the first ``n`` batches of a pass. Or any iterable: after a load, its first batches are skipped.
        reshard: Makes the loader state of a rank from the states of all ranks that saved. It is called with their
            states, this rank, and the current number of ranks. By default, a checkpoint that was saved by another
            number of ranks is refused.

    Raises:
        ConfigurationError: While iterating, if many batches were returned and none was reported as trained, or if a
            position was loaded after the iteration began.
        StateMismatchError: While loading, if another number of ranks saved the checkpoint and there is no ``reshard``.

    Examples:
        >>> reader = cnr.ReaderState(["batch 1", "batch 2", "batch 3"])
        >>> first = next(iter(reader))
        >>> reader.trained()
        >>> resumed = cnr.ReaderState(["batch 1", "batch 2", "batch 3"])
        >>> resumed.load_state_dict(reader.state_dict())
        >>> list(resumed)
        ['batch 2', 'batch 3']
    """

    def __init__(
        self,
        loader: StatefulLoader | Callable[[int], Iterable[Batch]] | Iterable[Batch],
        *,
        reshard: Callable[[Sequence[Any], int, int], Any] | None = None,
    ) -> None:
        self._loader: Any = loader if isinstance(loader, StatefulLoader) else _Counted(loader)
        self._reshard = reshard
        self._ahead: deque[_Position] = deque()
        self._trained: _Position | None = None
        self._num_passes = 0
        self._passing: Iterator[Batch] | None = None
        self._num_loads = 0

    @property
    def num_in_flight(self) -> int:
        """Number of batches that were returned and are not trained yet."""
        return len(self._ahead)

    @property
    def num_passes(self) -> int:
        """Number of passes that have ended, also before a load: ``for epoch in range(reader.num_passes, num_epochs)``.

        After a load of the position at the end of a pass, that pass begins again, and has no more batches.
        """
        return self._num_passes

    def __repr__(self) -> str:
        return f"ReaderState(batches in flight: {self.num_in_flight})"

    def __len__(self) -> int:
        """Return the number of batches of a whole pass; raise ``TypeError`` if the loader has no length."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        if self._trained is None:
            self._trained = self._position()
        num_loads = self._num_loads
        for batch in self._loader:
            if len(self._ahead) >= _MAX_IN_FLIGHT:
                raise ConfigurationError(
                    f"{_MAX_IN_FLIGHT} batches were returned, and none was reported as trained; call trained() after "
                    "each step, or iterate over train(pipeline)"
                )
            self._ahead.append(self._position())
            yield batch
            self._check_loads(num_loads)
        self._num_passes += 1

    def quota(self, num_batches: int) -> Iterator[Batch]:
        """Yield at most the next ``num_batches`` batches, so that a pipeline holds none once these are trained.

        Check-N-Run's reader works like this for each checkpoint interval (section 4). The next quota continues after
        this one; ``TrainPipelineBase`` needs a ``reset()`` before it. A quota with fewer batches, or none, is the last
        of its pass, and the next quota begins another pass. After a load, it begins at the loaded position.
        """
        if num_batches < 1:
            raise ConfigurationError(f"'num_batches' must be at least 1 (got {num_batches})")
        if self._passing is None:
            self._passing = iter(self)
        batches = self._passing
        for _ in range(num_batches):
            try:
                batch = next(batches)
            except StopIteration:
                if self._passing is batches:
                    self._passing = None
                return
            yield batch

    def trained(self, num_batches: int = 1) -> None:
        """Record that the next ``num_batches`` batches, in the order in which they were returned, were trained.

        Raises:
            ConfigurationError: Fewer batches were returned.
        """
        if not 0 <= num_batches <= len(self._ahead):
            raise ConfigurationError(
                f"{num_batches} batches cannot have been trained: {len(self._ahead)} were returned since the last "
                "report"
            )
        for _ in range(num_batches):
            self._trained = self._ahead.popleft()

    def train(self, pipeline: Pipeline[Output]) -> Iterator[Output]:
        """Train all batches of a pass with a pipeline, and report each. Yield the output of each step.

        The output of a ``StagedTrainPipeline`` is a batch that the caller trains. Save after that, before the next one.
        """
        batches, num_loads = iter(self), self._num_loads
        while True:
            self._check_loads(num_loads)  # a pipeline may hold batches that it took before the load
            try:
                output = pipeline.progress(batches)
            except StopIteration:
                return
            if output is None and not self._ahead:  # how StagedTrainPipeline says that none is left
                return
            self.trained()
            yield output

    def state_dict(self) -> dict[str, bytes]:
        """Return the position of this rank after the last trained batch."""
        position = self._position() if self._trained is None else self._trained
        return {ranked_name(*own_place()): position.saved()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue after the last batch that was trained when this state was saved.

        Raises:
            StateMismatchError: Another number of ranks saved it, and there is no ``reshard``. Or another kind of loader
                saved it.
            DamagedError: It is not a saved position.
        """
        rank, world_size = own_place()
        saved_state = state_dict[ranked_name(rank, world_size)]
        if not isinstance(saved_state, list):
            position = _Position.read(saved_state)
        elif self._reshard is None:
            raise StateMismatchError(
                f"the data loader state was saved by {len(saved_state)} ranks, and there are {world_size} now; pass "
                "ReaderState a 'reshard' that divides it, or load with as many ranks"
            )
        else:
            positions = [_Position.read(saved_position) for saved_position in saved_state]
            of_loader = self._reshard([position.of_loader for position in positions], rank, world_size)
            position = _Position(min(position.num_passes for position in positions), of_loader)
        self._loader.load_state_dict(position.of_loader)
        self._passing = None
        self._ahead.clear()
        self._trained, self._num_passes = position, position.num_passes
        self._num_loads += 1

    def _position(self) -> _Position:
        """Return the position after the last batch that was returned."""
        return _Position(self._num_passes, self._loader.state_dict())

    def _check_loads(self, num_loads: int) -> None:
        if self._num_loads != num_loads:
            raise ConfigurationError(
                "a position was loaded after this iteration began, so its next batch would not follow that position; "
                "leave the loop after a load and iterate again, with a pipeline that holds no earlier batches"
            )


def own_place() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
