"""The command line: ``python -m benchmarks``."""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.support.processes import BenchmarkError, Progress, run_alone
from benchmarks.support.registry import find_benchmarks, help_text
from benchmarks.support.report import Report, machine, text_of
from benchmarks.support.rounds import Setup

BENCHMARKS = find_benchmarks()
EPILOG = f"""\
{help_text(BENCHMARKS)}

* takes minutes, and runs only if it is named or with --full

examples:
  python -m benchmarks                       all but the long ones; takes some minutes, and 6 GB of memory
  python -m benchmarks --full                all of them; takes an hour and a half, and 8 GB of disk
  python -m benchmarks time memory           two of them
  python -m benchmarks --quick               small sizes, to see whether it works; the figures mean nothing
  python -m benchmarks bytes --json out.json the figures as JSON too
  python -m benchmarks scale --all-cases     with row-wise Adagrad's state too, which takes three times as long
  python -m benchmarks accuracy movement --all-cases --plots plots
                                             with more clicks and seeds, and plots; takes most of an hour
  python -m benchmarks time --dir /mnt/nvme  on another disk
  python -m benchmarks modified --data criteo=train.txt --plots plots   what your own data modifies

Figures are ratios of what was measured in this run, in turns. Times differ from machine to machine and from run to run.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run benchmarks, print their figures, and give the exit status: 0 unless one could not be run."""
    args = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that files are removed
    found = machine(args.dir.resolve()) | {"threads": f"{args.threads} of torch"}
    print("\n".join(f"{key + ':':10} {value}" for key, value in found.items()))
    if args.quick:
        print("\nSmall sizes, to see whether it works: the figures mean nothing.")
    print(flush=True)
    started = time.monotonic()
    reports: dict[str, Report] = {}
    failed = []
    for name in args.names or (name for name in BENCHMARKS if args.full or not BENCHMARKS[name].is_long):
        with tempfile.TemporaryDirectory(prefix="benchmark-", dir=args.dir) as folder:
            setup = Setup(
                Path(folder).resolve(),
                args.quick,
                args.threads,
                Progress(name, started),
                args.plots,
                args.all_cases,
                args.kafka,
                args.s3,
                args.data,
            )
            try:
                reports[name] = run_alone(BENCHMARKS[name].run, setup)
            except BenchmarkError as error:
                failed.append(name)
                print(f"{name}: {error}", file=sys.stderr)
                continue
        print(text_of(name, reports[name], is_judged=not args.quick), flush=True)
    if not args.quick:
        _print_summary(reports)
    if args.json:
        content = {"machine": found, "quick": args.quick} | {name: report.to_json() for name, report in reports.items()}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if failed else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure what the project promises.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names", nargs="*", metavar="name", help="benchmarks to run (default: all below without a star)"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to try it out")
    parser.add_argument("--dir", type=Path, default=Path(), help="where temporary files go (default: this folder)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1, as torchrun gives each rank)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file too")
    parser.add_argument("--full", action="store_true", help="run the long ones too")
    parser.add_argument(
        "--all-cases",
        action="store_true",
        help="scale: with optimizer state; alternatives: 64 million rows; accuracy, movement: more clicks",
    )
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw plots into this folder")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="a broker to use, in the place of one that is started")
    parser.add_argument("--s3", metavar="URL", help="a place in a bucket to use, in the place of a server of our own")
    parser.add_argument(
        "--data", type=_data, metavar="FORMAT=FILE", help="modified: a file of clicks, movielens or criteo to read"
    )
    args = parser.parse_args(arguments)
    unknown = [name for name in args.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    if args.threads < 1:
        parser.error(f"--threads must be at least 1 (got {args.threads})")
    if not args.dir.is_dir():
        parser.error(f"--dir {args.dir}: no such folder")
    return args


def _data(text: str) -> tuple[str, Path]:
    data_format, _, path = text.partition("=")
    if data_format not in ("clicks", "movielens", "criteo") or not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{text!r}: expected clicks=, movielens= or criteo= and a file")
    return data_format, Path(path)


def _print_summary(reports: Mapping[str, Report]) -> None:
    judged = [
        (name, figure) for name, report in reports.items() for figure in report.figures if figure.is_met is not None
    ]
    if not judged:
        return
    missed = [f"{name}: {figure.what}" for name, figure in judged if not figure.is_met]
    print(f"{len(judged) - len(missed)} of {len(judged)} targets met" + (", missed:" if missed else "."))
    for line in missed:
        print(f"  {line}")


if __name__ == "__main__":
    sys.exit(main())
