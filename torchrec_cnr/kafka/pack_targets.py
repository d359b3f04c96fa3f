"""Targets: what one save of one rank writes packs to. A pack is a run of records, sent in one transaction.

In a log that keeps everything, the key of a record is its pack's name. In one that keeps the last record of each key,
the key says which row block it is of, and which part of a pack; a header says the pack. Each put writes all keys that
any pack of that block and slot may have, those that this pack does not need as tombstones: nothing of what was there
before stays.
"""

import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchrec_cnr.format.manifest import LogRange
from torchrec_cnr.kafka.clients import Cluster
from torchrec_cnr.kafka.producers import Producing, Record
from torchrec_cnr.kafka.records import pack_header, part_header, part_key, parts_of
from torchrec_cnr.storage.files import Buffer


@dataclass(frozen=True)
class RowTopic:
    """Where rows go.

    Attributes:
        cluster: How to reach it.
        topic: For rows.
        num_partitions: Of the topic.
        part_bytes: Size of records.
    """

    cluster: Cluster
    topic: str
    num_partitions: int
    part_bytes: int

    def send(
        self,
        producing: Producing,
        partition: int,
        records: Sequence[Record],
        action: str,
        may_take_over: bool = False,
        is_held: bool = False,
    ) -> list[int]:
        """Send records in one transaction; returns their offsets. Errors tell what could not be done."""
        with self.cluster.errors(f"{action} topic {self.topic!r}"):
            return producing.send(self.topic, partition, records, may_take_over, is_held)


class KafkaTarget:
    """What one save of one rank writes to, in a log that keeps everything.

    Args:
        topic: Where to.
        producing: The producer of this rank.
        rank: Spreads ranks over partitions.
    """

    def __init__(self, topic: RowTopic, producing: Producing, rank: int) -> None:
        self._rows = topic
        self._producing = producing
        self._rank = rank
        self._packs = itertools.count()

    def put(self, name: str, parts: Sequence[Buffer]) -> LogRange:
        """Send a pack in one transaction."""
        rows, number = self._rows, next(self._packs)
        partition = (zlib.crc32(b"%d" % self._rank) + number) % rows.num_partitions
        values = list(parts_of(parts, rows.part_bytes))
        records = [Record(name.encode(), value, (part_header(n, len(values)),)) for n, value in enumerate(values)]
        offsets = rows.send(self._producing, partition, records, f"write {name} to", may_take_over=True)
        return LogRange(rows.topic, partition, offsets[0], offsets[-1], rows.part_bytes)


@dataclass(frozen=True)
class KafkaBlocks:
    """What one save of one rank writes to, in a log that keeps the newest pack of each row block.

    Attributes:
        rows: Where to.
        producing: The producer of this rank, which holds its id.
        owner: Begins keys.
    """

    rows: RowTopic
    producing: Producing
    owner: str

    def keyed(self, key: str, most_bytes: int) -> "KeyedTarget":
        """Where to write a pack that takes the place of the one with that key."""
        return KeyedTarget(self, key, most_bytes)


@dataclass(frozen=True)
class KeyedTarget:
    """A slot of a row block.

    Attributes:
        blocks: Those of the rank.
        key: Of the slot.
        most_bytes: Of any pack that may be there.
    """

    blocks: KafkaBlocks
    key: str
    most_bytes: int

    def put(self, name: str, parts: Sequence[Buffer]) -> LogRange:
        """Send a pack in one transaction, with tombstones for what an earlier one may have had besides."""
        rows = self.blocks.rows
        partition = partition_of(self.key, rows.num_partitions)
        values = list(parts_of(parts, rows.part_bytes))
        records = [
            Record(part_key(self.key, number), value, (pack_header(name), part_header(number, len(values))))
            for number, value in enumerate(values)
        ]
        rest = range(len(values), -(-self.most_bytes // rows.part_bytes))
        records += tombstones(self.key, rest)
        offsets = rows.send(self.blocks.producing, partition, records, f"write {name} to", is_held=True)
        return LogRange(rows.topic, partition, offsets[0], offsets[len(values) - 1], rows.part_bytes, self.key)


def partition_of(key: str, num_partitions: int) -> int:
    """Always the same for a key: where compaction compares it with older ones."""
    return zlib.crc32(key.encode()) % num_partitions


def tombstones(key: str, numbers: Sequence[int]) -> Iterator[Record]:
    """What removes parts."""
    return (Record(part_key(key, number), None) for number in numbers)
