"""The manifests of a chain are read once for all ranks of a load, and every rank still verifies them."""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zstandard
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadPlan

import torchrec_cnr as cnr
from tests.support import faults
from tests.support.jobs import SavingJob
from tests.support.models import differing, state, torchrec_job, whole
from tests.support.ranks import RankPools
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.lineage import manifest_files
from torchrec_cnr.lineage.checkpoint import Checkpoint, Lineage, read_checkpoint, read_lineage, read_lineage_of
from torchrec_cnr.lineage.manifest_files import KeptFiles, SentFiles
from torchrec_cnr.storage.leases import is_lease
from torchrec_cnr.storage.store import Store
from torchrec_cnr.testing import FaultyStore

NUM_LINKS = 6
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


NEWEST = NUM_LINKS - 1


@contextmanager
def chain_of_ranks(root: str, **options: Any) -> Iterator[tuple[FaultyStore, SavingJob]]:
    """A store that counts what this rank asks for, and a job that has saved a chain there."""
    name = hashlib.sha256(root.encode()).hexdigest()[:16]  # not of another test, since processes know roots by URL
    with FaultyStore(root, name) as store, SavingJob(store.url, torchrec_job, **options) as job:
        job.train_and_save(*range(NUM_LINKS))
        dist.barrier()
        yield store, job


def restart(job: SavingJob, seed: int) -> None:
    """Go on from the newest checkpoint as another process would, without looking for it."""
    job.close()
    job.begin(seed)
    job.restore(NEWEST)


def num_manifest_reads(store: FaultyStore, act: Callable[[], object]) -> int:
    """How many manifests this rank asks for, with those that do not exist."""
    store.clear()
    act()
    return sum("manifest" in operation.path for operation in store.operations if operation.kind == "read")


def _count(rank: int, root: str, options: dict[str, Any]) -> list[int]:
    with chain_of_ranks(root, **options) as (store, job):
        counts = [num_manifest_reads(store, lambda seed=seed: restart(job, seed)) for seed in (2, 3)]
        loaded = whole(state(job.job))
        for limit, num_bytes in (("_SENT_BYTES", 0), ("_SENT_BYTES", 3 << 12), ("_RANK_BYTES", 1 << 12)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(manifest_files, limit, num_bytes)
                counts.append(num_manifest_reads(store, lambda: restart(job, 4)))
            assert differing(loaded, whole(state(job.job))) == []
        if not options:
            assert differing(loaded, job.saved[str(NEWEST)]) == []
        job.train_and_save(NUM_LINKS)
        assert cnr.read_checkpoint(job.path(NUM_LINKS)).kind == "delta"
        job.restart(5)
        return counts


@pytest.mark.parametrize(
    "options", [{}, {"quantization": cnr.TransformCoded(cnr.AdaptiveAsymmetric(4))}], ids=["exact", "transforms"]
)
def test_one_rank_reads_the_chain(tmp_path: Path, rank_pool: RankPools, options: dict[str, Any]) -> None:
    """Each manifest, and whether a compaction has replaced it. Above a size, each rank reads what it does not get."""
    first, *others = rank_pool(3).run(_count, str(tmp_path), options)
    assert first == 5 * [2 * NUM_LINKS]
    for counts in others:
        assert counts[:3] == [2, 2, 2 * NUM_LINKS]
        assert all(2 < count < 2 * NUM_LINKS for count in counts[3:]), "some: compressed sizes differ from run to run"


class _OwnPlanner(cnr.CNRLoadPlanner):
    """A user's planner, which makes new plans and so loses what is attached to DCP's."""

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Plan as usual."""
        return LoadPlan(super().finish_plan(new_plan).items)


def _load_in_other_ways(rank: int, root: str) -> dict[str, int]:
    with chain_of_ranks(root) as (store, job):
        pair = dist.new_group([1, 2], backend="gloo")
        of_pair: dict[str, Any] = {"process_group": pair} if rank else {"no_dist": True}
        ways: dict[str, tuple[Any, dict[str, Any]]] = {
            "own plans": (_OwnPlanner(), {}),
            "planner of DCP": (None, {}),
            "alone": (cnr.CNRLoadPlanner(allow_partial_load=True), {"no_dist": True}),
            "pair": (cnr.CNRLoadPlanner(allow_partial_load=True), of_pair),
            "pair with DCP's": (None, of_pair),
        }
        counts = {}
        for seed, (way, (planner, options)) in enumerate(ways.items()):
            target, reader = state(torchrec_job(2 + seed)), cnr.CNRStorageReader(job.path(NEWEST))
            if planner is None:  # which wants the names of all lists
                target = {"model": target["model"]}
            load = partial(dcp.load, target, storage_reader=reader, planner=planner, **options)
            counts[way] = num_manifest_reads(store, load)
            loaded = whole(target)
            assert differing(loaded, {fqn: job.saved[str(NEWEST)][fqn] for fqn in loaded}) == [], way
        return counts


def test_other_loads_read_the_chain_too(tmp_path: Path, rank_pool: RankPools) -> None:
    """With a planner that makes new plans, with DCP's planner, each rank alone, and in a group without rank 0."""
    first, second, third = rank_pool(3).run(_load_in_other_ways, str(tmp_path))
    assert set(first.values()) == {2 * NUM_LINKS}
    received = {name for name, number in second.items() if number == 2}
    assert received == {"planner of DCP"}
    assert {name for name, number in second.items() if number == 2 * NUM_LINKS} == second.keys() - received
    received = {name for name, number in third.items() if number == 2}
    assert received == {"planner of DCP", "pair", "pair with DCP's"}
    assert {name for name, number in third.items() if number == 2 * NUM_LINKS} == third.keys() - received


def _load_different_ones(rank: int, root: str) -> None:
    with chain_of_ranks(root) as (store, job), SavingJob(f"{store.url}/other", torchrec_job, seed=7) as other:
        other.train_and_save(*range(NUM_LINKS))
        dist.barrier()
        for expected, path in (
            (job.saved[str(NEWEST - 1)], job.path(NEWEST - 1)),
            (other.saved[str(NEWEST)], other.path(NEWEST)),
        ):
            target = {name: torch.zeros_like(value) for name, value in expected.items() if isinstance(value, Tensor)}
            dcp.load(target, storage_reader=cnr.CNRStorageReader(path if rank else job.path(NEWEST)))
            own = expected if rank else job.saved[str(NEWEST)]
            assert [name for name, value in target.items() if not value.equal(own[name])] == []


def test_ranks_with_dcp_planners_may_load_different_checkpoints(tmp_path: Path, rank_pool: RankPools) -> None:
    """An older one of the chain, and one of the same name in another chain: what was read for others does no harm."""
    rank_pool(2).run(_load_different_ones, str(tmp_path))


def _fail(rank: int, root: str, damage: str) -> list[str]:
    with chain_of_ranks(root) as (store, job):
        manifest = Path(root, "2", MANIFEST_FILE)
        content = manifest.read_bytes()
        dist.barrier()
        if rank == 0:
            if damage == "missing":
                manifest.unlink()
            elif damage == "replaced":
                manifest.write_bytes(Path(root, "1", MANIFEST_FILE).read_bytes())
            else:
                faults.flip_middle(manifest)
        dist.barrier()
        reader = cnr.CNRStorageReader(job.path(NEWEST))
        load = partial(dcp.load, storage_reader=reader, planner=cnr.CNRLoadPlanner())
        with pytest.raises(cnr.DamagedError) as alone:
            read_lineage(job.path(NEWEST))
        pair = dist.new_group([1, 2], backend="gloo")
        for group in (None, pair) if rank else (None,):
            failures = faults.failures_of(lambda group=group: load(state(job.job), process_group=group))
            assert {type(failure) for failure in failures.values()} == {cnr.DamagedError}
            assert {str(failure) for failure in failures.values()} == {str(alone.value)}
        reader.reset()  # ends the leases of ranks that had no error of their own, as restore_newest does
        found = cnr.restore_newest(store.url, state(job.job), job.tracker)
        assert found is not None
        dist.barrier()
        names = Path(root, str(NEWEST)).iterdir()
        leases = [path.name for path in names if is_lease(path.name)]
        dist.barrier()
        if rank == 0:
            manifest.write_bytes(content)
        dist.barrier()
        target = state(torchrec_job(3))
        load(target)
        assert differing(whole(target), job.saved[str(NEWEST)]) == []
        job.train_and_save(NUM_LINKS)
        job.assert_loads(NUM_LINKS)
        return [found[0].rpartition("/")[2], *leases]


@pytest.mark.parametrize("damage", ["missing", "replaced", "flipped"])
def test_a_corrupt_older_manifest_is_an_error_on_all_ranks(tmp_path: Path, rank_pool: RankPools, damage: str) -> None:
    """The same one that a process alone gets. A restore then finds the checkpoint before it, and leaves no lease."""
    found = rank_pool(3).run(_fail, str(tmp_path), damage)
    assert found == 3 * [["1"]]


# What is sent, without ranks.


def _sent(path: str, num_ranks: int = 2) -> SentFiles:
    """What a coordinator that has read a chain sends."""
    kept = KeptFiles(Store.open(path), num_ranks)
    sha256 = read_lineage(path, read=kept.read).newest.sha256
    return kept.sent(sha256) or SentFiles(sha256, {})


def _reads(newest: Checkpoint, sent: SentFiles) -> tuple[Lineage, int]:
    """A rank's chain, and how many files it reads for that."""
    with pytest.MonkeyPatch.context() as patch:
        num_reads = 0

        def read(store: Store, name: str) -> bytes | None:
            nonlocal num_reads
            num_reads += 1
            return really_read(store, name)

        really_read = manifest_files.read_file
        patch.setattr(manifest_files, "read_file", read)
        return read_lineage_of(newest, sent.reader_at(newest.store)), num_reads


def test_a_chain_in_several_roots_is_sent_whole(tmp_path: Path) -> None:
    """Its checkpoints are known by where they are relative to the newest, which ranks may see at different paths."""
    with SavingJob(tmp_path / "here" / "first") as job:
        job.train_and_save(0, 1)
        job.root = str(tmp_path / "here" / "second")
        job.train_and_save(2, 3)
        shutil.copytree(tmp_path / "here", tmp_path / "there")
        newest = read_checkpoint(tmp_path / "there" / "second" / "3")
        lineage, num_reads = _reads(newest, _sent(job.path(3)))
    assert num_reads == 0
    assert [link.store.url for link in lineage.checkpoints] == [
        str(tmp_path / "there" / name) for name in ("first/0", "first/1", "second/2", "second/3")
    ]


@pytest.mark.parametrize(
    ("compacted", "who", "expected"),
    [
        (3, "coordinator", (3, 0)),
        (3, "rank", (6, 0)),
        (3, "both", (3, 0)),
        (5, "coordinator", (6, 10)),
        (5, "rank", (1, 0)),
        (5, "both", (1, 0)),
    ],
)
def test_a_compaction_while_ranks_begin_to_load(
    tmp_path: Path, compacted: int, who: str, expected: tuple[int, int]
) -> None:
    """Who reads after it may find a shorter chain than who reads before. A rank reads what it needs and does not get.

    ``expected`` is the number of checkpoints of a rank's chain, and of the manifests that it looks for.
    """
    with SavingJob(tmp_path) as job:
        job.train_and_save(*range(NUM_LINKS))
        path = job.path(NEWEST)
        sent, newest = _sent(path), read_checkpoint(path)
        cnr.compact(job.path(compacted), self_contained=True)
        sent = sent if who == "rank" else _sent(path)
        newest = newest if who == "coordinator" else read_checkpoint(path)
    lineage, num_reads = _reads(newest, sent)
    assert (len(lineage.checkpoints), num_reads) == expected


def test_what_was_sent_is_verified(tmp_path: Path) -> None:
    """A rank does not take the coordinator's word for what a manifest contains."""
    with SavingJob(tmp_path) as job:
        job.train_and_save(0, 1, 2)
        path = job.path(2)
    sent, newest = _sent(path), read_checkpoint(path)
    parent, oldest = ("../1", MANIFEST_FILE), ("../0", MANIFEST_FILE)
    for place, data, message in (
        (parent, sent.files[oldest], "was replaced"),
        (parent, None, "is missing"),
        (oldest, zstandard.ZstdCompressor().compress(b"{}"), "not a complete manifest"),
    ):
        with pytest.raises(cnr.DamagedError, match=message):
            _reads(newest, SentFiles(sent.newest_sha256, {**sent.files, place: data}))
    for place in (parent, oldest):
        fewer = {other: data for other, data in sent.files.items() if other != place}
        assert _reads(newest, SentFiles(sent.newest_sha256, fewer)) == (read_lineage(path), 1)
