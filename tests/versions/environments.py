"""The pairs of versions, and how their environments are made: what the tests need, with other versions of PyTorch."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Versions:
    """Versions that belong together.

    Attributes:
        torch: Of PyTorch.
        torchrec: Of TorchRec.
        fbgemm: Of FBGEMM's build for CPUs.
        others: What this TorchRec needs besides the packages of requirements/cpu.txt.
    """

    torch: str
    torchrec: str
    fbgemm: str
    others: tuple[str, ...] = ()

    @property
    def pins(self) -> Sequence[str]:
        """What pip installs for them, other than TorchRec."""
        return f"torch=={self.torch}", f"fbgemm-gpu-cpu=={self.fbgemm}", *self.others


VERSIONS = (
    Versions("2.11.0", "1.6.1", "1.6.0"),
    Versions("2.12.1", "1.7.0", "1.7.0", ("iopath==0.1.10",)),
    Versions("2.13.0", "1.8.0", "1.8.0"),
    Versions("2.14.1", "1.9.2", "1.9.0"),
)


def made(versions: Versions, folder: Path) -> Path:
    """Return the Python of the environment for these versions, which is made if it is not there, or lacks something."""
    environment, pip = folder / versions.torch, (folder / versions.torch / "bin" / "python", "-m", "pip")
    pinned = ("torch==", "fbgemm-gpu-cpu==", "setuptools==")  # PyTorch has bounds for the last
    others = (ROOT / "requirements/cpu.txt").read_text().splitlines()
    wanted = "\n".join([*versions.pins, *(line for line in others if not line.startswith(pinned))])
    complete = environment / "complete.txt"  # written last, with what was installed
    if not complete.exists() or complete.read_text() != wanted:
        _run(sys.executable, "-m", "venv", "--clear", environment)
        requirements = environment / "requirements.txt"
        requirements.write_text(wanted)
        install = (*pip, "install", "--quiet", "--disable-pip-version-check")
        _run(*install, "-r", requirements)
        _run(*install, "--no-deps", f"torchrec=={versions.torchrec}")
        complete.write_text(wanted)
    return environment / "bin" / "python"


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True)
