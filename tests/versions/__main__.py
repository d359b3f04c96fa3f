"""``python -m tests.versions``: test all versions, or some, and write what came of it and the page."""

import argparse
import json
import os
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.versions.environments import ROOT, VERSIONS, Versions, made
from tests.versions.page import RESULTS, write_page

PACKAGES = (
    *("format", "kernels", "lineage", "loading", "maintenance", "manager"),
    *("quantization", "reading", "saving", "serving", "sizing", "storage", "tracking"),
)
SUITES = {
    "quick tests": [*(f"tests/{package}" for package in PACKAGES), "-m", "not slow and not long and not gpu"],
    "matrix of models": ["tests/properties/test_matrix.py", "-m", "not slow"],
}
LIMIT_SECS = 3600


def main() -> None:
    """Test them one after the other, then exchange their checkpoints."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("--torch", nargs="*", help="versions of PyTorch to test, such as 2.14.1; by default, all")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/versions", help="where the environments are")
    parser.add_argument("--exchange-only", action="store_true", help="run no tests, exchange checkpoints only")
    arguments = parser.parse_args()
    chosen = [versions for versions in VERSIONS if not arguments.torch or versions.torch in arguments.torch]
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"versions": {}, "loads": {}}
    pythons = {versions: made(versions, arguments.folder) for versions in chosen}
    for versions, python in pythons.items():
        print(f"PyTorch {versions.torch}", flush=True)
        entry = results["versions"].setdefault(versions.torch, {})
        entry |= {"torchrec": versions.torchrec, "fbgemm": versions.fbgemm}
        if not arguments.exchange_only:
            entry["suites"] = {name: _tested(python, suite, arguments.folder) for name, suite in SUITES.items()}
            print(json.dumps(entry["suites"]), flush=True)
    saved = arguments.folder / "saved"
    shutil.rmtree(saved, ignore_errors=True)  # of an earlier run
    for versions, python in pythons.items():
        (saved / versions.torch).mkdir(parents=True, exist_ok=True)
        _exchange(python, "save", saved / versions.torch)
    for versions, python in pythons.items():
        for other in chosen:
            results["loads"].setdefault(versions.torch, {})[other.torch] = _loads(python, saved, other)
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    write_page()


def _tested(python: Path, suite: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run tests, and return how many passed, and the names of those that failed."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)  # of another run, whose figures these would seem to be
    options = ["--numprocesses", "2", "--dist", "loadfile", "-q", "--show-capture=no", f"--junitxml={report}"]
    _run([python, "-m", "pytest", *suite, *options], check=False)
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    names = sorted({f"{case.get('classname')}.{case.get('name')}" for case in failed})
    return {"passed": len(cases) - len(failed) - len(skipped), "skipped": len(skipped), "failed": names}


def _exchange(python: Path, action: str, folder: Path) -> int:
    launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return _run([*launcher, "-m", "tests.versions.exchange", action, folder], check=action == "save")


def _loads(python: Path, saved: Path, other: Versions) -> bool:
    return _exchange(python, "load", saved / other.torch) == 0


def _run(command: Sequence[str | Path], check: bool) -> int:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=environment, check=check, timeout=LIMIT_SECS
    ).returncode


if __name__ == "__main__":
    main()
