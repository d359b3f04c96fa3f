"""The layout of the log's records: parts of packs, and markers. Reading a record validates it."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

import msgspec

from torchrec_cnr.storage.files import Buffer
from torchrec_cnr.storage.row_log import Marker

PART, PACK = "part", "pack"
_PART = re.compile(rb"(\d{1,9})/(\d{1,9})")
_FORMAT, _VERSION = "torchrec_cnr marker", 1
_Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class _MarkerRecord(msgspec.Struct):
    """A marker as the value of a record; ``name`` must be a valid directory name."""

    format: Literal["torchrec_cnr marker"]
    version: Literal[1]
    root: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    name: Annotated[str, msgspec.Meta(pattern=r"\A(?!\.{1,2}\Z)[^/\\\x00-\x1f\ud800-\udfff]{1,1024}\Z")]
    save_id: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._-]{1,200}\Z")]
    sha256: _Digest
    parent_sha256: _Digest | None
    created_ns: int


def parts_of(buffers: Sequence[Buffer], part_bytes: int) -> Iterator[bytes]:
    """Yield the concatenated bytes of all buffers in parts of ``part_bytes``; the last part can be shorter."""
    part = bytearray()
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        start = 0
        while start < len(view):
            stop = min(len(view), start + part_bytes - len(part))
            part += view[start:stop]
            start = stop
            if len(part) == part_bytes:
                yield bytes(part)
                part.clear()
    if part:
        yield bytes(part)


def part_header(number: int, num_parts: int) -> tuple[str, bytes]:
    """Return the header that gives the number of a part in its pack."""
    return PART, b"%d/%d" % (number, num_parts)


def pack_header(name: str) -> tuple[str, bytes]:
    """Return the header that names the pack of a part, for topics whose keys do not."""
    return PACK, name.encode()


def pack_name(headers: Any) -> bytes | None:
    """Return the name of the pack in a record's headers; None if there is none."""
    return next((value for key, value in headers or () if key == PACK), None)


def part_key(key: str, number: int) -> bytes:
    """Return the key of a part of a pack in a compacted topic."""
    return b"%s/%d" % (key.encode(), number)


def part_number(headers: Any) -> tuple[int, int] | None:
    """Return the number of a part and the number of parts in its pack; None if the record is no part of a pack."""
    for key, value in headers or ():
        if key == PART and isinstance(value, bytes) and (match := _PART.fullmatch(value)):
            return int(match[1]), int(match[2])
    return None


def marker_json(marker: Marker) -> bytes:
    """Return a marker as the value of a record."""
    fields = asdict(marker)
    del fields["offset"]
    return json.dumps({"format": _FORMAT, "version": _VERSION, **fields}, separators=(",", ":")).encode()


def marker_of(value: Any, offset: int) -> Marker | None:
    """Return the marker in a record's value; None if the value is not a valid marker."""
    try:
        record = msgspec.convert(json.loads(value), _MarkerRecord)
    except (ValueError, TypeError, RecursionError):
        return None
    return Marker(
        record.root, record.name, record.save_id, record.sha256, record.parent_sha256, record.created_ns, offset
    )
