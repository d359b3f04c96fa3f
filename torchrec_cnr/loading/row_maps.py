"""Row maps: from which saved row each row of a table is loaded, in a warm start with other rows.

A user gives a map as a tensor, of a number for each row of the table. Only a description of it is sent to other ranks,
and every rank has the tensor. For the ids of managed collisions, the shards on both sides determine the map.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchrec_cnr.arguments import check_type
from torchrec_cnr.errors import ConfigurationError

_EXPECTED = "a list of patterns of FQNs, or a mapping of such patterns to None or int64 tensors of saved rows"


@dataclass(frozen=True)
class RowMap:
    """A description of a row map.

    Attributes:
        num_rows: Number of rows in the state dict.
        num_loaded: Number of these that a saved row is loaded into.
        num_saved: The largest saved row + 1; 0 if nothing is loaded.
        digest: SHA-256 of the tensor that a user gave; empty for consecutive rows.
        runs: Without a tensor: runs of consecutive rows, as the first row, the first saved row, and the number of rows.
    """

    num_rows: int
    num_loaded: int
    num_saved: int
    digest: str = field(default="", repr=False)
    runs: tuple[tuple[int, int, int], ...] = field(default=(), repr=False)

    @classmethod
    def given(cls, saved_rows: Tensor) -> "RowMap":
        """Return the description of a tensor, int64 [num_rows]: the saved row of each row, or -1."""
        num_saved = int(saved_rows.max()) + 1 if len(saved_rows) else 0
        digest = hashlib.sha256(saved_rows.numpy().data).hexdigest()
        return cls(len(saved_rows), int((saved_rows >= 0).sum()), num_saved, digest)

    @classmethod
    def of_runs(cls, num_rows: int, runs: Sequence[tuple[int, int, int]]) -> "RowMap":
        """Return the map of some runs of rows."""
        num_loaded = sum(num for _, _, num in runs)
        return cls(num_rows, num_loaded, max((saved + num for _, saved, num in runs), default=0), runs=tuple(runs))

    def saved_rows(self, rows: range, given: Tensor | None) -> Tensor:
        """Return the saved rows of a range of rows, int64 [len(rows)], -1 for none; ``given`` is a user's tensor."""
        if given is not None:
            return given[rows.start : rows.stop]
        saved_rows = torch.full((len(rows),), -1, dtype=torch.int64, device="cpu")
        for first, first_saved, num_rows in self.runs:
            start, stop = max(first, rows.start), min(first + num_rows, rows.stop)
            if start < stop:
                saved = torch.arange(start, stop, device="cpu") + (first_saved - first)
                saved_rows[start - rows.start : stop - rows.start] = saved
        return saved_rows


def checked_resize(
    resize: Sequence[str] | Mapping[str, Tensor | None] | None,
) -> tuple[tuple[tuple[str, RowMap | None], ...], dict[str, Tensor]]:
    """Return the patterns of a planner's ``resize`` with their maps, sorted; and the tensors, by digest.

    Raises:
        ConfigurationError: It is invalid.
    """
    check_type("resize", resize, (list, tuple, Mapping, type(None)), _EXPECTED)
    given = resize if isinstance(resize, Mapping) else dict.fromkeys(resize or ())
    maps: dict[str, RowMap | None] = {}
    tensors: dict[str, Tensor] = {}
    for pattern, saved_rows in given.items():
        check_type("resize", pattern, str, _EXPECTED)
        check_type("resize", saved_rows, (Tensor, type(None)), _EXPECTED)
        maps[pattern] = None
        if saved_rows is not None:
            tensor = _checked(pattern, saved_rows)
            maps[pattern] = row_map = RowMap.given(tensor)
            tensors[row_map.digest] = tensor
    return tuple(sorted(maps.items(), key=lambda item: item[0])), tensors


def _checked(pattern: str, saved_rows: Tensor) -> Tensor:
    if saved_rows.dim() != 1 or saved_rows.dtype not in (torch.int64, torch.int32):
        raise ConfigurationError(
            f"'resize': the saved rows of {pattern!r} must be a tensor int64 [rows], not {saved_rows.dtype} "
            f"{list(saved_rows.shape)}"
        )
    if len(saved_rows) and int(saved_rows.min()) < -1:
        raise ConfigurationError(
            f"'resize': the saved rows of {pattern!r} must be at least 0, or -1 for none, not {int(saved_rows.min())}"
        )
    return saved_rows.detach().to("cpu", torch.int64).contiguous()
