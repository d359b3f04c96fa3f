"""Sinks: where one rank's part of a save goes.

Baselines and the dense part go to files of the checkpoint. The rows of deltas go to the job's destination, which is one
of three kinds: files (``RowDestination``), a topic that keeps everything (``PlainTopic``), or one that is compacted
(``block_writer.CompactedTopic``). The writer has one destination, and makes a sink of it for each save. Whatever else
takes part in a save asks the destination, and does not know of which kind it is.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Protocol

from torch.profiler import record_function

from torchrec_cnr.format.blob_bytes import Bytes
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import CheckpointRef, Manifest, Pack, Place, Shard
from torchrec_cnr.format.row_sets import Blob, RowSet
from torchrec_cnr.policies import Policy, Since
from torchrec_cnr.quantization import Scheme
from torchrec_cnr.saving.decision import Decision
from torchrec_cnr.saving.encoding import EncodedRowSet, EncodedShard, EncodingInput, write_all_rows, write_rows
from torchrec_cnr.saving.row_blocks import Member
from torchrec_cnr.storage.fences import Fence
from torchrec_cnr.storage.pack_writer import PackWriter
from torchrec_cnr.storage.row_log import BlockTarget, PackTarget, RowLog, root_id
from torchrec_cnr.storage.store import Store
from torchrec_cnr.throttling import CpuThrottle
from torchrec_cnr.tracking.modified_rows import ModifiedRows, SelectedRows

_LOG_PACK_BYTES = 4 << 20  # no file: the sooner the first is sent, the more goes on at once


class Captured(Protocol):
    """What a destination must know of a table's shard at the cut, besides its modified rows.

    The cut carries it to the sink, and nothing in between looks into it.
    """

    def digest(self) -> bytes:
        """Tells whether another rank, which has the same shard, has captured the same."""
        ...


@dataclass(frozen=True)
class Places:
    """Where everything lies that a sink has written.

    Attributes:
        blobs: Those in files, by number.
        row_blobs: Those of rows of deltas, by number.
        num_packs: How many packs were written.
    """

    blobs: Sequence[Blob]
    row_blobs: Sequence[Blob]
    num_packs: int


Part = tuple[RowSet | EncodedRowSet, Sequence[EncodedShard]]
PlacedShards = Iterable[tuple[tuple[Shard, ...], int]]  # of each its parts in a manifest, and how many rows are exact


def _located(kinds: Sequence[tuple[Place, Scheme]], parts: Sequence[Part], places: Places) -> PlacedShards:
    shards: list[list[Shard]] = [[] for _ in kinds]
    for rows, encoded in parts:
        blobs = places.row_blobs if isinstance(rows, EncodedRowSet) else places.blobs
        located = rows.located(blobs) if isinstance(rows, EncodedRowSet) else rows
        for own, (place, scheme), shard in zip(shards, kinds, encoded, strict=True):
            codes = tuple(blobs[number] for number in shard.blobs)
            own.append(Shard(place.box, located, codes, scheme, place.table_box))
    num_exact = [sum(own.num_exact for own in of_shard) for of_shard in zip(*(part for _, part in parts), strict=True)]
    return zip(map(tuple, shards), num_exact, strict=True)


@dataclass(frozen=True)
class SinkRecords:
    """What a sink has written.

    Attributes:
        packs: All packs that a manifest must name.
        objects: The blobs of objects, in the order in which they were written.
        shards: The parts of shards, likewise; and how many rows of each its scheme cannot represent.
        num_bytes: Of the packs that were written.
        wait_secs: How long the caller has waited for packs to be written.
        upload_secs: How long all threads together took to write them.
    """

    packs: tuple[Pack, ...]
    objects: tuple[Blob, ...]
    shards: tuple[tuple[tuple[Shard, ...], int], ...]
    num_bytes: int
    wait_secs: float
    upload_secs: float


class PackSink:
    """Takes what one rank writes in one save, and fills packs with it.

    Args:
        files: Fills packs that are files.
        row_packs: Fills those of the rows of deltas; the same one, if they are files too.
    """

    def __init__(self, files: PackWriter, row_packs: PackWriter) -> None:
        self._files = files
        self._rows = row_packs
        self._writers = (files,) if row_packs is files else (files, row_packs)
        self._objects: list[int] = []
        self._located: list[Callable[[Places], PlacedShards]] = []  # no values

    def write_object(self, name: str, data: Bytes) -> None:
        """Take an object, as uint8 [n]."""
        self._objects.append(self._files.add(name, "uint8", data.shape, data))

    def write(
        self,
        members: Sequence[Member],
        sources: Sequence[EncodingInput],
        rows: Sequence[SelectedRows] | None,
        captured: Captured | None,
    ) -> None:
        """Encode shards whose rows are stored together, and write packs that are full.

        Args:
            members: These.
            sources: Their values.
            rows: The rows to store, by their heat; None for all.
            captured: What the destination has captured of them.
        """
        parts: list[Part]
        with record_function("torchrec_cnr.encode"):
            if rows is None:
                parts = [write_all_rows(self._files, sources)]
            else:
                parts = [write_rows(self._rows, sources, selected, heat) for heat, selected in enumerate(rows)]
        kinds = [(member.place, source.scheme) for member, source in zip(members, sources, strict=True)]
        self._located.append(partial(_located, kinds, parts))

    def throttle(self, cpu_share: float) -> None:
        """From now on, rest so that no more than a share of a core is taken."""
        for writer in self._writers:
            writer.pace = CpuThrottle(cpu_share)

    def flush(self) -> None:
        """Write what there is, and wait for it."""
        for writer in self._writers:
            writer.flush()

    def finish(self) -> SinkRecords:
        """Write what is left, wait, and tell where it lies."""
        packs, blobs = self._files.finish()
        row_blobs = blobs
        if self._rows is not self._files:
            row_packs, row_blobs = self._rows.finish()
            row_blobs = tuple(replace(blob, pack=blob.pack + len(packs)) for blob in row_blobs)
            packs += row_packs
        places = Places(blobs, row_blobs, len(packs))
        return SinkRecords(
            packs,
            tuple(blobs[number] for number in self._objects),
            tuple(itertools.chain.from_iterable(located(places) for located in self._located)),
            num_bytes=sum(pack.num_bytes for pack in packs),
            wait_secs=sum(writer.wait_secs for writer in self._writers),
            upload_secs=sum(writer.upload_secs for writer in self._writers),
        )

    def close(self) -> None:
        """Stop writing; packs that are not being written yet are dropped."""
        for writer in self._writers:
            writer.close()


@dataclass(frozen=True)
class PackSettings:
    """How a sink writes packs: what their names begin with, how many at once, and how large."""

    prefix: str
    thread_count: int
    pack_bytes: int

    def writer(self, target: PackTarget) -> PackWriter:
        """What fills packs that are files."""
        return PackWriter(target, self.prefix, self.thread_count, self.pack_bytes)


OpenSink = Callable[[PackSettings, Decision | None], PackSink]
OwnFence = Callable[[], Fence]


@dataclass(frozen=True)
class RowDestination:
    """Where the rows of a job's deltas go: here, to files of the checkpoint. A value that survives pickling.

    Attributes:
        row_log: The log that they go to, if they do.
        compared: Ranks that hold one and the same shard must have modified the same rows of it since then, too.
    """

    row_log: RowLog | None
    compared: ClassVar[frozenset[Since]] = frozenset()

    def refuse_policy(self, policy: Policy) -> None:
        """Raise a ConfigurationError if the deltas of a policy cannot go there."""

    def capture(self, table: str, box: Box, row_bytes: int, modified: ModifiedRows) -> Captured | None:
        """What the sink must know of a table's shard, whose rows take so many bytes as values, at the cut."""
        return None

    def loadable_besides(self, store: Store, head: CheckpointRef | None) -> CheckpointRef | None:
        """Another checkpoint than the head that may be loaded until a save commits, if its sinks must know of it."""
        return None

    def prepare(self, store: Store, rank: int, is_coordinator: bool, own_fence: OwnFence | None) -> OpenSink:
        """Get ready for a save, before the coordinator learns whether a later job has begun.

        Args:
            store: The checkpoint.
            rank: Of this process.
            is_coordinator: Whether it will commit.
            own_fence: Gives the fence of the job, if this is the coordinator of a save with a lineage.

        Returns:
            What makes the sink of the save, on this rank.

        Raises:
            FencedError: A later job saves there.
            StoreError: The log does not answer in time.
        """
        return partial(_file_sink, store)

    def begin(self, store: Store) -> None:
        """On the coordinator, which may save: shut out whoever saved there before."""

    def committed(self, store: Store, decision: Decision, manifest: Manifest) -> None:
        """A save is committed."""


FILES = RowDestination(None)


def _file_sink(store: Store, settings: PackSettings, decision: Decision | None) -> PackSink:
    writer = settings.writer(store)
    return PackSink(writer, writer)


@dataclass(frozen=True)
class PlainTopic(RowDestination):
    """A topic that keeps everything for a time."""

    row_log: RowLog

    def prepare(self, store: Store, rank: int, is_coordinator: bool, own_fence: OwnFence | None) -> OpenSink:
        """See ``RowDestination``."""
        target = self.row_log.target(root_id(store.at("..").url), rank, is_coordinator)
        assert not isinstance(target, BlockTarget)  # it keeps everything
        return partial(_topic_sink, store, target)

    def begin(self, store: Store) -> None:
        """See ``RowDestination``."""
        self.row_log.begin(root_id(store.at("..").url))


def _topic_sink(store: Store, target: PackTarget, settings: PackSettings, decision: Decision | None) -> PackSink:
    """The packs of rows have names of their own."""
    pack_bytes = min(settings.pack_bytes, _LOG_PACK_BYTES)
    rows = PackWriter(target, f"{settings.prefix}-rows", settings.thread_count, pack_bytes)
    return PackSink(settings.writer(store), rows)
