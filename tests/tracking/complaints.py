"""What a save says of rows that were modified and not marked."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torchrec_cnr as cnr

NUM_NAMED = 10
COMPLAINT = re.compile(r"table '([\w.]+)': (\d+) of its (\d+) rows on this rank \(([\d, .]+)\), in their ([\w ()]+)")


@dataclass(frozen=True)
class Complaint:
    """What an error says of one tensor."""

    table: str
    part: str
    num_found: int
    num_rows: int
    rows: str

    @classmethod
    def of(cls, table: str, part: str, rows: Sequence[int], num_rows: int) -> "Complaint":
        """What it must say."""
        named = ", ".join(map(str, rows[:NUM_NAMED])) + (", ..." if len(rows) > NUM_NAMED else "")
        return cls(table, part, len(rows), num_rows, named)


def _complaints(error: BaseException) -> list[Complaint]:
    assert isinstance(error, cnr.UntrackedRowsError)
    found = COMPLAINT.findall(str(error))
    assert found, error
    assert str(error).endswith("call tracker.mark(table, rows) or tracker.mark_all(table), then save again")
    return [Complaint(table, part, int(num), int(of), rows) for table, num, of, rows, part in found]


@dataclass(frozen=True)
class Save:
    """Save, perhaps with a phase that fails."""

    failing: tuple[str, str] | None = None
