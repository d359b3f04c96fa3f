"""Listings: what is in a directory, as any fsspec file system tells it."""

import os
import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Listing:
    """What is in a directory.

    Attributes:
        files: Sizes in bytes, by name.
        directories: Names.
        links: Names of symbolic links to directories.
    """

    files: Mapping[str, int]
    directories: tuple[str, ...] = ()
    links: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """All of them, sorted."""
        return sorted([*self.files, *self.directories, *self.links])

    @classmethod
    def of(cls, entries: Iterable[Mapping[str, Any]], path: str) -> "Listing":
        """From what ``ls(path, detail=True)`` returns."""
        files: dict[str, int] = {}
        directories, links = [], []
        for entry in sorted(entries, key=lambda entry: str(entry["name"])):
            entry_path = str(entry["name"]).rstrip("/")
            name = posixpath.basename(entry_path)
            if entry_path == path:  # a file of this name, or what stands for the directory in an object store
                continue
            if entry["type"] == "directory":
                directories.append(name)
            elif entry.get("islink") and os.path.isdir(entry_path):
                links.append(name)
            else:
                files[name] = int(entry["size"] or 0)
        return cls(files, tuple(directories), tuple(links))
