"""``python -m tests.attacks.fuzz``: look for inputs that readers do not refuse as they should, with atheris.

Each reader starts from its seeds and its corpus. For each input it may raise nothing but a ``CNRError``, and take no
more than the time and memory in ``limits``. What is found is confirmed in a process without instrumentation.
"""

import argparse
import importlib.util
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.attacks import corpus
from tests.attacks.limits import cost_of
from tests.attacks.readers import READERS
from tests.attacks.seeds import seeds

_ROOT = Path(__file__).parents[2]
_FOLDER = _ROOT / "build" / "fuzz"
_SHARES = {"loads": 4, "checks": 4, "updates": 2, "upkeep": 4}  # of the time; any other reader has one
_MAX_FINDINGS = 3  # of a reader, before it ends
_MIN_SECS = 5.0  # that are worth another process
_GRACE_SECS = 120.0
_MIN_KEEP_SECS = 30.0  # for what was found to be looked through
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # else each thread reserves 64 MiB of address space
    "MALLOC_MMAP_THRESHOLD_": "65536",  # what is freed goes back to the system, so that the next peak is seen
    "PYTHONWARNINGS": "ignore",
}


@dataclass
class _Outcome:
    """What came of fuzzing a reader."""

    reader: str
    secs: float
    num_inputs: int = 0
    slowest_secs: float = 0.0
    memory_bytes: int = 0
    num_kept: int = 0
    findings: list[str] = field(default_factory=list)
    unconfirmed: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.reader}: {self.num_inputs:,} inputs, {self.num_inputs / self.secs:.0f} per second; slowest "
            f"{self.slowest_secs:.2f} s; most memory {self.memory_bytes / 1e6:.1f} MB; {self.num_kept} kept in the "
            f"corpus; {len(self.findings)} findings, {len(self.unconfirmed)} not confirmed"
        )


def main() -> int:
    """Do what the command line says; 1 if there was a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.fuzz", description=__doc__)
    parser.add_argument("--reader", choices=READERS, help="fuzz this one; by default all, one after another")
    parser.add_argument("--minutes", type=float, default=60.0, help="in all, shared by the readers (default: 60)")
    parser.add_argument("--processes", type=int, default=1, help="readers that are fuzzed at a time (default: 1)")
    parser.add_argument("--replay", nargs=2, metavar=("READER", "FILE"), help="read one input, and print what it costs")
    parser.add_argument("--add", nargs=2, metavar=("READER", "FILE"), help="add an input to the corpus")
    options = parser.parse_args()
    logging.disable()
    warnings.simplefilter("ignore")
    if options.replay:
        return _replay(options.replay[0], Path(options.replay[1]).read_bytes())
    if options.add:
        return int(not corpus.add(options.add[0], Path(options.add[1]).read_bytes()))
    if importlib.util.find_spec("atheris") is None:
        parser.error("atheris is not installed: pip install -e '.[fuzz]'")
    return _fuzz([options.reader] if options.reader else list(READERS), options.minutes, options.processes)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _replay(reader: str, data: bytes) -> int:
    """Print what an input costs; 1 if that is a finding."""
    for seed in seeds(reader):  # so that imports are not taken for what it costs
        cost_of(READERS[reader], seed)
    cost = cost_of(READERS[reader], data)
    if cost.error is not None:
        _say("".join(traceback.format_exception(cost.error)))
    _say(f"{cost.secs:.2f} s, {cost.memory_bytes / 1e6:.1f} MB: {cost.complaint or 'within the limits'}")
    return int(cost.complaint is not None)


def _fuzz(readers: Sequence[str], minutes: float, num_processes: int) -> int:
    share_secs = 60 * minutes * num_processes / sum(_SHARES.get(reader, 1) for reader in readers)
    outcomes = []
    for outcome in _outcomes([(reader, share_secs * _SHARES.get(reader, 1)) for reader in readers], num_processes):
        outcomes.append(outcome)
        _say("\n".join([str(outcome), *outcome.findings, *outcome.unconfirmed]))
    num_inputs = sum(outcome.num_inputs for outcome in outcomes)
    num_findings = sum(len(outcome.findings) for outcome in outcomes)
    _say(
        f"{len(outcomes)} readers: {num_inputs:,} inputs; {sum(outcome.num_kept for outcome in outcomes)} kept in the "
        f"corpus, which has {corpus.num_bytes():,} bytes of {corpus.MAX_BYTES:,}; {num_findings} findings"
    )
    return int(num_findings > 0)


def _outcomes(turns: Sequence[tuple[str, float]], num_processes: int) -> Iterator[_Outcome]:
    if num_processes == 1:
        yield from (_fuzz_reader(*turn) for turn in turns)
        return
    with ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(_fuzz_reader, *turn) for turn in turns]):
            yield future.result()


def _fuzz_reader(reader: str, secs: float) -> _Outcome:
    """Fuzz one reader, confirm its findings, and keep the inputs that reach new code."""
    folder = _new_folder(reader)
    _instrumented()
    until = time.time() + secs
    outcome = _Outcome(reader, secs)
    complaints: dict[Path, str] = {}
    while time.time() < until - _MIN_SECS and len(outcome.findings) < _MAX_FINDINGS:
        complaints |= _run(reader, folder, until, outcome)
        confirmed = {file for file in complaints if _is_confirmed(reader, file)}
        outcome.findings = [_told(reader, file, complaints[file]) for file in confirmed]
        outcome.unconfirmed = [_told(reader, file, complaints[file]) for file in complaints.keys() - confirmed]
    found = [file.read_bytes() for file in (folder / "found").iterdir()]
    outcome.num_kept = corpus.keep(reader, found, max(_MIN_KEEP_SECS, secs / 4))
    return outcome


def _told(reader: str, file: Path, complaint: str) -> str:
    return f"  {complaint}\n    replay: python -m tests.attacks.fuzz --replay {reader} {file.relative_to(_ROOT)}"


def _new_folder(reader: str) -> Path:
    folder = _FOLDER / reader
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("seeds", "found", "findings", "tmp"):
        (folder / name).mkdir(parents=True)
    for number, data in enumerate(corpus.start(reader)):
        (folder / "seeds" / f"{number:05d}").write_bytes(data)
    return folder


class _Instrumented:
    """The process in which the library is instrumented; it fuzzes one reader at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.attacks.fuzz_process"]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self._process: Any = subprocess.Popen(command, cwd=_ROOT, env={**os.environ, **_ENVIRONMENT}, **pipes)
        self._status()

    def fuzz(self, reader: str, folder: Path, until: float) -> int:
        """Fuzz a reader until a time, or until it dies; returns the exit status."""
        self._process.stdin.write(json.dumps([reader, str(folder), until]) + "\n")
        self._process.stdin.flush()
        return self._status()

    def _status(self) -> int:
        return int(self._process.stdout.readline())


_instrumented = cache(_Instrumented)  # one for each process of this program


def _run(reader: str, folder: Path, until: float, outcome: _Outcome) -> dict[Path, str]:
    """Fuzz until the time or the death of the process; returns complaints by the file of the input."""
    status = _instrumented().fuzz(reader, folder, until)
    report = json.loads((folder / "report.json").read_text())
    outcome.num_inputs += report["num_inputs"]
    outcome.slowest_secs = max(outcome.slowest_secs, report["slowest_secs"])
    outcome.memory_bytes = max(outcome.memory_bytes, report["memory_bytes"])
    found = {folder / "findings" / name: complaint for name, complaint in report["complaints"].items()}
    died = f"the process died with status {status}"
    found |= {file: died for file in (folder / "findings").iterdir() if file not in found}
    if status and died not in found.values():
        raise RuntimeError(f"{reader}: {died}, and no input is to blame; see {folder / 'log'}")
    return found


def _is_confirmed(reader: str, file: Path) -> bool:
    """Whether an input is a finding for a process without instrumentation too."""
    command = [sys.executable, "-m", "tests.attacks.fuzz", "--replay", reader, str(file)]
    try:
        return subprocess.run(command, cwd=_ROOT, capture_output=True, timeout=_GRACE_SECS).returncode != 0
    except subprocess.TimeoutExpired:
        return True


if __name__ == "__main__":
    sys.exit(main())
