"""Packing: a large body of a manifest as a small one, of version 4, which holds it compressed.

Manifests of many shards say much that repeats itself. Small ones stay as they are, for people and other programs.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import zstandard

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.manifest_format import FORMAT, PACKED_VERSION

PLAIN_BYTES = 1 << 20  # a body of more is packed
MAX_BYTES = 1 << 30  # what a body is unpacked to, at most
_PIECE_BYTES = 1 << 10  # of a frame; what one becomes is some tens of MiB at most
_KEYS = ("format", "version", "created_ns", "zstd")


def packed(body: bytes, created_ns: int) -> dict[str, Any]:
    """What stands for a body of the version before."""
    frame = zstandard.ZstdCompressor(write_content_size=True).compress(body)
    values = (FORMAT, PACKED_VERSION, created_ns, base64.b64encode(frame).decode())
    return dict(zip(_KEYS, values, strict=True))


def unpacked(value: Mapping[str, Any], where: str) -> bytes:
    """The body that was packed.

    Args:
        value: A parsed body of version 4.
        where: Names the file in errors.

    Raises:
        DamagedError: It is none, or stands for too much.
    """
    try:
        if tuple(value) != _KEYS:
            raise DamagedError(f"{where}: its keys are not {list(_KEYS)}; use another checkpoint")
        frame = base64.b64decode(value["zstd"], validate=True)
        num_bytes = zstandard.frame_content_size(frame)
        if not 0 < num_bytes <= MAX_BYTES or base64.b64encode(frame).decode() != value["zstd"]:
            raise DamagedError(f"{where}: packed otherwise than manifests are; use another checkpoint")
        decompressor, body = zstandard.ZstdDecompressor().decompressobj(), bytearray()
        for start in range(0, len(frame), _PIECE_BYTES):  # whose size may be another than the one it declares
            body += decompressor.decompress(frame[start : start + _PIECE_BYTES])
            if decompressor.eof or len(body) > num_bytes:
                break
    except (zstandard.ZstdError, binascii.Error, TypeError, ValueError) as error:
        raise DamagedError(f"{where}: it cannot be unpacked ({error}); use another checkpoint") from error
    is_whole = decompressor.eof and start + _PIECE_BYTES >= len(frame) and not decompressor.unused_data
    if not is_whole or len(body) != num_bytes:
        raise DamagedError(f"{where}: it is not one zstd frame of {num_bytes} bytes; use another checkpoint")
    return bytes(body)
