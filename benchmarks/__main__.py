"""The command line: ``python -m benchmarks``."""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.runners.loading import integrity as integrity_
from benchmarks.runners.loading import reading as reading_
from benchmarks.runners.loading import serving as serving_
from benchmarks.runners.maintenance import bandwidth as bandwidth_
from benchmarks.runners.maintenance import compaction as compacting_
from benchmarks.runners.maintenance import policies as long_run_
from benchmarks.runners.quantization import accuracy as accuracy_
from benchmarks.runners.quantization import coding as coding_
from benchmarks.runners.quantization import error as quantization_error_
from benchmarks.runners.quantization import gpu as gpu_kernels_
from benchmarks.runners.quantization import movement as movement_
from benchmarks.runners.quantization import search as searching_
from benchmarks.runners.saving import alternatives as rivals_
from benchmarks.runners.saving import async_ as behind_training_
from benchmarks.runners.saving import bytes as disk_bytes_
from benchmarks.runners.saving import cost as delta_cost_
from benchmarks.runners.saving import growth as stall_growth_
from benchmarks.runners.saving import memory as peak_memory_
from benchmarks.runners.saving import scale as scale_
from benchmarks.runners.saving import time as save_and_load_
from benchmarks.runners.saving import training as training_
from benchmarks.runners.storage import kafka as streaming_
from benchmarks.runners.storage import s3 as s3_clients_
from benchmarks.runners.tracking import modified as modified_rows_
from benchmarks.runners.tracking import tracker as tracking_
from benchmarks.support.processes import BenchmarkError, Progress, run_alone
from benchmarks.support.report import Report, machine, text_of
from benchmarks.support.rounds import Setup

BENCHMARKS: Mapping[str, Callable[[Setup], Report]] = {
    "modified": modified_rows_.run,
    "bytes": disk_bytes_.run,
    "bandwidth": bandwidth_.run,
    "time": save_and_load_.run,
    "rivals": rivals_.run,
    "cost": delta_cost_.run,
    "reading": reading_.run,
    "integrity": integrity_.run,
    "memory": peak_memory_.run,
    "scale": scale_.run,
    "async": behind_training_.run,
    "growth": stall_growth_.run,
    "training": training_.run,
    "compaction": compacting_.run,
    "policies": long_run_.run,
    "serving": serving_.run,
    "kafka": streaming_.run,
    "s3": s3_clients_.run,
    "tracker": tracking_.run,
    "error": quantization_error_.run,
    "search": searching_.run,
    "coding": coding_.run,
    "accuracy": accuracy_.run,
    "movement": movement_.run,
    "gpu": gpu_kernels_.run,
}
# Not run unless they are named, or with --full: each takes some minutes, and the run of 2,000 checkpoints half an hour.
LONG = ("bandwidth", "rivals", "async", "training", "compaction", "policies", "accuracy", "movement")
EPILOG = """\
benchmarks:
  modified rows that training modifies, in each interval and since the first; with --data, of any file
  bytes    what a delta takes on disk at 2, 4 and 8 bits, against DCP's own writer
  bandwidth
           bytes written and kept over a run, by policy and width, against fp32 and the paper's own bytes
  time     to save a delta and to load a lineage, against DCP's own writer and reader
  rivals   stalls, saves, restores and memory as tables grow, beside torch.save, DCP and deltas written by hand
  cost     time and bytes of a delta by the share of rows modified
  reading  bytes read for one table of many, or a range of its rows, of the bytes that hold it
  integrity
           the part of a load that comparing digests takes
  memory   what a save takes beyond the state that it saves
  scale    what a thousand tables on 128 ranks cost the coordinator: time, memory, size of the manifest
  async    stalls, rate and memory of asynchronous saves, against DCP's own writer and stager
  growth   the stall of an asynchronous save where tables have 8 times as many rows, and as many are modified
  training what saves behind training take from it, on 2 ranks of the example
  compaction
           speed of folding gigabytes of deltas, against a copy of the files, and its memory
  policies bytes written, kept and restored over 2,000 checkpoints, by policy (the longest: half an hour)
  serving  lag of a model that follows a job: from the commit of a delta to the first lookup of its rows
  kafka    rows in Kafka: their rate, and saves, stalls and loads against files
  s3       saves and loads by each of the two clients of S3
  tracker  what tracking adds to a training step, and what TorchRec's own tracker does
  error    error of every scheme and width on trained tables, against the bytes a row takes
  search   error and speed of adaptive quantization, against the greedy search of the paper and of PyTorch
  coding   speed of plain quantization and of k-means, against FBGEMM and scikit-learn
  accuracy what restores from quantized checkpoints cost a small model in log loss and AUC, by bits and restores
  movement how far rows move between checkpoints, and what storing them as residuals would take
  gpu      speed of the kernels on a CUDA device, against FBGEMM and a copy

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
    for name in args.names or (name for name in BENCHMARKS if args.full or name not in LONG):
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
                reports[name] = run_alone(BENCHMARKS[name], setup)
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
    parser.add_argument("names", nargs="*", metavar="name", help="benchmarks to run (default: see below)")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try it out")
    parser.add_argument("--dir", type=Path, default=Path(), help="where temporary files go (default: this folder)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1, as torchrun gives each rank)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file too")
    parser.add_argument("--full", action="store_true", help="run the long ones too")
    parser.add_argument(
        "--all-cases",
        action="store_true",
        help="scale: with optimizer state; rivals: 64 million rows; accuracy, movement: more clicks",
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
