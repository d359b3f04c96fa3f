"""A checkpoint as one input: the body of its manifest in one line, and then the bytes of its packs.

``written`` corrects the digests of blobs, headers, the parent and the replaced manifest, so that a modified input is
read to its end. The parent is one of two checkpoints, which are the same in every process.
"""

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest import mock

import torch

import torchrec_cnr as cnr
from tests.attacks.draft import Json, crc32c, dumps, write_body
from tests.support.hand_made import Content, Part, mask_of, some_rows, whole, write
from torchrec_cnr.errors import DamagedError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.quantization import Asymmetric, HalfPrecision, KMeans
from torchrec_cnr.tracking.modified_rows import RowMask

BASELINE, DELTA, INPUT = "step-1", "step-2", "step-3"
_MAX_FILLED_BYTES = 256  # at the end of a pack
_PACK = re.compile(r"[A-Za-z0-9._-]{1,188}\.safetensors")


def seeds() -> list[bytes]:
    """A baseline, a delta, and the manifest that replaces the delta after a compaction."""
    root, _ = _base()
    with TemporaryDirectory() as copied, _same_ids(first=16):
        folder = shutil.copytree(root.name, Path(copied) / "root")
        cnr.compact(folder / DELTA)
        replacement = next((folder / DELTA).glob("manifest-*.json"))
        manifests = [folder / BASELINE / MANIFEST_FILE, folder / DELTA / MANIFEST_FILE, replacement]
        return [_input_of(manifest) for manifest in manifests]


@contextmanager
def written(data: bytes) -> Iterator[Path]:
    """Write the checkpoint that an input holds; yields its directory, which exists until the end of the context.

    Raises:
        DamagedError: The first line is not JSON.
    """
    (root, digests), (line, _, packs) = _base(), data.partition(b"\n")
    folder, name, files = Path(root.name) / INPUT, MANIFEST_FILE, dict[str, bytes]()
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"not JSON: {error}") from error
    try:
        with suppress(KeyError, TypeError, ValueError, IndexError, AttributeError):  # the library refuses this manifest
            files = _fitted(body, packs)
            if body["parent"] is not None:
                body["parent"]["sha256"] = digests[body["parent"]["path"].removeprefix("../")]
            if body["replaces"] is not None:
                body["replaces"] = digests[DELTA]
                name = f"manifest-{digests[DELTA]}.json"
                shutil.copytree(folder.parent / DELTA, folder)
        folder.mkdir(exist_ok=True)
        for file, content in files.items():
            (folder / file).write_bytes(content)
        write_body(folder / name, dumps(body))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _input_of(manifest: Path) -> bytes:
    body = json.loads(manifest.read_bytes())["manifest"]
    own = [name for directory, name, *_ in body["packs"] if directory is None]
    return b"\n".join([dumps(body), b"".join((manifest.parent / name).read_bytes() for name in own)])


def _fitted(body: Json, packs: bytes) -> dict[str, bytes]:
    """The packs by file name, each with the size that the manifest says; corrects the digests in the body."""
    files: dict[str, bytes] = {}
    contents: list[bytes | None] = []
    for pack in body["packs"]:
        directory, name, num_bytes, header_bytes, *_ = pack
        if directory is not None or not _PACK.fullmatch(name):
            contents.append(None)
            continue
        content, packs = packs[:num_bytes], packs[num_bytes:]
        if num_bytes - len(content) <= _MAX_FILLED_BYTES:  # else most mutants would be truncated
            content = content.ljust(num_bytes, b"\0")
        contents.append(content)
        files[name] = content
        pack[4] = crc32c(content[:header_bytes])
    _fit([body["tensors"], body["objects"], body["row_sets"]], contents)
    return files


def _fit(value: Json, contents: list[bytes | None]) -> None:
    """Correct the digests of all blobs in a value."""
    if isinstance(value, list) and len(value) == 4 and all(type(item) is int for item in value):
        pack, start, num_bytes, _ = value
        if 0 <= pack < len(contents) and (content := contents[pack]) is not None:
            value[3] = crc32c(content[start : start + num_bytes])
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _fit(inner, contents)


@contextmanager
def _same_ids(first: int) -> Iterator[None]:
    """Have saves and compactions take the same ids in every process."""
    ids = (SimpleNamespace(hex=f"{number:032x}"[::-1]) for number in itertools.count(first))
    with mock.patch("uuid.uuid4", side_effect=ids):
        yield


@cache
def _base() -> "tuple[TemporaryDirectory[str], dict[str, str]]":
    """A root with a baseline and a delta, and the digests of their manifests by directory."""
    root = TemporaryDirectory(prefix="fuzzed-")
    rows = mask_of([1, 4, 5], 8)
    with _same_ids(first=1):
        baseline = write(
            Path(root.name) / BASELINE,
            {
                **_table(0.0),
                "wide": whole(torch.arange(64.0).view(32, 2) % 7, is_table=True, scheme=Asymmetric(8)),
                "half": whole(torch.ones(2, 3), is_table=True, scheme=HalfPrecision(torch.float16)),
                "cube": whole(torch.arange(12, dtype=torch.float16).view(3, 2, 2)),
                "flags": whole(torch.tensor([True, False, True])),
                "step": whole(torch.tensor(7)),
            },
            objects={"seen": 1},
            created_ns=1,
        )
        delta = write(
            Path(root.name) / DELTA,
            {
                **_table(0.5, rows),
                "wide": some_rows(torch.arange(64.0).view(32, 2) % 5, range(0, 32, 3), scheme=KMeans(2)),
                "half": some_rows(torch.zeros(2, 3), [1], scheme=HalfPrecision(torch.float16)),
                "cube": whole(torch.ones(3, 2, 2, dtype=torch.float16)),
                "flags": whole(torch.tensor([False, False, True])),
                "step": whole(torch.tensor(8)),
            },
            objects={"seen": 2},
            parent=baseline,
            created_ns=2,
        )
    return root, {BASELINE: baseline.sha256, DELTA: delta.sha256}


def _table(shift: float, rows: RowMask | None = None) -> dict[str, Content]:
    """A table in two column shards, the first with a row that codes do not represent, and its optimizer state."""
    values = torch.arange(32.0).view(8, 4) + shift
    values[4, 0] = torch.nan
    left, right, scheme = Box((0, 0), (8, 2)), Box((0, 2), (8, 2)), Asymmetric(4)
    parts = (Part(left, values[:, :2].clone(), rows, scheme), Part(right, values[:, 2:].clone(), rows))
    state = tuple(
        Part(Box((8 * number,), (8,)), values[:, number].clone(), rows, table_box=box)
        for number, box in enumerate((left, right))
    )
    return {"table": Content((8, 4), parts, is_table=True), "table.state": Content((16,), state, table="table")}
