"""Manifests of earlier versions of the format, turned into those of the newest.

Before version 3, a checkpoint had no files but its own, and its shards did not overlap; where a shard had every row of
its box it had no row set, and the blocks of a row set were of one size. Version 1 had one quantization scheme for a
tensor, and did not count restores. What was valid then stays valid, and what was not is refused as it was.

Versions 5 and 6 of the format: version 3, but a pack may lie in a log, and says where; and blobs may be split.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torchrec_cnr.format.manifest import LogRange, Manifest, Pack, Shard, TensorEntry
from torchrec_cnr.format.manifest_parser import ManifestParser
from torchrec_cnr.format.row_sets import Blob, RowSet

_SCHEMES_1 = ({"name": "none"}, *({"name": "asymmetric", "bits": bits} for bits in (2, 4, 8)))


class Version2(ManifestParser):
    """Version 2."""

    keys = tuple(key for key in ManifestParser.keys if key != "replaces")
    tensor_keys = tuple(key for key in ManifestParser.tensor_keys if key != "folded")

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.blobs: list[Blob] = []
        self.block_rows: list[int] = []  # of each row set

    def pack(self, value: Any, what: str) -> Pack:
        return super().pack([None, *self.tuple_of(value, 4, what), None, 0], what)

    def blob(self, value: Any, what: str) -> Blob:
        self.blobs.append(super().blob(value, what))
        return self.blobs[-1]

    def stored(self, manifest: Manifest) -> list[Blob]:
        """Also those of row sets that no shard has. Each belonged to one block of rows."""
        return self.blobs

    def row_set(self, value: Any, what: str) -> RowSet:
        num_rows, block_rows, blocks = self.tuple_of(value, 3, what)
        left, most = self.integer(num_rows, what), self.integer(block_rows, what, low=1)
        self.block_rows.append(most)
        fields = self.items(lambda block, _: self.tuple_of(block, 4, what), blocks, what)
        if len(fields) != -(-left // most):
            self.fail(f"{what}: {len(fields)} blocks of {most} for {left} rows")
        found = []
        for coding, first, span, blob in fields:
            if coding == "all":
                self.fail(f"{what}: unknown coding {coding!r}")
            found.append([coding, first, span, min(most, left), blob])
            left -= most
        return super().row_set(found, what)

    def shard(self, value: Any, what: str, tensor: Mapping[str, Any]) -> Shard:
        box, row_set, block_rows, blobs, table_box, scheme = self.tuple_of(value, 6, what)
        place = self.place([box, table_box], what)
        codes = self.items(self.blob, blobs, what)
        most = self.integer(block_rows, what, low=1)
        if row_set is not None:
            index = self.integer(row_set, what, high=len(self.row_sets) - 1)
            rows = self.row_sets[index]
            if self.block_rows[index] != most:
                self.fail(f"{what}: blocks of {most} rows, its row set's have {self.block_rows[index]}")
        else:
            num_rows = place.box.num_rows if place.box.num_cols else 0
            if len(codes) != -(-num_rows // most):  # before as many blocks are made, which nothing else bounds
                self.fail(f"{what}: {len(codes)} blobs of {most} rows for {num_rows} rows")
            rows = RowSet.all(num_rows, most)
        return Shard(place.box, rows, codes, self.scheme(scheme, tensor["dtype"], what), place.table_box)


class Version1(Version2):
    """Version 1."""

    keys = tuple(key for key in Version2.keys if key != "restores")
    tensor_keys = ("dtype", "size", "scheme", "is_table", "table", "shards")

    def tensor(self, value: Any, fqn: str) -> TensorEntry:
        entry, what = super().tensor(value, fqn), f"tensor {fqn!r}"
        self.scheme_1(value, what)  # there need not be a shard
        return entry

    def shard(self, value: Any, what: str, tensor: Mapping[str, Any]) -> Shard:
        return super().shard([*self.tuple_of(value, 5, what), self.scheme_1(tensor, what)], what, tensor)

    def scheme_1(self, tensor: Mapping[str, Any], what: str) -> Any:
        """A tensor's scheme, which is that of each of its shards."""
        if tensor["scheme"] not in _SCHEMES_1:
            self.fail(f"{what}: {tensor['scheme']!r} is not a quantization scheme of format version 1")
        self.scheme(tensor["scheme"], tensor["dtype"], what)
        return tensor["scheme"]


TOPIC = re.compile(r"(?!\.\.?$)[A-Za-z0-9._-]{1,249}")  # Kafka's rule
_MAX_PART_BYTES = 1 << 30
_KEY = re.compile(r"[^\x00-\x1f]{1,16384}")


class LoggedManifestParser(ManifestParser):
    """Version 5."""

    def manifest(self, value: dict[str, Any]) -> Manifest:
        found = super().manifest(value)
        self.check_version(found)
        keys = [(pack.log.topic, pack.log.key) for pack in found.packs if pack.log is not None and pack.log.key]
        if len(set(keys)) != len(keys):
            self.fail("two packs have one key in a log, which keeps the last of them only")
        return found

    def check_version(self, found: Manifest) -> None:
        """There is what older versions do not have."""
        if all(pack.log is None for pack in found.packs):
            self.fail("no pack lies in a log, as in version 3")

    def pack(self, value: Any, what: str) -> Pack:
        *fields, log = self.tuple_of(value, 8, what)
        pack = super().pack(fields, what)
        found = self.optional(partial(self.log_range, num_bytes=pack.num_bytes), log, what)
        if found is not None and pack.directory is not None:
            self.fail(f"{what}: in a log and in the directory {pack.directory!r}")
        return replace(pack, log=found)

    def log_range(self, value: Any, what: str, num_bytes: int) -> LogRange:
        topic, partition, first, last, part_bytes, key = self.tuple_of(value, 6, what)
        found = LogRange(
            self.string(topic, what, TOPIC),
            self.integer(partition, what, high=2**31 - 1),
            self.integer(first, what),
            self.integer(last, what),
            self.integer(part_bytes, what, low=1, high=_MAX_PART_BYTES),
            self.optional(partial(self.string, pattern=_KEY), key, what),
        )
        if found.last - found.first + 1 < found.num_parts(num_bytes):
            self.fail(f"{what}: records {found.first} to {found.last} are too few for {num_bytes} bytes")
        return found


class SplitManifestParser(LoggedManifestParser):
    """Version 6."""

    reads_split = True

    def check_version(self, found: Manifest) -> None:
        """There is what older versions do not have."""
        if not found.has_split_blobs:
            self.fail("no blob is split, as in versions 3 and 5")


def log_range_json(found: LogRange) -> list[Any]:
    """What :meth:`LoggedManifestParser.log_range` reads."""
    return [found.topic, found.partition, found.first, found.last, found.part_bytes, found.key]
