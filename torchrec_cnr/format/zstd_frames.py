"""Frames: bytes as one Zstandard frame that states its size, and back without trusting what it states.

What is packed are byte planes: all first bytes of some numbers, then all second bytes, and so on. High bytes of numbers
of one kind have much in common, low bytes little, so that each plane gets a code of its own.
"""

import zstandard

from torchrec_cnr.errors import DamagedError

_LEVEL = 1
_PIECE_BYTES = 1 << 10


def compressed(*planes: bytes) -> bytes:
    """One frame of planes, one behind the other."""
    num_bytes = sum(map(len, planes))
    frame = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compressobj(size=num_bytes)
    parts = []
    for plane in planes[:-1]:
        parts += [frame.compress(plane), frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join((*parts, frame.compress(planes[-1]), frame.flush()))


def decompressed(data: bytes | memoryview, num_bytes: int, what: str) -> bytes:
    """The bytes of a frame, whose size is checked before anything is allocated.

    Args:
        data: One frame.
        num_bytes: The size expected.
        what: Names what is packed, and where, in errors.

    Raises:
        DamagedError: It is no frame, or has another size than expected, or than it states.
    """
    try:
        declared = zstandard.frame_content_size(data)
        if declared != num_bytes:
            raise DamagedError(f"{what} unpack to {declared} bytes, expected {num_bytes}; use another checkpoint")
        if num_bytes:
            return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
        frame = zstandard.ZstdDecompressor().decompressobj()  # the above does not look at a frame of nothing
        content = any(
            frame.decompress(data[start : start + _PIECE_BYTES]) for start in range(0, len(data), _PIECE_BYTES)
        )
        if content or not frame.eof or frame.unused_data:
            raise zstandard.ZstdError("not one frame of nothing")
        return b""
    except zstandard.ZstdError as error:
        raise DamagedError(f"{what} do not decompress ({error}); use another checkpoint") from error
