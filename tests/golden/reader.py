"""A reader of checkpoints, written from docs/format.md alone: the page is enough, and the library keeps to it.

It knows nothing of the library. It reads whole states into memory and refuses whatever the page tells it to refuse;
numbers in comments are the page's sections.
"""

import hashlib
import json
import math
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import zstandard

Array = npt.NDArray[Any]

FRAME = re.compile(rb'\{"sha256":"([0-9a-f]{64})","manifest":(\{.*\})\}\n', re.DOTALL)
NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
PARENT = re.compile(r"(\.\./)+(?!\.{1,2}(/|$))[^/\\\x00-\x1f]+(/(?!\.{1,2}(/|$))[^/\\\x00-\x1f]+)*")
KEYS = ["format", "version", "created_ns", "id", "save_id", "parent", "policy", "history", "restores", "world_size"]
KEYS += ["writer", "packs", "row_sets", "tensors", "objects", "paths"]
TENSOR_KEYS = ["dtype", "size", "is_table", "table", "shards"]
SCHEME_KEYS = {
    "none": ["name"],
    "half": ["name", "dtype"],
    "symmetric": ["name", "bits"],
    "asymmetric": ["name", "bits"],
    "adaptive_asymmetric": ["name", "bits", "search"],
    "kmeans": ["name", "bits"],
}
DECIMAL = re.compile(r"-?[0-9]+\.[0-9]+|[1-9](\.[0-9]+)?e-[0-9]{2,}")
# 13. Versions
KEYS_1 = [key for key in KEYS if key != "restores"]
TENSOR_KEYS_1 = ["dtype", "size", "scheme", "is_table", "table", "shards"]
SCHEMES_1 = [{"name": "none"}, *({"name": "asymmetric", "bits": bits} for bits in (2, 4, 8))]
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


class Refused(Exception):
    """The checkpoint breaks a MUST."""


class NewerVersion(Refused):
    """The checkpoint is of a newer version of the format."""


def refuse(why: str) -> NoReturn:
    """Raise."""
    raise Refused(why)


def check(holds: bool, why: str) -> None:
    """Refuse what does not hold."""
    if not holds:
        refuse(why)


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


def check_filled(size: Sequence[int], boxes: Sequence[Box]) -> None:
    """Boxes fill a tensor exactly."""
    for box in boxes:
        check(len(box.sizes) == len(size), "a box of other dimensions")
        check(all(o + n <= whole for o, n, whole in zip(box.offsets, box.sizes, size, strict=True)), "a box outside")
    boxes = [box for box in boxes if math.prod(box.sizes)]
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
class RowBlock:
    """One coded block of a row set."""

    coding: str
    first: int
    span: int
    members: int
    blob: Blob


@dataclass(frozen=True)
class Shard:
    """What is stored of one box."""

    box: Box
    row_set: int | None
    block_rows: int
    blobs: list[Blob]
    table_box: Box | None
    scheme: "Scheme"


@dataclass(frozen=True)
class Scheme:
    """How rows of a dtype lie in a blob (6): ``bits`` of a code, or ``half``, the dtype of values in 16 bits."""

    dtype: str
    name: str
    bits: int = 0
    half: str = ""

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


@dataclass(frozen=True)
class Tensor:
    """A tensor's entry."""

    dtype: str
    size: tuple[int, ...]
    is_table: bool
    table: str | None
    shards: list[Shard]

    @property
    def is_whole(self) -> bool:
        return all(shard.row_set is None for shard in self.shards)


class Manifest:
    """A manifest, validated."""

    def __init__(self, data: bytes) -> None:
        frame = FRAME.fullmatch(data)
        if frame is None:
            refuse("no frame")
        self.digest = hashlib.sha256(frame[2]).hexdigest()
        check(self.digest.encode() == frame[1], "another digest")
        try:
            value = json.loads(frame[2].decode("ascii"), object_pairs_hook=_once, parse_float=refuse)
            written = json.dumps(value, separators=(",", ":")).encode()
        except (ValueError, RecursionError) as error:
            refuse(f"not JSON: {error}")
        check(value.get("format") == "torchrec_cnr", "another format")
        version = value.get("version")
        check(type(version) is int and version >= 1, "no version")
        if version > 2:
            raise NewerVersion(str(version))
        self.version = version
        check(written == frame[2], "written in another way")
        value = mapping(value, KEYS_1 if version == 1 else KEYS)
        self.created_ns = integer(value["created_ns"])
        string(value["id"]), name(value["save_id"]), string(value["policy"]), string(value["writer"])
        self.parent = None if value["parent"] is None else mapping(value["parent"], ["path", "sha256"])
        if self.parent is not None:
            check(PARENT.fullmatch(string(self.parent["path"])) is not None, "no path of a parent")
            check(re.fullmatch("[0-9a-f]{64}", string(self.parent["sha256"])) is not None, "no digest of a parent")
        baseline_bytes, delta_bytes = array(value["history"], 2)
        for num_bytes in [baseline_bytes, *array(delta_bytes)]:
            integer(num_bytes)
        self.num_restores = 0 if version == 1 else integer(value["restores"])
        integer(value["world_size"], low=1)
        self.blobs: list[Blob] = []
        self.packs = [self._pack(pack) for pack in array(value["packs"])]
        check(len({pack[0] for pack in self.packs}) == len(self.packs), "two packs of one name")
        self.row_sets = [self._row_set(row_set) for row_set in array(value["row_sets"])]
        self.tensors = {string(fqn): self._tensor(entry) for fqn, entry in mapping(value["tensors"]).items()}
        self.objects = {string(fqn): self._blob(blob) for fqn, blob in mapping(value["objects"]).items()}
        self.paths = {string(fqn): self._path(path) for fqn, path in mapping(value["paths"]).items()}
        check(not set(self.tensors) & set(self.objects), "one FQN twice")
        check(self.parent is not None or all(t.is_whole for t in self.tensors.values()), "an incomplete baseline")
        self._check_packs_filled()
        for tensor in self.tensors.values():
            self._check_table(tensor)

    def _pack(self, value: Any) -> tuple[str, int, int, int]:
        file, num_bytes, header_bytes, crc = array(value, 4)
        check(name(file).endswith(".safetensors"), "no name of a pack")
        return file, integer(num_bytes), integer(header_bytes, 8, num_bytes), integer(crc, high=2**32 - 1)

    def _blob(self, value: Any) -> Blob:
        pack, offset, num_bytes, crc = array(value, 4)
        _, size, header_bytes, _ = self.packs[integer(pack, high=len(self.packs) - 1)]
        integer(num_bytes, 1, size - integer(offset, header_bytes))
        self.blobs.append(Blob(pack, offset, num_bytes, integer(crc, high=2**32 - 1)))
        return self.blobs[-1]

    def _row_set(self, value: Any) -> tuple[int, int, list[RowBlock]]:
        num_rows, block_rows, blocks = array(value, 3)
        members = _cut(integer(num_rows), integer(block_rows, 1), len(array(blocks)))
        found = []
        for block, count in zip(blocks, members, strict=True):
            coding, first, span, blob = array(block, 4)
            check(coding in ("bitmap", "gaps"), "unknown coding")
            found.append(RowBlock(coding, integer(first), integer(span, count), count, self._blob(blob)))
        check(all(a.first + a.span <= b.first for a, b in pairwise(found)), "blocks out of order")
        return num_rows, block_rows, found

    def _tensor(self, value: Any) -> Tensor:
        entry = mapping(value, TENSOR_KEYS_1 if self.version == 1 else TENSOR_KEYS)
        check(string(entry["dtype"]) in DTYPES, "unknown dtype")
        size = tuple(integer(extent) for extent in array(entry["size"]))
        check(type(entry["is_table"]) is bool, "is_table is no boolean")
        check(not entry["is_table"] or len(size) == 2, "a table that is no matrix")
        table = None if entry["table"] is None else string(entry["table"])
        found = array(entry["shards"])
        if self.version == 1:
            scheme_1(entry["scheme"], entry["dtype"])
            found = [[*array(shard, 5), entry["scheme"]] for shard in found]
        shards = [self._shard(shard, entry["dtype"]) for shard in found]
        check_filled(size, [shard.box for shard in shards])
        tensor = Tensor(entry["dtype"], size, entry["is_table"], table, shards)
        for shard in shards:
            self._check_blobs(tensor, shard)
        return tensor

    def _shard(self, value: Any, dtype: str) -> Shard:
        box, row_set, block_rows, blobs, table_box, scheme = array(value, 6)
        return Shard(
            self._box(box),
            None if row_set is None else integer(row_set, high=len(self.row_sets) - 1),
            integer(block_rows, 1),
            [self._blob(blob) for blob in array(blobs)],
            None if table_box is None else self._box(table_box),
            scheme_of(scheme, dtype),
        )

    def _box(self, value: Any) -> Box:
        offsets, sizes = array(value, 2)
        box = Box(tuple(integer(n) for n in array(offsets)), tuple(integer(n) for n in array(sizes)))
        check(len(box.offsets) == len(box.sizes), "a box of two dimensions")
        return box

    def _check_blobs(self, tensor: Tensor, shard: Shard) -> None:
        num_rows = shard.box.rows
        if shard.row_set is not None:
            num_rows, block_rows, blocks = self.row_sets[shard.row_set]
            check(block_rows == shard.block_rows, "blocks of another size")
            check(all(block.first + block.span <= shard.box.rows for block in blocks), "rows outside of the box")
        if shard.box.cols == 0:
            num_rows = 0
        for blob, rows in zip(shard.blobs, _cut(num_rows, shard.block_rows, len(shard.blobs)), strict=True):
            num_exact(shard.scheme, shard.box.cols, rows, blob.num_bytes)
        check(tensor.table is not None or shard.table_box is None, "a table_box without a table")

    def _check_packs_filled(self) -> None:
        ends = [header_bytes for _, _, header_bytes, _ in self.packs]
        for blob in sorted(self.blobs, key=lambda blob: (blob.pack, blob.offset)):
            check(blob.offset == ends[blob.pack], "a hole or an overlap in a pack")
            ends[blob.pack] += blob.num_bytes
        check(ends == [num_bytes for _, num_bytes, _, _ in self.packs], "a hole at the end of a pack")

    def _check_table(self, tensor: Tensor) -> None:
        if tensor.table is None:
            return
        table = self.tensors.get(tensor.table)
        if table is None or not table.is_table or len(tensor.size) != 1:
            refuse("state of no table")
        for shard in tensor.shards:
            rows = 0 if shard.table_box is None else shard.table_box.rows
            check(rows == shard.box.rows, "a table_box of other rows")
        check_filled(table.size, [shard.table_box for shard in tensor.shards if shard.table_box is not None])

    def _path(self, value: Any) -> list[str | int]:
        path = array(value)
        check(len(path) > 0 and type(path[0]) is str, "no path")
        return [string(key) if type(key) is str else integer(key, high=2**20) for key in path]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    check(len({key for key, _ in pairs}) == len(pairs), "a key twice")
    return dict(pairs)


def _cut(num_rows: int, block_rows: int, num_blocks: int) -> list[int]:
    """Rows in each block."""
    check(num_blocks == -(-num_rows // block_rows), f"{num_blocks} blocks of {block_rows} for {num_rows} rows")
    return [min(block_rows, num_rows - index * block_rows) for index in range(num_blocks)]


def scheme_of(value: Any, dtype: str) -> Scheme:
    """A shard's scheme (4)."""
    found = mapping(value)
    kind = string(found.get("name"))
    if kind not in SCHEME_KEYS:
        refuse("unknown scheme")
    mapping(value, SCHEME_KEYS[kind])
    check(kind == "none" or dtype in ("float32", "float16", "bfloat16"), "dtype that is not quantized")
    half = string(found.get("dtype", ""))
    check("dtype" not in found or half in ("float16", "bfloat16"), "no dtype of 16 bits")
    bits = integer(found.get("bits", 0))
    check("bits" not in found or bits in (2, 3, 4, 8), "no number of bits")
    if "search" in found:
        check_search(found["search"])
    return Scheme(dtype, kind, bits, half)


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


def scheme_1(value: Any, dtype: str) -> None:
    """The scheme of a tensor of version 1 (13), which need not have shards."""
    check(value in SCHEMES_1, "no scheme of version 1")
    scheme_of(value, dtype)


def num_exact(scheme: Scheme, cols: int, rows: int, num_bytes: int) -> int:
    """Rows stored exactly behind the codes of a blob (6)."""
    exact, rest = divmod(num_bytes - rows * scheme.row_bytes(cols), 4 + cols * scheme.item_bytes)
    check(rest == 0 and 0 <= exact <= (0 if scheme.name == "none" else rows), "a blob of another size")
    return exact


# 5. Row sets


def decode_rows(block: RowBlock, data: bytes) -> Array:
    """The members of a row block."""
    width = 1
    while block.span - 2 >= 256**width:
        width += 1
    num_bytes = (block.span + 7) // 8 if block.coding == "bitmap" else (block.members - 1) * width
    try:
        check(zstandard.frame_content_size(data) == num_bytes, "row numbers of another size")
        code = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        refuse(f"row numbers: {error}")
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
    codes = np.frombuffer(data[: rows * row_bytes], np.uint8).reshape(rows, row_bytes)
    if scheme.name == "none":
        check(scheme.dtype != "bool" or bool((codes <= 1).all()), "a bool that is neither 0 nor 1")
        return codes.reshape(-1).view(dtype).reshape(rows, cols)
    with np.errstate(all="ignore"):
        values = from_float(decode_codes(scheme, cols, codes), scheme.dtype)
    exact = num_exact(scheme, cols, rows, len(data))
    positions = np.frombuffer(data, "<u4", exact, rows * row_bytes)
    check(all(a < b for a, b in pairwise(positions)) and bool((positions < rows).all()), "positions of exact rows")
    values[positions] = np.frombuffer(data, np.uint8, offset=rows * row_bytes + 4 * exact).view(dtype).reshape(-1, cols)
    return values


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
    """Rounded to a dtype, to nearest, ties to even."""
    if dtype != "bfloat16":
        return values.astype(DTYPES[dtype])
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
class Checkpoint:
    """A checkpoint of a lineage."""

    folder: Path
    manifest: Manifest

    def bytes_of(self, blob: Blob) -> bytes:
        path = self.folder / self.manifest.packs[blob.pack][0]
        check(path.is_file() and path.stat().st_size >= blob.offset + blob.num_bytes, "a pack is missing or short")
        with path.open("rb") as stream:
            stream.seek(blob.offset)
            data = stream.read(blob.num_bytes)
        check(crc32c(data) == blob.crc, "another crc32c")
        return data

    def rows_of(self, shard: Shard) -> Array:
        if shard.row_set is None:
            return np.arange(shard.box.rows)
        blocks = self.manifest.row_sets[shard.row_set][2]
        return np.concatenate([np.arange(0), *(decode_rows(block, self.bytes_of(block.blob)) for block in blocks)])

    def values_of(self, tensor: Tensor, shard: Shard, num_rows: int) -> Array:
        cols = shard.box.cols
        counts = _cut(num_rows if cols else 0, shard.block_rows, len(shard.blobs))
        parts = [
            decode_values(shard.scheme, cols, count, self.bytes_of(blob))
            for blob, count in zip(shard.blobs, counts, strict=True)
        ]
        none = np.zeros((num_rows if cols == 0 else 0, cols), DTYPES[tensor.dtype])
        return np.concatenate([none, *parts]).reshape(num_rows, *shard.box.sizes[1:])


def read_lineage(folder: Path) -> list[Checkpoint]:
    """The head first, its baseline last."""
    found: list[Checkpoint] = []
    place, expected = posixpath.abspath(str(folder)), ""
    while True:
        check(place not in [str(checkpoint.folder) for checkpoint in found], "its own ancestor")
        path = Path(place, "manifest.json")
        check(path.is_file(), f"no checkpoint at {place}")
        manifest = Manifest(path.read_bytes())
        check(expected in ("", manifest.digest), "another parent")
        check(not found or manifest.created_ns < found[-1].manifest.created_ns, "a parent that is younger")
        found.append(Checkpoint(Path(place), manifest))
        if manifest.parent is None:
            return found
        place, expected = posixpath.normpath(posixpath.join(place, manifest.parent["path"])), manifest.parent["sha256"]


@dataclass(frozen=True)
class State:
    """What a checkpoint loads as: tensors as dtype, size and bytes."""

    tensors: Mapping[str, tuple[str, list[int], bytes]]
    objects: Mapping[str, bytes]
    paths: Mapping[str, list[str | int]]


def read(folder: Path) -> State:
    """Read all of a checkpoint."""
    lineage = read_lineage(folder)
    head = lineage[0]
    for checkpoint in lineage:
        for file, _, header_bytes, crc in checkpoint.manifest.packs:
            path = checkpoint.folder / file
            check(path.is_file() and crc32c(path.read_bytes()[:header_bytes]) == crc, "header of a pack")
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
        if tensor is None:
            refuse(f"no {fqn} in a parent")
        alike = tensor.dtype == head.dtype and tensor.is_table == head.is_table and tensor.table == head.table
        check(
            alike and _folded_size(checkpoint, tensor) == _folded_size(lineage[0], head), f"another {fqn} in a parent"
        )
        links.insert(0, (checkpoint, tensor))
        if tensor.is_whole:
            break
    folded = np.zeros(_folded_size(lineage[0], head), DTYPES[head.dtype])
    for checkpoint, tensor in links:
        for shard in tensor.shards:
            rows = checkpoint.rows_of(shard)
            values = checkpoint.values_of(tensor, shard, len(rows))
            place = shard.table_box or shard.box
            if tensor.table is not None:
                values = np.repeat(values.reshape(-1, 1), place.sizes[1] if shard.table_box else 1, axis=1)
            if folded.ndim == 0:
                folded[...] = values[0]
            elif len(rows):
                folded[place.slices][rows] = values
    return folded if head.table is None else _row_state(head, folded)


def _folded_size(checkpoint: Checkpoint, tensor: Tensor) -> tuple[int, ...]:
    return tensor.size if tensor.table is None else checkpoint.manifest.tensors[tensor.table].size


def _row_state(head: Tensor, folded: Array) -> Array:
    """Row-wise state (8), sharded as the head is."""
    state = np.zeros(head.size, folded.dtype)
    for shard in head.shards:
        if shard.table_box is not None and shard.table_box.sizes[1]:
            columns = folded[shard.table_box.slices]
            means = from_float(to_double(columns, head.dtype).mean(axis=1), head.dtype)
            state[shard.box.slices] = np.where((columns == columns[:, :1]).all(axis=1), columns[:, 0], means)
    return state
