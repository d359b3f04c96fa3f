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

* takes minutes, and runs only if you name it or pass --full

examples:
  python -m benchmarks                       run all except the long ones: some minutes, 6 GB of memory
  python -m benchmarks --full                run all: an hour and a half, 8 GB of disk
  python -m benchmarks time memory           run two of them
  python -m benchmarks --quick               try them with small sizes; the figures have no meaning
  python -m benchmarks bytes --json out.json write the figures as JSON, too
  python -m benchmarks scale --all-cases     include row-wise Adagrad's state, which takes three times as long
  python -m benchmarks accuracy movement --all-cases --plots plots
                                             use more clicks and seeds, and draw plots: most of an hour
  python -m benchmarks --redraw out.json --plots plots
                                             draw the plots of earlier figures again, without measuring
  python -m benchmarks time --dir /mnt/nvme  use another disk
  python -m benchmarks modified --data criteo=train.txt --plots plots   count the rows that your own data modifies

Figures are ratios of values measured alternately in this run. Times differ between machines and between runs.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run benchmarks, print their figures, and return the exit status: 0, or 1 if a benchmark failed."""
    args = _parse(arguments)
    if args.redraw:
        return _redraw(args.redraw, args.plots)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that files are removed
    found = machine(args.dir.resolve()) | {"threads": f"{args.threads} of torch"}
    print("\n".join(f"{key + ':':10} {value}" for key, value in found.items()))
    if args.quick:
        print("\nSmall sizes, only to try the benchmarks: the figures have no meaning.")
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
        plot = BENCHMARKS[name].plot
        if args.plots and plot:
            plot.write(reports[name].to_json(), args.plots / plot.name)
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
        description="Measure the project's figures, and compare them with its targets.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="name", help="benchmarks to run (default: all without a star)")
    parser.add_argument("--quick", action="store_true", help="use small sizes, to try the benchmarks")
    parser.add_argument("--dir", type=Path, default=Path(), help="folder for temporary files (default: this folder)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1, as under torchrun)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file, too")
    parser.add_argument("--full", action="store_true", help="run the long benchmarks, too")
    parser.add_argument(
        "--all-cases",
        action="store_true",
        help="scale: with optimizer state; alternatives: 64 million rows; accuracy, movement: more clicks",
    )
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw plots into this folder")
    parser.add_argument(
        "--redraw", type=Path, metavar="FILE", help="measure nothing; draw the plots of a file that --json wrote"
    )
    parser.add_argument("--kafka", metavar="HOST:PORT", help="Kafka broker to use (default: start one)")
    parser.add_argument("--s3", metavar="URL", help="S3 bucket and path to use (default: start a server)")
    parser.add_argument(
        "--data", type=_data, metavar="FORMAT=FILE", help="modified: file to read; clicks, movielens or criteo"
    )
    args = parser.parse_args(arguments)
    unknown = [name for name in args.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown benchmark {', '.join(unknown)}; benchmarks: {', '.join(BENCHMARKS)}")
    if args.redraw and not args.plots:
        parser.error("--redraw needs --plots FOLDER")
    if args.redraw and not args.redraw.is_file():
        parser.error(f"--redraw {args.redraw}: no such file")
    if args.threads < 1:
        parser.error(f"--threads must be at least 1 (got {args.threads})")
    if not args.dir.is_dir():
        parser.error(f"--dir {args.dir}: no such folder")
    return args


def _redraw(figures: Path, folder: Path) -> int:
    """Draw the plots of earlier reports, and print their paths; return 1 if a report lacks what its plot shows."""
    content = json.loads(figures.read_text())
    is_complete = True
    for name, benchmark in BENCHMARKS.items():
        if name not in content or benchmark.plot is None:
            continue
        try:
            benchmark.plot.write(content[name], folder / benchmark.plot.name)
        except KeyError as error:
            print(f"{name}: the report in {figures} has no {error}; measure it again", file=sys.stderr)
            is_complete = False
        else:
            print(folder / benchmark.plot.name)
    return 0 if is_complete else 1


def _data(text: str) -> tuple[str, Path]:
    data_format, _, path = text.partition("=")
    if data_format not in ("clicks", "movielens", "criteo") or not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{text!r}: expected clicks=, movielens= or criteo= and an existing file")
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
