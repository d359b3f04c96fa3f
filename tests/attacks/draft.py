"""A checkpoint put together by hand, without the library: whatever is in it has digests that fit."""

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import google_crc32c
import zstandard

Json = Any
ALL = [["all", 0, 8, 8, None]]
BOX = [[0, 0], [8, 4]]
NONE = {"name": "none"}
INT = b"K\x01"  # a pickle's instruction for 1


class Draft:
    """A checkpoint of a table [8, 4] of float32, which is 1 everywhere, and an object, which is 1.

    Args:
        parent: The checkpoint that it is a delta of: name, and digest of its manifest. It stores two rows of 2 then.
        archive: What ``torch.save`` made of the object.
        coded: Coding, span, number and code of the rows that a delta stores.
        values: The blob of the rows, where it is not what it should be.

    Attributes:
        body: Of the manifest. Packs are put into it when it is written.
    """

    def __init__(
        self,
        number: int = 1,
        parent: tuple[str, str] | None = None,
        archive: bytes | None = None,
        coded: tuple[str, int, int, bytes] = ("gaps", 3, 2, zstandard.compress(b"\x01")),
        values: bytes | None = None,
    ) -> None:
        self.number = number
        self._data = b""
        archive = archive_of(INT + b".") if archive is None else archive
        rows, num_rows = ALL, 8
        if parent is not None:
            coding, span, count, code = coded
            rows, num_rows = [[coding, 1, span, count, self.blob(code)]], 2
        right = bytes([0, 0, 128, 63] if parent is None else [0, 0, 0, 64]) * 4 * num_rows
        rows_blob = self.blob(right if values is None else values)
        self.body: dict[str, Json] = {
            "format": "torchrec_cnr",
            "version": 1,
            "created_ns": number,
            "id": f"step-{number}",
            "save_id": f"a{number}",
            "parent": None if parent is None else {"path": f"../{parent[0]}", "sha256": parent[1]},
            "replaces": None,
            "policy": "attack",
            "history": [100, []],
            "restores": 0,
            "world_size": 1,
            "writer": "attack",
            "packs": [],
            "row_sets": [rows],
            "tensors": {"table": tensor([[BOX, None, 0, [rows_blob], NONE]], [8, 4])},
            "objects": {"seen": self.blob(archive)},
            "paths": {"table": ["table"], "seen": ["seen"]},
        }

    @property
    def shard(self) -> list[Json]:
        """The table's."""
        found: list[Json] = self.body["tensors"]["table"]["shards"][0]
        return found

    def blob(self, data: bytes) -> list[int]:
        """Bytes in the pack."""
        self._data += data
        return [0, 10 + len(self._data) - len(data), len(data), crc32c(data)]

    def write(self, folder: Path, name: str | None = None, **pack: Json) -> str:
        """Write pack and manifest; the manifest's digest.

        Args:
            folder: The checkpoint's directory.
            name: Of the manifest's file.
            pack: What the manifest says of the pack, where that is not right.
        """
        folder.mkdir(parents=True, exist_ok=True)
        header = b"\x02\0\0\0\0\0\0\0{}"
        right = {"directory": None, "file": f"a{self.number}-0-0.safetensors", "num_bytes": 10 + len(self._data)}
        fields = {**right, "header_bytes": 10, "crc": crc32c(header), "at": None, "heat": 0, "log": None, **pack}
        if not self.body["packs"]:
            self.body["packs"] = [list(fields.values())]
        (folder / str(right["file"])).write_bytes(header + self._data)
        return write_body(folder / (name or "manifest.json"), dumps(self.body))


def tensor(shards: list[Json], size: list[int], **other: Json) -> dict[str, Json]:
    """An entry."""
    return {
        "dtype": "float32", "size": size, "is_table": len(size) == 2, "table": None, "folded": None, "shards": shards,
    } | other  # fmt: skip


def dumps(body: Json) -> bytes:
    """A body as manifests write it."""
    return json.dumps(body, separators=(",", ":")).encode()


def write_body(file: Path, body: bytes) -> str:
    """A manifest file with a digest that fits."""
    file.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(body).hexdigest()
    file.write_bytes(b'{"sha256":"%s","manifest":%s}\n' % (digest.encode(), body))
    return digest


def archive_of(pickled: bytes, is_compressed: bool = False, pickle_name: str = "data.pkl") -> bytes:
    """A pickle, without its first two bytes, as ``torch.save`` wraps it under the name ``data.pkl``."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        kind = zipfile.ZIP_DEFLATED if is_compressed else zipfile.ZIP_STORED
        for name, content in ((pickle_name, b"\x80\x02" + pickled), ("byteorder", b"little"), ("version", b"3\n")):
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content, kind)
    return stream.getvalue()


def crc32c(data: bytes) -> int:
    """A digest."""
    return int(google_crc32c.value(data))
