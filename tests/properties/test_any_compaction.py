"""Any lineage that is compacted: every checkpoint loads as before."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.lineages import (
    SCHEMES,
    RandomRoot,
    Save,
)
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.maintenance.compaction import copy_rows, live_rows
from torchrec_cnr.maintenance.compaction.compact import run_compaction
from torchrec_cnr.maintenance.compaction.live_rows import pieces_of
from torchrec_cnr.maintenance.compaction.plan import CompactionPlan, plan_compaction
from torchrec_cnr.storage import pack_reader, pack_writer


@dataclass(frozen=True)
class Compact:
    """Compact a checkpoint.

    Attributes:
        head: Its number, counted from the newest.
        since: Its ancestor, counted from the oldest of the lineage; None for all of it.
        max_ratio: As it is passed on.
        self_contained: As it is passed on.
        pack_bytes: Of new packs.
    """

    head: int
    since: int | None
    max_ratio: float
    self_contained: bool
    pack_bytes: int


@dataclass(frozen=True)
class Remove:
    """Remove all that one checkpoint, counted from the newest, does not need."""

    head: int


@dataclass(frozen=True)
class Sizes:
    """Sizes made so small that there are many of everything.

    Attributes:
        block_bytes: Of values in a blob.
        window_rows: Looked at at once.
        cache_bytes: Of blobs kept.
        max_waiting: Blocks being filled.
        span_bytes: Of a request.
    """

    block_bytes: int
    window_rows: int
    cache_bytes: int
    max_waiting: int
    span_bytes: int

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Make them so."""
        with ExitStack() as stack:
            for module, name, value in (
                (pack_writer, "BLOCK_BYTES", self.block_bytes),
                (pack_reader, "_SPAN_BYTES", self.span_bytes),
                (live_rows, "WINDOW_ROWS", self.window_rows),
                (copy_rows, "BlobCache", partial(copy_rows.BlobCache, max_bytes=self.cache_bytes)),
                (copy_rows, "CACHE_BYTES", self.cache_bytes),
                (copy_rows, "_MAX_WAITING", self.max_waiting),
            ):
                stack.enter_context(mock.patch.object(module, name, value))
            yield


seeds = st.integers(0, 2**32 - 1)
saves = st.builds(Save, st.integers(0, 2), seeds, st.sampled_from([0.05, 0.5, 1.0]), st.integers(0, 3))
compactions = st.builds(
    Compact,
    st.integers(0, 1),
    st.none() | st.integers(0, 3),
    st.sampled_from([1.0, 1.0, 1.2, 3.0]),
    st.booleans(),
    st.sampled_from([1024, 4000, 10**6]),
)
removals = st.builds(Remove, st.integers(0, 1))
programs = st.lists(saves | saves | compactions | removals, min_size=3, max_size=9)
sizes = st.builds(
    Sizes,
    st.sampled_from([100, 1000, 10**4]),
    st.sampled_from([5, 50, 10**6]),
    st.sampled_from([0, 2000, 10**8]),
    st.sampled_from([0, 2, 100]),
    st.sampled_from([100, 10**6]),
)


@contextmanager
def _without_codes() -> Iterator[None]:
    """Whoever encodes or decodes a row meanwhile fails."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("rows were decoded")

    with ExitStack() as stack:
        for kind in {type(scheme) for scheme in SCHEMES}:
            for name in ("encode", "decode", "decode_into"):
                stack.enter_context(mock.patch.object(kind, name, fail))
        yield


def _compact(random_root: RandomRoot, operation: Compact) -> None:
    """Compact, and see what must be true of any compaction."""
    name = random_root.names[operation.head % len(random_root.names)]
    path, lineage = random_root.path(name), read_lineage(random_root.path(name)).checkpoints
    below = None if operation.since is None else lineage[operation.since % len(lineage)]
    since = None if below is None or below is lineage[-1] else below.store.url
    with _without_codes():
        plan = plan_compaction(
            path, since=since, max_ratio=operation.max_ratio, self_contained=operation.self_contained
        )
        after = run_compaction(plan, pack_bytes=operation.pack_bytes)
    assert after.is_compacted or not plan.is_needed
    assert (after.sha256, after.created_ns) == (lineage[-1].sha256, lineage[-1].created_ns)
    if plan.is_needed:
        assert after.parent == since
        if operation.self_contained:
            assert all(pack.directory is None for pack in after.manifest.packs)
        if operation.max_ratio == 1:
            again = plan_compaction(path, since=since, max_ratio=1.0)
            assert sum(use.dead_bytes for use in again.uses) <= _left_behind_bytes(plan)


def _left_behind_bytes(plan: CompactionPlan) -> int:
    """Row numbers that lie in another file than their rows, which are moved: nobody uses them then."""
    pieces = [piece for fqn, entry in plan.merged.tensors.items() for piece in pieces_of(fqn, entry)]
    blobs = {piece.rows.blob for piece in pieces if piece.blob.pack in plan.rewritten and piece.rows.blob is not None}
    return sum(blob.num_bytes for blob in blobs if blob.pack not in plan.rewritten)


def _live(root: Path, seed: int, program: Sequence[Save | Compact | Remove], small: Sizes) -> None:
    random_root = RandomRoot(root, seed)
    with small.applied():
        for operation in [Save(None, seed, 1.0, 1), Save(0, seed + 1, 0.5, 1), *program]:
            match operation:
                case Save():
                    random_root.check([random_root.save(operation)])
                case Compact():
                    _compact(random_root, operation)
                    random_root.check()
                case Remove(head):
                    name = random_root.names[head % len(random_root.names)]
                    assert name in random_root.remove_all_but(name)
                    random_root.check()
        random_root.check()


@settings(
    max_examples=12, derandomize=True, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow]
)  # the slow test below shrinks what fails
@given(seed=seeds, program=programs, small=sizes)
def test_every_checkpoint_loads_as_before_a_compaction(
    tmp_path_factory: pytest.TempPathFactory, seed: int, program: list[Save | Compact | Remove], small: Sizes
) -> None:
    """Whatever is compacted, and removed then, each checkpoint has the values that were stored last, bit for bit."""
    _live(tmp_path_factory.mktemp("root"), seed, program, small)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(seed=seeds, program=programs, small=sizes)
def test_many_lineages_load_as_before_a_compaction(
    tmp_path_factory: pytest.TempPathFactory, part: int, seed: int, program: list[Save | Compact | Remove], small: Sizes
) -> None:
    """As above, with many programs that change from run to run."""
    _live(tmp_path_factory.mktemp("root"), seed, program, small)
