"""Writes the checkpoints in ``v1``: ``python -m tests.golden.write FOLDER``. Every run writes the same bytes.

In ``v1/run`` is a lineage of a baseline and its deltas: a small state, which each shards in its own way. Blobs are
split where that makes them smaller.

    step-1    baseline, two ranks, tables sharded by columns
    step-2    delta of step-1, two ranks, tables sharded by rows
    step-3    delta of step-2, one rank, saved after a restore
    step-4    delta of step-3, two ranks, tables sharded by other columns. Its manifest was replaced twice: the lineage
              was folded into it, then the rows of step-2 and some of step-1 were moved into a pack of its own
    step-5    delta of step-4, two ranks. It was removed, but for the pack that step-6 uses
    step-6    delta of step-5, one rank. Its manifest was replaced: step-5 was folded into it, and step-4 is its parent
    step-7    delta of step-6, one rank, its rows kept apart by heat, its manifest packed

Beside them lies ``expected.json``: what each loads as, elements as little-endian bytes in hex. In ``v1/logged`` are the
first three again, with packs in a log (see ``log``).
"""

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.golden import log, mixed, split
from tests.golden.replacement import replace_manifest, used_packs
from tests.golden.save import Rows, Save
from tests.golden.state import (
    EXP_AVG,
    MOMENTUM,
    T0,
    T2,
    T4,
    T8,
    dense_of,
    objects_of,
    scheme_of,
    values_of,
)
from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import MANIFEST_FILE, History, Place
from torchrec_cnr.quantization import NoQuantization, Scheme
from torchrec_cnr.sharding import dtype_name

RUN, LOGGED = "run", "logged"  # folders
STEPS = ("step-1", "step-2", "step-3", "step-4", "step-6", "step-7")
REPLACED = ("step-4", "step-6")
REMOVED = "step-5"
WHOLE_T0 = {T0: Place(Box((0, 0), (320, 2))), EXP_AVG: Place(Box((0, 0), (320, 2)))}
# By step, the widths of the column shards that T8 was saved in.
COLUMNS = {1: (4, 2), 4: (2, 4)}
MOVED = {f"5a7e{step:012d}-{file}.safetensors" for step, file in [(1, "1-0"), (2, "0-0"), (2, "0-1"), (2, "1-0")]}


def state_of(step: int) -> dict[str, Tensor]:
    """The tables and their optimizer state, dense tensors last."""
    seed = 10 * (step - 1)
    momentum = values_of((10 * len(COLUMNS.get(step, (6,))),), seed + 3).abs()
    state = {T0: values_of((320, 2), seed + 1), EXP_AVG: values_of((320, 2), seed + 2), MOMENTUM: momentum}
    state |= {T2: values_of((7, 3), seed + 4, torch.bfloat16), T4: values_of((9, 5), seed + 5)}
    return state | {T8: values_of((10, 6), seed + 6)} | mixed.tables_of(step) | split.tables_of(step) | dense_of(step)


def begin(folder: Path, step: int, num_ranks: int) -> Save:
    """A save of a step's state."""
    return Save(folder, step, num_ranks, state_of(step))


def save_rest(save: Save) -> Save:
    """The tables of every scheme, those that are split; dense tensors and objects, dealt out to the ranks in turn."""
    for rank, fqn, box, rows in (*mixed.shards_of(save.number), *split.shards_of(save.number)):
        save.add(rank, fqn, box, rows)
    for number, (fqn, tensor) in enumerate(dense_of(save.number).items()):
        save.add(number % save.num_ranks, fqn, Box.whole(tuple(tensor.shape)))
    for number, (fqn, value) in enumerate(objects_of(save.number).items()):
        save.add_object(number % save.num_ranks, fqn, value)
    return save


def add_columns(save: Save, rows: list[Rows]) -> None:
    """T8 and its momentum, sharded by columns."""
    start = 0
    for rank, width in enumerate(COLUMNS[save.number]):
        place = Box((0, start), (10, width))
        state = Place(Box((10 * rank,), (10,)), place)
        if rows[rank] is None:
            save.add(rank, T8, place)
            save.add(rank, MOMENTUM, state.box, None, place)
        else:
            save.add_sharing(rank, {T8: Place(place), MOMENTUM: state}, rows[rank])
        start += width


def save_step_1(folder: Path) -> Save:
    """The baseline. Row 3 of T4 holds a NaN and an infinity, row 6 of T2 a NaN: their schemes cannot represent them."""
    save = begin(folder, 1, 2)
    t2, t4 = save.state[T2], save.state[T4]
    t4[3, 1], t4[3, 2], t2[6, 0] = float("nan"), float("-inf"), float("nan")
    save.add_sharing(0, WHOLE_T0, None)
    save.add(0, T2, Box((0, 0), (7, 2)))
    save.add(1, T2, Box((0, 2), (7, 1)))
    save.add(1, T4, Box((0, 0), (9, 5)))
    add_columns(save, [None, None])
    return save_rest(save)


def save_step_2(folder: Path) -> Save:
    """A delta: sparse rows with gaps of two bytes, a shard stored whole, and an infinite row in T4."""
    save = begin(folder, 2, 2)
    save.state[T4][7, 4] = float("inf")
    save.add_sharing(1, WHOLE_T0, [1, 300, 301, 319])
    save.add(0, T2, Box((0, 0), (4, 3)), None)
    save.add(1, T2, Box((4, 0), (3, 3)), [1])
    save.add(0, T4, Box((0, 0), (5, 5)), [])
    save.add(1, T4, Box((5, 0), (4, 5)), [0, 2, 3])
    for rank, rows in enumerate([[0, 1, 4], [2]]):
        place = Box((5 * rank, 0), (5, 6))
        save.add_sharing(rank, {T8: Place(place), MOMENTUM: Place(Box((5 * rank,), (5,)), place)}, rows)
    save.add(1, T8, Box((10, 0), (0, 6)))  # a rank without rows may not know to what its state belongs
    save.add(1, MOMENTUM, Box((10,), (0,)))
    return save_rest(save)


def save_rows(folder: Path, step: int, t0: list[int], t2: list[int], t4: list[int], t8: list[int]) -> Save:
    """A delta with these rows of each table, all of them on rank 0."""
    save = begin(folder, step, 2 if step == 5 else 1)
    save.add_sharing(0, WHOLE_T0, t0)
    save.add(0, T2, Box((0, 0), (7, 3)), t2)
    save.add(0, T4, Box((0, 0), (9, 5)), t4)
    place = Box((0, 0), (10, 6))
    save.add_sharing(0, {T8: Place(place), MOMENTUM: Place(Box((0,), (10,)), place)}, t8)
    return save_rest(save)


def save_step_3(folder: Path) -> Save:
    """A delta of the delta: a dense row set of two blocks, and T4's row with a NaN is overwritten by one without."""
    return save_rows(folder, 3, [row for row in range(100, 300) if row % 7], [0, 5], [3], [1, 2, 9])


def save_step_4(folder: Path) -> Save:
    """A delta that leaves of blocks of T0 nothing alive, but of its optimizer state, which shares them, all."""
    save = begin(folder, 4, 2)
    save.add(0, T0, Box((0, 0), (320, 2)), list(range(100, 256)))
    save.add(1, EXP_AVG, Box((0, 0), (320, 2)), [0, 5])
    save.add(0, T2, Box((0, 0), (7, 3)), [6])
    save.add(1, T4, Box((0, 0), (9, 5)), [0, 7])
    add_columns(save, [[0, 3, 9], [3, 4]])
    return save_rest(save)


def save_step_7(folder: Path) -> Save:
    """A delta as `Compacted` has them, with rows that were modified more often than others in packs of their own."""
    save = save_rows(folder, 7, [7], [0], [1], [0])
    save.policy = "Compacted"
    save.add_sharing(0, WHOLE_T0, [310], heat=2)
    return save


class Folded:
    """What a lineage loads as, worked out from what was saved instead of from files."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}
        self.momentum = torch.zeros(10, 6, dtype=torch.float64)  # one value a row and column of T8

    def add(self, save: Save) -> None:
        """Lay a checkpoint over those before."""
        for fqn, place, rows in save.stored:
            index = place.box.slices(Box.whole(tuple(save.state[fqn].shape)))
            values = save.state[fqn][index]
            into: Any = ... if rows is None else rows
            if place.table_box is not None:
                cells = self.momentum[place.table_box.slices(Box.whole((10, 6)))]
                cells[into] = values[into].double()[:, None].expand(-1, cells.shape[1])
                continue
            target = self.state.setdefault(fqn, torch.zeros_like(save.state[fqn]))
            target[index][into] = through(scheme_of(save.number, fqn, place.box), values)[into]
        parts = self.momentum.split(COLUMNS.get(save.number, (6,)), dim=1)
        self.state[MOMENTUM] = torch.cat([(part.sum(1) / part.shape[1]).float() for part in parts])

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
    """Write both lineages into a folder that is there."""
    write_run(folder / RUN)
    log.write_logged(folder / RUN, folder / LOGGED)


def write_run(folder: Path) -> None:
    """Write the checkpoints and what they load as."""
    folded = Folded()
    expected: dict[str, Any] = {}
    history: History | None = None

    def commit(save: Save) -> None:
        nonlocal history
        history = save.commit(history)
        folded.add(save)
        expected[f"step-{save.number}"] = {"tensors": folded.to_json(), "objects": objects_of(save.number)}

    for save_step in (save_step_1, save_step_2, save_step_3, save_step_4):
        commit(save_step(folder))
    replace_manifest(folder / "step-4")
    history = replace_manifest(folder / "step-4", moved=MOVED).history
    commit(save_rows(folder, 5, [0, 1, 2], [1], [2], [3, 5]))
    commit(save_rows(folder, 6, [2, 3, 310], [1], [8], [6]))
    manifest = replace_manifest(folder / "step-6", base="step-4")
    history = manifest.history
    remove(folder / REMOVED, used_packs(manifest)[f"../{REMOVED}"])
    del expected[REMOVED]
    with patch.object(manifest_json, "PLAIN_BYTES", 0):
        commit(save_step_7(folder))
    Path(folder, "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def remove(folder: Path, kept: Collection[str]) -> None:
    """Remove a checkpoint, but for some of its packs."""
    Path(folder, MANIFEST_FILE).unlink()
    for path in folder.glob("*.safetensors"):
        if path.name not in kept:
            path.unlink()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
