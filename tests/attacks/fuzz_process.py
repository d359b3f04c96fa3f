"""Fuzzes one reader with atheris until a time; ``python -m tests.attacks.fuzz`` starts this as a process of its own.

libFuzzer, which atheris uses, ends its process when an input takes too long and when the reader crashes. So the process
writes what it finds to files in its folder: ``report.json``, ``findings/`` and, in ``found/``, inputs that reach new
code.
"""

import json
import logging
import os
import random
import resource
import sys
import time
import tracemalloc
from dataclasses import asdict, dataclass
from pathlib import Path

import atheris

import torchrec_cnr.kernels  # noqa: F401 - numba cannot compile code that was instrumented

with atheris.instrument_imports(include=["torchrec_cnr"]):
    from tests.attacks.limits import cost_of
    from tests.attacks.readers import READERS
    from tests.attacks.structure import mutated

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

    def warm_up(self) -> None:
        """Read the seeds, so that imports and caches are not taken for what an input costs."""
        for file in sorted((self._folder / "seeds").iterdir()):
            cost_of(self._read, file.read_bytes())

    def __call__(self, data: bytes) -> None:
        now = time.time()
        if now > self._told + _REPORT_SECS or now > self._until:
            self._told = now
            (self._folder / "report.json").write_text(json.dumps(asdict(self.report)))
            if now > self._until:
                os._exit(0)  # which libFuzzer would do as well
        cost, report = cost_of(self._read, data), self.report
        report.num_inputs += 1
        report.slowest_secs = max(report.slowest_secs, cost.secs)
        report.memory_bytes = max(report.memory_bytes, cost.memory_bytes)
        place = cost.complaint and cost.complaint.partition(": ")[0]
        if cost.complaint is not None and not any(told.startswith(f"{place}") for told in report.complaints.values()):
            name = f"finding-{len(report.complaints)}"
            (self._folder / "findings" / name).write_bytes(data)
            report.complaints[name] = cost.complaint


def main(reader: str, folder: Path, until: float) -> None:
    """Fuzz until a time."""
    logging.disable()
    tracemalloc.start()
    target = _Target(reader, folder, until)
    target.warm_up()
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


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
