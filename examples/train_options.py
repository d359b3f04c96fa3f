"""The options of train_dlrm.py, as one frozen value that is checked before anything slow begins."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import command_line
from click_data import FORMATS
from command_line import CountFrom, OneLineParser
from delimited import DataError

PROGRAM = "train_dlrm.py"
EXAMPLES = """\
examples:
  # synthetic clicks, 2 ranks, 4-bit deltas, killed in the save of step 60, resumed on 1 rank:
  python examples/train_dlrm.py --root runs/a --world-size 2 --crash-at 60
  python examples/train_dlrm.py --root runs/a --world-size 1 --resume --report runs/a.png

  # saved in the background:
  python examples/train_dlrm.py --root runs/d --async --every 20

  # real clicks, and the same under torchrun:
  python examples/train_dlrm.py --root runs/b --data clicks.csv.gz --format clicks --num-rows 400000
  torchrun --nproc-per-node 2 examples/train_dlrm.py --root runs/c --data ratings.csv --format movielens
"""


@dataclass(frozen=True)
class Options:
    """The options of data, model, training and checkpoints; ``--help`` describes each."""

    root: Path
    data: Path | None
    format: str
    policy: str
    bits: int
    every: int
    asynchronous: bool
    steps: int
    batch_size: int
    num_rows: int
    dim: int
    sharding: str
    seed: int
    crash_at: int | None
    resume: bool
    world_size: int
    report: Path | None
    losses: Path | None

    def check_world_size(self, world_size: int) -> None:
        """Raise an error if the ranks cannot share a batch evenly."""
        if self.batch_size % world_size:
            raise DataError(f"--batch-size {self.batch_size} is not divisible by {world_size} ranks")

    def saves_at(self, step: int) -> bool:
        """Return whether a checkpoint is saved after ``step``."""
        return step % self.every == 0 or step == self.steps


def fail(message: str) -> NoReturn:
    """Exit with status 2, which means a wrong command line, and print the reason in one line."""
    command_line.fail(PROGRAM, message)


def parse_options(arguments: Sequence[str]) -> Options:
    """Parse the command line; if it is wrong, print one line and exit."""
    parser = _make_parser()
    options = Options(**vars(parser.parse_args(arguments)))
    if options.dim % 8:
        parser.error(f"--dim must be a multiple of 8, because column shards are halves of it, got {options.dim}")
    if options.crash_at is not None and not (options.crash_at <= options.steps and options.saves_at(options.crash_at)):
        parser.error(
            f"--crash-at must be a step with a checkpoint (every {options.every}, or the last, {options.steps}),"
            f" got {options.crash_at}"
        )
    return options


def _make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=PROGRAM,
        description="Train TorchRec's DLRM on clicks, and save small quantized deltas with PyTorch's dcp.save.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("data").add_argument
    add("--data", type=Path, metavar="FILE", help="file of interactions to train on (default: synthetic clicks)")
    add("--format", choices=FORMATS, default="synthetic", help="format of the file (default synthetic: no file)")
    add("--seed", type=CountFrom(0), default=0, metavar="N", help="seed of synthetic clicks and initial weights")

    add = parser.add_argument_group("model and training").add_argument
    add("--num-rows", type=CountFrom(1), default=100_000, metavar="N", help="rows of each large table (default 100000)")
    add("--dim", type=CountFrom(8), default=32, metavar="N", help="columns of each table (default 32)")
    add("--sharding", choices=("row", "table", "column", "mixed"), default="mixed", help="sharding of tables")
    add("--steps", type=CountFrom(1), default=100, metavar="N", help="the last step (default 100)")
    add(
        "--batch-size",
        type=CountFrom(1),
        default=4096,
        metavar="N",
        help="samples per step, over all ranks (default 4096)",
    )
    add(
        "--world-size",
        type=CountFrom(1),
        default=2,
        metavar="N",
        help="number of ranks to start, unless under torchrun (default 2)",
    )
    add("--losses", type=Path, metavar="FILE", help="file to write the exact global loss of each step to")

    add = parser.add_argument_group("checkpoints").add_argument
    add("--root", type=Path, required=True, metavar="DIR", help="folder of the run's checkpoints")
    add("--policy", choices=("full", "oneshot", "consecutive", "intermittent"), default="intermittent")
    add("--bits", type=int, choices=(2, 3, 4, 8, 32), default=4, help="bits per element; 32 is exact (default 4)")
    add("--every", type=CountFrom(1), default=10, metavar="N", help="steps between checkpoints (default 10)")
    add("--async", action="store_true", dest="asynchronous", help="save in the background (dcp.async_save)")
    add("--resume", action="store_true", help="continue from the newest checkpoint under --root")
    add("--crash-at", type=CountFrom(1), metavar="STEP", help="kill the last rank in the middle of that step's save")
    add("--report", type=Path, metavar="PNG", help="file for a picture of the bytes of every checkpoint")
    return parser
