"""The ranks of a run: groups of their own for saves and for decisions, and the name of a rank that is missing."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torchrec_cnr.errors import CNRError, SaveError
from torchrec_cnr.pulse import Pulse
from torchrec_cnr.restoring import shared


class RunRanks:
    """All ranks of the default group, or this process alone; all ranks make theirs alike.

    Saves in the background must not meet collectives of training, on one group, nor decisions that are made meanwhile.

    Args:
        timeout_secs: How long a rank waits for the others.

    Attributes:
        rank: This one.
        group: For saves and loads; None where there is one process.
    """

    def __init__(self, timeout_secs: float) -> None:
        self.rank = 0
        self.group: dist.ProcessGroup | None = None
        self._deciding: dist.ProcessGroup | None = None
        self._pulse: Pulse | None = None
        if dist.is_initialized():
            timeout = timedelta(seconds=timeout_secs)
            self.rank = dist.get_rank()
            self.group = dist.new_group(backend="gloo", timeout=timeout)
            self._deciding = dist.new_group(backend="gloo", timeout=timeout)
            self._pulse = Pulse.of_world()

    def decide(self, value: Any) -> Any:
        """What rank 0 has, on all ranks."""
        return shared(value, self._deciding)

    def any(self, is_so: bool) -> bool:
        """Whether it is so on any rank."""
        if self._deciding is None:
            return is_so
        found: list[Any] = [None] * dist.get_world_size(self._deciding)
        dist.all_gather_object(found, is_so, group=self._deciding)
        return any(found)

    def explained(self, error: BaseException) -> BaseException:
        """An error of a save; one that came from a collective names the ranks that are missing, if any are."""
        if self._pulse is None or isinstance(error, CNRError | CheckpointException):
            return error
        missing = self._pulse.missing()
        if not missing:
            return error
        ranks = f"rank {missing[0]} does" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} do"
        return SaveError(
            f"{ranks} not answer: killed, stopped, or cut off. Whether the save was committed, its manifest tells; "
            "start the job again, and restore the newest checkpoint"
        )

    def close(self) -> None:
        """This rank leaves."""
        if self._pulse is not None:
            self._pulse.close()
