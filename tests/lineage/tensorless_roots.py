"""Roots of checkpoints without tensors."""

import hashlib
import json
from dataclasses import replace
from itertools import count
from typing import Any

from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.manifest import (
    MANIFEST_FILE,
    CheckpointRef,
    History,
    Manifest,
    replacement_name,
)
from torchrec_cnr.format.manifest_parser import VERSION
from torchrec_cnr.lineage.checkpoint import read_checkpoint
from torchrec_cnr.storage.store import Store

numbers = count()


class TensorlessRoot:
    """A directory of checkpoints, most of them without tensors."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = Store.open(url, sync_files=False)
        self.store.make()

    def commit(
        self, name: str, created_ns: int, parent: CheckpointRef | None = None, save_id: str = "save", **more: Any
    ) -> CheckpointRef:
        """Commit a checkpoint; returns how a child in the same directory refers to it."""
        history = History(0, () if parent is None else (0,))
        id_ = name.rpartition("/")[2]
        manifest = Manifest(created_ns, id_, save_id, parent, "Consecutive", history, 0, 1, "tests", (), {})
        data, sha256 = manifest_json.dumps(replace(manifest, **more))
        self.put(name, data)
        return CheckpointRef(f"../{name}", sha256)

    def replace(self, name: str, parent: CheckpointRef | None = None, **changes: Any) -> Manifest:
        """Put a replacement of a checkpoint's manifest, newer than all checkpoints, whose save id is its own."""
        before = read_checkpoint(self.at(name))
        new: dict[str, Any] = {
            "created_ns": 10**9,
            "save_id": f"by-{before.manifest_sha256[:4]}",
            "replaces": before.manifest_sha256,
        }
        manifest = replace(before.manifest, parent=parent, **(new | changes))
        self.put(name, manifest_json.dumps(manifest)[0], replacement_name(before.manifest_sha256))
        return manifest

    def put(self, name: str, data: bytes, file: str = MANIFEST_FILE) -> None:
        """Write a manifest file, whatever is in it."""
        place = self.store.at(name)
        place.make()
        place.put(file, [data])

    def read(self, name: str, file: str = MANIFEST_FILE) -> bytes:
        """A manifest file's bytes."""
        return self.store.at(name).read(file)

    def remove(self, name: str, file: str = MANIFEST_FILE) -> None:
        """Remove one file of a checkpoint."""
        self.store.fs.rm(self.store.at(name).child(file))

    def at(self, name: str) -> str:
        """A checkpoint's path or URL."""
        return self.store.at(name).url


def chain(root: TensorlessRoot, length: int) -> list[CheckpointRef]:
    found: list[CheckpointRef] = []
    for number in range(length):
        found.append(root.commit(f"step-{number}", number, found[-1] if found else None))
    return found


def as_newer_version(data: bytes) -> bytes:
    """The same manifest, of the next version of the format."""
    body = {**json.loads(data)["manifest"], "version": VERSION + 1, "something": "new"}
    return _framed(json.dumps(body, separators=(",", ":")).encode())


def _framed(body: bytes) -> bytes:
    return b'{"sha256":"%s","manifest":%s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)
