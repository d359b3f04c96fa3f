"""The process that fuzzes readers with atheris; ``python -m tests.attacks.fuzz`` starts it.

It imports the library with instrumentation, which takes long, and then forks for each reader that it is asked to fuzz.
libFuzzer, which atheris uses, ends the forked process when an input takes too long and when the reader crashes. So
findings go to files in the reader's folder: ``report.json``, ``findings/`` and, in ``found/``, inputs that reach new
code.
"""

import gc
import importlib
import json
import logging
import os
import pkgutil
import random
import resource
import signal
import sys
import tempfile
import time
import tracemalloc
from dataclasses import asdict, dataclass
from pathlib import Path

import atheris

import torchrec_cnr.kernels

for _module in pkgutil.walk_packages(torchrec_cnr.kernels.__path__, "torchrec_cnr.kernels."):
    importlib.import_module(_module.name)  # numba cannot compile code that was instrumented

with atheris.instrument_imports(include=["torchrec_cnr"]):
    from tests.attacks.limits import Cost, cost_of
    from tests.attacks.readers import READERS
    from tests.attacks.structure import mutated
    from torchrec_cnr.format import manifest_json

MAX_INPUT_BYTES = 1 << 16
_MOST_BYTES = 1 << 30  # of address space, beyond what the seeds take
_HANG_SECS = 60
_REPORT_SECS = 1.0


@dataclass
class Report:
    """What one process has done.

    Attributes:
        num_inputs: Inputs that were read.
        slowest_secs: Processor time of the slowest, which is instrumented.
        memory_bytes: The most that one took, beyond its own size.
        complaints: What was wrong, by the file in ``findings/`` that holds the first input with it.
    """

    num_inputs: int
    slowest_secs: float
    memory_bytes: int
    complaints: dict[str, str]


class _Target:
    """What libFuzzer calls with each input.

    Args:
        reader: Name of the reader.
        folder: Where the report goes.
        until: Unix time when to end.
    """

    def __init__(self, reader: str, folder: Path, until: float) -> None:
        self._read = READERS[reader]
        self._folder = folder
        self._until = until
        self._told = 0.0
        self.report = Report(0, 0.0, 0, {})
        self._tell()

    def _tell(self) -> None:
        (self._folder / "report.json").write_text(json.dumps(asdict(self.report)))

    def warm_up(self) -> None:
        """Read the seeds, so that imports and caches are not taken for what other inputs cost."""
        for file in sorted((self._folder / "seeds").iterdir()):
            cost = cost_of(self._read, data := file.read_bytes())
            if cost.error is not None:
                self._note(data, cost)

    def __call__(self, data: bytes) -> None:
        now = time.time()
        if now > self._told + _REPORT_SECS or now > self._until:
            self._told = now
            self._tell()
            gc.collect()  # or threads and buffers that failed reads have left are taken for what an input costs
            manifest_json.forget()
            if now > self._until:
                os._exit(0)  # which libFuzzer would do as well
        cost, report = cost_of(self._read, data), self.report
        report.num_inputs += 1
        report.slowest_secs = max(report.slowest_secs, cost.secs)
        report.memory_bytes = max(report.memory_bytes, cost.memory_bytes)
        self._note(data, cost)

    def _note(self, data: bytes, cost: Cost) -> None:
        """Write down an input that is a finding, if it is the first at its place."""
        complaints = self.report.complaints
        if (complaint := cost.complaint) is None:
            return
        place = complaint.partition(": ")[0]
        if not any(told.startswith(place) for told in complaints.values()):
            name = f"finding-{len(complaints)}"
            (self._folder / "findings" / name).write_bytes(data)
            complaints[name] = complaint


def _fuzz(reader: str, folder: Path, until: float) -> None:
    """Fuzz a reader until a time, and end the process."""
    tempfile.tempdir = str(folder / "tmp")
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    tracemalloc.start()
    target = _Target(reader, folder, until)
    target.warm_up()
    gc.freeze()
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + _MOST_BYTES, taken + _MOST_BYTES))
    arguments = [
        f"-max_len={MAX_INPUT_BYTES}", f"-timeout={_HANG_SECS}", "-rss_limit_mb=0", "-reduce_inputs=1",
        f"-artifact_prefix={folder}/findings/", str(folder / "found"), str(folder / "seeds"),
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *arguments], target, custom_mutator=_mutate)
    atheris.Fuzz()


def _mutate(data: bytes, max_bytes: int, seed: int) -> bytes:
    return mutated(data, random.Random(seed), lambda part: atheris.Mutate(part, max_bytes))[:max_bytes]


def _status(pid: int, until: float) -> int:
    """Wait for a process, which is killed if it does not end by itself."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.time() > until + 2 * _HANG_SECS:
            os.kill(pid, signal.SIGKILL)
        time.sleep(_REPORT_SECS / 10)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    """Take one turn a line, as JSON: reader, folder, and Unix time when to end; answer with the exit status.

    The first line of the answer says that the process is ready.
    """
    logging.disable()
    _answer(0)
    for line in sys.stdin:
        reader, folder, until = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _fuzz(reader, Path(folder), until)
        _answer(_status(pid, until))


def _answer(status: int) -> None:
    sys.stdout.write(f"{status}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
