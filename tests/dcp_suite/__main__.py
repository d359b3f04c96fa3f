"""``python -m tests.dcp_suite``: get PyTorch's tests of DCP, run those of storage with our classes, and list the rest.

The tests are those of PyTorch 2.6, as Debian keeps their source (27 MB). They need the package ``expecttest``, which is
installed beside them. A test that fails is an error, unless `REFUSED` has it with a reason.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
SOURCE = "http://deb.debian.org/debian/pool/main/p/pytorch/pytorch_2.6.0+dfsg.orig.tar.xz"
SHA256 = "099a9601bc40d67656e75735c44abedb0fbe92d08817852ab7472eebb7e6ddff"
MIN_GPUS = 4
TESTS = "test/distributed/checkpoint"
FILES = (  # those that save or load
    "e2e/test_e2e_save_and_load.py::TestInitStateDict",
    "test_compatibility.py",
    "test_dtensor_checkpoint.py",
    "test_dtensor_resharding.py",
    "test_file_system_checkpoint.py",
    "test_file_system_checkpoint_cpu.py",
    "test_planner.py",
    "test_tp_checkpoint.py",
)
GPU_FILES = (  # they need FSDP, which has no CPUs, or NCCL
    "e2e/test_e2e_save_and_load.py",
    "e2e/test_fine_tuning.py",
    "e2e/test_pipeline.py",
    "test_fsdp_model_state.py",
    "test_fsdp_optim_state.py",
    "test_fsdp_tp_checkpoint_conversion.py",
    "test_fsspec.py",
    "test_hsdp_checkpoint.py",
    "test_save_load_api.py",
)
REFUSED = {  # tests that cannot pass with our classes
    "TestDCPCompatbility.test_storage_meta": "it reads attributes that only DCP's own writer and reader have",
}


def main() -> int:
    """Run the tests, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.dcp_suite", description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/dcp_suite", help="where the tests are kept")
    chosen = (*FILES, *GPU_FILES) if torch.cuda.device_count() >= MIN_GPUS else FILES
    parser.add_argument("--file", nargs="*", default=chosen, help="run only these files, such as test_planner.py")
    arguments = parser.parse_args()
    tests = _tests(arguments.folder)
    report = arguments.folder / "report.xml"
    report.unlink(missing_ok=True)  # of an earlier run
    options = ["-c", os.devnull, "--rootdir", tests, "-p", "no:cacheprovider", "--timeout", "300", "--show-capture=no"]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, f"--junitxml={report}", *arguments.file],
        cwd=tests,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{arguments.folder / 'packages'}", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    return _told(report)


def _tests(folder: Path) -> Path:
    """Return a folder with the tests, of which each file imports our classes first."""
    kept, tests = folder / "source", folder / "tests"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        data = folder / "source.tar.xz"
        print(f"getting {SOURCE}", flush=True)
        urllib.request.urlretrieve(SOURCE, data)  # the URL is a constant, and the digest is checked
        digest = hashlib.sha256(data.read_bytes()).hexdigest()
        if digest != SHA256:
            raise SystemExit(f"{data}: expected SHA-256 {SHA256}, got {digest}")
        packages = ["--target", folder / "packages", "expecttest==0.3.0"]
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *packages], check=True)
        with tarfile.open(data) as archive:
            members = [member for member in archive if f"/{TESTS}/" in f"/{member.name}"]
            archive.extractall(folder / "archive", members, filter="data")
        (found,) = (folder / "archive").glob(f"*/{TESTS}")
        shutil.copytree(found, kept)
    shutil.rmtree(tests, ignore_errors=True)
    shutil.copytree(kept, tests)
    for path in tests.rglob("test_*.py"):
        path.write_text(f"import tests.dcp_suite.substitutes\n{path.read_text()}")
    return tests


def _told(report: Path) -> int:
    """Print what came of the tests, and return 1 if one failed that should not, or the other way round."""
    outcomes: dict[str, list[str]] = {"passed": [], "skipped": [], "refused": [], "FAILED": [], "PASSED AGAINST": []}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{str(case.get('classname')).rpartition('.')[2]}.{case.get('name')}"
        failed = case.find("failure") is not None or case.find("error") is not None
        if case.find("skipped") is not None:
            kind = "skipped"
        elif name in REFUSED:
            kind = "refused" if failed else "PASSED AGAINST"
        else:
            kind = "FAILED" if failed else "passed"
        outcomes[kind].append(name)
    for kind, names in outcomes.items():
        print(f"{len(names)} {kind}")
        for name in sorted(names) if kind != "passed" else ():
            print(f"  {name}{': ' + REFUSED[name] if kind == 'refused' else ''}")
    return int(bool(outcomes["FAILED"] or outcomes["PASSED AGAINST"]))


if __name__ == "__main__":
    sys.exit(main())
