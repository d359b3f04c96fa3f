"""Where a pack lies in a log: rows that stream through Kafka are packs all the same."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LogRange:
    """A pack in a log, cut into records of one size but the last.

    Attributes:
        topic: The log.
        partition: Of the log.
        first: Offset of its first record.
        last: Offset of its last; records of others may lie between them.
        part_bytes: Size of each record but the last, which has what is left.
        key: What the keys of its records begin with, in a log that keeps the last record of each key; None if they are
            the pack's name.
    """

    topic: str
    partition: int
    first: int
    last: int
    part_bytes: int
    key: str | None = None

    def __str__(self) -> str:
        return f"topic {self.topic!r} partition {self.partition} offsets {self.first} to {self.last}"

    def num_parts(self, num_bytes: int) -> int:
        """How many records a pack of that size has."""
        return -(-num_bytes // self.part_bytes)
