"""What records of the log look like: parts of packs, and markers. Reading is validating."""

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
    """A marker as a record's value; ``name`` is that of a directory."""

    format: Literal["torchrec_cnr marker"]
    version: Literal[1]
    root: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    name: Annotated[str, msgspec.Meta(pattern=r"\A(?!\.{1,2}\Z)[^/\\\x00-\x1f\ud800-\udfff]{1,1024}\Z")]
    save_id: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._-]{1,200}\Z")]
    sha256: _Digest
    parent_sha256: _Digest | None
    created_ns: int


def parts_of(buffers: Sequence[Buffer], part_bytes: int) -> Iterator[bytes]:
    """The bytes of all buffers, one behind the other, in parts of one size but the last."""
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
    """Tells a part from others of its pack."""
    return PART, b"%d/%d" % (number, num_parts)


def pack_header(name: str) -> tuple[str, bytes]:
    """Tells parts of a pack from those of others, where keys do not."""
    return PACK, name.encode()


def pack_name(headers: Any) -> bytes | None:
    """The name of the pack that a record says it is a part of; None if it does not."""
    return next((value for key, value in headers or () if key == PACK), None)


def part_key(key: str, number: int) -> bytes:
    """The key of a part, of a pack that has one."""
    return b"%s/%d" % (key.encode(), number)


def part_number(headers: Any) -> tuple[int, int] | None:
    """What a record says of itself; None if it is no part of a pack."""
    for key, value in headers or ():
        if key == PART and isinstance(value, bytes) and (found := _PART.fullmatch(value)):
            return int(found[1]), int(found[2])
    return None


def marker_json(marker: Marker) -> bytes:
    """A marker as a record's value."""
    fields = asdict(marker)
    del fields["offset"]
    return json.dumps({"format": _FORMAT, "version": _VERSION, **fields}, separators=(",", ":")).encode()


def marker_of(value: Any, offset: int) -> Marker | None:
    """A marker from a record's value; None if it is none that can be made sense of."""
    try:
        found = msgspec.convert(json.loads(value), _MarkerRecord)
    except (ValueError, TypeError, RecursionError):
        return None
    return Marker(found.root, found.name, found.save_id, found.sha256, found.parent_sha256, found.created_ns, offset)
