"""Continuous checkpoints of a DLRM: train and save, stop at any point, load, and continue bit for bit.

`save` trains TorchRec's DLRM for 3 epochs of 10,000 samples, in mini-batches of 50, and stops. Every 70 steps, it saves
the rows modified since the last checkpoint, in the background. Training after the last checkpoint is lost, as after the
failure of a machine. `load` resumes from the last checkpoint, at the right sample, and continues to epoch 8.

Rows are written to files under --root. With --kafka, they are written to a Kafka topic, commit records in another topic
commit the checkpoints, and only the baseline and the dense part are files. This module is the command line;
continuous_training.py does the work.
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

You can stop `save` at any time, with ctrl-c or with `kill -9`: `load` continues from the last checkpoint.
"""


def main() -> None:
    """Parse the options and train; print an error as one line."""
    options = parse_options(sys.argv[1:])
    signal.signal(signal.SIGINT, stop)
    # Imported here, because it takes seconds, and a wrong command line should fail at once.
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
    """End the process at once, as `kill -9` does. Python drops a KeyboardInterrupt that is raised in a callback."""
    with contextlib.suppress(RuntimeError):  # the signal may interrupt a print
        sys.stdout.flush()
    os.write(sys.stderr.fileno(), b"stopped; `load` continues from the last checkpoint\n")
    os._exit(130)


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; if it is wrong, print one line and exit."""
    parser = OneLineParser(
        prog=PROGRAM,
        description="Train TorchRec's DLRM with continuous checkpoints, and resume it from the last one.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("command", choices=LAST_EPOCH, help="save: train from the beginning; load: resume and continue")
    add("--root", type=Path, required=True, metavar="DIR", help="folder of the run's checkpoints")
    add("--kafka", metavar="HOST:PORT/TOPIC", help="Kafka topic to write rows to, instead of files")
    add("--every", type=CountFrom(1), default=70, metavar="N", help="steps between checkpoints (default 70)")
    add("--epochs", type=CountFrom(1), metavar="N", help="the last epoch (default 3 for save, 8 for load)")
    add("--check", action="store_true", help="train again without interruption, and compare the results")
    add("--data", type=Path, metavar="FILE", help="Criteo's train.txt (default: synthetic samples of its shape)")
    add("--num-samples", type=CountFrom(1), default=10_000, metavar="N", help="samples per epoch (default 10000)")
    add("--num-rows", type=CountFrom(1), default=5_000, metavar="N", help="rows of the largest tables (default 5000)")
    add("--dim", type=CountFrom(1), default=16, metavar="N", help="columns of each table (default 16)")
    options = parser.parse_args(arguments)
    if options.kafka is not None and not all(options.kafka.rpartition("/")[::2]):
        parser.error(f"--kafka must be HOST:PORT/TOPIC, got {options.kafka}")
    options.epochs = options.epochs or LAST_EPOCH[options.command]
    return options


if __name__ == "__main__":
    main()
