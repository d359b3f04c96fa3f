"""Checkpoints made by hand: any sharding, scheme, parent and size of files, without DCP, ranks or a model.

A checkpoint is what its parts are: each is rows of one box of one tensor, as a rank would store them. They go through
the library's own encoding, packs and manifest, so that what lies there is what a save would have left.
"""

import io
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import MANIFEST_FILE, CheckpointRef, History, Manifest, Pack, Shard, TensorEntry
from torchrec_cnr.format.row_sets import Blob, RowSet
from torchrec_cnr.lineage.checkpoint import Checkpoint, read_checkpoint, relative_path
from torchrec_cnr.quantization import NoQuantization, Scheme
from torchrec_cnr.saving.encoding import EncodedRowSet, EncodedShard, EncodingInput, write_all_rows, write_rows
from torchrec_cnr.sharding import dtype_name
from torchrec_cnr.storage import pack_writer
from torchrec_cnr.storage.pack_writer import PackWriter
from torchrec_cnr.storage.store import Store
from torchrec_cnr.tracking.modified_rows import RowMask

PACK_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows of a box.

    Attributes:
        box: Where it lies in its tensor.
        values: All values of the box, of which some rows are stored.
        rows: Which; None for all. Parts with one and the same object share their row numbers.
        scheme: How they are quantized.
        table_box: For row-wise optimizer state, the box of the table's shard.
        heat: Of the rows.
    """

    box: Box
    values: Tensor
    rows: RowMask | None = None
    scheme: Scheme = field(default_factory=NoQuantization)
    table_box: Box | None = None
    heat: int = 0


@dataclass(frozen=True, eq=False)
class Content:
    """A tensor of a checkpoint.

    Attributes:
        size: Its global size.
        parts: What is stored of it, in several parts of one box perhaps; later ones overwrite earlier ones.
        is_table: Whether it is a table.
        table: For row-wise optimizer state, the FQN of its table.
    """

    size: tuple[int, ...]
    parts: tuple[Part, ...]
    is_table: bool = False
    table: str | None = None


def whole(values: Tensor, is_table: bool = False, scheme: Scheme | None = None) -> Content:
    """A tensor in one part with all rows."""
    size = tuple(values.shape)
    return Content(size, (Part(Box.whole(size), values, scheme=scheme or NoQuantization()),), is_table)


def some_rows(values: Tensor, rows: Sequence[int], is_table: bool = True, scheme: Scheme | None = None) -> Content:
    """A tensor in one part with some rows."""
    size = tuple(values.shape)
    part = Part(Box.whole(size), values, mask_of(rows, size[0]), scheme or NoQuantization())
    return Content(size, (part,), is_table)


def mask_of(rows: Sequence[int] | npt.NDArray[np.int64], num_rows: int) -> RowMask:
    """A mask of these rows."""
    mask = torch.zeros(num_rows, dtype=torch.bool)
    mask[torch.as_tensor(rows, dtype=torch.int64)] = True
    return RowMask(mask)


def write(
    path: str | Path,
    tensors: Mapping[str, Content],
    *,
    objects: Mapping[str, object] | None = None,
    parent: Checkpoint | None = None,
    created_ns: int | None = None,
    pack_bytes: int = PACK_BYTES,
    block_bytes: int = pack_writer.BLOCK_BYTES,
) -> Checkpoint:
    """Write a checkpoint and read it back.

    Args:
        path: Its directory.
        tensors: By FQN.
        objects: What is no tensor, by FQN.
        parent: What it is a delta of.
        created_ns: Time of its commit; by default now, but after its parent's.
        pack_bytes: Size of a pack.
        block_bytes: Of values in a blob, if that is less than half of a pack.
    """
    store = Store.open(path, sync_files=False)
    store.make()
    save_id = uuid.uuid4().hex[:16]
    writer = PackWriter(store, f"{save_id}-0", 1, pack_bytes)
    try:
        with mock.patch.object(pack_writer, "BLOCK_BYTES", block_bytes):
            encoded = _encode(writer, tensors)
        numbers = {fqn: _add_object(writer, fqn, value) for fqn, value in (objects or {}).items()}
        files, blobs = writer.finish()
    finally:
        writer.close()
    manifest = Manifest(
        created_ns=max(created_ns or time.time_ns(), parent.created_ns + 1 if parent else 0),
        checkpoint_id=Path(str(path)).name,
        save_id=save_id,
        parent=None if parent is None else _ref(store, parent),
        policy="Compacted",
        history=_history(parent, files),
        num_restores=0,
        world_size=1,
        writer="tests",
        packs=files,
        tensors=_located(tensors, encoded, blobs),
        objects={fqn: blobs[number] for fqn, number in numbers.items()},
        paths={fqn: (fqn,) for fqn in (*tensors, *numbers)},
    )
    data, _ = manifest_json.dumps(manifest)
    manifest_json.loads(data, store.url)
    store.put_new(MANIFEST_FILE, data, save_id)
    return read_checkpoint(path)


_Encoded = list[tuple[RowSet | EncodedRowSet, EncodedShard]]


def _encode(writer: PackWriter, tensors: Mapping[str, Content]) -> _Encoded:
    """Every part of every tensor in order, those that share row numbers together."""
    parts = [(fqn, part) for fqn, content in tensors.items() for part in content.parts]
    found: dict[int, tuple[RowSet | EncodedRowSet, EncodedShard]] = {}
    sharing: dict[tuple[int, int], list[tuple[str, Part]]] = {}
    for fqn, part in parts:
        if part.rows is None:
            all_rows, (shard,) = write_all_rows(writer, [_source(fqn, part)])
            found[id(part)] = all_rows, shard
        else:
            sharing.setdefault((id(part.rows), part.heat), []).append((fqn, part))
    for members in sharing.values():
        rows, heat = members[0][1].rows, members[0][1].heat
        assert rows is not None
        coded, shards = write_rows(writer, [_source(fqn, part) for fqn, part in members], rows, heat)
        found |= {id(part): (coded, shard) for (_, part), shard in zip(members, shards, strict=True)}
    return [found[id(part)] for _, part in parts]


def _source(fqn: str, part: Part) -> EncodingInput:
    assert tuple(part.values.shape) == part.box.sizes, (fqn, part.values.shape, part.box)
    return EncodingInput(f"{fqn}{list(part.box.offsets)}", part.values, dtype_name(part.values), part.scheme)


def _located(tensors: Mapping[str, Content], encoded: _Encoded, blobs: Sequence[Blob]) -> dict[str, TensorEntry]:
    row_sets: dict[int, RowSet] = {}
    left = iter(encoded)
    entries = {}
    for fqn, content in tensors.items():
        shards = []
        for part in content.parts:
            coded, codes = next(left)
            if id(coded) not in row_sets:
                row_sets[id(coded)] = coded.located(blobs) if isinstance(coded, EncodedRowSet) else coded
            located = tuple(blobs[number] for number in codes.blobs)
            shards.append(Shard(part.box, row_sets[id(coded)], located, part.scheme, part.table_box))
        places = tuple(dict.fromkeys(shard.place for shard in shards))
        entries[fqn] = TensorEntry(
            dtype_name(content.parts[0].values),
            content.size,
            tuple(shards),
            content.is_table,
            content.table,
            folded=places if len(places) < len(shards) else None,
        )
    return entries


def _add_object(writer: PackWriter, fqn: str, value: object) -> int:
    stream = io.BytesIO()
    torch.save(value, stream)
    data = np.frombuffer(stream.getvalue(), dtype=np.uint8)
    return writer.add(fqn, "uint8", data.shape, data)


def _ref(store: Store, parent: Checkpoint) -> CheckpointRef:
    path = relative_path(store, parent.store.url)
    assert path is not None
    return CheckpointRef(path, parent.sha256)


def _history(parent: Checkpoint | None, files: Sequence[Pack]) -> History:
    num_bytes = sum(pack.num_bytes for pack in files)
    if parent is None:
        return History(num_bytes)
    history = parent.manifest.history
    return replace(history, delta_bytes=(*history.delta_bytes, num_bytes))
