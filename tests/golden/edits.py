"""Changes of a checkpoint whose digests are made to fit, so that a reader finds what is wrong behind them."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.golden.reader import crc32c


def body_of(folder: Path, step: str) -> dict[str, Any]:
    """The body of the manifest that committed a checkpoint."""
    body: dict[str, Any] = json.loads((folder / step / "manifest.json").read_text())["manifest"]
    return body


def edit(folder: Path, step: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the body of a manifest, and renew its digest and those by which its children name it."""
    path = folder / step / "manifest.json"
    old, body = json.loads(path.read_text()).values()
    change(body)
    data = json.dumps(body, separators=(",", ":"))
    digest = hashlib.sha256(data.encode()).hexdigest()
    path.write_text(f'{{"sha256":"{digest}","manifest":{data}}}\n')
    for child in folder.glob("step-*"):
        if old in (child / "manifest.json").read_text() and child.name != step:
            edit(folder, child.name, lambda body: body["parent"].update(sha256=digest))


def swap(folder: Path, step: str, blob: Sequence[int], data: bytes) -> None:
    """Put other bytes in the place of a blob, which may be more or fewer, and renew its digest.

    Args:
        folder: The checkpoints.
        step: The name of the one with the blob.
        blob: Pack, offset, bytes and digest, as in the manifest.
        data: What takes its place. Blobs after it in its pack are moved.
    """
    (number, offset, num_bytes, _), num_more = blob, len(data) - blob[2]

    def change(body: dict[str, Any]) -> None:
        pack = body["packs"][number]
        pack[2] += num_more
        for found in _blobs([body["row_sets"], body["tensors"], body["objects"]]):
            if found == list(blob):
                found[2:] = [len(data), crc32c(data)]
            elif found[0] == number and found[1] > offset:
                found[1] += num_more

    file = folder / step / body_of(folder, step)["packs"][number][1]
    old = file.read_bytes()
    assert old[offset : offset + num_bytes] != data
    file.write_bytes(old[:offset] + data + old[offset + num_bytes :])
    edit(folder, step, change)


def patch(folder: Path, step: str, blob: Sequence[int], at: int, new: bytes) -> None:
    """Overwrite bytes of a blob, and renew its digest; see :func:`swap`."""
    old = bytes_of(folder, step, blob)
    swap(folder, step, blob, old[:at] + new + old[at + len(new) :])


def bytes_of(folder: Path, step: str, blob: Sequence[int]) -> bytes:
    """The bytes of a blob."""
    file = folder / step / body_of(folder, step)["packs"][blob[0]][1]
    return file.read_bytes()[blob[1] : blob[1] + blob[2]]


def _blobs(value: Any) -> Iterator[list[int]]:
    """All lists of four numbers."""
    if isinstance(value, list) and len(value) == 4 and all(type(item) is int for item in value):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _blobs(inner)
