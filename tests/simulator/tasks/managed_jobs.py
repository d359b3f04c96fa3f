"""Managed jobs: the settings of their managers, and the rules for what may be removed from their roots."""

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.format.manifest_json import created_ns
from torchrec_cnr.lineage.abandoned import marked_name


@dataclass(frozen=True)
class Managed:
    """How the ranks of a job use their ``CheckpointManager``.

    Attributes:
        root: Of the manager.
        keep: How many checkpoints retention keeps; None for all.
        source: Another root, from whose newest checkpoint the job begins if its own has none.
        options: Other arguments of the manager.
        background: Arguments of its ``Background``.
        removes_source: Whether that root is removed, once no job saves there any more.
        raise_share: How often callbacks raise.
        closes: Whether a rank that fails closes its manager.
    """

    root: str
    keep: int | None
    source: str | None
    removes_source: bool
    options: Mapping[str, Any]
    background: Mapping[str, Any]
    raise_share: float
    closes: bool


@dataclass
class ManagedRoot:
    """The checkpoints of a root, and which of them retention has released.

    Attributes:
        path: Of the root.
        keep: How many of the newest retention keeps; None for all.
        created_ns: Of each checkpoint that is there, by path.
        digests: The first digits of their manifests' digests, which marks contain.
        abandoned: Those that a job has left behind.
        released: Those that retention did not want at some time.
        newest_ok: The last whose save has reported success; None if a job has left it behind.
        is_given_up: Whether the root is removed as a whole.
    """

    path: str
    keep: int | None
    created_ns: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    abandoned: set[str] = field(default_factory=set)
    released: set[str] = field(default_factory=set)
    newest_ok: str | None = None
    is_given_up: bool = False

    def note(self, is_put: bool, file: str, data: bytes) -> bool:
        """Note that a file was put or removed; returns False if retention wants the checkpoint that was removed."""
        if not file.startswith(f"{self.path}/"):
            return True
        path, name = posixpath.split(file)
        if path == self.path and (marked := marked_name(name)) is not None:
            target = posixpath.join(path, marked)
            if name.split(".")[-2] == self.digests.get(target):  # else of an earlier one of that name
                self._mark(target, is_put)
        elif name == MANIFEST_FILE and is_put:
            self.created_ns[path] = created_ns(data) or 0
            self.digests[path] = data.removeprefix(b'{"sha256":"')[:16].decode()
            self.abandoned.discard(path)
            self.released.discard(path)
            self._release()
        elif name == MANIFEST_FILE:
            self.created_ns.pop(path, None)
            return path in self.released or self.is_given_up
        return True

    def _mark(self, path: str, is_abandoned: bool) -> None:
        if not is_abandoned:
            self.abandoned.discard(path)
        elif path in self.created_ns:
            self.abandoned.add(path)
            self.newest_ok = None if path == self.newest_ok else self.newest_ok
            self._release()

    def newer_than(self, path: str) -> set[str]:
        """Return what was committed after a checkpoint; everything, if that is of another root."""
        since_ns = self.created_ns.get(path, -1)
        return {other for other, created_ns in self.created_ns.items() if created_ns > since_ns}

    def _release(self) -> None:
        if self.keep is not None:
            order = sorted(self.created_ns, key=lambda path: (self.created_ns[path], path), reverse=True)
            wanted = [path for path in order if path not in self.abandoned][: self.keep]
            self.released |= self.created_ns.keys() - set(wanted)
