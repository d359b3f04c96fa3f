"""Continuous checkpoints of a DLRM: train and save, stop anywhere, load, and go on as if nothing had been.

`save` trains TorchRec's DLRM for 3 epochs of 10,000 samples, in mini-batches of 50, and stops. Every 70 steps, the rows
modified since the last time are saved behind the training; what was trained after the last checkpoint is lost, as it is
when a machine fails. `load` resumes there, at the right sample, and goes on to epoch 8.

Rows are written to files under --root; or they stream through Kafka, where markers commit checkpoints, and only the
baseline and the dense part are files. See continuous_training.py for how; this module is the command line.
"""

import argparse
import contextlib
import os
import signal
import sys
from pathlib import Path

from command_line import CountFrom, OneLineParser
from delimited import DataError

PROGRAM = "continuous_dlrm.py"
LAST_EPOCH = {"save": 3, "load": 8}
EXAMPLES = """\
examples:
  # rows in files:
  python examples/continuous_dlrm.py save --root runs/a
  python examples/continuous_dlrm.py load --root runs/a --check

  # rows in Kafka:
  python examples/continuous_dlrm.py save --root runs/b --kafka localhost:9092/dlrm
  python examples/continuous_dlrm.py load --root runs/b --kafka localhost:9092/dlrm --check

Stop `save` wherever you like, with ctrl-c or with `kill -9`: `load` goes on from the last checkpoint.
"""


def main() -> None:
    """Parse, then train; whatever is wrong is said in one line."""
    options = parse_options(sys.argv[1:])
    signal.signal(signal.SIGINT, stop)
    # Imported here, because it takes seconds, and a wrong command line needs none of it.
    from continuous_training import train  # noqa: PLC0415

    status = 0
    try:
        train(options)
    except DataError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        status = 2
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # DDP's threads outlive its group, and abort a Python that shuts down


def stop(_signal: int, _frame: object) -> None:
    """End it here and now, as `kill -9` would. Python drops a KeyboardInterrupt that comes in a callback."""
    with contextlib.suppress(RuntimeError):  # in the middle of a line
        sys.stdout.flush()
    os.write(sys.stderr.fileno(), b"stopped; `load` goes on from the last checkpoint\n")
    os._exit(130)


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """The command line; a wrong one ends the program with one line."""
    parser = OneLineParser(
        prog=PROGRAM,
        description="Train TorchRec's DLRM with continuous checkpoints, and resume it from the last.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("command", choices=LAST_EPOCH, help="train from the beginning and stop, or resume and go on")
    add("--root", type=Path, required=True, metavar="DIR", help="folder of the run's checkpoints")
    add("--kafka", metavar="HOST:PORT/TOPIC", help="where rows go to, in the place of files")
    add("--every", type=CountFrom(1), default=70, metavar="N", help="steps between checkpoints (default 70)")
    add("--epochs", type=CountFrom(1), metavar="N", help="the last epoch (default 3 to save, 8 to load)")
    add("--check", action="store_true", help="train once more without a stop, and compare")
    add("--data", type=Path, metavar="FILE", help="Criteo's train.txt; without it, made-up samples of its shape")
    add("--num-samples", type=CountFrom(1), default=10_000, metavar="N", help="in an epoch (default 10000)")
    add("--num-rows", type=CountFrom(1), default=5_000, metavar="N", help="of the largest tables (default 5000)")
    add("--dim", type=CountFrom(1), default=16, metavar="N", help="columns of each table (default 16)")
    options = parser.parse_args(arguments)
    if options.kafka is not None and not all(options.kafka.rpartition("/")[::2]):
        parser.error(f"--kafka must be HOST:PORT/TOPIC, got {options.kafka}")
    options.epochs = options.epochs or LAST_EPOCH[options.command]
    return options


if __name__ == "__main__":
    main()
