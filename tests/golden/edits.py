"""Changes of a checkpoint whose digests are made to fit, so that a reader finds what is wrong behind them."""

import hashlib
import json
from collections.abc import Callable, Sequence
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


def patch(folder: Path, step: str, blob: Sequence[int], at: int, new: bytes) -> None:
    """Overwrite bytes of a blob, and renew its digest.

    Args:
        folder: The checkpoints.
        step: The name of the one with the blob.
        blob: Pack, offset, bytes and digest, as in the manifest.
        at: The first byte of the blob that is overwritten.
        new: What takes its place.
    """
    body = body_of(folder, step)
    file = folder / step / body["packs"][blob[0]][1]
    data = bytearray(file.read_bytes())
    assert data[blob[1] + at : blob[1] + at + len(new)] != new
    data[blob[1] + at : blob[1] + at + len(new)] = new
    file.write_bytes(data)
    crc = crc32c(bytes(data[blob[1] : blob[1] + blob[2]]))
    text = json.dumps(body).replace(json.dumps(list(blob)), json.dumps([*blob[:3], crc]))
    edit(folder, step, lambda body: body.update(json.loads(text)))
