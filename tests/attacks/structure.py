"""Mutations that keep the structure of an input, and cuts that make it smaller.

Bytes that are changed at random seldom get past a digest, a frame or the syntax of JSON. So the parts of an input are
changed instead, and put together again: the body of a manifest file, a packed body, the files in an archive, the
content of a Zstandard frame, the values of JSON, the instructions of a pickle, and lines.
"""

import base64
import hashlib
import io
import json
import pickletools
import random
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import zstandard

from tests.attacks.draft import Json, dumps
from tests.format.test_manifest import DELETE, REPEAT, VALUES, changed, nodes

Mutate = Callable[[bytes], bytes]

_MANIFEST = re.compile(rb'\{"sha256":"[0-9a-f]{64}","manifest":(.*)\}\n', re.DOTALL)
_FRAME = b"\x28\xb5\x2f\xfd"  # what a Zstandard frame begins with
_MAX_PART_BYTES = 1 << 20  # of what is unpacked
_BYTES_SHARE = 0.1  # of the mutations that take no notice of structure
_MAX_CHANGES = 3

# Instructions of pickles: those that take values off the stack, and those that push what pickles of torch name.
INSTRUCTIONS = [b"\x85", b"\x86", b"\x87", b"t", b"R", b"\x81", b"a", b"e", b"s", b"u", b"b", b"Q", b"0", b"2"]
_NAMES = [
    "__builtin__\nbytearray", "__builtin__\nset", "builtins\nbytes", "_codecs\nencode", "collections\nOrderedDict",
    "collections\nCounter", "torch\nSize", "torch\nTensor", "torch.storage\nUntypedStorage", "torch\nFloatStorage",
    "torch._utils\n_rebuild_tensor_v2", "torch._utils\n_rebuild_parameter", "torch._tensor\n_rebuild_from_type_v2",
    "torch._utils\n_rebuild_qtensor", "torch._utils\n_rebuild_device_tensor_from_cpu_tensor", "posix\nmkdir",
]  # fmt: skip
GLOBALS = [b"c%s\n" % name.encode() for name in _NAMES]


@dataclass(frozen=True)
class _Parts:
    """The parts of an input, and what puts others in their place."""

    parts: list[bytes]
    joined: Callable[[list[bytes]], bytes]


def mutated(data: bytes, rng: random.Random, mutate: Mutate) -> bytes:
    """An input with a change somewhere in its structure.

    Args:
        data: The input.
        rng: Chooses the place.
        mutate: Changes bytes that have no structure.
    """
    if rng.random() < _BYTES_SHARE:
        return mutate(data)
    if (found := _parts(data)) is not None:
        (index,) = rng.choices(range(len(found.parts)), weights=[1 + len(part) for part in found.parts])
        found.parts[index] = mutated(found.parts[index], rng, mutate)
        return found.joined(found.parts)
    if (value := _json(data)) is not None:
        return _changed_json(value, rng)
    if instructions := _instructions(data):
        return _changed_list(instructions, [*INSTRUCTIONS, *GLOBALS, b"}", b")", b"]", b"("], rng)
    lines = data.splitlines(keepends=True) if data.isascii() else []
    return _changed_list(lines, [], rng) if len(lines) > 1 else mutate(data)


def smaller(data: bytes) -> Iterator[bytes]:
    """Inputs that lack a part of this one, those that lack most of it first."""
    if (found := _parts(data)) is not None:
        for index, part in enumerate(found.parts):
            for less in smaller(part):
                yield found.joined([*found.parts[:index], less, *found.parts[index + 1 :]])
        return
    if (value := _json(data)) is not None:
        for path in sorted(nodes(value), key=len):
            yield dumps(changed(value, path, DELETE))
        return
    pieces = _instructions(data) or [data[place : place + 1] for place in range(len(data))]
    size = len(pieces)
    while size := size // 2:
        for start in range(0, len(pieces), size):
            yield b"".join(pieces[:start] + pieces[start + size :])


def _parts(data: bytes) -> _Parts | None:
    """The parts of an input that has a structure, other than JSON's or that of a pickle."""
    if manifest := _MANIFEST.fullmatch(data):
        return _Parts([manifest[1]], lambda parts: manifest_file(parts[0]))
    if data.startswith(b"PK\x03\x04"):
        return _archive(data)
    if data.startswith(b"{") and (line := data.find(b"\n")) > 0:
        return _Parts([data[:line], data[line + 1 :]], b"\n".join)
    value = _json(data)
    if isinstance(value, dict) and isinstance(packed := value.get("zstd"), str):
        return _packed_body(value, packed)
    if value is None and (place := data.find(_FRAME)) >= 0:
        content = _unpacked(data[place:])
        if content is not None:
            return _Parts([data[:place], content], lambda parts: parts[0] + zstandard.compress(parts[1]))
    return None


def manifest_file(body: bytes) -> bytes:
    """A manifest file with a digest that fits."""
    return b'{"sha256":"%s","manifest":%s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)


def _packed_body(value: Json, packed: str) -> _Parts | None:
    try:
        body = _unpacked(base64.b64decode(packed))
    except ValueError:
        return None

    def joined(parts: list[bytes]) -> bytes:
        return dumps({**value, "zstd": base64.b64encode(zstandard.compress(parts[0])).decode()})

    return None if body is None else _Parts([body], joined)


def _unpacked(frame: bytes) -> bytes | None:
    try:
        if not 0 <= zstandard.frame_content_size(frame) <= _MAX_PART_BYTES:
            return None
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError:
        return None


def _archive(data: bytes) -> _Parts | None:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            if not entries or sum(entry.file_size for entry in entries) > _MAX_PART_BYTES:
                return None
            parts = [archive.read(entry) for entry in entries]
    except Exception:  # noqa: BLE001 - bytes that are no archive may make it raise anything
        return None

    def joined(parts: list[bytes]) -> bytes:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            for entry, part in zip(entries, parts, strict=True):
                archive.writestr(zipfile.ZipInfo(entry.filename), part)
        return stream.getvalue()

    return _Parts(parts, joined)


def _json(data: bytes) -> Json:
    """The value of JSON that has values in it; None for others."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None


def _changed_json(value: Json, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, _MAX_CHANGES)):
        paths = list(nodes(value))
        if not paths:
            break
        path, other = rng.choice(paths), rng.choice(paths)
        value = changed(value, path, _new_value(_at(value, path), _at(value, other), rng))
    return dumps(value)


def _at(value: Json, path: Sequence[str | int]) -> Json:
    for key in path:
        value = value[key]
    return value


def _new_value(old: Json, other: Json, rng: random.Random) -> Json:
    """What takes the place of a value: one from a list, another value of the input, or a number that is near."""
    choices: list[Json] = [rng.choice(VALUES), DELETE, REPEAT, other]
    if type(old) is int:
        choices += [old + 1, old - 1, 2 * old, old + rng.randint(-64, 64), rng.getrandbits(rng.randint(1, 64))]
    if isinstance(old, str):
        choices += [old + "x", old[: rng.randint(0, len(old))], f"{old}/{other}"[:300]]
    return rng.choice(choices)


def _instructions(data: bytes) -> list[bytes] | None:
    """The instructions of a pickle."""
    try:
        places = [place for _, _, place in pickletools.genops(data) if place is not None]
    except Exception:  # noqa: BLE001 - bytes that are no pickle may make it raise anything
        return None
    return [data[start:stop] for start, stop in zip(places, [*places[1:], len(data)], strict=True)]


def _changed_list(pieces: list[bytes], others: list[bytes], rng: random.Random) -> bytes:
    """Pieces of which one is left out, replaced, or followed by a copy of another or by one of ``others``."""
    for _ in range(rng.randint(1, _MAX_CHANGES)):
        index, other = rng.randrange(len(pieces)), rng.choice([rng.choice(pieces), rng.choice(others or pieces)])
        pieces[index : index + 1] = rng.choice([[], [other], [pieces[index], other]])
        if not pieces:
            return b""
    return b"".join(pieces)
