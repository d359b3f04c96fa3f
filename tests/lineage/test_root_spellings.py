"""One root that is spelled in several ways is one: deltas load, jobs are told apart, and markers are found."""

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

import torchrec_cnr as cnr
from tests.servers import s3_servers
from tests.support.jobs import SavingJob
from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.storage.fences import is_fence
from torchrec_cnr.storage.row_log import root_id
from torchrec_cnr.storage.store import Store

numbers = count()


@pytest.fixture
def spellings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A local root: by its path, by a link at another depth, by a link to what it is in, and otherwise."""
    root = tmp_path / "a" / "b" / "root"
    root.mkdir(parents=True)
    (tmp_path / "link").symlink_to(root)
    (tmp_path / "a" / "above").symlink_to(root.parent)
    monkeypatch.chdir(tmp_path / "a")
    return [
        str(root),
        str(tmp_path / "link"),
        str(tmp_path / "a" / "above" / "root"),
        f"{root}/",
        f"{tmp_path}/a//b/./root",
        f"{tmp_path}/link/../root",  # behind a link, this is another directory than its names tell
        f"{root}/missing/..",
        "b/root",
        f"file://{tmp_path}/link",
    ]


def of_bucket(url: str) -> list[str]:
    """A root on a file system without links, by more than one spelling."""
    protocol, _, path = url.partition("://")
    above, _, name = path.rpartition("/")
    return [url, f"{url}/", f"{protocol}://{above}//{name}", f"{protocol}://{above}/./x/../{name}//"]


def check_run(spellings: list[str]) -> None:
    """A job that saves by one spelling after another, and others that load by each of them."""
    run = SavingJob(spellings[0])
    for number, spelling in enumerate(spellings):
        run.root = spelling
        run.train_and_save(number)
    root = Store.open(spellings[0])
    assert [name for name in root.listing().files if is_fence(name)] == ["fence-00000001.json"]
    for spelling in spellings:
        run.root = spelling
        for name in (0, len(spellings) - 1):
            run.assert_loads(name)
        assert cnr.latest(spelling) == root.at(str(len(spellings) - 1)).url
        assert root_id(Store.open(spelling).url) == root_id(root.url)
        assert cnr.read_checkpoint(f"{spelling}/1").parent == root.at("0").url


def test_local_roots(spellings: list[str]) -> None:
    """By links, by relative paths, and by names that lead back."""
    check_run(spellings)


def test_roots_in_memory() -> None:
    """Of a file system whose names are only names."""
    check_run(of_bucket(f"memory://spelled-{next(numbers)}/above/root"))


@pytest.mark.long
@pytest.mark.parametrize("protocol", s3_servers.PROTOCOLS)
def test_roots_in_buckets(protocol: str, tmp_path: Path) -> None:
    """A slash at the end, as of what a shell completes, is no part of a key."""
    with s3_servers.running(s3_servers.Moto(tmp_path)) as server, s3_servers.configured(server.variables()):
        check_run(of_bucket(f"{protocol}://{s3_servers.BUCKET}/{next(numbers)}/root"))


@pytest.mark.parametrize("spell", [str, lambda root: f"{root}/", lambda root: f"{root.parent}//{root.name}"])
def test_the_latest_by_a_link(tmp_path: Path, spell: Callable[[Path], str]) -> None:
    """It is named by the directory itself."""
    root = tmp_path / "root"
    SavingJob(root).train_and_save(1)
    (tmp_path / "link").symlink_to(root)
    assert cnr.latest(spell(tmp_path / "link")) == str(root / "1")


def test_a_link_to_a_checkpoint_stands_for_it(tmp_path: Path) -> None:
    """It may lead to another one later, and what was based on it then must not."""
    run = SavingJob(tmp_path)
    run.train_and_save("1")
    os.symlink("1", tmp_path / "best")
    run.restore("best")
    run.train_and_save("2")
    (tmp_path / "best").unlink()
    run.assert_loads("2")


def test_a_checkpoint_that_was_moved_loads_by_its_link(tmp_path: Path) -> None:
    """What it is based on lies in its root, whatever that is called."""
    root = tmp_path / "root"
    run = SavingJob(root)
    run.train_and_save("1", "2")
    os.rename(root / "2", tmp_path / "moved")
    os.symlink(tmp_path / "moved", root / "2")
    (tmp_path / "link").symlink_to(root)
    for run.root in (str(root), str(tmp_path / "link")):
        run.assert_loads("2")
    run.train_and_save("3")
    run.assert_loads("3")


@pytest.mark.parametrize("url", ["memory://bucket/../../other", "s3://b/x/../../c/y"])
def test_what_leads_out_of_a_bucket_is_refused(url: str) -> None:
    """It would be another bucket than the one that is named."""
    with pytest.raises(ConfigurationError, match="leads out of the bucket"):
        Store.open(url)
