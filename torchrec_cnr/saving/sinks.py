"""Sinks: write one rank's part of a save to its destination.

Baselines and dense tensors go to files of the checkpoint. The rows of deltas go to the job's destination, which is of
one of three kinds: files (``RowDestination``), a Kafka topic that keeps all records for a time (``PlainTopic``), or a
compacted topic (``block_writer.CompactedTopic``). The writer has one destination, which makes a sink for each save. The
other parts of a save call the destination's methods and do not know its kind.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Protocol

import numpy as np
from torch import Tensor
from torch.profiler import record_function

from torchrec_cnr.format.blob_bytes import Bytes, compressed
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import CheckpointRef, Manifest, Pack, Place, Shard, StoredTransform
from torchrec_cnr.format.row_sets import Blob, RowSet
from torchrec_cnr.policies import Policy, Since
from torchrec_cnr.quantization import NoQuantization, Scheme, Transformed
from torchrec_cnr.saving.decision import Decision, StoredPart
from torchrec_cnr.saving.encoding import EncodedRowSet, EncodedShard, EncodingInput, write_all_rows, write_rows
from torchrec_cnr.saving.row_blocks import Member
from torchrec_cnr.storage.fences import Fence
from torchrec_cnr.storage.pack_writer import PackWriter
from torchrec_cnr.storage.row_log import BlockTarget, PackTarget, RowLog, root_id
from torchrec_cnr.storage.store import Store
from torchrec_cnr.throttling import CpuThrottle
from torchrec_cnr.tracking.modified_rows import ModifiedRows, SelectedRows

_LOG_PACK_BYTES = 4 << 20  # small: sending overlaps with encoding as soon as the first one is full


class Captured(Protocol):
    """The facts that a destination must know of a table's shard when the snapshot is taken, besides its modified rows.

    The snapshot carries it to the sink. Nothing in between uses its content.
    """

    def digest(self) -> bytes:
        """Return a digest that is equal on two ranks if they have captured the same of the same shard."""
        ...


@dataclass(frozen=True)
class Places:
    """The positions of everything that a sink has written.

    Attributes:
        blobs: Blobs in files, by number.
        row_blobs: Blobs of rows of deltas, by number.
        num_packs: Number of data files that were written, and of older ones with transforms.
        older: Transforms and bases in older data files, by their digests.
    """

    blobs: Sequence[Blob]
    row_blobs: Sequence[Blob]
    num_packs: int
    older: Mapping[str, Blob]


Part = tuple[RowSet | EncodedRowSet, Sequence[EncodedShard]]
SourcesOf = Callable[[Sequence[SelectedRows] | Tensor | None], Sequence[EncodingInput]]  # rows as for choose_scheme
PlacedShards = Iterable[tuple[tuple[Shard, ...], int]]  # for each, its parts in a manifest and the number of exact rows


@dataclass(frozen=True)
class Kind:
    """The place and scheme of a shard, and the numbers of the blobs of its transform and basis, if it has them.

    What an older checkpoint has stored has no number; it is found by its digest.
    """

    place: Place
    scheme: Scheme
    transform: int | None = None
    basis: int | None = None

    def shard(self, rows: RowSet, codes: tuple[Blob, ...], num_exact: tuple[int, ...], places: Places) -> Shard:
        """Return a part of the shard, whose blobs have so many exact rows."""
        if not isinstance(self.scheme, Transformed):
            return Shard(self.place.box, rows, codes, self.scheme, self.place.table_box)
        if not codes:
            return Shard(self.place.box, rows, codes, NoQuantization(), self.place.table_box)
        blob = places.older[self.scheme.digest] if self.transform is None else places.blobs[self.transform]
        basis = places.older.get(self.scheme.basis or "") if self.basis is None else places.blobs[self.basis]
        transform = StoredTransform(blob, basis, num_exact)
        return Shard(self.place.box, rows, codes, self.scheme, self.place.table_box, transform)


def _located(kinds: Sequence[Kind], parts: Sequence[Part], places: Places) -> PlacedShards:
    shards: list[list[Shard]] = [[] for _ in kinds]
    for rows, encoded in parts:
        blobs = places.row_blobs if isinstance(rows, EncodedRowSet) else places.blobs
        row_set = rows.located(blobs) if isinstance(rows, EncodedRowSet) else rows
        for member_shards, kind, shard in zip(shards, kinds, encoded, strict=True):
            codes = tuple(blobs[index] for index in shard.blobs)
            member_shards.append(kind.shard(row_set, codes, shard.exact_of_blobs, places))
    num_exact = [
        sum(shard.num_exact for shard in encoded) for encoded in zip(*(part for _, part in parts), strict=True)
    ]
    return zip(map(tuple, shards), num_exact, strict=True)


@dataclass(frozen=True)
class SinkRecords:
    """The records of what a sink has written.

    Attributes:
        packs: All data files that a manifest must name.
        objects: Blobs of objects, in the order in which they were written.
        shards: For each shard, in the order of writing, its parts and the number of rows that are stored exactly.
        num_bytes: Bytes of the data files that were written.
        wait_secs: Seconds that the caller has waited for data files to be written.
        upload_secs: Seconds that all threads together took to write them.
    """

    packs: tuple[Pack, ...]
    objects: tuple[Blob, ...]
    shards: tuple[tuple[tuple[Shard, ...], int], ...]
    num_bytes: int
    wait_secs: float
    upload_secs: float


class PackSink:
    """Sink that writes what one rank stores in one save to data files.

    Args:
        files: Writes data files to the store.
        row_packs: Writes the rows of deltas; the same object as ``files`` if they are stored in files, too.
        older: Transforms and bases that older data files have, by their digests.
    """

    def __init__(self, files: PackWriter, row_packs: PackWriter, older: Mapping[str, StoredPart]) -> None:
        self._files = files
        self.older = older
        self._used: dict[str, StoredPart] = {}
        self._rows = row_packs
        self._writers = (files,) if row_packs is files else (files, row_packs)
        self._objects: list[int] = []
        self._located: list[Callable[[Places], PlacedShards]] = []  # these hold no values of rows

    def write_object(self, name: str, data: Bytes) -> None:
        """Write an object, given as uint8 [n]."""
        self._objects.append(self._files.add(name, "uint8", data.shape, data))

    def write(
        self,
        members: Sequence[Member],
        sources_of: SourcesOf,
        rows: Sequence[SelectedRows] | None,
        captured: Captured | None,
    ) -> None:
        """Encode shards whose rows are stored together, and write data files that are full.

        Args:
            members: The shards.
            sources_of: Returns their values, and the schemes that suit the rows to encode.
            rows: The rows to store, by their heat; None for all.
            captured: What the destination has captured of the shards.
        """
        sources = sources_of(rows)
        parts: list[Part]
        with record_function("torchrec_cnr.encode"):
            if rows is None:
                parts = [write_all_rows(self._files, sources)]
            else:
                parts = [
                    write_rows(self._rows, sources, selected_rows, heat) for heat, selected_rows in enumerate(rows)
                ]
        kinds = [
            self._kind(member.place, source, any(encoded[index].blobs for _, encoded in parts))
            for index, (member, source) in enumerate(zip(members, sources, strict=True))
        ]
        self._located.append(partial(_located, kinds, parts))

    def _kind(self, place: Place, source: EncodingInput, has_rows: bool) -> Kind:
        """Write the transform of a shard and its basis, if it has them, unless an older checkpoint has them."""
        scheme = source.scheme
        if not isinstance(scheme, Transformed) or not has_rows:
            return Kind(place, scheme)
        data = np.frombuffer(compressed(scheme.known.data), dtype=np.uint8)
        transform = self._part(scheme.digest, f"{source.name}/transform", "uint8", data.shape, data)
        basis = scheme.known.basis
        if basis is None or scheme.basis is None:
            return Kind(place, scheme, transform)
        values = np.frombuffer(basis.data, dtype=np.uint8)
        shape = basis.components.shape
        return Kind(
            place, scheme, transform, self._part(scheme.basis, f"{source.name}/basis", "float32", shape, values)
        )

    def _part(self, digest: str, name: str, dtype: str, shape: tuple[int, ...], data: Bytes) -> int | None:
        """Write a part of a transform, and return the number of its blob; None if an older checkpoint has it."""
        if digest in self.older:
            self._use(digest)
            return None
        # In a file of its own, because it is used for longer than rows are.
        return self._files.add(name, dtype, shape, data, age=1)

    def _use(self, digest: str) -> None:
        """Record that a manifest must name the data file of a part of a transform that an older checkpoint has."""
        self._used[digest] = self.older[digest]

    def throttle(self, cpu_share: float, lifted: threading.Event) -> None:
        """Pause from now on so that encoding uses no more than this share of a core, until ``lifted`` is set."""
        for writer in self._writers:
            writer.pace = CpuThrottle(cpu_share, lifted)

    def flush(self) -> None:
        """Write all that was encoded so far, and wait for it."""
        for writer in self._writers:
            writer.flush()

    def finish(self) -> SinkRecords:
        """Write the rest, wait for it, and return the records."""
        packs, blobs = self._files.finish()
        row_blobs = blobs
        if self._rows is not self._files:
            row_packs, row_blobs = self._rows.finish()
            row_blobs = tuple(replace(blob, pack=blob.pack + len(packs)) for blob in row_blobs)
            packs += row_packs
        older_packs = list(dict.fromkeys(part.pack for part in self._used.values()))
        older = {
            digest: part.blob.in_pack(len(packs) + older_packs.index(part.pack)) for digest, part in self._used.items()
        }
        places = Places(blobs, row_blobs, len(packs) + len(older_packs), older)
        return SinkRecords(
            (*packs, *older_packs),
            tuple(blobs[index] for index in self._objects),
            tuple(itertools.chain.from_iterable(located(places) for located in self._located)),
            num_bytes=sum(pack.num_bytes for pack in packs),
            wait_secs=sum(writer.wait_secs for writer in self._writers),
            upload_secs=sum(writer.upload_secs for writer in self._writers),
        )

    def close(self) -> None:
        """Stop writing; drop data files whose writing has not begun."""
        for writer in self._writers:
            writer.close()


@dataclass(frozen=True)
class PackSettings:
    """The prefix for names of data files, the number written in parallel, and their size in bytes."""

    prefix: str
    thread_count: int
    pack_bytes: int

    def writer(self, target: PackTarget) -> PackWriter:
        """Return a writer of data files."""
        return PackWriter(target, self.prefix, self.thread_count, self.pack_bytes)


OpenSink = Callable[[PackSettings, Decision | None], PackSink]
OwnFence = Callable[[], Fence]


@dataclass(frozen=True)
class RowDestination:
    """The destination for the rows of a job's deltas: here, files of the checkpoint. It can be pickled.

    Attributes:
        row_log: The Kafka topic for the rows; None for files.
        compared: Checkpoints since which all replicas of a shard must also have modified the same rows.
    """

    row_log: RowLog | None
    compared: ClassVar[frozenset[Since]] = frozenset()

    def refuse_policy(self, policy: Policy) -> None:
        """Raise a ``ConfigurationError`` if this destination cannot store the deltas of a policy."""

    def capture(self, table: str, box: Box, row_bytes: int, modified: ModifiedRows) -> Captured | None:
        """Return what the sink must know of a table's shard; ``row_bytes`` is the size of one row's values."""
        return None

    def loadable_besides(self, store: Store, head: CheckpointRef | None) -> CheckpointRef | None:
        """Return a checkpoint besides ``head`` whose rows sinks must keep until a save commits; None without one."""
        return None

    def prepare(self, store: Store, rank: int, is_coordinator: bool, own_fence: OwnFence | None) -> OpenSink:
        """Prepare for a save, before the coordinator learns whether a newer job has begun.

        Args:
            store: The checkpoint.
            rank: Rank of this process.
            is_coordinator: Whether this rank will commit.
            own_fence: Returns the fence of the job, if this is the coordinator and the planner has a tracker.

        Returns:
            Function that makes the sink of the save, on this rank.

        Raises:
            FencedError: A newer job saves there.
            StoreError: The Kafka broker does not answer in time.
        """
        return partial(_file_sink, store)

    def begin(self, store: Store) -> None:
        """Fence off earlier writers. Only the coordinator calls this, once it knows that it may save."""

    def committed(self, store: Store, decision: Decision, manifest: Manifest) -> None:
        """Do what remains to be done after a save has committed."""


FILES = RowDestination(None)


def _file_sink(store: Store, settings: PackSettings, decision: Decision | None) -> PackSink:
    writer = settings.writer(store)
    return PackSink(writer, writer, {} if decision is None else decision.transforms)


@dataclass(frozen=True)
class PlainTopic(RowDestination):
    """A Kafka topic that keeps all records for a time."""

    row_log: RowLog

    def prepare(self, store: Store, rank: int, is_coordinator: bool, own_fence: OwnFence | None) -> OpenSink:
        """Open the topic for this rank's rows; see ``RowDestination``."""
        target = self.row_log.target(root_id(store.at("..").url), rank, is_coordinator)
        assert not isinstance(target, BlockTarget)  # the topic is not compacted
        return partial(_topic_sink, store, target)

    def begin(self, store: Store) -> None:
        """Fence off earlier writers of this topic; see ``RowDestination``."""
        self.row_log.begin(root_id(store.at("..").url))


def _topic_sink(store: Store, target: PackTarget, settings: PackSettings, decision: Decision | None) -> PackSink:
    """Return a sink whose row files have a prefix of their own."""
    pack_bytes = min(settings.pack_bytes, _LOG_PACK_BYTES)
    rows = PackWriter(target, f"{settings.prefix}-rows", settings.thread_count, pack_bytes)
    return PackSink(settings.writer(store), rows, {} if decision is None else decision.transforms)
