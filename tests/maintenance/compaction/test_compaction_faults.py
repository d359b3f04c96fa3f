"""What may go wrong with a compaction: the checkpoint is as it was, or compacted, and nothing is lost.

Arguments that cannot work, lineages that are damaged, disks that are full, several compactions at once, and processes
that die at any of their file operations.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import faults, hand_made
from tests.support.hand_made import mask_of, some_rows, whole
from tests.support.lineages import PACK_BYTES, ROWS, HotLineage, family, is_same, own_packs
from tests.support.ranks import FORK_SERVER
from torchrec_cnr import Keep, load_table, read_checkpoint
from torchrec_cnr.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigurationError,
    DamagedError,
    StoreError,
)
from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.lineage.checkpoint import Checkpoint, read_lineage
from torchrec_cnr.maintenance.compaction.compact import compact, run_compaction
from torchrec_cnr.maintenance.compaction.plan import plan_compaction
from torchrec_cnr.maintenance.pruning.execute import run_prune
from torchrec_cnr.maintenance.pruning.plan import plan_prune
from torchrec_cnr.quantization import Asymmetric, NoQuantization
from torchrec_cnr.storage import leases, retries, store
from torchrec_cnr.storage.store import Store

CHILD_SECS = 60.0


def _values(size: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@contextmanager
def _unchanged(run: HotLineage) -> Iterator[None]:
    """Files and what the head loads as are the same afterwards."""
    before, files = run.load(), {path: path.read_bytes() for path in Path(run.path).parent.glob("*/*")}
    yield
    assert {path: path.read_bytes() for path in Path(run.path).parent.glob("*/*")} == files
    assert all(is_same(*pair) for pair in zip(before, run.load(), strict=True))


@pytest.fixture
def run(tmp_path: Path) -> HotLineage:
    """A baseline and four deltas."""
    found = HotLineage(tmp_path / "job", Asymmetric(4))
    found.save(4)
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_ratio": 0.99}, ConfigurationError),
        ({"max_ratio": float("nan")}, ConfigurationError),
        ({"thread_count": 0}, ConfigurationError),
        ({"pack_bytes": 100}, ConfigurationError),
        ({"since": "step-4"}, CheckpointNotFoundError),
        ({"since": "fork"}, CheckpointNotFoundError),
        ({"since": "nowhere"}, CheckpointNotFoundError),
    ],
)
def test_arguments_that_cannot_work(run: HotLineage, options: dict[str, Any], expected: type[Exception]) -> None:
    """A typed error says so before anything is written."""
    root = Path(run.path).parent
    hand_made.write(root / "fork", family([mask_of([1], ROWS)], 7, NoQuantization()), parent=run.newest)
    if "since" in options:
        options = {"since": root / options["since"]}
    with _unchanged(run), pytest.raises(expected):
        compact(run.path, **options)


def test_since_is_told_by_its_file_system(run: HotLineage) -> None:
    """A path in another file system is no ancestor, though it is spelled like one."""
    with pytest.raises(CheckpointNotFoundError):
        compact(run.path, since=f"memory:/{Path(run.path).parent}/step-1")


def test_nothing_to_compact(tmp_path: Path) -> None:
    """What is no checkpoint is not compacted."""
    with pytest.raises(CheckpointNotFoundError):
        compact(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_missing_parents(run: HotLineage) -> None:
    """A lineage with a missing link cannot be folded below it, but above."""
    Path(run.path).with_name("step-1").joinpath(MANIFEST_FILE).unlink()
    with pytest.raises(DamagedError, match="step-1 is missing"):
        compact(run.path)
    assert not read_checkpoint(run.path).is_compacted


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (Path.unlink, "the data file is missing"),
        (lambda path: os.truncate(path, 3), r"truncated: expected \d+ bytes, got 3"),
    ],
    ids=["removed", "truncated"],
)
def test_files_that_are_missing_or_truncated(run: HotLineage, damage: Callable[[Path], None], found: str) -> None:
    """The message says which of the two, before anything is copied."""
    step_1 = read_checkpoint(Path(run.path).with_name("step-1"))
    damage(Path(step_1.store.path) / step_1.manifest.packs[0].name)
    with pytest.raises(DamagedError, match=rf"step-1/.*: {found}; use another checkpoint"):
        compact(run.path)
    assert not read_checkpoint(run.path).is_compacted


def _flip(checkpoint: Checkpoint, fqn: str, of_rows: bool) -> None:
    """Damage the first byte of some blob of a tensor, or of its row numbers."""
    shard = next(shard for shard in checkpoint.manifest.tensors[fqn].shards if shard.blobs)
    blob = shard.rows.blocks[0].blob if of_rows else shard.blobs[0]
    assert blob is not None
    faults.flip(checkpoint.store.child(checkpoint.manifest.packs[blob.pack].name), blob.offset)


@pytest.mark.parametrize("of_rows", [False, True], ids=["codes", "row numbers"])
def test_damage_is_noticed_and_nothing_is_committed(run: HotLineage, of_rows: bool) -> None:
    """A blob that is not what was stored stops a compaction that needs it, and leaves no files."""
    step_2 = Path(run.path).with_name("step-2")
    _flip(read_checkpoint(step_2), "t", of_rows)
    files = set(Path(run.path).iterdir())
    with pytest.raises(DamagedError, match=r"step-2/.*crc32c"):
        compact(run.path, max_ratio=1.0)
    assert set(Path(run.path).iterdir()) == files
    assert not read_checkpoint(run.path).is_compacted
    parent = load_table(step_2.with_name("step-1"), "t")
    assert not is_same(parent, torch.zeros_like(parent))


def test_damage_of_what_is_dead_is_no_harm(tmp_path: Path) -> None:
    """Codes that a load sees no more are not read: a compaction heals such a lineage."""
    values = [_values((40, 4), number) for number in range(3)]
    a = hand_made.write(tmp_path / "a", {"t": whole(values[0], True)})
    b = hand_made.write(tmp_path / "b", {"t": some_rows(values[1], [3, 5, 8])}, parent=a)
    hand_made.write(tmp_path / "c", {"t": some_rows(values[2], [2, 3, 5, 8])}, parent=b)
    _flip(b, "t", of_rows=False)
    with pytest.raises(DamagedError):
        load_table(tmp_path / "c", "t")
    compact(tmp_path / "c", max_ratio=1.0)
    expected = values[0].clone()
    expected[[2, 3, 5, 8]] = values[2][[2, 3, 5, 8]]
    assert is_same(load_table(tmp_path / "c", "t"), expected)


def test_rows_that_are_stored_nowhere_are_refused(tmp_path: Path) -> None:
    """A compacted baseline that lacks rows neither loads nor is folded, until a delta has them."""
    values = _values((40, 4), 1)
    a = hand_made.write(tmp_path / "a", {fqn: whole(values, True) for fqn in "tu"})
    hand_made.write(tmp_path / "b", {fqn: some_rows(values, [1, 2]) for fqn in "tu"}, parent=a)
    b = compact(tmp_path / "b", max_ratio=2.0)
    entry = b.manifest.tensors["t"]
    assert len(entry.shards) == 2
    tensors = {**b.manifest.tensors, "t": replace(entry, shards=entry.shards[1:])}
    data, _ = manifest_json.dumps(replace(b.manifest, tensors=tensors))
    (tmp_path / "b" / f"manifest-{b.manifest.replaces}.json").write_bytes(data)
    hand_made.write(
        tmp_path / "c", {fqn: some_rows(values, [0, 2]) for fqn in "tu"}, parent=read_checkpoint(b.store.url)
    )
    for name, row in (("b", 0), ("c", 3)):
        with pytest.raises(DamagedError, match=f"row {row} is nowhere stored"):
            load_table(tmp_path / name, "t")
        with pytest.raises(DamagedError, match=f"row {row} is nowhere stored"):
            compact(tmp_path / name, max_ratio=1.0)
        assert is_same(load_table(tmp_path / name, "u"), values)
    rest = [0, *range(3, 40)]
    hand_made.write(
        tmp_path / "d", {fqn: some_rows(values, rest) for fqn in "tu"}, parent=read_checkpoint(tmp_path / "b")
    )
    assert compact(tmp_path / "d").parent is None
    assert is_same(load_table(tmp_path / "d", "t"), values)


# Two at once, full disks, and processes that die


def _race(barrier: Any, path: str, results: Any) -> None:
    torch.set_num_threads(1)
    plan = plan_compaction(path, max_ratio=1.0)
    barrier.wait(CHILD_SECS)
    try:
        results.put(("won", run_compaction(plan, pack_bytes=PACK_BYTES).manifest_sha256))
    except CheckpointExistsError as error:
        results.put(("lost", str(error)))


@pytest.mark.long
def test_of_two_compactions_one_wins(run: HotLineage) -> None:
    """Processes that compact one head at once: one takes effect, and files of the others are removed."""
    before = run.load()
    results, barrier = FORK_SERVER.Queue(), FORK_SERVER.Barrier(3)
    children = [FORK_SERVER.Process(target=_race, args=(barrier, run.path, results), daemon=True) for _ in range(3)]
    for child in children:
        child.start()
    answers = [results.get(timeout=CHILD_SECS) for _ in children]
    for child in children:
        child.join(CHILD_SECS)
    winners = [digest for outcome, digest in answers if outcome == "won"]
    after = read_checkpoint(run.path)
    assert winners == [after.manifest_sha256]
    assert all(
        "another compaction of this checkpoint was faster" in text for outcome, text in answers if outcome == "lost"
    )
    save_ids = {name.split("-")[0] for name in own_packs(after)}
    assert save_ids == {run.newest.committed.save_id, after.manifest.save_id}
    assert all(is_same(*pair) for pair in zip(before, run.load(), strict=True))


def test_plans_that_came_too_late(run: HotLineage) -> None:
    """A plan made before another compaction took effect leaves no files, and may be made anew."""
    plan = plan_compaction(run.path, max_ratio=1.0)
    compact(run.path, max_ratio=1.3)
    with _unchanged(run), pytest.raises(CheckpointExistsError, match="nothing was changed"):
        run_compaction(plan)
    assert compact(run.path, max_ratio=1.0).is_compacted


def test_a_compaction_needs_a_lease(run: HotLineage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a prune could remove its new data files before it commits."""
    asked = []
    with monkeypatch.context() as patch:
        patch.setattr(leases.Lease, "take", lambda *args: asked.append(args))
        with _unchanged(run), pytest.raises(StoreError, match="nothing was changed: no lease can be written there"):
            compact(run.path, max_ratio=1.0)
        assert [purpose for _, purpose in asked].count("compact") == 2
    assert compact(run.path, max_ratio=1.0).is_compacted


def test_a_compaction_that_has_lost_its_lease_changes_nothing(run: HotLineage) -> None:
    """As by a process whose clock is far ahead."""

    def remove_lease(*_: int) -> None:
        for lease in Path(run.path).glob("*.compact.lease"):
            lease.unlink()

    with _unchanged(run), pytest.raises(StoreError, match="the lease of the compaction has expired or was removed"):
        compact(run.path, max_ratio=1.0, progress=remove_lease)
    assert compact(run.path, max_ratio=1.0).is_compacted


def test_saves_and_compactions_of_one_lineage_do_not_meet(run: HotLineage) -> None:
    """A delta that is saved on a head while that is compacted has it as its parent before and after."""
    plan = plan_compaction(run.path, max_ratio=1.0)
    head = run.path
    run.save(1)
    before = run.load()
    run_compaction(plan)
    assert read_checkpoint(run.path).parent == head
    assert len(read_lineage(run.path).checkpoints) == 2
    assert all(is_same(*pair) for pair in zip(before, run.load(), strict=True))


def _compact_where_files_are_small(path: str, num_bytes: int) -> str:
    torch.set_num_threads(1)
    try:
        with faults.small_files(num_bytes):
            compact(path, max_ratio=1.0, pack_bytes=PACK_BYTES)
    except StoreError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


def _in_child(fn: Any, *args: Any) -> Any:
    with FORK_SERVER.Pool(1) as pool:
        return pool.apply_async(fn, args).get(timeout=CHILD_SECS)


@pytest.mark.long
@pytest.mark.parametrize("num_bytes", [1000, 100_000])
def test_files_that_cannot_be_written(run: HotLineage, num_bytes: int) -> None:
    """Where there is no room, nothing is committed, and what was written is removed."""
    with _unchanged(run):
        assert _in_child(_compact_where_files_are_small, run.path, num_bytes) == "EFBIG"
    assert compact(run.path, max_ratio=1.0, pack_bytes=PACK_BYTES).is_compacted


def test_manifests_that_cannot_be_written(run: HotLineage, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the last file of all cannot be written, what was written before is removed, too."""

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with _unchanged(run), monkeypatch.context() as patch:
        patch.setattr(store, "link_new", fail)
        with pytest.raises(StoreError, match="no space left"):
            compact(run.path, max_ratio=1.0)


@pytest.mark.parametrize("failure", [OSError(errno.EIO, "lost power"), KeyboardInterrupt()], ids=["EIO", "Ctrl-C"])
def test_a_commit_that_took_effect_keeps_its_files(
    run: HotLineage, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    """What fails after the new manifest is there must not remove the files that this names."""
    before = run.load()
    link = os.link

    def link_and_fail(*args: Any) -> None:
        link(*args)
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", link_and_fail)
        with pytest.raises((StoreError, KeyboardInterrupt)):
            compact(run.path, max_ratio=1.0)
    after = read_checkpoint(run.path)
    assert after.is_compacted
    assert any(pack.name.startswith(after.manifest.save_id) for pack in after.manifest.packs)
    assert all(is_same(*pair) for pair in zip(before, run.load(), strict=True))


def test_a_commit_whose_fate_is_unknown_keeps_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a store that is not local, a request that failed may still arrive: no prune removes its files before."""
    root = f"memory://compaction-{os.getpid()}"
    values = [_values((400, 4), number) for number in range(3)]
    parent = hand_made.write(f"{root}/a", {"t": whole(values[0], True)})
    hand_made.write(f"{root}/b", {"t": some_rows(values[1], range(0, 400, 2))}, parent=parent)
    create = Store._create_new
    late: list[Any] = []

    def fail(*args: Any) -> None:
        late.append(args)
        raise TimeoutError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "_create_new", fail)
        patch.setattr(retries, "RETRY_SECS", 0.5)
        with pytest.raises(StoreError, match="no answer"):
            compact(f"{root}/b", max_ratio=1.0)
    assert not read_checkpoint(f"{root}/b").is_compacted
    run_prune(plan_prune(root, Keep(last=1)))
    create(*late[0])
    assert read_checkpoint(f"{root}/b").is_compacted
    expected = values[0].clone()
    expected[::2] = values[1][::2]
    assert is_same(load_table(f"{root}/b", "t"), expected)


def _die_at_write(path: str, number: int) -> None:
    """Compact, and be killed at one of the operations that write."""
    torch.set_num_threads(1)
    left = [number]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        is_write = (
            event == "open" and isinstance(args[2], int) and bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        )
        if (is_write or event in ("os.link", "os.remove")) and str(args[0]).startswith(path):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    compact(path, max_ratio=1.0, pack_bytes=PACK_BYTES)


@pytest.mark.long
def test_a_process_that_dies_at_any_file_operation(run: HotLineage) -> None:
    """Whichever is the last, the head loads; the next compaction works, if there is anything left to do."""
    before = run.load()
    outcomes = []
    for number in range(30):
        child = FORK_SERVER.Process(target=_die_at_write, args=(run.path, number), daemon=True)
        child.start()
        child.join(CHILD_SECS)
        outcomes.append((child.exitcode, read_checkpoint(run.path).is_compacted))
        assert all(is_same(*pair) for pair in zip(before, run.load(), strict=True))
        if child.exitcode == 0:
            break
    assert outcomes[0] == (-signal.SIGKILL, False)
    assert outcomes[-1] == (0, True)
    assert len(outcomes) >= 4, "a lease, packs, a manifest that is linked"
