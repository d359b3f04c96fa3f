"""Golden checkpoints of version 6: tables of schemes whose blobs are split, and of one whose blobs are not.

``python -m tests.golden.split_v6 FOLDER`` wrote them, by stock saves; ids and times are those of that run.

    step-1    baseline; the first row of one table, and so of its block, is stored exactly
    step-2    delta of step-1
    step-3    delta of step-2, compacted

Beside them lies ``expected.json``: the SHA-256 of what each tensor loads as, elements as little-endian bytes.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

import torchrec_cnr as cnr
from tests.golden.write_v3 import as_bytes
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.tracking.modified_rows import ModifiedRows
from torchrec_cnr.tracking.tracked_tables import TrackedRows, TrackedShard

STEPS = ("step-1", "step-2", "step-3")
NUM_ROWS, NUM_COLS = 192, 5
SPOILED = "asymmetric4"  # the table with a row that codes cannot represent
SCHEMES: Mapping[str, cnr.Scheme] = {
    "none": cnr.NoQuantization(),
    "half": cnr.HalfPrecision(torch.bfloat16),
    "symmetric3": cnr.Symmetric(3),
    "asymmetric8": cnr.Asymmetric(8),
    SPOILED: cnr.Asymmetric(4),
    "adaptive2": cnr.AdaptiveAsymmetric(2, cnr.LeastSquares((0.0,))),
    "kmeans2": cnr.KMeans(2),
    "kmeans3": cnr.KMeans(3),
}
STATE_SCHEMES: Mapping[str, cnr.Scheme] = {"none": cnr.NoQuantization(), "half": cnr.HalfPrecision(torch.bfloat16)}


def state_of(step: int) -> dict[str, Tensor]:
    """Tables, a vector for each row of two of them, and a vector that is nobody's state."""
    numbers = (torch.arange(NUM_ROWS * NUM_COLS, dtype=torch.int64) * 73 + step * 29) % 127 - 63
    values = (numbers.double() / 512).float().reshape(NUM_ROWS, NUM_COLS)
    tables = {f"table.{name}": values.clone() for name in SCHEMES}
    if step == 1:
        tables[f"table.{SPOILED}"][0, 3] = float("nan")
    sums = {f"state.{name}": values.square().sum(1) for name in STATE_SCHEMES}
    return {**tables, **sums, "dense.bias": values.reshape(-1)[:NUM_ROWS].double()}


def rows_of(step: int) -> Tensor:
    """What is modified before a step, of all tables."""
    return torch.arange(step, NUM_ROWS, step)


def write(folder: Path) -> None:
    """Save, modify, save, modify, save and compact."""
    state = state_of(1)
    rows = {
        name: ModifiedRows(f"table.{name}", Box((0, 0), (NUM_ROWS, NUM_COLS)), torch.device("cpu")) for name in SCHEMES
    }
    planner = cnr.CNRSavePlanner(TrackedRows([_tracked(rows[name], state, name) for name in SCHEMES]))
    quantization = {f"table.{name}": scheme for name, scheme in SCHEMES.items()}
    quantization |= {f"state.{name}": scheme for name, scheme in STATE_SCHEMES.items()}
    expected = {}
    for step in (1, 2, 3):
        for fqn, values in state_of(step).items():
            state[fqn][rows_of(step)] = values[rows_of(step)]
        for modified in rows.values():
            modified.mark(rows_of(step))
        writer = cnr.CNRStorageWriter(folder / f"step-{step}", quantization=quantization, pack_bytes=1024)
        save(dict(state), storage_writer=writer, planner=planner, no_dist=True)
        if step == 3:
            cnr.compact(folder / "step-3", self_contained=True)
        expected[f"step-{step}"] = digests_of(folder / f"step-{step}")
    Path(folder, "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def digests_of(path: Path) -> dict[str, str]:
    """Of what each tensor loads as."""
    found = {fqn: cnr.load_table(path, fqn) for fqn in state_of(1)}
    return {fqn: hashlib.sha256(as_bytes(tensor)).hexdigest() for fqn, tensor in found.items()}


def _tracked(rows: ModifiedRows, state: dict[str, Tensor], name: str) -> TrackedShard:
    states = [state[f"state.{name}"]] if name in STATE_SCHEMES else []
    return TrackedShard(rows, state[f"table.{name}"], lambda: states)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
