"""The corpus: inputs that the fuzzer has found, in ``corpus/<reader>.txt``, one a line, by zlib and in base64.

An input is kept if it reaches code that no seed and no input kept before reaches, through any reader. It is made
smaller while it still reaches that. Code is what a trace function sees: steps from one line of the library to the next.
"""

import base64
import contextlib
import sys
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torchrec_cnr
from tests.attacks.limits import cost_of
from tests.attacks.readers import READERS, Reader
from tests.attacks.seeds import seeds
from tests.attacks.structure import manifest_file, smaller

FOLDER = Path(__file__).parent / "corpus"
MAX_BYTES = 300_000  # of all files
_MAX_INPUT_BYTES = 6_000
_SHRINK_SECS = 5.0  # to make one input smaller
# Readers whose inputs can be made from those of another one, and how.
_LIKE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "packed_manifests": ("manifests", bytes),
    "manifest_files": ("manifests", manifest_file),
    "checks": ("loads", bytes),
    "updates": ("loads", bytes),
    "upkeep": ("loads", bytes),
}
_LIBRARY = str(Path(torchrec_cnr.__file__).parent)

Step = tuple[str, int, int]  # file, line, and the line after it


def inputs(reader: str) -> list[bytes]:
    """The inputs that are kept for a reader."""
    file = FOLDER / f"{reader}.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    return [zlib.decompress(base64.b64decode(line, validate=True)) for line in lines]


def start(reader: str) -> list[bytes]:
    """The inputs that the fuzzer starts from: seeds, and what is kept for this reader and for one that is like it."""
    like, converted = _LIKE.get(reader, ("", bytes))
    return [*seeds(reader), *inputs(reader), *map(converted, inputs(like))]


def num_bytes() -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in FOLDER.iterdir())


def add(reader: str, data: bytes) -> bool:
    """Keep an input, unless it or the corpus would be too large; returns whether it is kept."""
    line = base64.b64encode(zlib.compress(data, level=9)) + b"\n"
    if len(data) > _MAX_INPUT_BYTES or num_bytes() + len(line) >= MAX_BYTES:
        return False
    with (FOLDER / f"{reader}.txt").open("ab") as file:
        file.write(line)
    return True


def keep(reader: str, found: Iterable[bytes], secs: float) -> int:
    """Keep those inputs that reach new code and are read within the limits; returns how many there are.

    Args:
        reader: Name of the reader.
        found: The inputs; the smallest are looked at first.
        secs: After which the others are not looked at.
    """
    read, reached = READERS[reader], _reached()
    until = time.monotonic() + secs
    num_kept = 0
    for data in sorted(found, key=len):
        if time.monotonic() > until:
            break
        new = steps(read, data) - reached
        if not new:
            continue
        data = _shrunk(read, data, new)
        if cost_of(read, data).complaint is None and add(reader, data):
            reached |= steps(read, data)
            num_kept += 1
    return num_kept


@cache
def _reached() -> set[Step]:
    """What seeds and kept inputs reach; callers add to it."""
    return {step for reader, read in READERS.items() for data in start(reader) for step in steps(read, data)}


def _shrunk(read: Reader, data: bytes, wanted: Collection[Step]) -> bytes:
    """A smaller input that reaches the same steps."""
    until = time.monotonic() + _SHRINK_SECS
    candidates = smaller(data)
    while time.monotonic() < until and (candidate := next(candidates, None)) is not None:
        if len(candidate) < len(data) and steps(read, candidate).issuperset(wanted):
            data, candidates = candidate, smaller(candidate)
    return data


def steps(read: Reader, data: bytes) -> set[Step]:
    """The steps of the library that reading an input takes, in all threads."""
    found: set[Step] = set()

    def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        if not name.startswith(_LIBRARY):
            return None
        before = 0

        def step(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
            nonlocal before
            found.add((name, before, frame.f_lineno))
            before = frame.f_lineno
            return step

        return step

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        with contextlib.suppress(Exception):  # a finding is told when it is found
            read(data)
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]  # which ends it
    return found
