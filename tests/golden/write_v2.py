"""Writes the checkpoints in ``v2``: ``python -m tests.golden.write_v2 FOLDER``.

A lineage of a baseline and two deltas of a small state, each sharded in its own way, goes through the library's own
encoding, packs and manifest. Ranks, ids and times are made up, so that every run writes the same bytes, and values come
from arithmetic on integers rather than from a random generator, whose numbers may change with its version.

    step-1    baseline, two ranks, tables sharded by columns
    step-2    delta of step-1, two ranks, tables sharded by rows
    step-3    delta of step-2, one rank, saved after a restore

Beside them lies ``expected.json``: what each of the three loads as, elements as little-endian bytes in hex. The
checkpoints in ``v1`` are much the same without the tables of ``mixed``, written by the library when it wrote version 1;
nothing writes that any more.
"""

import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from tests.golden import mixed
from torchrec_cnr import encoding, manifest_json
from torchrec_cnr.encoding import EncodedShard, Source, write_all_rows, write_rows
from torchrec_cnr.manifest import FILE_NAME, Blob, CheckpointRef, History, Manifest, Pack, RowSet, Shard, TensorEntry
from torchrec_cnr.modified import RowMask
from torchrec_cnr.packs import PackWriter
from torchrec_cnr.rows import Box
from torchrec_cnr.schemes import Asymmetric, NoQuantization, Scheme
from torchrec_cnr.shards import dtype_name
from torchrec_cnr.stores import Store

STEPS = ("step-1", "step-2", "step-3")
PACK_BYTES = 4096  # small, so that a rank writes several packs
T0, T2, T4, T8 = (f"model.ebc.embedding_bags.t{bits}.weight" for bits in (0, 2, 4, 8))
TABLES = (T0, T2, T4, T8, *mixed.TABLES)
EXP_AVG, MOMENTUM = "optimizer.t0.exp_avg", "optimizer.t8.momentum1"
SCHEMES: Mapping[str, Scheme] = {T2: Asymmetric(2), T4: Asymmetric(4), T8: Asymmetric(8), "dense.kernel": Asymmetric(8)}
EXACT = NoQuantization()
# Shards whose ranks decided otherwise, by step, FQN and offsets.
OTHER_SCHEMES: Mapping[tuple[int, str, tuple[int, ...]], Scheme] = {
    (1, T8, (0, 4)): Asymmetric(2),
    (2, T2, (4, 0)): EXACT,
    (2, T8, (5, 0)): Asymmetric(4),
    (3, T2, (0, 0)): Asymmetric(4),
    **mixed.SCHEME_OF,
}
NUM_RESTORES = {1: 0, 2: 0, 3: 1}  # by step

Rows = list[int] | None  # of a box, to be stored; None for all


def values_of(size: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values between -2 and 2 that every floating dtype holds exactly."""
    numbers = (torch.arange(int(np.prod(size)), dtype=torch.int64) * 73 + seed * 29) % 127 - 63
    return (numbers.double() / 32).to(dtype).reshape(size)


def scheme_of(step: int, fqn: str, box: Box) -> Scheme:
    """The scheme of one shard."""
    return OTHER_SCHEMES.get((step, fqn, box.offsets), SCHEMES.get(fqn, EXACT))


@dataclass
class Rank:
    """What one rank has written, with its own numbers of packs and row sets."""

    packs: PackWriter
    shards: list[tuple[str, Box, Box | None, int | None, EncodedShard]] = field(default_factory=list)
    row_sets: list[encoding.EncodedRowSet] = field(default_factory=list)
    objects: dict[str, int] = field(default_factory=dict)


@dataclass
class Save:
    """One checkpoint on its way."""

    folder: Path
    number: int
    parent: str | None
    num_ranks: int
    state: dict[str, Tensor]
    ranks: list[Rank] = field(init=False)
    stored: list[tuple[str, Box, Box | None, Rows]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.save_id = f"5a7e{self.number:012d}"
        self.store = Store.open(self.folder / STEPS[self.number - 1], sync_files=False)
        self.store.make()
        self.ranks = [
            Rank(PackWriter(self.store, f"{self.save_id}-{rank}", 1, PACK_BYTES)) for rank in range(self.num_ranks)
        ]

    def add(self, rank: int, fqn: str, box: Box, rows: Rows = None, table_box: Box | None = None) -> None:
        """Store one shard by itself."""
        self.add_sharing(rank, [(fqn, box, table_box)], rows)

    def add_sharing(self, rank: int, members: Sequence[tuple[str, Box, Box | None]], rows: Rows) -> None:
        """Store shards that share their row numbers."""
        to = self.ranks[rank]
        sources = [self._source(fqn, box) for fqn, box, _ in members]
        with mock.patch.object(encoding, "BLOCK_BYTES", 1024 if members[0][0] in (T0, *mixed.TABLES) else 64):
            if rows is None:
                row_set, encoded = None, [write_all_rows(to.packs, source) for source in sources]
            else:
                mask = torch.zeros(members[0][1].num_rows, dtype=torch.bool)
                mask[rows] = True
                coded, found = write_rows(to.packs, sources, RowMask(mask))
                row_set, encoded = len(to.row_sets), list(found)
                to.row_sets.append(coded)
        for (fqn, box, table_box), shard in zip(members, encoded, strict=True):
            to.shards.append((fqn, box, table_box, row_set, shard))
            self.stored.append((fqn, box, table_box, rows))

    def add_object(self, rank: int, fqn: str, value: object) -> None:
        """Store an object as ``torch.save`` writes it."""
        stream = io.BytesIO()
        torch.save(value, stream)
        data = np.frombuffer(stream.getvalue(), dtype=np.uint8)
        self.ranks[rank].objects[fqn] = self.ranks[rank].packs.add(fqn, "uint8", data.shape, data)

    def _source(self, fqn: str, box: Box) -> Source:
        values = self.state[fqn]
        values = values[box.slices(Box.whole(tuple(values.shape)))]
        name = f"{fqn}{list(box.offsets)}"
        return Source(name, values, dtype_name(values), scheme_of(self.number, fqn, box))

    def commit(self, history: History | None, paths: Mapping[str, tuple[str | int, ...]]) -> History:
        """Write the manifest."""
        packs: list[Pack] = []
        row_sets: list[RowSet] = []
        shards: dict[str, list[Shard]] = {}
        objects: dict[str, Blob] = {}
        for rank in self.ranks:
            own_packs, own_blobs = rank.packs.finish()
            rank.packs.close()
            blobs = [replace(blob, pack=blob.pack + len(packs)) for blob in own_blobs]
            for fqn, box, table_box, row_set, encoded in rank.shards:
                index = None if row_set is None else row_set + len(row_sets)
                located = tuple(blobs[number] for number in encoded.blobs)
                scheme = scheme_of(self.number, fqn, box)
                shards.setdefault(fqn, []).append(Shard(box, index, encoded.block_rows, located, scheme, table_box))
            objects |= {fqn: blobs[number] for fqn, number in rank.objects.items()}
            row_sets += (coded.located(blobs) for coded in rank.row_sets)
            packs += own_packs
        num_bytes = sum(pack.num_bytes for pack in packs)
        total = (
            History(num_bytes) if history is None else replace(history, delta_bytes=(*history.delta_bytes, num_bytes))
        )
        manifest = Manifest(
            created_ns=1_700_000_000_000_000_000 + self.number,
            checkpoint_id=STEPS[self.number - 1],
            save_id=self.save_id,
            parent=self._parent(),
            policy="Consecutive",
            history=total,
            num_restores=NUM_RESTORES[self.number],
            world_size=self.num_ranks,
            writer="torchrec_cnr 0.1.0",
            packs=tuple(packs),
            row_sets=tuple(row_sets),
            tensors={fqn: self._entry(fqn, found) for fqn, found in sorted(shards.items())},
            objects=dict(sorted(objects.items())),
            paths=dict(sorted(paths.items())),
        )
        self.store.put_new(FILE_NAME, manifest_json.dumps(manifest)[0], self.save_id)
        return total

    def _parent(self) -> CheckpointRef | None:
        if self.parent is None:
            return None
        data = Path(self.folder, self.parent, FILE_NAME).read_bytes()
        return CheckpointRef(f"../{self.parent}", manifest_json.loads(data, self.parent)[1])

    def _entry(self, fqn: str, shards: list[Shard]) -> TensorEntry:
        values, is_table = self.state[fqn], fqn in TABLES
        table = T8 if fqn == MOMENTUM else None
        return TensorEntry(dtype_name(values), tuple(values.shape), tuple(shards), is_table, table)


def dense_of(step: int) -> dict[str, Tensor]:
    """What is no table: stored whole by each checkpoint."""
    return {
        "dense.bias": values_of((3,), step, torch.float64),
        "dense.cube": values_of((2, 2, 3), step + 1, torch.float16),
        "dense.kernel": values_of((3, 3), step + 2, torch.float16),
        "dense.layers.0": values_of((2,), step + 3, torch.bfloat16),
        "dense.mask": torch.tensor([True, False, step == 1]),
        "dense.none": torch.zeros(0, 4),
        "step": torch.tensor(step * 1_000_000_007, dtype=torch.int64),
        "tiny.i8": torch.tensor([-128, 127, step], dtype=torch.int8),
        "tiny.i16": torch.tensor([-(2**15), step], dtype=torch.int16),
        "tiny.i32": torch.tensor([-(2**31), step], dtype=torch.int32),
        "tiny.u8": torch.tensor([255, step], dtype=torch.uint8),
    }


def save_rest(save: Save, step: int) -> None:
    """The tables of every scheme; dense tensors and objects, dealt out to the ranks in turn."""
    save.state |= mixed.tables_of(step)
    for rank, fqn, box, rows in mixed.shards_of(step):
        save.add(rank, fqn, box, rows)
    for number, (fqn, tensor) in enumerate(dense_of(step).items()):
        save.state[fqn] = tensor
        save.add(number % save.num_ranks, fqn, Box.whole(tuple(tensor.shape)))
    for number, (fqn, value) in enumerate(objects_of(step).items()):
        save.add_object(number % save.num_ranks, fqn, value)


def objects_of(step: int) -> dict[str, Any]:
    """What is no tensor."""
    return {"epoch": step, "reader.state": {"files": ["day_0", "day_1"], "offset": 10 * step}}


def paths_of(fqns: Iterable[str]) -> dict[str, tuple[str | int, ...]]:
    """Where each item lies in a nested state dict: one level down, and a list of layers."""
    paths: dict[str, tuple[str | int, ...]] = {}
    for fqn in fqns:
        first, _, rest = fqn.partition(".")
        paths[fqn] = (first, rest) if rest else (first,)
    return paths | {"dense.layers.0": ("dense", "layers", 0)}


def write_step_1(folder: Path) -> tuple[Save, History]:
    """The baseline. Row 3 of T4 holds a NaN and an infinity, row 6 of T2 a NaN: their schemes cannot represent them."""
    state = {T0: values_of((320, 2), 1), EXP_AVG: values_of((320, 2), 2), MOMENTUM: values_of((20,), 3).abs()}
    state |= {T2: values_of((7, 3), 4, torch.bfloat16), T4: values_of((9, 5), 5), T8: values_of((10, 6), 6)}
    state[T4][3, 1], state[T4][3, 2], state[T2][6, 0] = float("nan"), float("-inf"), float("nan")
    save = Save(folder, 1, None, 2, state)
    save.add_sharing(0, [(T0, Box((0, 0), (320, 2)), None), (EXP_AVG, Box((0, 0), (320, 2)), None)], None)
    save.add(0, T2, Box((0, 0), (7, 2)))
    save.add(1, T2, Box((0, 2), (7, 1)))
    save.add(1, T4, Box((0, 0), (9, 5)))
    for rank, (column, width) in enumerate([(0, 4), (4, 2)]):
        save.add(rank, T8, Box((0, column), (10, width)))
        save.add(rank, MOMENTUM, Box((10 * rank,), (10,)), None, Box((0, column), (10, width)))
    save_rest(save, 1)
    return save, save.commit(None, paths_of([*state, *objects_of(1)]))


def write_step_2(folder: Path, history: History) -> tuple[Save, History]:
    """A delta: sparse rows with gaps of two bytes, a shard stored whole, and an infinite row in T4."""
    state = {T0: values_of((320, 2), 11), EXP_AVG: values_of((320, 2), 12), MOMENTUM: values_of((10,), 13).abs()}
    state |= {T2: values_of((7, 3), 14, torch.bfloat16), T4: values_of((9, 5), 15), T8: values_of((10, 6), 16)}
    state[T4][7, 4] = float("inf")
    save = Save(folder, 2, STEPS[0], 2, state)
    members = [(T0, Box((0, 0), (320, 2)), None), (EXP_AVG, Box((0, 0), (320, 2)), None)]
    save.add_sharing(1, members, [1, 300, 301, 319])
    save.add(0, T2, Box((0, 0), (4, 3)), None)
    save.add(1, T2, Box((4, 0), (3, 3)), [1])
    save.add(0, T4, Box((0, 0), (5, 5)), [])
    save.add(1, T4, Box((5, 0), (4, 5)), [0, 2, 3])
    for rank, rows in enumerate([[0, 1, 4], [2]]):
        place = Box((5 * rank, 0), (5, 6))
        save.add_sharing(rank, [(T8, place, None), (MOMENTUM, Box((5 * rank,), (5,)), place)], rows)
    save.add(1, T8, Box((10, 0), (0, 6)))  # a rank without rows may not know to what its state belongs
    save.add(1, MOMENTUM, Box((10,), (0,)))
    save_rest(save, 2)
    return save, save.commit(history, paths_of([*state, *objects_of(2)]))


def write_step_3(folder: Path, history: History) -> Save:
    """A delta of the delta: a dense row set of two blocks, and T4's row with a NaN is overwritten by one without."""
    state = {T0: values_of((320, 2), 21), EXP_AVG: values_of((320, 2), 22), MOMENTUM: values_of((10,), 23).abs()}
    state |= {T2: values_of((7, 3), 24, torch.bfloat16), T4: values_of((9, 5), 25), T8: values_of((10, 6), 26)}
    save = Save(folder, 3, STEPS[1], 1, state)
    members = [(T0, Box((0, 0), (320, 2)), None), (EXP_AVG, Box((0, 0), (320, 2)), None)]
    save.add_sharing(0, members, [row for row in range(100, 300) if row % 7])
    save.add(0, T2, Box((0, 0), (7, 3)), [0, 5])
    save.add(0, T4, Box((0, 0), (9, 5)), [3])
    place = Box((0, 0), (10, 6))
    save.add_sharing(0, [(T8, place, None), (MOMENTUM, Box((0,), (10,)), place)], [1, 2, 9])
    save_rest(save, 3)
    save.commit(history, paths_of([*state, *objects_of(3)]))
    return save


class Folded:
    """What a lineage loads as, worked out from what was saved instead of from files."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}
        self.momentum = torch.zeros(10, 6, dtype=torch.float64)  # one value a row and column of T8

    def add(self, save: Save) -> None:
        """Lay a checkpoint over those before."""
        for fqn, place, table_box, rows in save.stored:
            values = save.state[fqn][place.slices(Box.whole(tuple(save.state[fqn].shape)))]
            into: Any = ... if rows is None else rows
            if table_box is not None:
                cells = self.momentum[table_box.slices(Box.whole((10, 6)))]
                cells[into] = values[into].double()[:, None].expand(-1, cells.shape[1])
                continue
            target = self.state.setdefault(fqn, torch.zeros_like(save.state[fqn]))
            decoded = through(scheme_of(save.number, fqn, place), values)
            target[place.slices(Box.whole(tuple(target.shape)))][into] = decoded[into]
        columns = [slice(0, 4), slice(4, 6)] if save.number == 1 else [slice(0, 6)]
        means = [(self.momentum[:, column].sum(1) / (column.stop - column.start)).float() for column in columns]
        self.state[MOMENTUM] = torch.cat(means)

    def to_json(self) -> dict[str, Any]:
        """Dtype, size and elements of each tensor."""
        return {
            fqn: {"dtype": dtype_name(tensor), "size": list(tensor.shape), "hex": as_bytes(tensor).hex()}
            for fqn, tensor in sorted(self.state.items())
        }


def through(scheme: Scheme, values: Tensor) -> Tensor:
    """Values after quantization; rows that it cannot represent as they are."""
    if isinstance(scheme, NoQuantization):
        return values
    encoded = scheme.encode(values)
    decoded = scheme.decode(encoded.codes, values.shape[1], values.dtype)
    decoded[encoded.exact] = values[encoded.exact]
    return decoded


def as_bytes(tensor: Tensor) -> bytes:
    """Elements in order, little-endian."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def write(folder: Path) -> None:
    """Write the three checkpoints and what they load as into a folder that is there."""
    folded = Folded()
    expected: dict[str, Any] = {}
    save, history = write_step_1(folder)
    folded.add(save)
    expected["step-1"] = {"tensors": folded.to_json(), "objects": objects_of(1)}
    save, history = write_step_2(folder, history)
    folded.add(save)
    expected["step-2"] = {"tensors": folded.to_json(), "objects": objects_of(2)}
    folded.add(write_step_3(folder, history))
    expected["step-3"] = {"tensors": folded.to_json(), "objects": objects_of(3)}
    Path(folder, "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
