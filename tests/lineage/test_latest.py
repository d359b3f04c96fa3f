"""The newest checkpoint of a root, and the outcome of a save."""

import errno
import logging

import pytest

from tests.lineage.bare_roots import BareRoot, _newer
from torchrec_cnr.errors import (
    StoreError,
    VersionError,
)
from torchrec_cnr.format.manifest_parser import VERSION
from torchrec_cnr.lineage.checkpoint import committed
from torchrec_cnr.lineage.latest import latest
from torchrec_cnr.storage.store import Store


def test_latest_of_nothing_is_none(run: BareRoot) -> None:
    """An empty directory, and one that is not there, have no newest checkpoint."""
    assert latest(run.url) is None
    assert latest(f"{run.url}/missing") is None


def test_latest_goes_by_time_not_by_name(run: BareRoot) -> None:
    """Of a hundred checkpoints the one committed last is the newest, whatever its name."""
    for number in range(100):
        run.commit(f"step-{number}", (number * 37) % 100 + 1)
    times = {number: (number * 37) % 100 + 1 for number in range(100)}
    newest = max(times, key=lambda number: times[number])
    assert newest not in (9, 99)
    assert latest(run.url) == run.at(f"step-{newest}")


def test_latest_compares_times_as_numbers(run: BareRoot) -> None:
    """A time with more digits is later."""
    run.commit("a", 9)
    run.commit("b", 10)
    assert latest(run.url) == run.at("b")


def test_latest_passes_over_what_is_no_checkpoint(run: BareRoot) -> None:
    """Files, empty directories and saves that died are no checkpoints."""
    run.commit("good", 1)
    run.store.put("notes.txt", [b"x"])
    for name in ("empty", "died"):
        run.store.at(name).make()
    run.store.at("died").put("5a7e-0-0.safetensors", [b"data"])
    assert latest(run.url) == run.at("good")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign", "another digest"])
def test_latest_passes_over_damage_with_a_warning(run: BareRoot, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    """The newest checkpoint that is good is found, and each damaged one that is newer is named in the log."""
    run.commit("good", 1)
    run.commit("bad", 2)
    data = run.read("bad")
    damaged = {
        "truncated": data[:-20],
        "flipped": data.replace(b'"world_size":1', b'"world_size":3'),
        "empty": b"",
        "foreign": b"{}\n" * 400,
        "another digest": data.replace(data[11:75], b"0" * 64),
    }
    run.put("bad", damaged[damage])
    with caplog.at_level(logging.WARNING):
        assert latest(run.url) == run.at("good")
    assert "bad/manifest.json" in caplog.text  # what has no time of commit may be the newest


def test_latest_refuses_to_go_behind_a_newer_version(run: BareRoot) -> None:
    """If the newest was written by a newer version, resuming from an older one would lose work silently."""
    run.commit("old", 1)
    run.commit("new", 2)
    run.put("new", _newer(run.read("new")))
    with pytest.raises(VersionError, match=rf"new/manifest\.json: written in format version {VERSION + 1}.*upgrade"):
        latest(run.url)
    run.commit("newest", 3)
    assert latest(run.url) == run.at("newest")


def test_latest_verifies_what_it_names(run: BareRoot) -> None:
    """A time of commit that was altered to look newest is not believed."""
    run.commit("good", 5)
    run.commit("bad", 1)
    run.put("bad", run.read("bad").replace(b'"created_ns":1', b'"created_ns":9'))
    assert latest(run.url) == run.at("good")


def test_latest_reports_what_cannot_be_read(run: BareRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that fails is no reason to resume from an older checkpoint."""
    run.commit("old", 1)
    run.commit("new", 2)
    read = Store.read

    def fail(self: Store, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        if self.path.endswith("/new"):
            failure = StoreError("cannot read: connection lost")
            failure.errno = errno.EIO
            raise failure
        return read(self, name, start, stop)

    monkeypatch.setattr(Store, "read", fail)
    with pytest.raises(StoreError, match="connection lost"):
        latest(run.url)


# The fate of a save


def test_fate_of_a_save_is_read_from_the_store(run: BareRoot, caplog: pytest.LogCaptureFixture) -> None:
    """A save committed if its manifest is there: not if none is, another's is, or what is there cannot be read."""
    run.commit("mine", 1, save_id="save-1")
    found = committed(run.at("mine"), "save-1")
    assert found is not None
    assert found.manifest.save_id == "save-1"
    assert committed(run.at("mine"), "save-2") is None
    assert committed(run.at("missing"), "save-1") is None
    run.put("mine", run.read("mine")[:-5])
    assert committed(run.at("mine"), "save-1") is None
    assert "its rows will be saved again" in caplog.text


def test_fate_of_a_save_is_not_guessed(run: BareRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store does not answer, nobody knows: an error is raised instead of an answer given."""
    run.commit("mine", 1, save_id="save-1")

    def fail(*_: object, **__: object) -> bytes:
        raise StoreError("cannot read: connection lost")

    monkeypatch.setattr(Store, "read", fail)
    with pytest.raises(StoreError):
        committed(run.at("mine"), "save-1")
