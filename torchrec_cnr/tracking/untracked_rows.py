"""The check that every modified row is marked: unmarked rows must be bit for bit unchanged since the last snapshot."""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from torchrec_cnr.errors import UntrackedRowsError
from torchrec_cnr.tracking.row_digests import digest_rows
from torchrec_cnr.tracking.tracked_tables import TrackedShard

_NUM_NAMED = 10  # rows of a tensor that a message names


@dataclass(frozen=True, eq=False)
class _Reference:
    """The rows of one tensor at the last snapshot.

    Attributes:
        tensor: The tensor.
        kind: Its shape and dtype.
        digests: int64 [num_rows], on the device of the marks.
    """

    tensor: ReferenceType[Tensor]
    kind: tuple[torch.Size, torch.dtype]
    digests: Tensor

    @classmethod
    def of(cls, tensor: Tensor, device: torch.device) -> "_Reference":
        """Return a reference to the present rows of a tensor."""
        digests = torch.empty(len(tensor), dtype=torch.int64, device=device)
        for rows, block in digest_rows(tensor):
            digests[rows] = block
        return cls(ref(tensor), _kind(tensor), digests)

    def update(self, tensor: Tensor, marked: Tensor) -> tuple[int, list[int]]:
        """Replace the digests of marked rows. Return how many others have changed, and the first numbers of these.

        The digests of these others are kept.
        """
        num_rows = 0
        first_rows: list[int] = []
        for rows, block in digest_rows(tensor):
            old_digests, new_digests = self.digests[rows], block.to(marked.device)
            is_untracked = (old_digests != new_digests) & ~marked[rows]
            num_found = int(is_untracked.count_nonzero())
            if num_found and len(first_rows) < _NUM_NAMED:
                untracked = is_untracked.nonzero().squeeze(1)[: _NUM_NAMED - len(first_rows)]
                first_rows += (untracked + rows.start).tolist()
            num_rows += num_found
            self.digests[rows] = torch.where(is_untracked, old_digests, new_digests)
        return num_rows, first_rows


class ReferenceDigests:
    """Digests of the rows of all shards on this rank at the last snapshot, 8 bytes per row and tensor.

    The tensors are the weights, and all row-shaped optimizer state. State that did not exist at the last snapshot,
    because the optimizer has made or replaced it since, is not compared: it is stored whole.
    """

    def __init__(self, shards: Sequence[TrackedShard]) -> None:
        self._shards = tuple(shards)
        self._references: list[list[_Reference]] = [[] for _ in self._shards]

    def drop(self) -> None:
        """Drop all digests, because the tables are overwritten: the next check compares nothing."""
        self._references = [[] for _ in self._shards]

    def take(self) -> None:
        """Replace all digests by those of the present rows."""
        self.drop()
        self.check()

    def check(self) -> None:
        """Compare the unmarked rows with the last snapshot. If they are unchanged, this is the new last snapshot.

        One pass over the tables does both, so digests of marked rows are replaced even if the check then fails. These
        rows stay marked. So they are not compared until a check that passes has replaced their digests again.

        Raises:
            UntrackedRowsError: Unmarked rows have changed.
        """
        references: list[list[_Reference]] = []
        complaints: list[str] = []
        for shard, last_references in zip(self._shards, self._references, strict=True):
            tensors = shard.tensors()
            references.append([])
            for number, tensor in enumerate(tensors):
                reference = _find(last_references, shard, number, tensor)
                if reference is None:
                    reference = _Reference.of(tensor, shard.rows.marked.device)
                else:
                    num_rows, first_rows = reference.update(tensor, shard.rows.marked)
                    if num_rows:
                        complaints.append(_complaint(shard, num_rows, first_rows, _part(number, len(tensors) - 1)))
                references[-1].append(reference)
        if complaints:
            raise UntrackedRowsError(
                "rows have changed since the last save without being marked, and a delta would lack them: "
                f"{'; '.join(complaints)}; nothing was saved and no mark was lost: call tracker.mark(table, rows) or "
                "tracker.mark_all(table), then save again"
            )
        self._references = references


def _find(last_references: Sequence[_Reference], shard: TrackedShard, number: int, tensor: Tensor) -> _Reference | None:
    """Return the reference to a tensor: by position for fused kernels, which return new views each time."""
    if shard.is_state_replaceable:
        candidates = [reference for reference in last_references if reference.tensor() is tensor]
    else:
        candidates = list(last_references[number : number + 1])
    return candidates[0] if candidates and candidates[0].kind == _kind(tensor) else None


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _part(number: int, num_states: int) -> str:
    """Return the name of a table's tensor in messages: the first is its weights."""
    if number == 0:
        return "weights"
    return "optimizer state" if num_states == 1 else f"optimizer state ({number} of {num_states})"


def _complaint(shard: TrackedShard, num_rows: int, first_rows: Sequence[int], tensor_name: str) -> str:
    name, box = shard.rows.name, shard.rows.box
    rows = ", ".join(str(box.offsets[0] + row) for row in first_rows)
    more = ", ..." if num_rows > len(first_rows) else ""
    return f"table {name!r}: {num_rows} of its {box.num_rows} rows on this rank ({rows}{more}), in their {tensor_name}"
