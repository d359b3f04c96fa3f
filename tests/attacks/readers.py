"""Readers: for each kind of bytes that the library reads from a store or from Kafka, a function that reads one input.

A reader puts the bytes where the library looks for them, and reads them as the library does. It raises a ``CNRError``
if the library refuses them, and no other error. The fuzzer and ``test_corpus.py`` take all readers from ``READERS``.
"""

import base64
import io
import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import zstandard
from confluent_kafka import Message
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import torchrec_cnr as cnr
from tests.attacks import checkpoints
from tests.attacks.draft import Draft, Json, archive_of, dumps
from tests.attacks.structure import manifest_file
from tests.attacks.walk import cli, load_state
from torchrec_cnr.errors import CNRError
from torchrec_cnr.format import manifest_json, safe_pickle
from torchrec_cnr.format.blob_bytes import join
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import DTYPES, MANIFEST_FILE, Shard, TensorEntry
from torchrec_cnr.format.manifest_parser import FORMAT, VERSION, ManifestParser
from torchrec_cnr.format.row_sets import Blob, CodedRows, RowSet, decode_row_numbers
from torchrec_cnr.kafka.connection import KafkaLog
from torchrec_cnr.kafka.records import marker_of
from torchrec_cnr.kafka.topics import TopicRules
from torchrec_cnr.lineage.checkpoint import read_checkpoint, read_objects
from torchrec_cnr.lineage.marker_commit import publish_marked
from torchrec_cnr.loading.fitting import ranked_name
from torchrec_cnr.maintenance.catalog import read_catalog
from torchrec_cnr.maintenance.dcp_import.dcp_checkpoint import read_dcp_checkpoint
from torchrec_cnr.maintenance.dcp_import.dcp_metadata import METADATA_FILE
from torchrec_cnr.maintenance.read_run_history import read_run_history
from torchrec_cnr.quantization import Asymmetric, HalfPrecision, KMeans, NoQuantization, Scheme, Symmetric
from torchrec_cnr.quantization.packed_rows import fits_packed_rows, unpack_rows
from torchrec_cnr.quantization.row_transform import RowTransform, transform_bytes
from torchrec_cnr.reading.blocks import PlacedRows, parse_block
from torchrec_cnr.storage import fences, leases
from torchrec_cnr.storage.store import Store

Reader = Callable[[bytes], None]
READERS: dict[str, Reader] = {}

SCHEMES: Sequence[Scheme] = (
    NoQuantization(), HalfPrecision(torch.float16), HalfPrecision(torch.bfloat16), Symmetric(2), Symmetric(8),
    Asymmetric(3), Asymmetric(4), Asymmetric(4, entropy_coded=True), KMeans(2), KMeans(4),
)  # fmt: skip
DCP_SIZE = (4, 2)  # of the float32 tensor that the data file of ``dcp_files`` holds
_NOT_AN_INPUT = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)
_MAX_NAMES = 32  # that are made as files
_KEPT = b"outside"


def _reader(read: Reader) -> Reader:
    READERS[read.__name__] = read
    return read


@contextmanager
def _root() -> Iterator[Store]:
    """An empty directory, beside a file that nothing may remove."""
    with TemporaryDirectory(prefix="fuzzed-") as folder:
        outside, root = Path(folder, "outside", "manifest.json"), Store.open(f"{folder}/root", sync_files=False)
        outside.parent.mkdir()
        outside.write_bytes(_KEPT)
        root.make()
        yield root
        assert outside.read_bytes() == _KEPT


def _put(store: Store, name: str, data: bytes) -> None:
    store.make()
    store.put(name, [data], is_durable=False)


# Values.


@_reader
def manifests(data: bytes) -> None:
    """Read the body of a manifest, in a file with a digest that fits."""
    file = manifest_file(data)
    manifest_json.forget()
    manifest, _ = manifest_json.loads(file, "here")
    assert b'"zstd"' in data or manifest_json.dumps(manifest)[0] == file  # there is one way to write a value


@_reader
def packed_manifests(data: bytes) -> None:
    """Read the body of a manifest that is packed in another body."""
    created_ns, frame = manifest_json.created_ns(data), base64.b64encode(zstandard.compress(data)).decode()
    manifests(dumps({"format": FORMAT, "version": VERSION, "created_ns": created_ns or 0, "zstd": frame}))


@_reader
def pickles(data: bytes) -> None:
    """Read a pickle without its first two bytes, in an archive as ``torch.save`` writes it."""
    archives(archive_of(data))


@_reader
def archives(data: bytes) -> None:
    """Read the archive of an object, and hand the object on as a load does."""
    stream = safe_pickle.serialized(safe_pickle.unpickled(data, "here"), "here")
    with suppress(Exception):  # a load does the same, and raises a typed error then
        torch.load(stream, weights_only=True)


@_reader
def reader_states(data: bytes) -> None:
    """Read the archive of a data loader's position, and take the batch that follows."""
    state = cnr.ReaderState([1, 2, 3])
    state.load_state_dict({ranked_name(0, 1): data})
    next(iter(state), None)


@_reader
def row_codes(data: bytes) -> None:
    """Read row numbers: one byte for the coding, 4 for the span, 3 for the number of rows, and then the code."""
    span = int.from_bytes(data[1:5], "little") % (1 << 22) + 1
    num_rows = int.from_bytes(data[5:8], "little") % span + 1
    coding = "bitmap" if data[:1] == b"\1" else "gaps"
    if coding == "gaps" or span <= 64 * num_rows:  # as manifests are checked
        decode_row_numbers(CodedRows(coding, 1, span, data[8:]), num_rows, "here")


@_reader
def blobs(data: bytes) -> None:
    """Read a block of rows: one byte each for scheme, dtype and columns, two for the number of rows, and the blob."""
    if len(data) < 6:
        return
    scheme, dtype_name = SCHEMES[data[0] % len(SCHEMES)], list(DTYPES)[data[1] % len(DTYPES)]
    num_cols, num_rows, dtype = 1 + data[2] % 64, 1 + int.from_bytes(data[3:5], "little"), DTYPES[dtype_name]
    if not scheme.supports(dtype):
        scheme = NoQuantization()
    box = Box((0, 0), (num_rows, num_cols))
    shard = Shard(box, RowSet.all(num_rows, num_rows), (Blob(0, 0, len(data) - 5, 0),), scheme)
    ManifestParser("here").check_blobs(shard, TensorEntry(dtype_name, box.sizes, (shard,), is_table=True), "here")
    blob = np.frombuffer(bytearray(data[5:]), dtype=np.uint8)
    row_bytes, tail_bytes = scheme.row_bytes(num_cols, dtype), scheme.tail_bytes(num_cols, dtype)
    rows = join(blob, num_rows, row_bytes, tail_bytes, "here")
    block = parse_block(shard, dtype, rows, PlacedRows(box, 0, num_rows, None), False, "here")
    assert block.values.shape == box.sizes


@_reader
def packed_rows(data: bytes) -> None:
    """Read transformed rows: one byte for columns, two for the number of rows, a transform without basis, the blob."""
    num_cols, num_rows = 1 + int.from_bytes(data[:1], "little") % 64, 1 + int.from_bytes(data[1:3], "little")
    start = 3 + transform_bytes(num_cols)
    transform = RowTransform.parsed(data[3:start], None, "here")
    blob = np.frombuffer(bytearray(data[start:]), dtype=np.uint8)
    if transform.num_cols == num_cols and fits_packed_rows(len(blob), num_rows, num_cols):  # as manifests are checked
        numbers, rest = unpack_rows(blob, num_rows, 0, transform, "here")
        assert (numbers.dtype, numbers.shape) == (np.int16, (num_rows, num_cols))
        assert not len(rest)


# What Kafka holds.


class _MarkedLog:
    """A row log with a commit record of every manifest."""

    def open(self, *, may_make: bool) -> bool:
        return not may_make

    def marked(self, root: str, manifests: Mapping[str, str | None]) -> frozenset[str]:
        return frozenset(manifests)


class _Records:
    """The consumers of one partition."""

    def __init__(self, records: Sequence[Message]) -> None:
        self._records = records

    def one(self, topic: str, partition: int, start: int) -> Any:
        return nullcontext(self)

    def records(self, topic: str, partition: int, start: int, stop: int) -> Iterator[Message]:
        return iter(self._records[start:stop])


class _Log(KafkaLog):
    """A log without a broker."""

    def __init__(self, records: Sequence[Message]) -> None:
        cluster = SimpleNamespace(bootstrap="here", errors=lambda what: nullcontext())
        self.rules: Any = SimpleNamespace(cluster=cluster)
        self._consumers: Any = _Records(records)


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode("latin1")


@_reader
def kafka_packs(data: bytes) -> None:
    """Read a pack from a topic; JSON: name, size, log range, and of each record key, value and headers, in latin1."""
    try:
        name, num_bytes, place, records = json.loads(data)
        messages = [
            Message(offset=offset, key=_bytes(key), value=_bytes(value), headers=[(k, _bytes(v)) for k, v in headers])
            for offset, (key, value, headers) in enumerate(records)
        ]
    except _NOT_AN_INPUT:
        return
    pack = ManifestParser("here").pack([None, name, num_bytes, 8, 0, None, 0, place], "pack")
    if pack.log is not None:
        for start in (0, pack.num_bytes // 2):
            assert len(_Log(messages).read(pack.name, pack.num_bytes, pack.log, start, pack.num_bytes))


@_reader
def markers(data: bytes) -> None:
    """Read a commit record, and look for the manifest that it commits."""
    marker = marker_of(data, 0)
    if marker is not None:
        with _root() as root:
            publish_marked(replace(root, row_log=_MarkedLog()), {marker.name})


@_reader
def topic_settings(data: bytes) -> None:
    """Check the settings that a broker returns for a topic; JSON."""
    try:
        settings = {str(key): str(value) for key, value in json.loads(data).items()}
    except _NOT_AN_INPUT:
        return
    TopicRules("topic", 4, 3600.0, 1 << 20).complaints(settings, 4)


# Files.


@_reader
def manifest_files(data: bytes) -> None:
    """Read a whole manifest file, and one that waits for its commit record."""
    with _root() as root:
        _put(root.at("step-1"), MANIFEST_FILE, data)
        _put(root.at("step-2"), "a2.uncommitted.json", data)
        cnr.latest(root.url)
        publish_marked(replace(root, row_log=_MarkedLog()))
        read_checkpoint(root.at("step-2" if root.at("step-2").exists(MANIFEST_FILE) else "step-1"))


def _read_by_all(folder: Path, ways: Sequence[Callable[[str], object]]) -> None:
    for read in ways:
        with suppress(CNRError):
            read(str(folder))


def _load_all(path: str) -> None:
    checkpoint = read_checkpoint(path)
    dict(read_objects(checkpoint, list(checkpoint.manifest.objects), 1))
    for fqn in checkpoint.manifest.tensors:
        cnr.load_table(path, fqn, thread_count=1)


@_reader
def loads(data: bytes) -> None:
    """Load a checkpoint, in the form of ``checkpoints``."""
    with checkpoints.written(data) as folder:
        _read_by_all(folder, [load_state, _load_all])


@_reader
def checks(data: bytes) -> None:
    """Verify and inspect a checkpoint, in the form of ``checkpoints``."""
    with checkpoints.written(data) as folder:
        _read_by_all(folder, [cnr.verify, lambda path: cli("inspect", "--all", path)])


class _Commits:
    """A source of commits, each of which is newer than those before it."""

    def __init__(self) -> None:
        self.commits: list[cnr.Commit] = []

    def add(self, folder: Path) -> None:
        self.commits.insert(0, cnr.Commit(str(folder), len(self.commits)))

    def newest_first(self) -> Sequence[cnr.Commit]:
        return self.commits

    def wait(self, timeout_secs: float) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


@_reader
def updates(data: bytes) -> None:
    """Update a served model from the parent of a checkpoint to it, in the form of ``checkpoints``."""
    model, commits = torch.nn.Module(), _Commits()
    model.table = torch.nn.Parameter(torch.zeros(8, 4))
    with checkpoints.written(data) as folder:
        subscriber = cnr.RowSubscriber(model, commits, key=None, allow_partial_load=True, thread_count=1)
        for checkpoint in (folder.parent / checkpoints.BASELINE, folder):
            commits.add(checkpoint)
            subscriber.update()
        subscriber.close()


@_reader
def upkeep(data: bytes) -> None:
    """Compare, export and compact a checkpoint, in the form of ``checkpoints``, and plan a prune of its root."""
    with checkpoints.written(data) as folder, TemporaryDirectory(prefix="fuzzed-") as out:
        baseline, root = str(folder.parent / checkpoints.BASELINE), str(folder.parent)
        ways: list[Callable[[str], object]] = [
            lambda path: cnr.compare(baseline, path),
            lambda path: cnr.export(path, f"{out}/torch", to="torch"),
            lambda path: cnr.export(path, f"{out}/safetensors", to="safetensors"),
            lambda _: str(cnr.plan_prune(root, cnr.Keep(last=1))),
            lambda _: read_run_history(read_catalog(root)),
            lambda _: cli("ls", root),
            cnr.compact,
            load_state,
        ]
        _read_by_all(folder, ways)


@_reader
def fence_files(data: bytes) -> None:
    """Refuse a save because of another job's fence, and say whose it is."""
    with _root() as root:
        _put(root, "fence-00000001.json", data)
        fences.Fence(root, 0, b"ours").claim()


@_reader
def lease_files(data: bytes) -> None:
    """Find out whether a lease is in force."""
    with _root() as root:
        name = f"{0:016x}.{1 << 62}.load.lease"
        _put(root, name, data)
        leases.in_force(root, [name], 0)


@_reader
def journal_files(data: bytes) -> None:
    """Read the journal of prunes, plan the next prune by it, and execute that."""
    with _root() as root:
        _put(root.at("journal"), f"{1:020d}-{0:016x}.json", data)
        _put(root.at("step-1"), f"{0:016x}-0-0.safetensors", b"left")
        found = read_catalog(root)
        with suppress(CNRError):
            cli("report", "--json", root.path)
        plan = cnr.plan_prune(found)
        assert str(plan)
        cnr.execute(plan)
        cli("ls", root.path)


@_reader
def metric_files(data: bytes) -> None:
    """Read the metrics of a checkpoint, and plan a prune that keeps the best one."""
    with _root() as root:
        Draft().write(Path(root.path, "step-1"))
        _put(root.at("step-1"), f"metrics-{1:020d}-{0:016x}.json", data)
        assert str(cnr.plan_prune(root.url, cnr.Keep(last=0, best=cnr.Best("auc"))))


@_reader
def file_names(data: bytes) -> None:
    """Look at a root and a checkpoint that hold files and directories of any names; one name a line."""
    lines = [line for line in data.split(b"\n") if 0 < len(line) < 256 and not {*b"/\0"} & {*line}]
    with _root() as root:
        Draft().write(Path(root.path, "step-1"))
        for line in lines[:_MAX_NAMES]:
            name = os.fsdecode(line)
            if line not in (b".", b".."):
                for directory in (root.path, f"{root.path}/step-1"):
                    with suppress(FileExistsError):
                        os.mkdir(f"{directory}/{name}") if name[-1] in "+~" else Path(directory, name).touch()
        _read_by_all(
            Path(root.path),
            [
                cnr.latest,
                lambda path: cli("ls", path),
                lambda path: cli("ls", "--json", path),
                lambda path: read_run_history(read_catalog(path)),
                lambda path: cnr.execute(cnr.plan_prune(path)),
            ],
        )


# Checkpoints of DCP.


@_reader
def dcp_metadata(data: bytes) -> None:
    """Read the metadata of a checkpoint that DCP wrote."""
    with _root() as root:
        _put(root, METADATA_FILE, data)
        _put(root, "__0_0.distcp", dcp_archive())
        _read_dcp(root)


@_reader
def dcp_files(data: bytes) -> None:
    """Read a data file of a checkpoint that DCP wrote, as a tensor and as an object."""
    with _root() as root:
        _put(root, METADATA_FILE, pickle.dumps(dcp_metadata_of(len(data))))
        _put(root, "__0_0.distcp", data)
        _read_dcp(root)


def _read_dcp(root: Store) -> None:
    found = read_dcp_checkpoint(root.url)
    for chunk in found.chunks:
        assert found.read(chunk).nbytes <= sum(root.listing().files.values())
    for fqn in found.objects:
        found.read_object(fqn)


def dcp_archive() -> bytes:
    """A tensor of ``DCP_SIZE``, as DCP writes it."""
    stream = io.BytesIO()
    torch.save(torch.ones(DCP_SIZE), stream)
    return stream.getvalue()


def dcp_metadata_of(num_bytes: int) -> Metadata:
    """Metadata of one tensor and one object, which both lie in one file of so many bytes."""
    size, first = torch.Size(DCP_SIZE), torch.Size((0, 0))
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), size, [ChunkStorageMetadata(first, size)])
    place = _StorageInfo("__0_0.distcp", 0, num_bytes)
    entries: Json = {"table": tensor, "seen": BytesStorageMetadata()}
    places = {MetadataIndex("table", first): place, MetadataIndex("seen"): place}
    return Metadata(entries, storage_data=places, planner_data={"table": ("table",), "seen": ("seen",)})
