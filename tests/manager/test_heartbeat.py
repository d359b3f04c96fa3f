"""The pulse: who is still there, as the others see it."""

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from torchrec_cnr.manager import ranks
from torchrec_cnr.manager.ranks import Heartbeat


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dist.FileStore:
    """A store of three ranks, whose pulses are fast."""
    monkeypatch.setattr(ranks, "HEARTBEAT_SECS", 0.05)
    return dist.FileStore(str(tmp_path / "store"), 3)


def _pulses(store: dist.FileStore, monkeypatch: pytest.MonkeyPatch) -> list[Heartbeat]:
    monkeypatch.setattr(ranks, "_instances", iter([0, 0, 0]))  # as in processes of their own
    return [Heartbeat(rank, 3, store) for rank in range(3)]


@pytest.mark.long
def test_ranks_that_stop_are_missed(store: dist.FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as all are there, nobody is missing; those that leave are, and no others."""
    pulses = _pulses(store, monkeypatch)
    time.sleep(0.2)
    assert list(pulses[0].missing()) == []
    pulses[2].close()
    assert list(pulses[0].missing()) == [2]
    assert list(pulses[1].missing()) == [2]
    pulses[1].close()
    assert list(pulses[0].missing()) == [1, 2]
    pulses[0].close()


@pytest.mark.long
def test_a_store_that_does_not_answer(store: dist.FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has it is gone, or this rank is cut off: it cannot tell, and says so within seconds."""
    pulses = _pulses(store, monkeypatch)

    def fail(key: str, value: int) -> int:
        raise RuntimeError("connection reset by peer")

    def hang(key: str, value: int) -> int:
        time.sleep(3)
        return 0

    for add in (fail, hang):
        monkeypatch.setattr(pulses[0], "_store", type("Store", (), {"add": staticmethod(add)}))
        began = time.monotonic()
        assert list(pulses[0].missing()) == [1, 2]
        assert time.monotonic() - began < 2.5
    for one in pulses:
        one.close()
