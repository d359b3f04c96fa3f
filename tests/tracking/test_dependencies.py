"""Versions of PyTorch, TorchRec and FBGEMM that do not belong together are an error, which names those that do."""

from collections.abc import Mapping
from importlib import metadata

import pytest

from torchrec_cnr import dependencies


def _install(monkeypatch: pytest.MonkeyPatch, versions: Mapping[str, str]) -> None:
    def version(package: str) -> str:
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(dependencies, "version", version)
    dependencies.check_versions.cache_clear()


@pytest.mark.parametrize(
    "versions",
    [
        {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"},
        {"torch": "2.14.1", "torchrec": "1.9.2", "fbgemm-gpu": "1.9.0"},
        {"torch": "2.11.0", "torchrec": "1.6.1"},
        {"torch": "2.13.0"},
        {},
    ],
    ids=str,
)
def test_versions_that_belong_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, versions: Mapping[str, str]
) -> None:
    """Nothing is said; nor where TorchRec is not installed, because reading checkpoints does not need it."""
    _install(monkeypatch, versions)
    dependencies.check_versions()
    assert not caplog.records


@pytest.mark.parametrize(
    "versions",
    [
        {"torch": "2.14.0", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"},
        {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.9.0"},
        {"torch": "2.15.0", "torchrec": "1.9.2"},
        {"torch": "2.13.0", "torchrec": "1.10.0"},
    ],
    ids=str,
)
def test_versions_that_do_not(monkeypatch: pytest.MonkeyPatch, versions: Mapping[str, str]) -> None:
    """The error names what is installed, and all pairs."""
    _install(monkeypatch, versions)
    with pytest.raises(ImportError, match=r"do not belong together: install PyTorch 2\.11 with TorchRec") as raised:
        dependencies.check_versions()
    assert ".".join(versions["torch"].split(".")[:2]) in str(raised.value)


def test_newer_versions_are_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where both are newer than what was tested, they may work."""
    _install(monkeypatch, {"torch": "2.15.0", "torchrec": "1.10.0", "fbgemm-gpu": "1.10.0"})
    for _ in range(3):  # each package that imports TorchRec asks
        dependencies.check_versions()
    assert caplog.text.count("PyTorch 2.15 with TorchRec 1.10 is untested") == 1


def test_the_installed_versions_belong_together() -> None:
    """The tests run with a pair."""
    torch, torchrec = (".".join(metadata.version(name).split(".")[:2]) for name in ("torch", "torchrec"))
    assert dependencies.PAIRS[torch] == torchrec
