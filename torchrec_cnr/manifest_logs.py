"""Versions 5 and 6 of the format: version 3, but a pack may lie in a log, and says where; and blobs may be split."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

from torchrec_cnr.log_ranges import LogRange
from torchrec_cnr.manifest import Manifest, Pack
from torchrec_cnr.manifest_parser import ManifestParser

TOPIC = re.compile(r"(?!\.\.?$)[A-Za-z0-9._-]{1,249}")  # Kafka's rule
_MOST_PART_BYTES = 1 << 30
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
            self.integer(part_bytes, what, low=1, high=_MOST_PART_BYTES),
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
