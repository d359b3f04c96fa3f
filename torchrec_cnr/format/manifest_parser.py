"""Validation of manifests, from parsed JSON to values that can be relied on, and the constants of the format.

The parser checks types and bounds. Blobs must fill their packs, and boxes their tensors, without holes or overlaps.
Every blob must have the size that its rows need, and every reference must name an entry of the right kind.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.format.blob_bytes import MAX_CODED_ROWS, exact_row_bytes, may_be_split
from torchrec_cnr.format.boxes import MAX_DIVIDED_DIMS, Box, fills, lies_within
from torchrec_cnr.format.manifest import (
    DTYPES,
    PACK_SUFFIX,
    CheckpointRef,
    History,
    LogRange,
    Manifest,
    Pack,
    Place,
    Shard,
    StoredTransform,
    TensorEntry,
)
from torchrec_cnr.format.row_sets import MAX_ROWS_PER_MEMBER, Blob, RowBlock, RowSet
from torchrec_cnr.quantization import Scheme, Transformed, scheme_from_json
from torchrec_cnr.quantization.packed_rows import fits_packed_rows
from torchrec_cnr.quantization.row_transform import basis_bytes, transform_bytes

FORMAT = "torchrec_cnr"
VERSION = 1
TOPIC = re.compile(r"(?!\.\.?$)[A-Za-z0-9._-]{1,249}")  # Kafka's rule

# The path of another checkpoint: at least one '../', then plain names.
PARENT_PATH = re.compile(r"(\.\./)+(?!\.\.?(/|$))[^/\\\x00-\x1f]+(/(?!\.\.?(/|$))[^/\\\x00-\x1f]+)*")

_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
_MAX_FRAME_EXTRA = 64  # bytes by which compressing may make a transform larger
_SURROGATE = re.compile("[\ud800-\udfff]")  # only lone ones: json.loads made one character of each pair
_PACK_NAME = re.compile(r"[A-Za-z0-9._-]{1,188}" + re.escape(PACK_SUFFIX))
_HEX = re.compile(r"[0-9a-f]{64}")
_MAX_INT = 2**62
_MAX_CRC32C = 2**32 - 1
_MAX_DIMENSIONS = 64  # the limit of torch
_MAX_FQN = 1 << 13  # characters; bounded because the name of each blob contains the FQN
_MAX_MESSAGE = 2 * _MAX_FQN  # characters
_MAX_LIST_INDEX = 2**20  # bounded because a load allocates a list of this length
_MAX_PARTITION = 2**31 - 1  # the limit of Kafka
_MAX_PART_BYTES = 1 << 30
_RECORD_KEY = re.compile(r"[^\x00-\x1f]{1,16384}")

T = TypeVar("T")


class ManifestParser:
    """A parser from JSON values to a manifest.

    Args:
        where: The name of the file, for errors.
    """

    keys = (
        "format", "version", "created_ns", "id", "save_id", "parent", "replaces", "policy", "history", "restores",
        "world_size", "writer", "packs", "row_sets", "tensors", "objects", "paths",
    )  # fmt: skip
    tensor_keys = ("dtype", "size", "is_table", "table", "folded", "shards")

    def __init__(self, where: str) -> None:
        self.where = where
        self.packs: tuple[Pack, ...] = ()
        self.row_sets: tuple[RowSet, ...] = ()
        self.schemes: dict[str, Scheme] = {}
        self._last_scheme: tuple[Any, str, Scheme] | None = None

    def fail(self, message: str) -> NoReturn:
        shortened = message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}…"
        raise DamagedError(f"{self.where}: {shortened}; use another checkpoint")

    def manifest(self, value: dict[str, Any]) -> Manifest:
        if tuple(value) != self.keys:
            self.fail(f"its keys are {list(value)}, expected {list(self.keys)}")
        baseline_bytes, delta_bytes = self.tuple_of(value["history"], 2, "history")
        self.packs = self.items(self.pack, value["packs"], "packs")
        if len({(pack.directory, pack.name) for pack in self.packs}) != len(self.packs):
            self.fail("two packs have the same name")
        keys = [(pack.log.topic, pack.log.key) for pack in self.packs if pack.log is not None and pack.log.key]
        if len(set(keys)) != len(keys):
            self.fail("two packs have the same key in a Kafka topic, which keeps only the last record of each key")
        self.row_sets = self.items(self.row_set, value["row_sets"], "row_sets")
        manifest = Manifest(
            created_ns=self.integer(value["created_ns"], "created_ns"),
            checkpoint_id=self.string(value["id"], "id"),
            save_id=self.string(value["save_id"], "save_id", _NAME),
            parent=self.optional(self.parent, value["parent"], "parent"),
            policy=self.string(value["policy"], "policy"),
            history=History(self.integer(baseline_bytes, "history"), self.items(self.integer, delta_bytes, "history")),
            num_restores=self.integer(value["restores"], "restores"),
            world_size=self.integer(value["world_size"], "world_size", low=1),
            writer=self.string(value["writer"], "writer"),
            packs=self.packs,
            tensors={fqn: self.tensor(entry, fqn) for fqn, entry in self.mapping(value["tensors"], "tensors").items()},
            objects={fqn: self.blob(blob, fqn) for fqn, blob in self.mapping(value["objects"], "objects").items()},
            paths={fqn: self.path(path, fqn) for fqn, path in self.mapping(value["paths"], "paths").items()},
            replaces=self.optional(partial(self.string, pattern=_HEX), value["replaces"], "replaces"),
        )
        self.check_packs(manifest, self.stored(manifest))
        self.check_references(manifest)
        return manifest

    def parent(self, value: Any, what: str) -> CheckpointRef:
        if list(self.mapping(value, what)) != ["path", "sha256"]:
            self.fail(f"its parent is {value!r}")
        path = self.string(value["path"], "parent path", PARENT_PATH)
        return CheckpointRef(path, self.string(value["sha256"], "parent sha256", _HEX))

    def pack(self, value: Any, what: str) -> Pack:
        directory, name, num_bytes, header_bytes, crc32c, written_ns, heat, log = self.tuple_of(value, 8, what)
        size = self.integer(num_bytes, what)
        if log is not None and directory is not None:
            self.fail(f"{what}: both in a Kafka topic and in the directory {str(directory)[:80]!r}")
        return Pack(
            self.string(name, what, _PACK_NAME),
            size,
            self.integer(header_bytes, what, low=8, high=size),
            self.integer(crc32c, what, high=_MAX_CRC32C),
            self.optional(partial(self.string, pattern=PARENT_PATH), directory, what),
            self.optional(self.integer, written_ns, what),
            self.integer(heat, what, high=3),
            self.optional(partial(self.log_range, num_bytes=size), log, what),
        )

    def log_range(self, value: Any, what: str, num_bytes: int) -> LogRange:
        topic, partition, first, last, part_bytes, key = self.tuple_of(value, 6, what)
        records = LogRange(
            self.string(topic, what, TOPIC),
            self.integer(partition, what, high=_MAX_PARTITION),
            self.integer(first, what),
            self.integer(last, what),
            self.integer(part_bytes, what, low=1, high=_MAX_PART_BYTES),
            self.optional(partial(self.string, pattern=_RECORD_KEY), key, what),
        )
        if records.last - records.first + 1 < records.num_parts(num_bytes):
            self.fail(f"{what}: records {records.first} to {records.last} are too few for {num_bytes} bytes in a topic")
        return records

    def blob(self, value: Any, what: str) -> Blob:
        pack_number, offset, num_bytes, crc32c = self.tuple_of(value, 4, what)
        index = self.integer(pack_number, what, high=len(self.packs) - 1)
        pack = self.packs[index]
        start = self.integer(offset, what, pack.header_bytes)
        size = self.integer(num_bytes, what, 1, pack.num_bytes - start)
        return Blob(index, start, size, self.integer(crc32c, what, 0, _MAX_CRC32C))

    def row_set(self, value: Any, what: str) -> RowSet:
        rows = RowSet(self.items(self.row_block, value, what))
        if any(a.first + a.span > b.first for a, b in pairwise(rows.blocks)):
            self.fail(f"{what}: its blocks are out of order")
        return rows

    def row_block(self, value: Any, what: str) -> RowBlock:
        coding, first, span, num_rows, blob = self.tuple_of(value, 5, what)
        if coding not in ("all", "bitmap", "gaps"):
            self.fail(f"{what}: unknown coding {coding!r}")
        block = RowBlock(
            coding,
            self.integer(first, what),
            self.integer(span, what, low=1),
            self.integer(num_rows, what, low=1),
            self.optional(self.blob, blob, what),
        )
        if coding != "all" and block.num_rows > MAX_CODED_ROWS:
            self.fail(f"{what}: a block of {block.num_rows} rows, expected {MAX_CODED_ROWS} at most")
        if coding == "bitmap" and block.span > MAX_ROWS_PER_MEMBER * block.num_rows:
            self.fail(f"{what}: a bitmap of {block.span} bits for {block.num_rows} rows, expected fewer bits")
        if (coding == "all") != (blob is None):
            self.fail(f"{what}: coding {coding!r} {'without' if blob is None else 'with'} a blob")
        if block.num_rows > block.span or (blob is None and block.num_rows < block.span):
            self.fail(f"{what}: {block.num_rows} rows in a span of {block.span}, coded as {coding!r}")
        return block

    def tensor(self, value: Any, fqn: str) -> TensorEntry:
        what = f"tensor {fqn!r}"
        if tuple(self.mapping(value, what)) != self.tensor_keys:
            self.fail(f"{what}: its keys are {list(value)}")
        if self.string(value["dtype"], what) not in DTYPES:
            self.fail(f"{what}: unknown dtype {value['dtype']!r}")
        if not isinstance(value["is_table"], bool):
            self.fail(f"{what}: is_table is {value['is_table']!r}")
        entry = TensorEntry(
            dtype=value["dtype"],
            size=self.indices(value["size"], what),
            shards=self.items(partial(self.shard, tensor=value), value["shards"], what),
            is_table=value["is_table"],
            table=self.optional(self.string, value["table"], what),
            folded=self.optional(partial(self.items, self.place), value["folded"], what),
        )
        if entry.is_table and len(entry.size) != 2:
            self.fail(f"{what}: a table of {len(entry.size)} dimensions, expected 2")
        if not fills(entry.size, [place.box for place in entry.sharding]):
            self.fail(
                f"{what}: its boxes do not fill its size {list(entry.size)} exactly, or divide more than "
                f"{MAX_DIVIDED_DIMS} dimensions"
            )
        for shard in entry.shards:
            if entry.folded is not None:  # otherwise fills() has checked the boxes already
                self.check_box(shard.box, entry, what)
            self.check_blobs(shard, entry, what)
        return entry

    def shard(self, value: Any, what: str, tensor: Mapping[str, Any]) -> Shard:
        has_six = isinstance(value, list) and len(value) == 6
        is_transformed = has_six and isinstance(value[4], dict) and value[4].get("name") == Transformed.name
        fields = self.tuple_of(value, 6 if is_transformed else 5, what)
        box_value, table_box_value, row_set_number, blobs, scheme = fields[:5]
        box = self.box(box_value, what)
        table_box = None if table_box_value is None else self.box(table_box_value, what)
        rows = self.row_sets[self.integer(row_set_number, what, high=len(self.row_sets) - 1)]
        codes = self.items(self.blob, blobs, what)
        transform = self.transform(fields[5], what) if is_transformed else None
        return Shard(box, rows, codes, self.scheme(scheme, tensor["dtype"], what), table_box, transform)

    def transform(self, value: Any, what: str) -> StoredTransform:
        blob, basis, num_exact = self.tuple_of(value, 3, what)
        return StoredTransform(
            self.blob(blob, what), self.optional(self.blob, basis, what), self.items(self.integer, num_exact, what)
        )

    def place(self, value: Any, what: str) -> Place:
        box, table_box = self.tuple_of(value, 2, what)
        return Place(self.box(box, what), self.optional(self.box, table_box, what))

    def scheme(self, value: Any, dtype: str, what: str) -> Scheme:
        if self._last_scheme is not None and value is self._last_scheme[0] and dtype == self._last_scheme[1]:
            return self._last_scheme[2]
        key = f"{dtype} {value}"  # in text, unlike in dicts, 1 differs from True, and the order of keys counts
        if key not in self.schemes:
            scheme = scheme_from_json(self.mapping(value, what), f"{self.where}: {what}")
            if not scheme.supports(DTYPES[dtype]):
                self.fail(f"{what}: {dtype} cannot be quantized as {value}")
            self.schemes[key] = scheme
        self._last_scheme = (value, dtype, self.schemes[key])
        return self.schemes[key]

    def check_box(self, box: Box, entry: TensorEntry, what: str) -> None:
        """Check a box of a folded tensor."""
        if len(box.sizes) != len(entry.size):
            self.fail(f"{what}: a box of {len(box.sizes)} dimensions, expected {len(entry.size)}")
        if entry.table is None and not lies_within(entry.size, box):
            self.fail(f"{what}: a box outside of its size {list(entry.size)}")
        if box.sizes[2:] != entry.size[2:]:  # Coverage divides only two dimensions
            self.fail(f"{what}: it is folded, and a box divides it in its third or a later dimension")

    def check_blobs(self, shard: Shard, entry: TensorEntry, what: str) -> None:
        blocks = shard.rows.blocks
        if blocks and blocks[-1].first + blocks[-1].span > shard.box.num_rows:
            self.fail(f"{what}: row numbers beyond the {shard.box.num_rows} rows of its box")
        if shard.box.num_cols == 0:
            blocks = ()
        if len(shard.blobs) != len(blocks):
            self.fail(f"{what}: {len(shard.blobs)} blobs for {len(blocks)} blocks of rows")
        dtype, num_cols = DTYPES[entry.dtype], shard.box.num_cols
        if shard.transform is not None or isinstance(shard.scheme, Transformed):
            self.check_transformed(shard, shard.transform, dtype, what)
            return
        row_bytes, tail_bytes = shard.scheme.row_bytes(num_cols, dtype), shard.scheme.tail_bytes(num_cols, dtype)
        for number, (block, blob) in enumerate(zip(blocks, shard.blobs, strict=True)):
            num_bytes = block.num_rows * row_bytes
            if blob.num_bytes == num_bytes:
                continue
            if may_be_split(blob.num_bytes, block.num_rows, row_bytes, tail_bytes):
                continue
            num_exact, remainder = divmod(blob.num_bytes - num_bytes, exact_row_bytes(num_cols, dtype.itemsize))
            if not 0 <= num_exact <= (block.num_rows if shard.scheme.name != "none" else 0) or remainder:
                self.fail(
                    f"{what}: block {number} has {blob.num_bytes} bytes, its {block.num_rows} rows need {num_bytes}"
                )

    def check_transformed(self, shard: Shard, transform: StoredTransform | None, dtype: torch.dtype, what: str) -> None:
        """Check the sizes of a transform and of the blobs of its rows, which bound the memory that these need."""
        num_cols = shard.box.num_cols
        if transform is None or not isinstance(shard.scheme, Transformed) or not shard.blobs:
            self.fail(f"{what}: a transform without rows, or rows without their transform")
        if (transform.basis is None) != (shard.scheme.basis is None):
            self.fail(f"{what}: a basis without a digest, or a digest without a basis")
        if transform.blob.num_bytes > transform_bytes(num_cols) + _MAX_FRAME_EXTRA:
            self.fail(f"{what}: a transform of {transform.blob.num_bytes} bytes, for {num_cols} columns")
        if transform.basis is not None and transform.basis.num_bytes != basis_bytes(num_cols):
            self.fail(f"{what}: a basis of {transform.basis.num_bytes} bytes, for {num_cols} columns")
        if len(transform.num_exact) != len(shard.blobs):
            self.fail(f"{what}: {len(transform.num_exact)} numbers of exact rows for {len(shard.blobs)} blobs")
        blobs = zip(shard.rows.blocks, shard.blobs, transform.num_exact, strict=True)
        for number, (block, blob, num_exact) in enumerate(blobs):
            num_bytes = blob.num_bytes - num_exact * shard.exact_row_bytes(dtype)
            if num_exact > block.num_rows or not fits_packed_rows(num_bytes, block.num_rows, num_cols):
                self.fail(
                    f"{what}: block {number} has {blob.num_bytes} bytes, which cannot be {block.num_rows} transformed "
                    f"rows of {num_cols} columns, {num_exact} of them exact"
                )

    def stored(self, manifest: Manifest) -> list[Blob]:
        """Return all blobs, after checking that every listed row set and pack is used.

        Unused ones would be kept needlessly, and no check would cover them.
        """
        if manifest.row_sets != self.row_sets:
            self.fail("its row sets are not those of its shards, each once, in the order of the shards")
        blobs = manifest.unnamed_blobs()
        unused = set(range(len(self.packs))).difference(blob.pack for blob in blobs)
        if unused:
            self.fail(f"pack {self.packs[min(unused)].name}: it holds no blob")
        return blobs

    def check_packs(self, manifest: Manifest, blobs: Iterable[Blob]) -> None:
        """Check that blobs do not overlap, and that they fill their packs unless this is a replacement manifest."""
        fields = [(blob.pack, blob.offset, blob.num_bytes) for blob in blobs]
        packs, offsets, sizes = np.array(fields, dtype=np.int64).reshape(-1, 3).T
        order = np.lexsort((sizes, offsets, packs))
        packs, offsets, stops = packs[order], offsets[order], (offsets + sizes)[order]
        begins = np.array([pack.header_bytes for pack in self.packs], dtype=np.int64)[packs]
        expected = np.where(np.diff(packs, prepend=-1) != 0, begins, np.roll(stops, 1))
        # A replacement, or a delta that uses a transform of an older checkpoint, need not use all of another's pack.
        may_skip = np.array([manifest.replaces is not None or pack.directory is not None for pack in self.packs])
        is_wrong = np.where(may_skip[packs], offsets < expected, offsets != expected)
        if is_wrong.any():
            first_wrong = int(np.argmax(is_wrong))
            byte = min(offsets[first_wrong], expected[first_wrong])
            self.fail(f"pack {self.packs[packs[first_wrong]].name}: a hole or an overlap at byte {byte}")
        ends = [pack.header_bytes for pack in self.packs]
        for index, stop in zip(packs.tolist(), stops.tolist(), strict=True):
            ends[index] = stop
        for pack, end in zip(self.packs, ends, strict=True):
            if end != pack.num_bytes and manifest.replaces is None and pack.directory is None:
                self.fail(f"pack {pack.name}: its blobs end at byte {end}, expected {pack.num_bytes}")
        if manifest.replaces is None:
            transforms = (shard.transform for entry in manifest.tensors.values() for shard in entry.shards)
            parts = {blob for transform in transforms if transform is not None for blob in transform.blobs}
            if any(self.packs[blob.pack].directory is not None and blob not in parts for blob in blobs):
                self.fail("it uses rows in other checkpoints' packs, but replaces no manifest")

    def check_references(self, manifest: Manifest) -> None:
        is_replacement = manifest.replaces is not None  # a load checks whether it contains every row
        is_whole = all(entry.is_whole or (is_replacement and entry.folded) for entry in manifest.tensors.values())
        if manifest.parent is None and not is_whole:
            self.fail("it is a baseline that does not contain every row")
        if set(manifest.tensors) & set(manifest.objects):
            self.fail("a tensor and an object have the same name")
        for fqn, entry in manifest.tensors.items():
            places: list[Place | Shard] = [*(entry.folded or ()), *entry.shards]
            if entry.table is None:
                if any(place.table_box is not None for place in places):
                    self.fail(f"tensor {fqn!r}: it has boxes of a table, but names no table")
                continue
            table = manifest.tensors.get(entry.table)
            if table is None or not table.is_table or len(entry.size) != 1:
                self.fail(f"tensor {fqn!r}: its table {entry.table!r} is not a table of this checkpoint")
            rows_agree = all(
                place.box.num_rows == (place.table_box.num_rows if place.table_box else 0) for place in places
            )
            boxes = [place.table_box for place in entry.sharding if place.table_box is not None]
            has_values = all(place.box.num_rows == 0 or place.table_box.num_cols for place in places if place.table_box)
            is_within = entry.folded is None or all(
                lies_within(table.size, shard.table_box) for shard in entry.shards if shard.table_box is not None
            )
            if not (rows_agree and has_values and fills(table.size, boxes) and is_within):
                self.fail(f"tensor {fqn!r}: its shards do not match those of its table {entry.table!r}")

    def box(self, value: Any, what: str) -> Box:
        offsets, sizes = self.tuple_of(value, 2, what)
        box = Box(self.indices(offsets, what), self.indices(sizes, what))
        if len(box.offsets) != len(box.sizes):
            self.fail(f"{what}: a box with {len(box.offsets)} offsets and {len(box.sizes)} sizes")
        return box

    def indices(self, value: Any, what: str) -> tuple[int, ...]:
        """Parse a list of indices, one for each dimension."""
        if isinstance(value, list) and len(value) > _MAX_DIMENSIONS:
            self.fail(f"{what}: {len(value)} dimensions, expected {_MAX_DIMENSIONS} at most")
        if type(value) is list and not [item for item in value if type(item) is not int or not 0 <= item <= _MAX_INT]:
            return tuple(value)
        return self.items(self.integer, value, what)  # fails with a message about the wrong item

    def path(self, value: Any, what: str) -> tuple[str | int, ...]:
        keys: tuple[str | int, ...] = self.items(lambda key, _: key, value, what)
        if not keys or not isinstance(keys[0], str):
            self.fail(f"path of {what!r} is {value!r}")
        for key in keys:
            if isinstance(key, str):
                self.string(key, f"path of {what!r}")
            else:
                self.integer(key, f"path of {what!r}", high=_MAX_LIST_INDEX)
        return keys

    def optional(self, parse: Callable[[Any, str], T], value: Any, what: str) -> T | None:
        return None if value is None else parse(value, what)

    def items(self, parse: Callable[[Any, str], T], value: Any, what: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            self.fail(f"{what}: expected a list, got {type(value).__name__}")
        return tuple([parse(item, what) for item in value])  # a list comprehension is faster than a generator

    def tuple_of(self, value: Any, length: int, what: str) -> list[Any]:
        if not isinstance(value, list) or len(value) != length:
            self.fail(f"{what}: expected a list of {length}, got {str(value)[:80]!r}")
        return value

    def mapping(self, value: Any, what: str) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            self.fail(f"{what}: expected an object, got {type(value).__name__}")
        for key in value:
            self.string(key, f"key in {what}")
            if len(key) > _MAX_FQN:
                self.fail(f"key in {what}: {len(key)} characters, expected {_MAX_FQN} at most: {key[:80]!r}")
        return value

    def integer(self, value: Any, what: str, low: int = 0, high: int = _MAX_INT) -> int:
        if type(value) is not int or not low <= value <= high:
            self.fail(f"{what}: expected an integer from {low} to {high}, got {repr(value)[:80]}")
        return value

    def string(self, value: Any, what: str, pattern: re.Pattern[str] | None = None) -> str:
        if not isinstance(value, str) or _SURROGATE.search(value) or (pattern and not pattern.fullmatch(value)):
            self.fail(f"{what}: unexpected value {str(value)[:80]!r}")
        return value
