"""Writes the checkpoints in ``v1_transformed``: ``python -m tests.golden.write_transformed FOLDER``.

    step-1    baseline, one table each of fp32 with a basis, of bf16, and of fp32 without a basis, with exact rows
    step-2    delta of step-1, which uses its transforms
    step-3    delta of step-2, of smaller rows, with other steps but the same basis
    step-4    delta of step-3. Its manifest was replaced: the chain was compacted into it

Beside them lies ``expected.json``: the SHA-256 of what each table of each loads as, elements as little-endian bytes.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import torchrec_cnr as cnr

STEPS = ("step-1", "step-2", "step-3", "step-4")
NUM_ROWS = 4_200  # more than a strip
DTYPES = {"few": torch.float32, "brief": torch.bfloat16, "own": torch.float32}


def rows_of(name: str, step: int, num_rows: int) -> Tensor:
    """Rows close to a subspace of few dimensions; with ``own``, in all dimensions, and mostly small."""
    generator = torch.Generator().manual_seed(step)
    if name == "own":
        return torch.randn(num_rows, 6, generator=generator) ** 3
    directions = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))[0]
    scales = torch.tensor([1.0, 0.5, 0.1, 0.01, 0.01, 0.01, 0.001, 0.001])
    rows = torch.randn(num_rows, 8, generator=generator) * scales @ directions
    return (rows * (0.2 if step == 3 else 1.0)).to(DTYPES[name])


def expected_of(path: Path) -> dict[str, str]:
    """The digests of what a checkpoint loads as."""
    manifest = cnr.read_checkpoint(path).manifest
    tables = {fqn: cnr.load_table(path, fqn) for fqn in manifest.tensors}
    return {fqn: digest_of(table.contiguous().view(torch.uint8).numpy().tobytes()) for fqn, table in tables.items()}


def digest_of(data: bytes) -> str:
    """The SHA-256 of the elements of a table."""
    return hashlib.sha256(data).hexdigest()


def main() -> None:
    """Write all of it."""
    folder = Path(sys.argv[1])
    model = nn.ModuleDict(
        {
            name: nn.EmbeddingBag(NUM_ROWS, 6 if name == "own" else 8, sparse=True, dtype=dtype)
            for name, dtype in DTYPES.items()
        }
    )
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    writer = cnr.CNRStorageWriter(folder / STEPS[0], quantization=cnr.TransformCoded(cnr.AdaptiveAsymmetric(4)))
    expected = {}
    for step, name in enumerate(STEPS, 1):
        rows = torch.arange(NUM_ROWS) if step == 1 else torch.arange(step, NUM_ROWS, 37)
        for table_name in DTYPES:
            table = model.get_parameter(f"{table_name}.weight").detach()
            table[rows] = rows_of(table_name, step, len(rows))
            table[rows[5]], table[rows[9], 2] = 3e7, float("nan")
            tracker.mark(table_name, rows)
        state = {"model": model.state_dict()}
        dcp.save(state, checkpoint_id=str(folder / name), storage_writer=writer, planner=planner, no_dist=True)
        if name == STEPS[-1]:
            cnr.compact(folder / name, max_ratio=1.2)
        expected[name] = expected_of(folder / name)
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
