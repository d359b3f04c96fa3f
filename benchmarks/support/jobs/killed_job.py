"""The example's training with local checkpoints, which is killed and started again; to be started by torchrun.

Each rank appends to a log, by step: the time at which the step was done, and a digest of the rank's state then.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchrec_cnr as cnr
from benchmarks.support.jobs.example_training import ExampleTraining
from torchrec_cnr.sharding import local_shards
from torchrec_cnr.storage.pack_writer import crc32c

BATCH_SIZE, DIM = 512, 16
DURABLE_SECS = 20.0
TRAINED, RESTORED = "trained", "restored"


@dataclass(frozen=True)
class Line:
    """A line of a rank's log.

    Attributes:
        kind: ``TRAINED`` or ``RESTORED``.
        step: The step that was done, or that of the restored checkpoint; 0 if there was none.
        secs: When, in seconds of Unix time.
        digest: A digest of the rank's tensors.
    """

    kind: str
    step: int
    secs: float
    digest: int

    @classmethod
    def all_of(cls, path: Path) -> list["Line"]:
        """Return the complete lines of a log; a kill may have cut the last one."""
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        parts = (line.split() for line in lines)
        return [cls(kind, int(step), float(secs), int(digest)) for kind, step, secs, digest in parts]


def log_of(folder: Path, rank: int) -> Path:
    """Return the path of a rank's log."""
    return folder / f"rank-{rank}.log"


def main() -> None:
    """Restore, and train until the process is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="the folder of the checkpoints and of the logs")
    parser.add_argument("--rows", type=int, required=True, help="rows of each large table")
    parser.add_argument("--every-secs", type=float, required=True, help="seconds between local checkpoints")
    options = parser.parse_args()
    training = ExampleTraining(options.rows, DIM, BATCH_SIZE)
    trainer = training.trainer
    manager = cnr.CheckpointManager(
        options.folder / "run",
        cnr.RowTracker(trainer.model),
        every_secs=DURABLE_SECS,
        quantization=cnr.AdaptiveAsymmetric(bits=4),
        local_checkpoints=cnr.LocalCheckpoints(options.folder / "local", every_secs=options.every_secs),
    )
    first = manager.restore(trainer.state({})) or 0
    with log_of(options.folder, dist.get_rank()).open("a", buffering=1) as log:
        log.write(f"{RESTORED} {first} {time.time()} {_digest(trainer.state({}))}\n")
        for step, batch in enumerate(training.batches(first), first + 1):
            trainer.train(batch)
            log.write(f"{TRAINED} {step} {time.time()} {_digest(trainer.state({}))}\n")
            manager.async_save(step, trainer.state({}))


def _digest(state: dict[str, Any]) -> int:
    """Return a digest of the tensors of a state dict on this rank."""
    digest, values = 0, list[Any]([state])
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += [value[key] for key in sorted(value, key=str)]
        elif isinstance(value, list | tuple):
            values += value
        elif isinstance(value, torch.Tensor):
            for shard in local_shards(value):
                digest = crc32c(shard.tensor.detach().contiguous().view(-1).view(torch.uint8).numpy(), digest)
    return digest


if __name__ == "__main__":
    main()
