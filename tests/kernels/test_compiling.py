"""Kernels: compiled once and kept, and what happens where nothing can be kept."""

import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

import torchrec_cnr
from torchrec_cnr.kernels.cpu import compiling, fused_rows
from torchrec_cnr.kernels.cpu.compiling import CodeFiles, Kernel

TIMES_TWO = """
import sys
from torchrec_cnr.kernels.cpu.compiling import Kernel

def times_two(values):
    for index in range(len(values)):
        values[index] *= 2
"""
PROGRAM = """
import logging
import numpy as np
import times_two
logging.basicConfig(format="%(message)s")
kernel = times_two.Kernel(times_two.times_two)
values = np.arange(3.0)
kernel(values)
assert values.tolist() == [0.0, 2.0, 4.0]
kernel(values.astype(np.float32))
print(sum(kernel._compiled.stats.cache_hits.values()))
"""


def _add_one(values: Any) -> None:
    """Add one."""
    for index in range(len(values)):
        values[index] += 1


@pytest.mark.long
def test_code_is_kept_for_the_next_process(tmp_path: Path) -> None:
    """The first process compiles and says so once; the second one loads what the first has kept."""
    (tmp_path / "times_two.py").write_text(TIMES_TWO)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py"]
    results = [
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120) for _ in range(2)
    ]
    assert [result.stdout.strip() for result in results] == ["0", "2"]
    assert [result.stderr.count("compiling kernels for CPUs") for result in results] == [1, 0]


def _code_files(folder: Path) -> CodeFiles:
    return CodeFiles(str(folder), "kernel-1.py311", "a" * 64)


def test_code_of_two_dtypes_compiled_at_once_is_not_mixed_up(tmp_path: Path) -> None:
    """One process keeps its code while another is doing so, after both have found no code."""
    first, second = _code_files(tmp_path), _code_files(tmp_path)
    dump = first._dump

    def dump_late(data: object) -> Any:
        second.save(("float16",), "code for fp16")
        return dump(data)

    first._dump = dump_late
    first.save(("float32",), "code for fp32")
    for files in (first, _code_files(tmp_path)):
        assert [files.load((dtype,)) for dtype in ("float32", "float16")] == ["code for fp32", "code for fp16"]


@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: content[:-1] + b"?"], ids=["empty", "changed"])
def test_damaged_code_is_not_run(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """A file that a crash of the machine left empty or damaged counts as none, and is written again."""
    files = _code_files(tmp_path)
    files.save(("float32",), "code")
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert files.load(("float32",)) is None
    files.save(("float32",), "code")
    assert files.load(("float32",)) == "code"


def test_code_of_other_sources_is_removed(tmp_path: Path) -> None:
    """Files of this kernel from an earlier version, numba's own too, make room; those of other kernels stay."""
    _code_files(tmp_path).save(("float32",), "old code")
    for name in ("kernel-1.py311.nbi", "kernel-1.py311.1.nbc", "kernel-12.py311.1.nbc"):
        (tmp_path / name).write_bytes(b"")
    new = CodeFiles(str(tmp_path), "kernel-1.py311", "b" * 64)
    assert new.load(("float32",)) is None
    new.save(("float32",), "new code")
    new.save(("float16",), "new code")
    names = sorted(path.name.split(".")[0:3] for path in tmp_path.iterdir())
    assert names == [["kernel-1", "py311", "b" * 16]] * 2 + [["kernel-12", "py311", "1"]]


ENCODING = """
import sys
import numba
import torch
import torchrec_cnr as cnr

for _ in range(int(sys.argv[1])):
    numba.njit(lambda x: x)(1)
for dtype in sys.argv[2:]:
    values = torch.linspace(-3, 3, 44).view(4, 11).to(getattr(torch, dtype))
    codes = cnr.KMeans(8).encode(values).codes
    codebook = codes[:, 11:].contiguous().view(torch.float16)
    decoded = codebook.gather(1, codes[:, :11].long())
    assert torch.allclose(decoded.float(), values.float(), atol=0.01), (dtype, codes[0, :11])
"""


def test_compiled_functions_have_names_of_their_own() -> None:
    """No two functions of one module share a name, by which numba links what different processes have kept."""
    modules = [import_module(f"torchrec_cnr.kernels.cpu.{name}") for name in ("fused_rows", "kmeans", "range_search")]
    functions = {
        id(value): value.py_func
        for module in modules
        for value in vars(module).values()
        if isinstance(value, Dispatcher)
    }
    names = [(function.__module__, function.__qualname__) for function in functions.values()]
    assert len(names) > 20
    assert len(set(names)) == len(names)


@pytest.mark.slow
def test_kernels_of_different_processes_do_not_mix(tmp_path: Path) -> None:
    """What processes with other compiled functions have kept is right together: functions have names of their own."""
    shutil.copytree(Path(torchrec_cnr.__file__).parent, tmp_path / "torchrec_cnr", ignore=lambda *_: ["__pycache__"])
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for arguments in (["5", "float32"], ["0", "float16"], ["0", "float32", "float16"]):
        command = [sys.executable, "-c", ENCODING, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr


DECODING = """
import torch
import torchrec_cnr as cnr
from torchrec_cnr.kernels.cpu import fused_rows

cnr.Asymmetric(4).decode(torch.zeros(2, 12, dtype=torch.uint8), 16, torch.float32)
print(cnr.__file__)
print(sum(fused_rows.decode._compiled.stats.cache_hits.values()))
"""


@pytest.mark.slow
def test_a_change_of_any_file_makes_kernels_anew(tmp_path: Path) -> None:
    """Kernels take functions from other files: what was kept is not used once one of these has changed."""
    shutil.copytree(Path(torchrec_cnr.__file__).parent, tmp_path / "torchrec_cnr", ignore=lambda *_: ["__pycache__"])
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    hits = []
    for _ in range(3):
        command = [sys.executable, "-c", DECODING]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        origin, num_hits = done.stdout.split()
        assert Path(origin).is_relative_to(tmp_path)
        hits.append(num_hits)
        if len(hits) == 2:
            with (tmp_path / "torchrec_cnr" / "kernels" / "memory.py").open("a") as file:
                file.write("# changed\n")
    assert hits == ["0", "1", "0"]


def test_nothing_writable_is_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where numba finds no folder for what it compiles, the kernel is compiled all the same, and a warning says so."""
    njit = compiling.njit

    def without_cache(cache: bool = False, **options: Any) -> Callable[..., Any]:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        decorator: Callable[..., Any] = njit(**options)
        return decorator

    monkeypatch.setattr(compiling, "njit", without_cache)
    with caplog.at_level(logging.WARNING):
        kernel = Kernel(_add_one)
    values = np.zeros(2)
    kernel(values)
    assert values.tolist() == [1.0, 1.0]
    assert "cannot be kept" in caplog.text


def test_a_full_disk_is_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where what was compiled cannot be written, the call goes through once, and a warning says why."""
    kernel = Kernel(_add_one)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kernel._compiled._cache, "save_overload", fail)
    monkeypatch.setattr(kernel._compiled._cache, "load_overload", lambda *_: None)
    values = np.zeros(2)
    with caplog.at_level(logging.WARNING):
        kernel(values)
        kernel(values)
    assert values.tolist() == [2.0, 2.0]
    assert caplog.text.count("No space left") == 1


def test_docstrings_stay() -> None:
    """A kernel is documented as its function is."""
    assert Kernel(_add_one).__doc__ == "Add one."


@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other CPUs convert fp16 always")
def test_a_cpu_without_fp16_is_refused() -> None:
    """Where numba is told to compile for any x86, there is an error instead of the end of the process."""
    program = """
import torch
import torchrec_cnr as cnr

try:
    cnr.Asymmetric(4).encode(torch.ones(2, 8))
except cnr.ConfigurationError as error:
    print(error)
"""
    variables = {**os.environ, "NUMBA_CPU_NAME": "generic"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=120)
    assert "without F16C" in done.stdout


@pytest.mark.long
def test_kernels_count_no_references() -> None:
    """That takes locked instructions, for each array at each call of a function, and took a third of the time."""
    function = fused_rows.decode._compiled.py_func
    codes, rows, target = np.zeros(12, np.uint8), np.zeros(1, np.int64), np.ones(16, np.float32)
    kernel, counting = numba.njit(**compiling._OPTIONS)(function), numba.njit(function)
    for compiled in (kernel, counting):
        target[:] = 1.0
        compiled(codes, 12, rows, 4, 0, target, 16, rows, 16)
        assert target.tolist() == [0.0] * 16
    assert "NRT_incref" in "".join(counting.inspect_asm().values())
    assert "NRT_incref" not in "".join(kernel.inspect_asm().values())
