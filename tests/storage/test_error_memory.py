"""Errors of stores: that nothing of who caught one stays in memory until a garbage collection."""

import errno
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import torch

import torchrec_cnr as cnr
from tests.servers import s3_servers
from tests.support.models import plain_job
from torchrec_cnr.errors import CNRError, DamagedError, StoreError
from torchrec_cnr.lineage.checkpoint import committed
from torchrec_cnr.manager import manager
from torchrec_cnr.manager.restore import shared
from torchrec_cnr.serving import Commit, RowSubscriber
from torchrec_cnr.serving.served_model import ServedModel
from torchrec_cnr.storage import retries
from torchrec_cnr.storage.store import Store

numbers = count()


@pytest.fixture(autouse=True, scope="module")
def _old_objects_are_frozen() -> Iterator[None]:
    """A collection does not look at what was there before these tests; all modules and tests take it a second."""
    gc.freeze()
    yield
    gc.unfreeze()


class Rows:
    """What a caller holds."""


def missing_file(store: Store) -> None:
    """Read it."""
    store.read("missing")


def missing_range(store: Store) -> None:
    """Read a part of it into an array."""
    store.read_array("missing", 0, 5)


def missing_stream(store: Store) -> None:
    """Read it piece by piece."""
    with store.open_file("missing") as file:
        file.read()


def missing_time(store: Store) -> None:
    """Ask when it was written."""
    store.modified_ns("missing")


def taken_name(store: Store) -> None:
    """Write what is there already."""
    store.put("file", [b"one"])
    store.put_new("file", b"two", "id")


def missing_manifest(store: Store) -> None:
    """Ask what became of a save that committed nothing."""
    assert committed(store, "id") is None


def failed_stream(store: Store) -> None:
    """Write a file that cannot be written."""
    with store.create("file") as stream:
        stream.write("text")  # type: ignore[arg-type]


ACTIONS = [missing_file, missing_range, missing_stream, missing_time, taken_name, missing_manifest, failed_stream]


def outlives(act: Callable[[], object]) -> bool:
    """Whether what a caller holds stays when the caller is gone, who has caught an error."""
    gc.collect()
    gc.disable()
    try:
        held = _act(act)
        return held() is not None
    finally:
        gc.enable()


def _act(act: Callable[[], object]) -> "weakref.ref[Rows]":
    rows = Rows()
    with suppress(CNRError, OSError, TypeError, RuntimeError):
        act()
    return weakref.ref(rows)


@pytest.mark.parametrize("act", ACTIONS)
def test_errors_keep_nothing_of_their_callers(store: Store, act: Callable[[Store], None]) -> None:
    """Neither rows nor file descriptors: a lineage is read up to a file that is not there, at each save."""
    gc.collect()  # tests before this one may have left files to a collection
    num_files = len(os.listdir("/proc/self/fd"))
    assert not outlives(lambda: act(store))
    assert len(os.listdir("/proc/self/fd")) <= num_files


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("error", [StoreError("no answer"), RuntimeError("foreign")], ids=repr)
@pytest.mark.parametrize("is_async", [False, True])
def test_failed_saves_of_a_manager_keep_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, is_async: bool
) -> None:
    """Whether they fail at once or in the background."""
    saver = cnr.CheckpointManager(tmp_path, cnr.RowTracker(plain_job(1).model))

    def fail(*_: object, **__: object) -> None:
        raise type(error)(*error.args)

    def fail_later(*_: object, **__: object) -> Future[None]:
        future: Future[None] = Future()
        future.set_exception(type(error)(*error.args))
        return future

    monkeypatch.setattr(manager, "save", fail)
    monkeypatch.setattr(manager, "async_save", fail_later)

    def act() -> None:
        if is_async:
            saver.async_save(1, {})
            saver.wait()
        else:
            saver.save(1, {})

    assert not outlives(act)
    saver.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An S3 server, of which the clients of this process know."""
    folder: Path = tmp_path_factory.mktemp("server")
    with s3_servers.running(s3_servers.Moto(folder)) as found, s3_servers.configured(found.variables()):
        yield


@pytest.mark.long
@pytest.mark.parametrize("protocol", s3_servers.PROTOCOLS)
@pytest.mark.parametrize("act", ACTIONS)
def test_errors_of_s3_keep_nothing(server: None, protocol: str, act: Callable[[Store], None]) -> None:
    """Clients keep their errors in variables, and raise them from there."""
    store = Store.open(f"{protocol}://{s3_servers.BUCKET}/{next(numbers)}/job")
    assert not outlives(lambda: act(store))


@pytest.mark.parametrize("number", [errno.EIO, errno.EBUSY])
def test_attempts_keep_nothing(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Whether it is the first one that fails for good, or the last of several."""
    monkeypatch.setattr(retries, "RETRY_SECS", 0.3)

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    assert not outlives(lambda: retries.tried_again(fail, "do it"))


def test_a_restore_that_fails_keeps_nothing() -> None:
    """Where ranks have no checkpoint to go on from, one of them raises what it tells the others."""
    assert not outlives(lambda: shared(StoreError("cannot list"), None))


def test_a_subscriber_that_is_closed_keeps_nothing(tmp_path: Path) -> None:
    """It raises then what its thread could not mend."""

    def close() -> None:
        subscriber = RowSubscriber(torch.nn.Linear(1, 1), tmp_path)
        subscriber._untold = StoreError("cannot list")
        subscriber.close()

    assert not outlives(close)


def test_a_checkpoint_that_is_passed_over_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subscriber that applies the one before it holds nothing of the attempt."""

    def apply(served: ServedModel, commit: Commit) -> None:
        if commit.path == "new":
            raise DamagedError("flipped")

    def update() -> None:
        subscriber = RowSubscriber(torch.nn.Linear(1, 1), tmp_path)
        assert subscriber._apply_newest([Commit("new", 2), Commit("old", 1)]) is None
        subscriber.close()

    monkeypatch.setattr(ServedModel, "apply", apply)
    assert not outlives(update)
