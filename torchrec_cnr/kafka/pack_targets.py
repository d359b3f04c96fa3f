"""Pack targets: one rank writes the packs of one save to them. A pack is a run of records, sent in one transaction.

In a log that keeps everything, the key of a record is the name of its pack. In a compacted log, the key names the row
block and slot, and the part of the pack; a header names the pack. Each put writes all keys that any pack of that block
and slot can have. Keys that this pack does not need get tombstones, so that no record of an earlier pack remains.
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
    """The topic that rows are sent to.

    Attributes:
        cluster: The cluster of the topic.
        topic: Name of the topic.
        num_partitions: Number of its partitions.
        part_bytes: Size of a pack's records in bytes.
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
        """Send records in one transaction; return their offsets. Errors name ``action``."""
        with self.cluster.errors(f"{action} topic {self.topic!r}"):
            return producing.send(self.topic, partition, records, may_take_over, is_held)


class KafkaTarget:
    """The target of one rank for one save, in a log that keeps everything.

    Args:
        topic: The topic to send to.
        producing: The producer of this rank.
        rank: The rank, by which ranks are spread over partitions.
    """

    def __init__(self, topic: RowTopic, producing: Producing, rank: int) -> None:
        self._rows = topic
        self._producing = producing
        self._rank = rank
        self._packs = itertools.count()

    def put(self, name: str, parts: Sequence[Buffer]) -> LogRange:
        """Send a pack in one transaction."""
        rows, pack_number = self._rows, next(self._packs)
        partition = (zlib.crc32(b"%d" % self._rank) + pack_number) % rows.num_partitions
        values = list(parts_of(parts, rows.part_bytes))
        records = [Record(name.encode(), value, (part_header(n, len(values)),)) for n, value in enumerate(values)]
        offsets = rows.send(self._producing, partition, records, f"write {name} to", may_take_over=True)
        return LogRange(rows.topic, partition, offsets[0], offsets[-1], rows.part_bytes)


@dataclass(frozen=True)
class KafkaBlocks:
    """The target of one rank for one save, in a log that keeps the newest pack of each row block.

    Attributes:
        rows: The topic to send to.
        producing: The producer of this rank, which holds its id.
        owner: Prefix of this rank's keys.
    """

    rows: RowTopic
    producing: Producing
    owner: str

    def keyed(self, key: str, most_bytes: int) -> "KeyedTarget":
        """Return the target for a pack that replaces the earlier pack with that key."""
        return KeyedTarget(self, key, most_bytes)


@dataclass(frozen=True)
class KeyedTarget:
    """The target for a slot of a row block.

    Attributes:
        blocks: The target of the rank.
        key: Key of the slot.
        most_bytes: Largest size of a pack in this slot, in bytes.
    """

    blocks: KafkaBlocks
    key: str
    most_bytes: int

    def put(self, name: str, parts: Sequence[Buffer]) -> LogRange:
        """Send a pack in one transaction, with tombstones for further parts that an earlier pack may have."""
        rows = self.blocks.rows
        partition = partition_of(self.key, rows.num_partitions)
        values = list(parts_of(parts, rows.part_bytes))
        records = [
            Record(part_key(self.key, number), value, (pack_header(name), part_header(number, len(values))))
            for number, value in enumerate(values)
        ]
        further_parts = range(len(values), -(-self.most_bytes // rows.part_bytes))
        records += tombstones(self.key, further_parts)
        offsets = rows.send(self.blocks.producing, partition, records, f"write {name} to", is_held=True)
        return LogRange(rows.topic, partition, offsets[0], offsets[len(values) - 1], rows.part_bytes, self.key)


def partition_of(key: str, num_partitions: int) -> int:
    """Return the partition of a key, which never changes: compaction works within a partition."""
    return zlib.crc32(key.encode()) % num_partitions


def tombstones(key: str, numbers: Sequence[int]) -> Iterator[Record]:
    """Return tombstones that remove parts."""
    return (Record(part_key(key, number), None) for number in numbers)
