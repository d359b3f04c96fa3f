"""Takes attacks one by one through all that reads a checkpoint, with little memory: ``python -m tests.attacks.walk``.

It is a process of its own, so that one that takes all memory, waits for ever or crashes is noticed. For each attack and
way of reading it prints a line of JSON, before and after.
"""

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from typer.testing import CliRunner

import torchrec_cnr as cnr
from tests.attacks.write import ATTACKS, OUTSIDE
from torchrec_cnr.cli.app import app

LIMIT_SECS = 20
MEMORY_BYTES = 1 << 30  # beyond what is taken before the first attack


class _TooLong(BaseException):
    """It was not done in time; whatever catches exceptions lets it pass."""


def load_state(path: str | Path) -> str:
    """What a checkpoint holds of the state that attacks and fuzzers begin with.

    Raises:
        BaseException: What the load failed with on this rank.
    """
    state: dict[str, Any] = {"table": torch.zeros(8, 4), "seen": 0}
    planner = cnr.CNRLoadPlanner(allow_partial_load=True)
    try:
        load(state, storage_reader=cnr.CNRStorageReader(path), planner=planner, no_dist=True)
    except CheckpointException as failure:
        raise failure.failures[0][0] from None
    return f"{float(state['table'].sum())} {state['seen']}"


def cli(*arguments: str) -> str:
    """What a command of ``cnr`` prints, behind its exit status."""
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return f"{result.exit_code} {result.output}"


WAYS: dict[str, Callable[[str], str]] = {
    "load": load_state,
    "load_table": lambda path: str(float(cnr.load_table(path, "table").sum())),
    "verify": lambda path: cli("verify", path),
    "verify root": lambda path: cli("verify", "--all", os.path.dirname(path)),
    "inspect": lambda path: cli("inspect", path),
    "latest": lambda path: str(cnr.latest(os.path.dirname(path))),
    "ls": lambda path: cli("ls", os.path.dirname(path)),
    "prune": lambda path: cli("prune", os.path.dirname(path), "--last", "1"),
    "compact": lambda path: str(cnr.plan_compaction(path)),
    "diff": lambda path: cli("diff", path, path),
    "report": lambda path: cli("report", os.path.dirname(path), "--out", "memory://attacks/report.html"),
    "serving": lambda path: str(cnr.RootCommits(os.path.dirname(path)).newest_first()),
}


def _tell(**told: object) -> None:
    sys.__stdout__.write(json.dumps(told) + "\n")  # type: ignore[union-attr]  # it is there
    sys.__stdout__.flush()  # type: ignore[union-attr]  # it is there


def _walk(folder: Path, opened: list[str]) -> None:
    for name, attack in ATTACKS.items():
        for way, read in WAYS.items():
            opened.clear()
            _tell(attack=name, way=way)
            before = time.monotonic()
            signal.alarm(LIMIT_SECS)
            try:
                outcome, kind = read(str(folder / name / attack.head)), "none"
            except cnr.CNRError as error:
                outcome, kind = str(error), type(error).__name__
            except BaseException as error:  # noqa: BLE001 - whatever is raised is what is looked for
                outcome, kind = f"{type(error).__name__}: {error}", "untyped"
            finally:
                signal.alarm(0)
            secs = time.monotonic() - before
            _tell(attack=name, way=way, kind=kind, outcome=outcome[:5000], secs=secs, opened=sorted(set(opened)))


def _in_vain(_number: int, _frame: object) -> None:
    raise _TooLong(f"more than {LIMIT_SECS} s")


def main(folder: Path) -> None:
    """Walk all attacks in a folder."""
    outside, opened = str(folder / OUTSIDE), []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str):
            real = os.path.realpath(arguments[0])
            if real.startswith((outside, "/dev/zero")):
                opened.append(os.path.relpath(real, outside))

    _walk_once_for_imports(folder)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, taken + MEMORY_BYTES))
    signal.signal(signal.SIGALRM, _in_vain)
    sys.addaudithook(note)
    _walk(folder, opened)
    _tell(peak_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def _walk_once_for_imports(folder: Path) -> None:
    for read in WAYS.values():
        read(str(folder / "nothing" / ATTACKS["nothing"].head))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
