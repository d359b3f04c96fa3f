"""A reader of checkpoints, written from docs/reference/format.md alone: the page is enough, the library follows it.

It knows nothing of the library, nor do ``transformed`` and ``refusals``, which it uses. It reads whole states into
memory and refuses whatever the page tells it to refuse; numbers in comments are the page's sections.
"""

import base64
import hashlib
import json
import math
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from tests.golden import transformed
from tests.golden.refusals import Refused, check, refuse

Array = npt.NDArray[Any]

FRAME = re.compile(rb'\{"sha256":"([0-9a-f]{64})","manifest":(\{.*\})\}\n', re.DOTALL)
TOPIC = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")
KEY = re.compile(r"[^\x00-\x1f]{1,16384}")
PART = re.compile(rb"([0-9]{1,9})/([0-9]{1,9})")
NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
PATH = re.compile(r"(\.\./)+(?!\.{1,2}(/|$))[^/\\\x00-\x1f]+(/(?!\.{1,2}(/|$))[^/\\\x00-\x1f]+)*")
DIGEST = re.compile("[0-9a-f]{64}")
KEYS = ["format", "version", "created_ns", "id", "save_id", "parent", "replaces", "policy", "history", "restores"]
KEYS += ["world_size", "writer", "packs", "row_sets", "tensors", "objects", "paths"]
TENSOR_KEYS = ["dtype", "size", "is_table", "table", "folded", "shards"]
SCHEME_KEYS = {
    "none": ["name"],
    "half": ["name", "dtype"],
    "symmetric": ["name", "bits"],
    "asymmetric": ["name", "bits"],
    "adaptive_asymmetric": ["name", "bits", "search"],
    "kmeans": ["name", "bits"],
    "transformed": ["name", "digest", "basis"],
}
ENTROPY_CODED = ("symmetric", "asymmetric", "adaptive_asymmetric")
DECIMAL = re.compile(r"-?[0-9]+\.[0-9]+|[1-9](\.[0-9]+)?e-[0-9]{2,}")
# A bfloat16 is kept as its 16 bits.
DTYPES = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "i1",
    "uint8": "u1",
    "bool": "u1",
}


class NewerVersion(Refused):
    """The checkpoint is of a newer version of the format."""


# 1. Conventions


def crc32c(data: bytes) -> int:
    """CRC-32C, a byte at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _crc_of_byte(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC_TABLE = [_crc_of_byte(byte) for byte in range(256)]


@dataclass(frozen=True)
class Box:
    """A place in a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.sizes[0] if self.sizes else 1

    @property
    def cols(self) -> int:
        return math.prod(self.sizes[1:])

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def overlaps(self, other: "Box") -> bool:
        return all(
            a < b + n and b < a + m
            for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )


def check_within(size: Sequence[int], box: Box) -> None:
    """A box lies within a tensor."""
    check(len(box.sizes) == len(size), "a box of other dimensions")
    check(all(o + n <= whole for o, n, whole in zip(box.offsets, box.sizes, size, strict=True)), "a box outside")


def check_filled(size: Sequence[int], boxes: Sequence[Box]) -> None:
    """Boxes fill a tensor exactly."""
    for box in boxes:
        check_within(size, box)
    boxes = [box for box in boxes if math.prod(box.sizes)]
    check(
        sum(len({whole, *own}) > 1 for whole, *own in zip(size, *(b.sizes for b in boxes), strict=True)) <= 8, "cubes"
    )
    check(sum(math.prod(box.sizes) for box in boxes) == math.prod(size), "boxes with a hole or overlap")
    for index, box in enumerate(boxes):
        check(not any(box.overlaps(other) for other in boxes[:index]), "boxes that overlap")


def integer(value: Any, low: int = 0, high: int = 2**62) -> int:
    check(type(value) is int and low <= value <= high, f"{value!r} is no integer from {low} to {high}")
    return int(value)


def string(value: Any) -> str:
    check(type(value) is str and not re.search("[\ud800-\udfff]", value), f"{value!r} is no string")
    return str(value)


def name(value: Any) -> str:
    check(NAME.fullmatch(string(value)) is not None, f"{value!r} is no name")
    return str(value)


def array(value: Any, length: int | None = None) -> list[Any]:
    check(type(value) is list and length in (None, len(value)), f"no list of {length}")
    return list(value)


def indices(value: Any) -> tuple[int, ...]:
    check(len(array(value)) <= 64, "more than 64 dimensions")
    return tuple(integer(n) for n in value)


def mapping(value: Any, keys: Sequence[str] | None = None) -> dict[str, Any]:
    check(type(value) is dict and (keys is None or list(value) == list(keys)), f"no object with keys {keys}")
    return dict(value)


# 3. and 4. The manifest


@dataclass(frozen=True)
class Blob:
    """A range of a pack."""

    pack: int
    offset: int
    num_bytes: int
    crc: int


@dataclass(frozen=True)
class LogRange:
    """Where in a log a pack lies."""

    topic: str
    partition: int
    first: int
    last: int
    part_bytes: int
    key: str | None

    def num_parts(self, num_bytes: int) -> int:
        return -(-num_bytes // self.part_bytes)


@dataclass(frozen=True)
class RowBlock:
    """The rows in a blob."""

    coding: str
    first: int
    span: int
    members: int
    blob: Blob | None


@dataclass(frozen=True)
class Place:
    """How a shard lies."""

    box: Box
    table_box: Box | None


@dataclass(frozen=True)
class Shard:
    """What is stored of one box."""

    place: Place
    row_set: list[RowBlock]
    blobs: list[Blob]
    scheme: "Scheme"
    transform: "StoredTransform | None" = None

    @property
    def box(self) -> Box:
        return self.place.box

    @property
    def is_whole(self) -> bool:
        is_all = all(block.coding == "all" for block in self.row_set)
        return self.box.cols == 0 or (is_all and sum(block.members for block in self.row_set) == self.box.rows)


@dataclass(frozen=True)
class StoredTransform:
    """The sixth item of a shard of transformed rows (4)."""

    blob: Blob
    basis: Blob | None
    num_exact: list[int]


@dataclass(frozen=True)
class Scheme:
    """How rows of a dtype lie in a blob (6): ``bits`` of a code, or ``half``, the dtype of values in 16 bits."""

    dtype: str
    name: str
    bits: int = 0
    half: str = ""
    digest: str = ""
    basis: str | None = None
    is_entropy_coded: bool = False

    @property
    def item_bytes(self) -> int:
        return np.dtype(DTYPES[self.dtype]).itemsize

    def row_bytes(self, cols: int) -> int:
        if self.name == "none":
            return cols * self.item_bytes
        if self.name == "half":
            return 2 * cols
        if self.name == "kmeans":
            return (cols * self.bits + 7) // 8 + 2 * (1 << self.bits)
        if self.bits == 3:
            return (cols * 3 + 7) // 8 + 4
        return (cols * self.bits + 15) // 16 * 2 + 4

    def tail_bytes(self, cols: int) -> int:
        if self.is_entropy_coded:
            return self.row_bytes(cols)
        if self.name in ("none", "half"):
            found = self.row_bytes(cols)
        else:
            found = 2 * (1 << self.bits) if self.name == "kmeans" else 4
        return found if found <= 16 else 0


@dataclass(frozen=True)
class Tensor:
    """A tensor's entry."""

    dtype: str
    size: tuple[int, ...]
    is_table: bool
    table: str | None
    folded: list[Place] | None
    shards: list[Shard]

    @property
    def is_whole(self) -> bool:
        return self.folded is None and all(shard.is_whole for shard in self.shards)

    @property
    def places(self) -> list[Place]:
        return [shard.place for shard in self.shards] if self.folded is None else self.folded


def _unpacked(text: str) -> bytes:
    """3. A packed body."""
    try:
        frame = base64.b64decode(text, validate=True)
        num_bytes = zstandard.frame_content_size(frame)
        check(0 < num_bytes <= 2**30 and base64.b64encode(frame).decode() == text, "no packed body")
        check(num_bytes <= 32 * len(frame), "it unpacks to more than a frame may")
        decompressor = zstandard.ZstdDecompressor().decompressobj()
        body: bytes = decompressor.decompress(frame)
    except (ValueError, zstandard.ZstdError) as error:
        refuse(f"not packed: {error}")
    check(decompressor.eof and not decompressor.unused_data and len(body) == num_bytes, "not one frame")
    values_bytes = 96 * body.count(b"[") + 208 * body.count(b"{") + 32 * body.count(b",")
    check(values_bytes <= 2**26 + 256 * len(frame), "more values than a frame may hold")
    return body


class Manifest:
    """A manifest, validated."""

    def __init__(self, data: bytes) -> None:
        frame = FRAME.fullmatch(data)
        if frame is None:
            refuse("no frame")
        self.digest = hashlib.sha256(frame[2]).hexdigest()
        check(self.digest.encode() == frame[1], "another digest")
        value = self._parsed(frame[2])
        if "zstd" in value:
            packed = mapping(value, ["format", "version", "created_ns", "zstd"])
            value = self._parsed(_unpacked(string(packed["zstd"])))
            check(value.get("created_ns") == integer(packed["created_ns"]), "another one is packed")
        value = mapping(value, KEYS)
        self.created_ns = integer(value["created_ns"])
        string(value["id"]), name(value["save_id"]), string(value["policy"]), string(value["writer"])
        self.parent = None if value["parent"] is None else mapping(value["parent"], ["path", "sha256"])
        if self.parent is not None:
            check(PATH.fullmatch(string(self.parent["path"])) is not None, "no path of a parent")
            check(DIGEST.fullmatch(string(self.parent["sha256"])) is not None, "no digest of a parent")
        self.replaces = None if value["replaces"] is None else string(value["replaces"])
        check(self.replaces is None or DIGEST.fullmatch(self.replaces) is not None, "no digest of what it replaces")
        baseline_bytes, delta_bytes = array(value["history"], 2)
        for num_bytes in [baseline_bytes, *array(delta_bytes)]:
            integer(num_bytes)
        self.num_restores = integer(value["restores"])
        integer(value["world_size"], low=1)
        self.blobs: list[Blob] = []
        self.parts: set[Blob] = set()  # transforms and bases
        self.logs: list[LogRange | None] = []  # of each pack
        self.packs = [self._pack(pack) for pack in array(value["packs"])]
        check(len({pack[:2] for pack in self.packs}) == len(self.packs), "two packs of one name")
        keys = [(log.topic, log.key) for log in self.logs if log is not None and log.key is not None]
        check(len(set(keys)) == len(keys), "two packs of one key")
        self.used: dict[int, None] = {}  # row sets, in the order of the shards
        self.row_sets = [self._row_set(row_set) for row_set in array(value["row_sets"])]
        self.tensors = {string(fqn): self._tensor(entry) for fqn, entry in mapping(value["tensors"]).items()}
        self.objects = {string(fqn): self._blob(blob) for fqn, blob in mapping(value["objects"]).items()}
        self.paths = {string(fqn): self._path(path) for fqn, path in mapping(value["paths"]).items()}
        check(not set(self.tensors) & set(self.objects), "one FQN twice")
        check(all(len(fqn) <= 8192 for fqn in (*self.tensors, *self.objects, *self.paths)), "a name that is too long")
        for tensor in self.tensors.values():
            is_folded = self.replaces is not None and tensor.folded is not None
            check(self.parent is not None or tensor.is_whole or is_folded, "an incomplete baseline")
            self._check_table(tensor)
        self._check_packs()
        check(list(self.used) == list(range(len(self.row_sets))), "row sets unlike the shards'")
        check(len({tuple(row_set) for row_set in self.row_sets}) == len(self.row_sets), "a row set twice")
        check({blob.pack for blob in self.blobs} == set(range(len(self.packs))), "a pack of nothing")

    def _parsed(self, body: bytes) -> dict[str, Any]:
        try:
            value = json.loads(body.decode("ascii"))
            written = json.dumps(value, separators=(",", ":")).encode()
        except (ValueError, RecursionError) as error:
            refuse(f"not JSON: {error}")
        check(isinstance(value, dict) and value.get("format") == "torchrec_cnr", "another format")
        version = value.get("version")
        check(type(version) is int and version >= 1, "no version")
        if version > 1:
            raise NewerVersion(str(version))
        check(written == body, "written in another way")
        try:
            json.loads(body, object_pairs_hook=_once, parse_float=refuse)
        except RecursionError:
            refuse("nested too deeply")
        return value

    def _pack(self, value: Any) -> tuple[str | None, str, int, int, int]:
        directory, file, num_bytes, header_bytes, crc, written_ns, heat, log = array(value, 8)
        self.logs.append(None if log is None else self._log_range(log, integer(num_bytes)))
        check(directory is None or log is None, "a pack in a directory and in a log")
        check(written_ns is None or integer(written_ns) is not None, "no time")
        integer(heat, high=3)
        check(directory is None or PATH.fullmatch(string(directory)) is not None, "no path of a directory")
        check(name(file).endswith(".safetensors"), "no name of a pack")
        return directory, file, integer(num_bytes), integer(header_bytes, 8, num_bytes), integer(crc, high=2**32 - 1)

    def _log_range(self, value: Any, num_bytes: int) -> "LogRange":
        topic, partition, first, last, part_bytes, key = array(value, 6)
        check(TOPIC.fullmatch(string(topic)) is not None, "no name of a topic")
        integer(partition, high=2**31 - 1), integer(first), integer(last), integer(part_bytes, 1, 2**30)
        check(key is None or KEY.fullmatch(string(key)) is not None, "no beginning of a key")
        found = LogRange(topic, partition, first, last, part_bytes, key)
        check(last - first + 1 >= found.num_parts(num_bytes), "too few records")
        return found

    def _blob(self, value: Any, is_of_rows: bool = False) -> Blob:
        pack, offset, num_bytes, crc = array(value, 4)
        _, _, size, header_bytes, _ = self.packs[integer(pack, high=len(self.packs) - 1)]
        integer(num_bytes, 1, size - integer(offset, header_bytes))
        blob = Blob(pack, offset, num_bytes, integer(crc, high=2**32 - 1))
        if not is_of_rows or blob not in self.blobs:  # row blocks have been read before all else
            self.blobs.append(blob)
        return blob

    def _row_set(self, value: Any) -> list[RowBlock]:
        found = [self._row_block(block) for block in array(value)]
        check(all(a.first + a.span <= b.first for a, b in pairwise(found)), "blocks out of order")
        return found

    def _row_block(self, value: Any) -> RowBlock:
        coding, first, span, members, blob = array(value, 5)
        check(coding in ("all", "bitmap", "gaps"), "unknown coding")
        integer(span, integer(members, 1))
        check((coding == "all") == (blob is None), "coding and blob do not fit")
        check(coding != "all" or span == members, "consecutive rows with gaps")
        check(coding == "all" or members <= 2**24, "too many rows in a code")
        check(coding != "bitmap" or span <= 64 * members, "a bitmap with too few rows")
        code = None if blob is None else self._blob(blob, is_of_rows=True)
        return RowBlock(coding, integer(first), span, members, code)

    def _tensor(self, value: Any) -> Tensor:
        entry = mapping(value, TENSOR_KEYS)
        check(string(entry["dtype"]) in DTYPES, "unknown dtype")
        size = indices(entry["size"])
        check(type(entry["is_table"]) is bool, "is_table is no boolean")
        check(not entry["is_table"] or len(size) == 2, "a table that is no matrix")
        table = None if entry["table"] is None else string(entry["table"])
        folded = entry["folded"]
        places = None if folded is None else [self._place(*array(place, 2)) for place in array(folded)]
        shards = [self._shard(shard, entry["dtype"]) for shard in array(entry["shards"])]
        tensor = Tensor(entry["dtype"], size, entry["is_table"], table, places, shards)
        check_filled(size, [place.box for place in tensor.places])
        for place in [*tensor.places, *(shard.place for shard in shards)]:
            check(table is not None or place.table_box is None, "a table_box without a table")
        for shard in shards:
            self._check_shard(tensor, shard)
        return tensor

    def _shard(self, value: Any, dtype: str) -> Shard:
        check(len(array(value)) in (5, 6), "a shard of another length")
        box, table_box, row_set, blobs, scheme, *more = value
        self.used.setdefault(integer(row_set, high=len(self.row_sets) - 1))
        codes = [self._blob(blob) for blob in array(blobs)]
        found = scheme_of(scheme, dtype)
        check(len(more) == (found.name == "transformed"), "a shard of another length")
        transform = self._transform(more[0]) if more else None
        return Shard(self._place(box, table_box), self.row_sets[row_set], codes, found, transform)

    def _transform(self, value: Any) -> StoredTransform:
        blob, basis, num_exact_rows = array(value, 3)
        found = self._part(blob), None if basis is None else self._part(basis)
        return StoredTransform(*found, [integer(number) for number in array(num_exact_rows)])

    def _part(self, value: Any) -> Blob:
        blob = self._blob(value, is_of_rows=True)  # several shards may have it
        self.parts.add(blob)
        return blob

    def _place(self, box: Any, table_box: Any) -> Place:
        return Place(self._box(box), None if table_box is None else self._box(table_box))

    def _box(self, value: Any) -> Box:
        offsets, sizes = array(value, 2)
        box = Box(indices(offsets), indices(sizes))
        check(len(box.offsets) == len(box.sizes), "a box of two dimensions")
        return box

    def _check_shard(self, tensor: Tensor, shard: Shard) -> None:
        box = shard.box
        check(len(box.sizes) == len(tensor.size), "a box of other dimensions")
        if tensor.table is None:
            check_within(tensor.size, box)
            check(
                tensor.folded is None or box.sizes[2:] == tensor.size[2:], "a folded tensor, cut in a third dimension"
            )
        check(all(block.first + block.span <= box.rows for block in shard.row_set), "rows outside of the box")
        blocks = shard.row_set if box.cols else []
        check(len(shard.blobs) == len(blocks), "blobs without rows")
        if shard.transform is not None:
            self._check_transformed(shard, shard.transform, blocks)
            return
        for blob, block in zip(shard.blobs, blocks, strict=True):
            if not is_split(shard.scheme, box.cols, block.members, blob.num_bytes):
                num_exact(shard.scheme, box.cols, block.members, blob.num_bytes)

    def _check_transformed(self, shard: Shard, transform: StoredTransform, blocks: list[RowBlock]) -> None:
        cols, basis = shard.box.cols, transform.basis
        check(len(shard.blobs) > 0 and len(transform.num_exact) == len(blocks), "numbers of exact rows")
        check(transform.blob.num_bytes <= 77 + 16 * cols + 64, "a transform of another size")
        check((basis is None) == (shard.scheme.basis is None), "no basis, or one too many")
        check(basis is None or basis.num_bytes == 4 * cols * cols, "a basis of another size")
        for blob, block, exact in zip(shard.blobs, blocks, transform.num_exact, strict=True):
            check(exact <= block.members and block.members * cols <= 2**24, "too many rows")
            num_bytes = blob.num_bytes - exact * (4 + cols * shard.scheme.item_bytes)
            check(transformed.fits(num_bytes, block.members, cols), "a blob of another size")

    def _check_packs(self) -> None:
        ends = [pack[3] for pack in self.packs]
        for blob in sorted(self.blobs, key=lambda blob: (blob.pack, blob.offset)):
            check(blob.offset >= ends[blob.pack], "an overlap in a pack")
            is_own = self.replaces is None and self.packs[blob.pack][0] is None
            check(not is_own or blob.offset == ends[blob.pack], "a hole in a pack")
            check(is_own or self.replaces is not None or blob in self.parts, "rows in a pack of another directory")
            ends[blob.pack] = blob.offset + blob.num_bytes
        for end, pack in zip(ends, self.packs, strict=True):
            check(self.replaces is not None or pack[0] is not None or end == pack[2], "a hole at the end of a pack")

    def _check_table(self, tensor: Tensor) -> None:
        if tensor.table is None:
            return
        table = self.tensors.get(tensor.table)
        if table is None or not table.is_table or len(tensor.size) != 1:
            refuse("state of no table")
        for place in [*tensor.places, *(shard.place for shard in tensor.shards)]:
            rows = 0 if place.table_box is None else place.table_box.rows
            check(rows == place.box.rows, "a table_box of other rows")
            check(rows == 0 or place.table_box is None or place.table_box.cols > 0, "state of no columns")
            check_within(table.size, place.table_box or Box((0, 0), (0, 0)))
        check_filled(table.size, [place.table_box for place in tensor.places if place.table_box is not None])

    def _path(self, value: Any) -> list[str | int]:
        path = array(value)
        check(len(path) > 0 and type(path[0]) is str, "no path")
        return [string(key) if type(key) is str else integer(key, high=2**20) for key in path]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    check(len({key for key, _ in pairs}) == len(pairs), "a key twice")
    return dict(pairs)


def scheme_of(value: Any, dtype: str) -> Scheme:
    """A shard's scheme (4)."""
    found = mapping(value)
    kind = string(found.get("name"))
    if kind not in SCHEME_KEYS:
        refuse("unknown scheme")
    is_entropy_coded = kind in ENTROPY_CODED and "entropy_coded" in found
    keys = SCHEME_KEYS[kind]
    mapping(value, [*keys[:2], "entropy_coded", *keys[2:]] if is_entropy_coded else keys)
    check(not is_entropy_coded or found["entropy_coded"] is True, "entropy-coded or not")
    check(kind == "none" or dtype in ("float32", "float16", "bfloat16"), "dtype that is not quantized")
    half = string(found.get("dtype", ""))
    check("dtype" not in found or half in ("float16", "bfloat16"), "no dtype of 16 bits")
    bits = integer(found.get("bits", 0))
    check("bits" not in found or bits in (2, 3, 4, 8), "no number of bits")
    if "search" in found:
        check_search(found["search"])
    if kind == "transformed":
        for digest in (found["digest"], found["basis"]):
            check(digest is None or DIGEST.fullmatch(string(digest)) is not None, "no digest")
        return Scheme(dtype, kind, digest=string(found["digest"]), basis=found["basis"])
    return Scheme(dtype, kind, bits, half, is_entropy_coded=is_entropy_coded)


def check_search(value: Any) -> None:
    """A search (4)."""
    if mapping(value).get("name") == "greedy":
        found = mapping(value, ["name", "num_bins", "ratio"])
        integer(found["num_bins"], 1, 10_000)
        check(0 < decimal(found["ratio"]) <= 1, "ratio out of bounds")
        return
    found = mapping(value, ["name", "cuts", "rounds", "kept", "polish"])
    check(found["name"] == "least_squares", "unknown search")
    check(1 <= len(array(found["cuts"])) <= 64, "number of cuts")
    check(all(0 <= decimal(cut) < 0.5 for cut in found["cuts"]), "a cut out of bounds")
    integer(found["rounds"], 1, 1000), integer(found["kept"], 1, 64), integer(found["polish"], 0, 1000)


def decimal(value: Any) -> float:
    check(DECIMAL.fullmatch(string(value)) is not None, f"{value!r} is no decimal")
    check(repr(float(value)) == value, f"{value!r} has other digits than it needs")
    return float(value)


def num_exact(scheme: Scheme, cols: int, rows: int, num_bytes: int) -> int:
    """Rows stored exactly behind the codes of a blob (6)."""
    exact, rest = divmod(num_bytes - rows * scheme.row_bytes(cols), 4 + cols * scheme.item_bytes)
    check(rest == 0 and 0 <= exact <= (0 if scheme.name == "none" else rows), "a blob of another size")
    return exact


def is_split(scheme: Scheme, cols: int, rows: int, num_bytes: int) -> bool:
    """Whether a blob is split (6)."""
    if num_bytes >= rows * scheme.row_bytes(cols):
        return False
    tails = rows * scheme.tail_bytes(cols)
    check(num_bytes >= rows * scheme.row_bytes(cols) - tails + 10, "a blob that is too small")
    check(128 * (rows * scheme.row_bytes(cols) - num_bytes) >= tails, "a blob that was cut")
    check(64 * num_bytes >= rows * scheme.row_bytes(cols), "a blob that is too small")
    check(rows <= 2**24, "too many rows in a split blob")
    return True


# 5. Row sets


def unframed(data: bytes, num_bytes: int) -> bytes:
    """The content of a frame, of which so many bytes are expected."""
    try:
        check(data[:4] == zstandard.FRAME_HEADER, "no frame")
        check(zstandard.frame_content_size(data) == num_bytes, "a frame of another size")
        window = zstandard.get_frame_parameters(data).window_size
        check(num_bytes <= 2**24 or window <= 2**23, "a frame that needs a larger window")
        content: bytes = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        refuse(f"a frame: {error}")
    return content


def decode_rows(block: RowBlock, data: bytes) -> Array:
    """The members of a row block."""
    width = 1
    while block.span - 2 >= 256**width:
        width += 1
    num_bytes = (block.span + 7) // 8 if block.coding == "bitmap" else (block.members - 1) * width
    code = unframed(data, num_bytes)
    if block.coding == "bitmap":
        bits = np.unpackbits(np.frombuffer(code, np.uint8), bitorder="little")
        rows = [int(row) for row in np.flatnonzero(bits)]
    else:
        rows = [0]
        for index in range(block.members - 1):
            gap = sum(code[plane * (block.members - 1) + index] << (8 * plane) for plane in range(width))
            rows.append(rows[-1] + 1 + gap)
    check(len(rows) == block.members and rows[0] == 0 and rows[-1] == block.span - 1, "other row numbers")
    return np.array(rows) + block.first


# 6. Rows in a blob


def decode_values(scheme: Scheme, cols: int, rows: int, data: bytes) -> Array:
    """The rows of a blob, [rows, cols]."""
    dtype, row_bytes = np.dtype(DTYPES[scheme.dtype]), scheme.row_bytes(cols)
    if len(data) < rows * row_bytes:
        data = joined(scheme.tail_bytes(cols), row_bytes, rows, data)
    codes = np.frombuffer(data[: rows * row_bytes], np.uint8).reshape(rows, row_bytes)
    if scheme.name == "none":
        check(scheme.dtype != "bool" or bool((codes <= 1).all()), "a bool that is neither 0 nor 1")
        return codes.reshape(-1).view(dtype).reshape(rows, cols)
    with np.errstate(all="ignore"):
        values = from_float(decode_codes(scheme, cols, codes), scheme.dtype)
    return with_exact(values, data[rows * row_bytes :], num_exact(scheme, cols, rows, len(data)), dtype)


def with_exact(values: Array, data: bytes, exact: int, dtype: Any) -> Array:
    """The rows of a blob, with those that are stored exactly in their places, from the bytes after its codes."""
    rows, cols = values.shape
    positions = np.frombuffer(data, "<u4", exact)
    check(all(a < b for a, b in pairwise(positions)) and bool((positions < rows).all()), "positions of exact rows")
    values[positions] = np.frombuffer(data, np.uint8, offset=4 * exact).view(dtype).reshape(-1, cols)
    return values


def transformed_values(shard: Shard, checkpoint: "Checkpoint", rows: int, data: bytes, exact: int) -> Array:
    """Transformed rows, [rows, cols]."""
    scheme, cols, stored = shard.scheme, shard.box.cols, shard.transform
    assert stored is not None
    basis = None if stored.basis is None else checkpoint.bytes_of(stored.basis)
    content = unframed(checkpoint.bytes_of(stored.blob), 77 + 16 * cols)
    transform = transformed.Transform.of(content, basis, scheme.digest, scheme.basis, cols)
    numbers, place = transformed.decode(data, rows, cols, transform)
    check(len(data) == place + exact * (4 + cols * scheme.item_bytes), "another number of exact rows")
    return with_exact(from_float(transform.rows(numbers), scheme.dtype), data[place:], exact, DTYPES[scheme.dtype])


def joined(tail_bytes: int, row_bytes: int, rows: int, data: bytes) -> bytes:
    """The rows of a split blob."""
    num_heads = rows * (row_bytes - tail_bytes)
    planes = unframed(data[num_heads:], rows * tail_bytes)
    heads = np.frombuffer(data[:num_heads], np.uint8).reshape(rows, row_bytes - tail_bytes)
    tails = np.frombuffer(planes, np.uint8).reshape(tail_bytes, rows).T
    return np.concatenate((heads, tails), axis=1).tobytes()


def decode_codes(scheme: Scheme, cols: int, codes: Array) -> Array:
    """What the codes say, as binary32; from bytes [rows, row_bytes]."""
    if scheme.name == "half":
        return to_float(codes.reshape(-1).view(DTYPES[scheme.half]).reshape(-1, cols), scheme.half)
    bits = np.unpackbits(codes, axis=1, bitorder="little")[:, : cols * scheme.bits]
    numbers = bits.reshape(-1, cols, scheme.bits) @ 2 ** np.arange(scheme.bits)
    if scheme.name == "kmeans":
        codebooks = codes[:, -2 * 2**scheme.bits :].copy().view("<f2")
        return np.take_along_axis(codebooks, numbers, axis=1).astype("<f4")
    scale, bias = codes[:, -4:].copy().view("<f2").astype("<f4").T
    return np.asarray(numbers.astype("<f4") * scale[:, None] + bias[:, None])


def from_float(values: Array, dtype: str) -> Array:
    """Rounded to a dtype, to nearest, ties to even; to one of 16 bits by way of binary32."""
    if dtype == "bool":
        return (values != 0).astype(DTYPES[dtype])
    if dtype != "bfloat16":
        return values.astype("<f4" if dtype == "float16" else DTYPES[dtype]).astype(DTYPES[dtype])
    bits = values.astype("<f4").view("<u4")
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return np.where(np.isnan(values), 0x7FC0, rounded).astype("<u2")


def to_float(values: Array, dtype: str) -> Array:
    """A dtype of 16 bits as binary32."""
    return (values.astype("<u4") << 16).view("<f4") if dtype == "bfloat16" else values.astype("<f4")


def to_double(values: Array, dtype: str) -> Array:
    """As binary64."""
    return (to_float(values, dtype) if dtype == "bfloat16" else values).astype("<f8")


# 10. Reading


@dataclass(frozen=True)
class Record:
    """A record of a log: its key, the value of its header `part`, its value, and that of its header `pack`."""

    key: bytes
    part: bytes
    value: bytes
    pack: bytes | None = None


Log = Mapping[tuple[str, int], Mapping[int, Record]]  # by topic and partition, then by offset


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a lineage."""

    folder: Path
    manifest: Manifest
    committed: Manifest
    log: Log

    def path_of(self, pack: int) -> Path:
        directory, file = self.manifest.packs[pack][:2]
        return Path(posixpath.normpath(posixpath.join(str(self.folder), directory or ".")), file)

    def bytes_of(self, blob: Blob) -> bytes:
        data = self.pack_bytes(blob.pack)[blob.offset : blob.offset + blob.num_bytes]
        check(len(data) == blob.num_bytes, "a pack is short")
        check(crc32c(data) == blob.crc, "another crc32c")
        return data

    def pack_bytes(self, pack: int) -> bytes:
        place, (_, file, num_bytes, _, _) = self.manifest.logs[pack], self.manifest.packs[pack]
        if place is None:
            path = self.path_of(pack)
            check(path.is_file(), "a pack is missing")
            return path.read_bytes()
        data, num_parts = b"", place.num_parts(num_bytes)  # 7, packs in a log
        for number, record in enumerate(self._records(place, file.encode())):
            check(record.part == b"%d/%d" % (number, num_parts), "a part is missing, or there twice")
            check(number + 1 == num_parts or len(record.value) == place.part_bytes, "a part of another size")
            data += record.value
        check(len(data) == num_bytes, "parts are missing")
        return data

    def _records(self, place: LogRange, key: bytes) -> list[Record]:
        partition = self.log.get((place.topic, place.partition), {})
        found = (partition.get(offset) for offset in range(place.first, place.last + 1))
        parts = [record for record in found if record is not None and PART.fullmatch(record.part)]
        return [record for record in parts if (record.key if place.key is None else record.pack) == key]

    def rows_of(self, block: RowBlock) -> Array:
        if block.blob is None:
            return np.arange(block.first, block.first + block.span)
        return decode_rows(block, self.bytes_of(block.blob))


def read_checkpoint(folder: Path, log: Log) -> Checkpoint:
    """The manifest that committed a checkpoint, and the last one that took its place."""
    path = folder / "manifest.json"
    check(path.is_file(), f"no checkpoint at {folder}")
    committed = last = Manifest(path.read_bytes())
    check(committed.replaces is None, "a commit that replaces something")
    while (path := folder / f"manifest-{last.digest}.json").is_file():
        replacement = Manifest(path.read_bytes())
        check(replacement.replaces == last.digest, "it replaces another manifest")
        check(replacement.parent is None or last.parent is not None, "a baseline is given a parent")
        check(items_of(replacement) == items_of(last), "it is of another state")
        last = replacement
    return Checkpoint(folder, last, committed, log)


def items_of(manifest: Manifest) -> Any:
    """What every replacement has in common with what it replaces (9)."""
    tensors = {
        fqn: (tensor.dtype, tensor.size, tensor.is_table, tensor.table, set(tensor.places))
        for fqn, tensor in manifest.tensors.items()
    }
    return tensors, set(manifest.objects), manifest.paths


def read_lineage(folder: Path, log: Log | None = None) -> list[Checkpoint]:
    """The head first, its baseline last."""
    found: list[Checkpoint] = []
    place, expected = posixpath.abspath(str(folder)), ""
    while True:
        check(place not in [str(checkpoint.folder) for checkpoint in found], "its own ancestor")
        checkpoint = read_checkpoint(Path(place), log or {})
        check(expected in ("", checkpoint.committed.digest), "another parent")
        is_older = not found or checkpoint.committed.created_ns < found[-1].committed.created_ns
        check(is_older, "a parent that is younger")
        found.append(checkpoint)
        parent = checkpoint.manifest.parent
        if parent is None:
            return found
        place, expected = posixpath.normpath(posixpath.join(place, parent["path"])), parent["sha256"]


@dataclass(frozen=True)
class State:
    """What a checkpoint loads as: tensors as dtype, size and bytes."""

    tensors: Mapping[str, tuple[str, list[int], bytes]]
    objects: Mapping[str, bytes]
    paths: Mapping[str, list[str | int]]


def read(folder: Path, log: Log | None = None) -> State:
    """Read all of a checkpoint, whose rows may be in a log."""
    lineage = read_lineage(folder, log)
    head = lineage[0]
    for checkpoint in lineage:
        for number, (_, _, _, header_bytes, crc) in enumerate(checkpoint.manifest.packs):
            check(crc32c(checkpoint.pack_bytes(number)[:header_bytes]) == crc, "header of a pack")
    return State(
        {fqn: (t.dtype, list(t.size), _fold(lineage, fqn).tobytes()) for fqn, t in head.manifest.tensors.items()},
        {fqn: head.bytes_of(blob) for fqn, blob in head.manifest.objects.items()},
        head.manifest.paths,
    )


def _fold(lineage: Sequence[Checkpoint], fqn: str) -> Array:
    head = lineage[0].manifest.tensors[fqn]
    links: list[tuple[Checkpoint, Tensor]] = []
    for checkpoint in lineage:
        tensor = checkpoint.manifest.tensors.get(fqn)
        if tensor is None or not _is_alike(checkpoint, tensor, lineage[0], head):
            check(bool(links) and links[0][0].manifest.replaces is not None, f"no such {fqn} in a parent")
            break
        links.insert(0, (checkpoint, tensor))
        if tensor.is_whole:
            break
    size, dtype = _folded_size(lineage[0], head), DTYPES[head.dtype]
    if 0 in size and 8 * math.prod(max(1, n) for n in size) >= 2**63:
        return np.zeros(0, dtype)  # numpy has no such shape, although nothing is in it
    folded = np.zeros(size, dtype)
    stored = np.zeros(folded.shape, bool)
    for checkpoint, tensor in links:
        for shard in tensor.shards:
            nums_exact = [0] * len(shard.blobs) if shard.transform is None else shard.transform.num_exact
            # A shard without columns has blocks of rows, but no blobs.
            for block, blob, exact in zip(shard.row_set, shard.blobs, nums_exact, strict=False):
                rows = checkpoint.rows_of(block)
                data = checkpoint.bytes_of(blob)
                if shard.transform is None:
                    values = decode_values(shard.scheme, shard.box.cols, len(rows), data)
                else:
                    values = transformed_values(shard, checkpoint, len(rows), data, exact)
                box = shard.place.table_box or shard.box
                if folded.ndim == 0:
                    folded[...], stored[...] = values[0, 0], True
                    continue
                if shard.place.table_box is None:
                    values = values.reshape(len(rows), *box.sizes[1:])
                folded[box.slices][rows] = values
                stored[box.slices][rows] = True
    check(bool(stored.all()), "a row that is stored nowhere")
    return folded if head.table is None else _row_state(head, folded)


def _is_alike(checkpoint: Checkpoint, tensor: Tensor, newest: Checkpoint, head: Tensor) -> bool:
    nature = (head.dtype, head.is_table, head.table, _folded_size(newest, head))
    return (tensor.dtype, tensor.is_table, tensor.table, _folded_size(checkpoint, tensor)) == nature


def _folded_size(checkpoint: Checkpoint, tensor: Tensor) -> tuple[int, ...]:
    return tensor.size if tensor.table is None else checkpoint.manifest.tensors[tensor.table].size


def _row_state(head: Tensor, folded: Array) -> Array:
    """Row-wise state (8), sharded as the head is."""
    state = np.zeros(head.size, folded.dtype)
    for place in head.places:
        if place.table_box is not None and place.box.rows:
            columns = folded[place.table_box.slices]
            means = from_float(to_double(columns, head.dtype).mean(axis=1), head.dtype)
            state[place.box.slices] = np.where((columns == columns[:, :1]).all(axis=1), columns[:, 0], means)
    return state
