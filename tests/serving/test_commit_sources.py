"""When a subscriber looks for commits, and what it tells of its lag."""

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.loading.quantized_models import float_model
from tests.serving.served_models import SCHEMES, following, save_tables, wait_until
from tests.support.faults import flip
from torchrec_cnr.lineage.abandoned import mark_abandoned
from torchrec_cnr.lineage.marker_commit import uncommitted_name
from torchrec_cnr.serving import commit_sources
from torchrec_cnr.serving.commit_sources import MarkerCommits
from torchrec_cnr.storage.row_log import Marker, RowLog, root_id
from torchrec_cnr.storage.store import Store

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
]


def test_a_thread_follows_until_it_is_closed(tmp_path: Path) -> None:
    """It applies what comes, logs and outlives what it cannot apply, tells of each update, and ends."""
    model, told = float_model(1), []
    first = save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    with cnr.RowSubscriber(model, tmp_path, interval_secs=0.01, on_applied=told.append) as subscriber:
        assert [applied.path for applied in told] == [str(tmp_path / "0")]
        with pytest.raises(cnr.ConfigurationError, match="already been started"):
            subscriber.start()
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "manifest.json").write_bytes(b"{}")
        wait_until(lambda: subscriber.failure is not None)
        (tmp_path / "1" / "manifest.json").unlink()
        second = save_tables(tmp_path / "2", 2, SCHEMES[2], first, 0.5)
        wait_until(lambda: len(told) == 2)
        wait_until(lambda: subscriber.failure is None)
    assert (told[1].sha256, told[1].kind) == (second.sha256, "delta")
    assert not any(thread.name == "cnr-follow" for thread in threading.enumerate())
    assert "forward" not in vars(model)
    with pytest.raises(cnr.ConfigurationError, match="closed"):
        subscriber.update()


def test_a_callback_that_loads_does_not_end_the_thread(tmp_path: Path) -> None:
    """What DCP raises is no Exception; the next checkpoint is applied."""
    told = []

    def fail(applied: cnr.Applied) -> None:
        told.append(applied.path)
        if len(told) == 2:
            raise CheckpointException("no such checkpoint", {})

    last = save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    with cnr.RowSubscriber(float_model(1), tmp_path, interval_secs=0.01, on_applied=fail):
        for number in (1, 2):
            last = save_tables(tmp_path / str(number), number, SCHEMES[2], last, 0.5)
            wait_until(lambda: str(tmp_path / str(number)) in told)  # noqa: B023 - it is called here


def test_a_failure_that_lasts_is_raised_at_the_end(tmp_path: Path) -> None:
    """Who leaves the block learns that the model is not what it should be; what he raised himself goes first."""
    save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)

    def follow(failing: type[Exception] | None) -> None:
        with cnr.RowSubscriber(float_model(1), tmp_path, interval_secs=0.01) as subscriber:
            (tmp_path / "1").mkdir(exist_ok=True)
            (tmp_path / "1" / "manifest.json").write_bytes(b"{}")
            wait_until(lambda: subscriber.failure is not None)
            if failing is not None:
                raise failing
        (tmp_path / "1" / "manifest.json").unlink()

    with pytest.raises(cnr.DamagedError):
        follow(None)
    (tmp_path / "1" / "manifest.json").unlink()
    with pytest.raises(ZeroDivisionError):
        follow(ZeroDivisionError)


class Markers:
    """A source that is told of commits, as one that reads a stream is."""

    def __init__(self) -> None:
        self.found: list[cnr.Commit] = []
        self.news = threading.Event()

    def newest_first(self) -> Sequence[cnr.Commit]:
        return sorted(self.found, key=lambda commit: commit.created_ns, reverse=True)

    def wait(self, timeout_secs: float) -> None:
        self.news.wait(timeout_secs)

    def close(self) -> None:
        self.news.set()


def test_commits_may_come_from_elsewhere(tmp_path: Path) -> None:
    """A source of another kind wakes the thread; only what it names is applied."""
    markers, model = Markers(), float_model(1)
    first = save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    with cnr.RowSubscriber(model, markers, interval_secs=600) as subscriber:
        assert (subscriber.applied, subscriber.lag) == (None, cnr.Lag(0, 0.0, None))
        markers.found.append(cnr.Commit(first.store.url, first.created_ns))
        markers.news.set()
        wait_until(lambda: subscriber.applied == first.store.url)


def test_lag_is_what_is_not_applied(tmp_path: Path) -> None:
    """It counts checkpoints, and the time since the oldest of them."""
    first = save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    with following(float_model(1), tmp_path) as subscriber:
        subscriber.update()
        assert subscriber.lag.num_checkpoints == 0
        assert subscriber.lag.age_secs == pytest.approx((time.time_ns() - first.created_ns) / 1e9, abs=5)
        newest = first
        for number in range(1, 4):
            newest = save_tables(tmp_path / str(number), number, SCHEMES[2], newest, 0.5)
            flip(next((tmp_path / str(number)).glob("*.safetensors")), -3)
        with pytest.raises(cnr.DamagedError):
            subscriber.update()
        assert subscriber.lag.num_checkpoints == 3
        assert 0 < subscriber.lag.waiting_secs <= (subscriber.lag.age_secs or 0)


def test_abandoned_checkpoints_are_not_applied(tmp_path: Path) -> None:
    """Whatever their time of commit; one whose mark is removed again is applied."""
    first = save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    second = save_tables(tmp_path / "1", 1, SCHEMES[2], first, 0.5)
    third = save_tables(tmp_path / "2", 2, SCHEMES[2], second, 0.5)
    commits = cnr.RootCommits(tmp_path)
    assert [Path(commit.path).name for commit in commits.newest_first()] == ["2", "1", "0"]
    mark_abandoned(Store.open(tmp_path), [second, third], None)
    assert [Path(commit.path).name for commit in commits.newest_first()] == ["0"]
    with following(float_model(1), commits) as subscriber:
        subscriber.update()
        assert subscriber.applied == str(tmp_path / "0")
    mark_abandoned(Store.open(tmp_path), [], second)
    assert [Path(commit.path).name for commit in commits.newest_first()] == ["1", "0"]
    assert cnr.latest(tmp_path) == str(tmp_path / "1")


class Log:
    """A log with one marker, which does not tell what is committed while it fails."""

    def __init__(self, root: Store) -> None:
        self.marker = Marker(root_id(root.url), "0", "s", "1" * 64, None, 1, 7)
        self.asked: list[int] = []
        self.fails = True

    def open(self, *, may_make: bool = True) -> bool:
        return True

    def end(self) -> int:
        return 7 + bool(self.asked)

    def markers_from(self, offset: int, timeout_secs: float) -> Sequence[Marker]:
        self.asked.append(offset)
        return [self.marker] if offset <= 7 else []

    def marked(self, root: str, manifests: Mapping[str, str | None]) -> frozenset[str]:
        if self.fails:
            raise cnr.StoreError("the broker does not answer")
        return frozenset(manifests)


def test_a_marker_that_cannot_be_followed_is_not_read_again(tmp_path: Path) -> None:
    """The root is looked through instead, as at the beginning, until the log tells what is committed."""
    waiting = save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    manifest, uncommitted = (
        tmp_path / "0" / name for name in ("manifest.json", uncommitted_name(waiting.committed.save_id))
    )
    log = Log(Store.open(tmp_path))
    commits = MarkerCommits(tmp_path, cast("RowLog", log))
    for asked in ([], [7]):
        manifest.rename(uncommitted)
        log.fails = True
        if asked:
            with pytest.raises(cnr.StoreError, match="the broker does not answer"):
                commits.wait(0.01)
        for _ in range(2):
            with pytest.raises(cnr.StoreError, match="the broker does not answer"):
                commits.newest_first()
            commits.wait(0.01)
        assert log.asked == asked
        log.fails = False
        assert [Path(commit.path).name for commit in commits.newest_first()] == ["0"]
    commits.wait(0.01)
    assert log.asked == [7, 8]


@pytest.mark.long
def test_looking_costs_nothing_where_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a root has come to rest, no file is read and nothing is listed; a new checkpoint is read alone."""
    first = save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    save_tables(tmp_path / "1", 1, SCHEMES[2], first, 0.5)
    commits = cnr.RootCommits(tmp_path)
    time.sleep(1.1)
    assert len(commits.newest_first()) == 2
    used: list[str] = []
    read, listing = Store.read, Store.listing
    monkeypatch.setattr(Store, "read", lambda self, *args: used.append(self.path) or read(self, *args))
    monkeypatch.setattr(Store, "listing", lambda self: used.append("listing") or listing(self))
    assert len(commits.newest_first()) == 2
    assert used == []
    save_tables(tmp_path / "2", 2, SCHEMES[2], first, 0.5)
    used.clear()
    assert commits.newest_first()[0].path == str(tmp_path / "2")
    assert used == ["listing", str(tmp_path / "2")]


def test_no_older_checkpoint_takes_the_place_of_one_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that refuses one read of the newest manifest does not send the model back; one that is gone does."""
    first = save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    save_tables(tmp_path / "1", 1, SCHEMES[2], first, 0.5)
    subscriber, read = cnr.RowSubscriber(float_model(1), tmp_path), commit_sources.committed_ns
    subscriber.update()
    assert subscriber.applied == str(tmp_path / "1")
    with monkeypatch.context() as patch:
        patch.setattr(
            commit_sources,
            "committed_ns",
            lambda store, level: None if store.path.endswith("/1") else read(store, level),
        )
        assert subscriber.update() is None
    assert subscriber.applied == str(tmp_path / "1")
    (tmp_path / "1" / "manifest.json").unlink()
    subscriber.update()
    assert subscriber.applied == str(tmp_path / "0")
    subscriber.close()
