"""Conversion of a manifest to JSON and back, with all checks that make it safe to use.

The file is one JSON object in a fixed frame, ``{"sha256":"<64 hex digits>","manifest":<body>}``. The digest is that of
the body's bytes, and other checkpoints refer to this one by it. :func:`loads` returns validated manifests: only the
bytes of blobs need further checks.

The body of a large manifest is compressed, because the shards of many ranks repeat one another. A small body is plain,
for people and other programs. A process caches the manifests that it has parsed, by their digests: each save and each
load reads a whole checkpoint chain, so manifests are read and hashed each time, but parsed once.
"""

import base64
import binascii
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Mapping
from typing import Any

import zstandard
from cachetools import LRUCache

from torchrec_cnr.errors import DamagedError, VersionError
from torchrec_cnr.format.blob_bytes import decompressed
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import LogRange, Manifest, Pack, StoredTransform, TensorEntry
from torchrec_cnr.format.manifest_parser import FORMAT, VERSION, ManifestParser
from torchrec_cnr.format.row_sets import Blob, RowSet
from torchrec_cnr.gc_pause import paused_gc

_MAX_PARTS = 1 << 18  # of all cached manifests together; each part takes about one KiB
_MAX_CACHED = 256  # manifests: a job that saves every second should not keep thousands


def _num_parts(manifest: Manifest) -> int:
    """Return the number of shards, packs, row sets and objects, which take about the same memory each."""
    shards = sum(len(entry.shards) + len(entry.folded or ()) for entry in manifest.tensors.values())
    return 1 + shards + len(manifest.packs) + len(manifest.row_sets) + len(manifest.objects)


class KnownManifests:
    """A cache of the most recently used manifests, by the digests of their bodies.

    Args:
        max_parts: The most shards, packs, row sets and objects of all cached manifests together.
    """

    def __init__(self, max_parts: int = _MAX_PARTS) -> None:
        self._lock = threading.Lock()
        least = max_parts // _MAX_CACHED
        self._found: LRUCache[str, Manifest] = LRUCache(max_parts, lambda manifest: max(least, _num_parts(manifest)))

    def get(self, digest: str) -> Manifest | None:
        """Return the manifest with this digest, or None if it is not cached."""
        with self._lock:
            return self._found.get(digest)

    def add(self, digest: str, manifest: Manifest) -> None:
        """Add a valid manifest, unless it is larger than the whole cache."""
        with self._lock, contextlib.suppress(ValueError):
            self._found[digest] = manifest

    def clear(self) -> None:
        """Remove all manifests."""
        with self._lock:
            self._found.clear()


PLAIN_BYTES = 1 << 14  # larger bodies are packed, which means compressed
MAX_BYTES = 1 << 30  # the largest body that is decompressed
# Measured: manifests of many ranks or tables compress to 1/4 to 1/28, and their values take up to 195 times the frame.
MAX_PACKED_RATIO = 32  # most bytes of a body per byte of its frame
_VALUES_BYTES = 1 << 26
_VALUES_RATIO = 256
_BYTES_OF = {b"[": 96, b"{": 208, b",": 32}  # bytes of memory for the value that begins or ends with this character
_KEYS = ("format", "version", "created_ns", "zstd")


def may_be_packed(body: bytes, frame_bytes: int) -> bool:
    """Return whether a frame of this size may contain a body: its text and its values must not take too much memory."""
    values_bytes = sum(num_bytes * body.count(mark) for mark, num_bytes in _BYTES_OF.items())
    return _has_room(len(body), frame_bytes) and values_bytes <= _VALUES_BYTES + _VALUES_RATIO * frame_bytes


def _has_room(num_bytes: int, frame_bytes: int) -> bool:
    return 0 < num_bytes <= min(MAX_BYTES, MAX_PACKED_RATIO * frame_bytes)


def compressed_body(body: bytes, created_ns: int) -> dict[str, Any] | None:
    """Return the packed form of a large body, or None if it shrinks so much that readers would refuse it as a bomb."""
    frame = zstandard.ZstdCompressor(write_content_size=True).compress(body)
    if not may_be_packed(body, len(frame)):
        return None
    values = (FORMAT, VERSION, created_ns, base64.b64encode(frame).decode())
    return dict(zip(_KEYS, values, strict=True))


def decompressed_body(value: Mapping[str, Any], where: str) -> bytes:
    """Decompress a packed body.

    Args:
        value: A parsed body with the key ``zstd``.
        where: The name of the file, for errors.

    Raises:
        DamagedError: ``value`` is not a packed body, or would take too much memory for its size.
    """
    if tuple(value) != _KEYS:
        raise DamagedError(f"{where}: its keys are not {list(_KEYS)}; use another checkpoint")
    try:
        frame = base64.b64decode(value["zstd"], validate=True)
        num_bytes = zstandard.frame_content_size(frame)
    except (zstandard.ZstdError, binascii.Error, TypeError, ValueError) as error:
        raise DamagedError(f"{where}: it cannot be decompressed ({error}); use another checkpoint") from error
    if base64.b64encode(frame).decode() != value["zstd"] or num_bytes <= 0:
        raise DamagedError(f"{where}: not compressed as manifests are; use another checkpoint")
    body = decompressed(frame, num_bytes, f"{where}: bytes of its body") if _has_room(num_bytes, len(frame)) else b""
    if not may_be_packed(body, len(frame)):
        raise DamagedError(
            f"{where}: a frame of {len(frame)} bytes decompresses to {num_bytes} bytes, expected at most "
            f"{MAX_PACKED_RATIO} times as many, with fewer values; use another checkpoint"
        )
    return body


MAX_MANIFEST_BYTES = 1 << 30  # the largest manifest file; it can describe about 80 TB of rows
_FRAME = re.compile(rb'\{"sha256":"([0-9a-f]{64})","manifest":(.*)\}\n', re.DOTALL)
_KNOWN = KnownManifests()
_CREATED = re.compile(rb'"created_ns":(\d{1,20})\b')
_DIGEST = re.compile(rb'\{"sha256":"([0-9a-f]{64})"')


def dumps(manifest: Manifest) -> tuple[bytes, str]:
    """Return the bytes of the manifest file, and the digest of the manifest."""
    with paused_gc():
        return _framed(_to_json(manifest))


def dumps_valid(manifest: Manifest, where: str) -> tuple[bytes, str]:
    """Return the bytes and the digest as :func:`dumps` does, after checking that :func:`loads` accepts the manifest.

    Args:
        manifest: The manifest.
        where: The name of the file, for errors.

    Raises:
        DamagedError: :func:`loads` would refuse the manifest.
    """
    with paused_gc():
        value = _to_json(manifest)
        parsed = ManifestParser(where).manifest(value)
        data, digest = _framed(value)
        _KNOWN.add(digest, parsed)
        return data, digest


def loads(data: bytes, where: str) -> tuple[Manifest, str]:
    """Parse and validate a manifest file.

    Args:
        data: The bytes of the file.
        where: The name of the file, for errors.

    Raises:
        DamagedError: The manifest is corrupt, or contradicts itself.
        VersionError: The manifest was written in a newer version of the format.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise DamagedError(
            f"{where}: too large for a manifest, expected at most {MAX_MANIFEST_BYTES} bytes; use another checkpoint"
        )
    frame = _FRAME.fullmatch(data)
    if frame is None:
        raise DamagedError(f"{where}: not a complete manifest ({len(data)} bytes); use another checkpoint")
    digest, body = frame[1].decode(), frame[2]
    actual = hashlib.sha256(body).hexdigest()
    if actual != digest:
        raise DamagedError(f"{where}: sha256 is {actual}, the manifest says {digest}; use another checkpoint")
    cached = _KNOWN.get(digest)
    if cached is not None:
        return cached, digest
    with paused_gc():
        value = _parsed(body, where)
        if "zstd" in value:
            created_ns = value.get("created_ns")
            value = _parsed(decompressed_body(value, where), where)
            if value.get("created_ns") != created_ns:
                raise DamagedError(f"{where}: its compressed body has another 'created_ns'; use another checkpoint")
        manifest = ManifestParser(where).manifest(value)
    _KNOWN.add(digest, manifest)
    return manifest, digest


def forget() -> None:
    """Clear the cache of manifests, for benchmarks and tests: they are parsed again, as in a new process."""
    _KNOWN.clear()


def _parsed(body: bytes, where: str) -> dict[str, Any]:
    """Parse a body, and check that this version of the package can read it."""
    try:
        value = json.loads(body)
        is_plain = _body(value) == body
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{where}: not JSON ({error}); use another checkpoint") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise DamagedError(f"{where}: not a manifest of {FORMAT}; use another checkpoint")
    version = value.get("version")
    if type(version) is int and version > VERSION:
        raise VersionError(
            f"{where}: written in format version {version}, this torchrec_cnr reads versions up to {VERSION}; "
            "upgrade torchrec_cnr to load it"
        )
    if type(version) is not int or version < 1:
        raise DamagedError(f"{where}: there is no format version {version!r}; use another checkpoint")
    if not is_plain:  # white space, floating-point numbers, a repeated key, other escapes
        raise DamagedError(f"{where}: not written as manifests are; use another checkpoint")
    return value


def _framed(value: dict[str, Any]) -> tuple[bytes, str]:
    """Return the bytes of a manifest file with this body, packed if it is large, and the digest of its body."""
    body = _body(value)
    packed = compressed_body(body, value["created_ns"]) if len(body) > PLAIN_BYTES else None
    if packed is not None:
        body = _body(packed)
    digest = hashlib.sha256(body).hexdigest()
    return b'{"sha256":"%s","manifest":%s}\n' % (digest.encode(), body), digest


def _body(value: Any) -> bytes:
    """Return the canonical bytes of a manifest's body."""
    # Values come from JSON or from this module, so they cannot be circular.
    return json.dumps(value, separators=(",", ":"), check_circular=False).encode()


def created_ns(start: bytes) -> int | None:
    """Return the commit time from the first bytes of a manifest file (512 suffice), without verifying it."""
    match = _CREATED.search(start)
    return int(match[1]) if match else None


def stated_digest(start: bytes) -> str | None:
    """Return the digest that the first bytes of a manifest file contain, without verifying it."""
    match = _DIGEST.match(start)
    return match[1].decode() if match else None


def _to_json(manifest: Manifest) -> dict[str, Any]:
    schemes: dict[int, dict[str, Any]] = {}  # by id(), because many shards share few objects
    numbers = manifest.row_set_numbers
    return {
        "format": FORMAT,
        "version": VERSION,
        "created_ns": manifest.created_ns,
        "id": manifest.checkpoint_id,
        "save_id": manifest.save_id,
        "parent": manifest.parent and {"path": manifest.parent.path, "sha256": manifest.parent.sha256},
        "replaces": manifest.replaces,
        "policy": manifest.policy,
        "history": [manifest.history.baseline_bytes, list(manifest.history.delta_bytes)],
        "restores": manifest.num_restores,
        "world_size": manifest.world_size,
        "writer": manifest.writer,
        "packs": [_pack_json(pack) for pack in manifest.packs],
        "row_sets": [_row_set_json(rows) for rows in manifest.row_sets],
        "tensors": {fqn: _tensor_json(entry, numbers, schemes) for fqn, entry in manifest.tensors.items()},
        "objects": {fqn: _blob_json(blob) for fqn, blob in manifest.objects.items()},
        "paths": {fqn: list(path) for fqn, path in manifest.paths.items()},
    }


def _pack_json(pack: Pack) -> list[Any]:
    fields = [pack.directory, pack.name, pack.num_bytes, pack.header_bytes, pack.header_crc32c]
    return [*fields, pack.written_ns, pack.heat, pack.log and _log_range_json(pack.log)]


def _log_range_json(log_range: LogRange) -> list[Any]:
    return [log_range.topic, log_range.partition, log_range.first, log_range.last, log_range.part_bytes, log_range.key]


def _row_set_json(row_set: RowSet) -> list[Any]:
    return [[b.coding, b.first, b.span, b.num_rows, b.blob and _blob_json(b.blob)] for b in row_set.blocks]


def _tensor_json(entry: TensorEntry, row_sets: Mapping[int, int], schemes: dict[int, dict[str, Any]]) -> dict[str, Any]:
    schemes |= {id(shard.scheme): shard.scheme.to_json() for shard in entry.shards if id(shard.scheme) not in schemes}
    return {
        "dtype": entry.dtype,
        "size": list(entry.size),
        "is_table": entry.is_table,
        "table": entry.table,
        "folded": entry.folded and [_place_json(place.box, place.table_box) for place in entry.folded],
        "shards": [
            [
                *_place_json(shard.box, shard.table_box),
                row_sets[id(shard.rows)],
                list(map(_blob_json, shard.blobs)),
                schemes[id(shard.scheme)],
                *_transform_json(shard.transform),
            ]
            for shard in entry.shards
        ],
    }


def _transform_json(transform: StoredTransform | None) -> list[Any]:
    if transform is None:
        return []
    basis = transform.basis and _blob_json(transform.basis)
    return [[_blob_json(transform.blob), basis, list(transform.num_exact)]]


def _place_json(box: Box, table_box: Box | None) -> list[Any]:
    return [_box_json(box), table_box and _box_json(table_box)]


def _box_json(box: Box) -> list[list[int]]:
    return [list(box.offsets), list(box.sizes)]


def _blob_json(blob: Blob) -> list[int]:
    return [blob.pack, blob.offset, blob.num_bytes, blob.crc32c]
