"""Served models that follow the checkpoints of a job: what they have after each update, and what lookups see meanwhile.

What is expected is said by a dictionary of all checkpoints (``lineages.World``), or by a load of the newest one into
another model, which tests of their own hold to be right.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.inference.modules import quantize_embeddings

import torchrec_cnr as cnr
from tests.loading.test_torchrec_inference import float_model, load, load_quantized, looked_up, quantized, step_of
from tests.support import faults, hand_made, lineages, models
from tests.support.faults import flip
from tests.support.hand_made import Content, Part, some_rows
from tests.support.lineages import E, Q, Save, T, W, World, is_same
from tests.support.models import differing, torchrec_job, train, whole
from tests.support.ranks import RankPools
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.quantization import NoQuantization, Scheme
from torchrec_cnr.serving.forward_lock import ForwardLock
from torchrec_cnr.serving.update_rows import UpdateRows
from torchrec_cnr.storage.store import Store

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
]


class WorldModel(nn.Module):
    """The tensors of a world, of other values; ``has_cube`` adds one whose rows are tensors themselves."""

    def __init__(self, world: World, has_cube: bool) -> None:
        super().__init__()
        self.t, self.q = nn.Module(), nn.Module()
        for fqn in (T, E, Q, *([W] if has_cube else [])):
            module, name = fqn.split(".")
            dtype = world.quantized_dtype if fqn == Q else torch.float32
            getattr(self, module).register_buffer(name, torch.full(world.sizes[fqn], 7.0, dtype=dtype))


@contextmanager
def following(model: nn.Module, root: Any, **options: Any) -> Iterator[cnr.RowSubscriber]:
    """A subscriber without a thread."""
    subscriber = cnr.RowSubscriber(model, root, **options)
    yield subscriber
    subscriber.close()


SAVES = st.builds(
    Save,
    parent=st.sampled_from([0, 0, 0, 0, 0, 1, 2, None]),
    seed=st.integers(0, 2**32 - 1),
    density=st.sampled_from([0.0, 0.05, 0.5]),
    num_cuts=st.integers(0, 3),
)
OPERATIONS = st.lists(
    st.one_of(
        SAVES,
        st.tuples(st.just("compact"), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("leave"), st.sampled_from([0, 0, 1])),
        st.just("update"),
    ),
    min_size=2,
    max_size=12,
)


def _follow_a_world(root: Path, seed: int, has_cube: bool, operations: Sequence[Any]) -> None:
    world = World(root, seed)
    model = WorldModel(world, has_cube)
    with following(model, root, key=None) as subscriber:
        assert subscriber.update() is None
        for operation in (Save(None, seed, 1.0, 2), *operations, "update"):
            if isinstance(operation, Save):
                world.save(operation)
            elif operation == "update":
                subscriber.update()
                newest = world.names[0]
                assert subscriber.applied == world.path(newest)
                assert subscriber.update() is None
                assert subscriber.lag.num_checkpoints == 0
                for fqn, value in model.state_dict().items():
                    assert is_same(value, world.expected[newest].elements[fqn]), (newest, fqn)
            elif operation[0] == "compact":
                path = world.path(world.names[operation[1] % len(world.names)])
                cnr.compact(path, max_ratio=1.0, self_contained=operation[2], pack_bytes=world.pack_bytes)
            else:
                world.remove_all_but(world.names[operation[1] % len(world.names)])


@given(seed=st.integers(0, 99), has_cube=st.sampled_from([False, False, True]), operations=OPERATIONS)
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
def test_a_model_has_the_newest_checkpoint_after_each_update(
    tmp_path_factory: pytest.TempPathFactory, seed: int, has_cube: bool, operations: Sequence[Any]
) -> None:
    """Whatever was saved, branched, compacted and removed since: bit for bit what the dictionary has."""
    _follow_a_world(tmp_path_factory.mktemp("world"), seed, has_cube, operations)


@pytest.mark.slow
@given(seed=st.integers(0, 9999), has_cube=st.booleans(), operations=OPERATIONS)
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_many_models_have_the_newest_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, seed: int, has_cube: bool, operations: Sequence[Any]
) -> None:
    """The same, more often."""
    _follow_a_world(tmp_path_factory.mktemp("world"), seed, has_cube, operations)


TABLES = {f"model.ebc.embedding_bags.t{i}.weight": (rows, 8) for i, rows in enumerate((37, 24, 5))} | {
    "model.ec.embeddings.t0.weight": (29, 8)
}
DENSE = {"model.over.weight": (1, 32), "model.over.bias": (1,)}
SCHEMES: tuple[Scheme, ...] = (cnr.Asymmetric(4), cnr.Symmetric(3), NoQuantization(), cnr.KMeans(2))


def _save_tables(path: Path, seed: int, scheme: Scheme, parent: Checkpoint | None, density: float) -> Checkpoint:
    """The tables of ``float_model`` with random rows, in two shards of rows each, and its dense layer."""
    generator = torch.Generator().manual_seed(seed)
    contents = {fqn: hand_made.whole(torch.randn(size, generator=generator)) for fqn, size in DENSE.items()}
    for fqn, (num_rows, num_cols) in TABLES.items():
        cut = int(torch.randint(1, num_rows, (), generator=generator))
        parts = []
        for first, stop in ((0, cut), (cut, num_rows)):
            values = torch.randn(stop - first, num_cols, generator=generator)
            chosen = (torch.rand(len(values), generator=generator) < density).nonzero().squeeze(1).tolist()
            rows = None if parent is None else hand_made.mask_of(chosen, len(values))
            parts.append(Part(Box((first, 0), (len(values), num_cols)), values, rows, scheme))
        contents[fqn] = Content((num_rows, num_cols), tuple(parts), is_table=True)
    return hand_made.write(path, contents, parent=parent)


@given(
    bits=st.sampled_from([torch.qint8, torch.quint4x2, torch.float16]),
    saves=st.lists(
        st.tuples(
            st.sampled_from([0, 0, 0, 1, None]), st.sampled_from(SCHEMES), st.sampled_from([0.0, 0.3, 1]), st.booleans()
        ),
        min_size=1,
        max_size=8,
    ),
)
@settings(max_examples=8)
def test_a_quantized_model_has_what_a_load_would_give(
    tmp_path_factory: pytest.TempPathFactory, bits: torch.dtype, saves: Sequence[tuple[Any, Scheme, float, bool]]
) -> None:
    """Rows of all schemes, codes taken over where they fit, also of several deltas at once and of branches."""
    root = tmp_path_factory.mktemp("run")
    model, fresh = quantized(float_model(1), bits), quantized(float_model(2), bits)
    saved = [_save_tables(root / "first", 99, cnr.Asymmetric(4), None, 1.0)]
    with following(model, root) as subscriber:
        for number, (parent, scheme, density, is_looked_at) in enumerate([*saves, (0, SCHEMES[0], 0.3, True)]):
            below = None if parent is None else saved[-1 - parent % len(saved)]
            saved.append(_save_tables(root / str(number), number, scheme, below, density))
            if not is_looked_at:
                continue
            before = looked_up(model)
            subscriber.update()
            expected, got = load_quantized(fresh, root / str(number)), looked_up(model)
            assert all(torch.equal(got[table], rows) for table, rows in expected.items())
            assert torch.equal(model.over.weight, fresh.over.weight)
            assert subscriber.update() is None
            assert density == 0 or any(not torch.equal(got[table], rows) for table, rows in before.items())


def _save_rows(path: Path, parent: Checkpoint | None, rows: Sequence[int]) -> Checkpoint:
    """A table of 40 rows in which only some are stored, with values of their own."""
    values = torch.randn(40, 8, generator=torch.Generator().manual_seed(int(path.name)))
    return hand_made.write(
        path, {"t": hand_made.whole(values, True) if parent is None else some_rows(values, rows)}, parent=parent
    )


def test_deltas_of_one_baseline_follow_one_another(tmp_path: Path) -> None:
    """One that holds all rows applied since the baseline is applied by itself; one that lacks some is not enough."""
    model, kinds = nn.Module(), []
    model.register_buffer("t", torch.zeros(40, 8))
    baseline = _save_rows(tmp_path / "0", None, ())
    saved = [_save_rows(tmp_path / "1", baseline, (1, 2))]
    with following(model, tmp_path, key=None) as subscriber:
        for number, (is_on_baseline, rows) in enumerate(
            [(True, (1, 2, 3)), (False, (9,)), (True, (1, 2, 3, 8, 9)), (True, (1, 2, 3, 8)), (True, (1, 2, 3, 8))], 2
        ):
            subscriber.update()
            saved.append(_save_rows(tmp_path / str(number), baseline if is_on_baseline else saved[-1], rows))
            applied = subscriber.update()
            assert applied is not None
            kinds.append((applied.kind, applied.num_rows))
            assert torch.equal(model.t, cnr.load_table(tmp_path / str(number), "t"))
    assert kinds == [("delta", 3), ("delta", 1), ("delta", 5), ("baseline", 40), ("delta", 4)]


NUM_ROWS, DIM = 3000, 8


class Served(nn.Module):
    """Two tables whose rows all say which step they are of."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=NUM_ROWS, feature_names=[name])
            for name in ("a", "b")
        ]
        self.ebc = EmbeddingBagCollection(tables=tables)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """[rows, 2 * DIM]."""
        return torch.as_tensor(self.ebc(features).values())


def _all_rows() -> KeyedJaggedTensor:
    ids = torch.arange(NUM_ROWS).repeat(2)
    return KeyedJaggedTensor.from_lengths_sync(["a", "b"], ids, torch.ones(2 * NUM_ROWS, dtype=torch.int64))


def _save_step(root: Path, step: int, parent: Checkpoint | None) -> Checkpoint:
    rows = torch.full((NUM_ROWS, DIM), float(step))
    contents = {
        f"model.ebc.embedding_bags.{name}.weight": hand_made.whole(rows, is_table=True)
        if parent is None
        else some_rows(rows, range(NUM_ROWS))
        for name in ("a", "b")
    }
    return hand_made.write(root / f"step-{step}", contents, parent=parent)


def _swap_in_halves(self: UpdateRows) -> None:
    """As it is, but slowly enough that a lookup which does not wait falls in between."""
    half = len(self.rows) // 2
    self.tensor.index_copy_(0, self.rows[:half], self.values[:half])
    time.sleep(0.003)
    self.tensor.index_copy_(0, self.rows[half:], self.values[half:])


def _torn_lookups(root: Path, model: nn.Module, num_steps: int, look_up: Callable[[], Tensor]) -> tuple[int, int]:
    """Look all rows up while steps are applied; how many lookups there were, and how many saw several steps."""
    newest, steps, num_torn = _save_step(root, 0, None), [], 0
    is_over = threading.Event()

    def look() -> None:
        nonlocal num_torn
        while not is_over.is_set():
            with torch.no_grad():
                rows = look_up()
            steps.append(float(rows[0, 0]))
            num_torn += bool((rows != rows[0, 0]).any())

    with following(model, root) as subscriber:
        subscriber.update()
        thread = threading.Thread(target=look)
        thread.start()
        try:
            for step in range(1, num_steps):
                newest = _save_step(root, step, newest)
                applied = subscriber.update()
                assert applied is not None
                assert (applied.kind, applied.num_rows) == ("delta", 2 * NUM_ROWS)
        finally:
            is_over.set()
            thread.join()
    assert len(set(steps)) > 1
    assert steps == sorted(steps)
    return len(steps), num_torn


@pytest.mark.parametrize("kind", ["float", "quantized", "a module within"])
def test_no_lookup_sees_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Hundreds of deltas while all rows are looked up: each lookup is of one step, in both tables."""
    monkeypatch.setattr(UpdateRows, "swap_in", _swap_in_halves)
    model = quantize_embeddings(Served(), torch.qint8, inplace=False) if kind == "quantized" else Served()
    features = _all_rows()
    look_up = (lambda: model.ebc(features).values()) if kind == "a module within" else (lambda: model(features))
    num_lookups, num_torn = _torn_lookups(tmp_path, model, 150, look_up)
    assert num_lookups > 50
    assert num_torn == 0


def test_without_the_lock_lookups_are_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above sees what it looks for: with nothing to hold lookups off, some see two steps."""
    monkeypatch.setattr(UpdateRows, "swap_in", _swap_in_halves)
    monkeypatch.setattr(ForwardLock, "exclusive", lambda self: nullcontext())
    model, features = Served(), _all_rows()
    assert _torn_lookups(tmp_path, model, 60, lambda: model(features))[1] > 0


def _serve_on_ranks(rank: int, root: str, shardings: Sequence[str], served: str) -> list[str]:
    """A job that is resumed with one sharding after another, followed by a model with its own."""
    target = torchrec_job(50, served)
    small = quantized(float_model(60 + rank), torch.qint8)
    kinds, number = [], 0
    with following(target.model, root) as subscriber, following(small, root) as quantizing:
        for sharding in shardings:
            job = torchrec_job(number, sharding)
            tracker = cnr.RowTracker(job.model)
            planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
            if number:
                dcp.load(
                    {"model": job.model.state_dict()},
                    storage_reader=cnr.CNRStorageReader(f"{root}/{number - 1}"),
                    planner=cnr.CNRLoadPlanner(tracker),
                )
            for _ in range(2):
                train(job, number)
                path = f"{root}/{number}"
                writer = models.writer(path, quantization=cnr.Asymmetric(8))
                dcp.save({"model": job.model.state_dict()}, storage_writer=writer, planner=planner)
                applied = subscriber.update()
                assert applied is not None
                kinds.append(applied.kind)
                fresh = torchrec_job(70, served)
                dcp.load(
                    {"model": fresh.model.state_dict()},
                    storage_reader=cnr.CNRStorageReader(path),
                    planner=cnr.CNRLoadPlanner(),
                )
                expected, got = whole({"model": fresh.model.state_dict()}), whole({"model": target.model.state_dict()})
                assert differing(got, expected) == []
                assert quantizing.update() is not None
                number += 1
            tracker.close()
        _assert_close(small, f"{root}/{number - 1}")
    return kinds


def _assert_close(model: nn.Module, path: str) -> None:
    trained = float_model(101)
    planner = cnr.CNRLoadPlanner(allow_partial_load=True)
    reader = cnr.CNRStorageReader(path)
    dcp.load({"model": trained.state_dict()}, storage_reader=reader, planner=planner, no_dist=True)
    for table, rows in looked_up(trained).items():
        assert bool(((looked_up(model)[table] - rows).abs() <= step_of(rows, 8) * 1.01 + 1e-6).all()), table


@pytest.mark.parametrize(
    ("shardings", "served"), [(("row", "column"), "table"), (("table", "row"), "column"), (("mixed", "table"), "row")]
)
def test_a_sharded_model_follows_a_job_that_is_sharded_otherwise(
    tmp_path: Path, rank_pool: RankPools, shardings: Sequence[str], served: str
) -> None:
    """Each rank applies its own shards, also when the job goes on with another sharding; deltas stay deltas."""
    for kinds in rank_pool(2).run(_serve_on_ranks, str(tmp_path), shardings, served):
        assert kinds == ["baseline", "delta", "delta", "delta"]


def test_a_damaged_delta_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    """It is named in a typed error, as often as it is tried; the next one on a good parent is applied."""
    model = quantized(float_model(1), torch.qint8)
    good = _save_tables(tmp_path / "0", 0, SCHEMES[0], None, 1.0)
    with following(model, tmp_path) as subscriber:
        subscriber.update()
        before = looked_up(model)
        bad = _save_tables(tmp_path / "1", 1, SCHEMES[0], good, 0.5)
        flip(next((tmp_path / "1").glob("*.safetensors")), -3)
        for _ in range(2):
            with pytest.raises(cnr.DamagedError, match="crc32c"):
                subscriber.update()
            assert all(torch.equal(rows, before[table]) for table, rows in looked_up(model).items())
            assert (subscriber.applied, subscriber.lag.num_checkpoints) == (str(tmp_path / "0"), 1)
            assert isinstance(subscriber.failure, cnr.DamagedError)
        _save_tables(tmp_path / "2", 2, SCHEMES[0], bad, 0.5)
        with pytest.raises(cnr.DamagedError, match="crc32c"):
            subscriber.update()
        _save_tables(tmp_path / "3", 3, SCHEMES[0], good, 0.5)
        applied = subscriber.update()
        assert applied is not None
        assert (applied.kind, applied.num_checkpoints, subscriber.failure) == ("delta", 1, None)
    expected = load_quantized(quantized(float_model(2), torch.qint8), tmp_path / "3")
    assert all(torch.equal(rows, expected[table]) for table, rows in looked_up(model).items())


def test_what_is_damaged_is_passed_over_for_what_is_not(tmp_path: Path) -> None:
    """The newest that can be read is applied, and the error comes when nothing is left to do."""
    model = float_model(1)
    first = _save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    second = _save_tables(tmp_path / "1", 1, SCHEMES[2], first, 0.5)
    _save_tables(tmp_path / "2", 2, SCHEMES[2], second, 0.5)
    (tmp_path / "2" / "manifest.json").write_bytes(b"{}")
    with following(model, tmp_path) as subscriber:
        applied = subscriber.update()
        assert applied is not None
        assert applied.path == str(tmp_path / "1")
        with pytest.raises(cnr.DamagedError):
            subscriber.update()
    expected = load(float_model(2), tmp_path / "1")
    assert all(torch.equal(rows, expected[table]) for table, rows in looked_up(model).items())


def test_what_is_damaged_after_it_was_applied_stays_applied(tmp_path: Path) -> None:
    """Nothing needs to be read of it any more, so that nothing is wrong."""
    _save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    with following(float_model(1), tmp_path) as subscriber:
        subscriber.update()
        (tmp_path / "0" / "manifest.json").write_bytes(b"{}")
        assert subscriber.update() is None
        assert (subscriber.lag.num_checkpoints, subscriber.failure) == (0, None)


@pytest.mark.parametrize("loses_packs", [False, True])
def test_a_compaction_behind_its_back(tmp_path: Path, loses_packs: bool) -> None:
    """Links are read as they were committed if they are there still; else the lineage is read as it is now."""
    run = lineages.Run(tmp_path, cnr.Asymmetric(4))
    model = nn.Module()
    model.register_buffer("t", torch.zeros(lineages.ROWS, lineages.COLS))
    with following(model, tmp_path, key=None) as subscriber:
        run.save(1)
        assert subscriber.update() is not None
        run.save(3)
        cnr.compact(run.path, self_contained=True, max_ratio=1.0)
        if loses_packs:
            lineages.remove_all_but(run.path)
        applied = subscriber.update()
        assert applied is not None
        assert (applied.kind, applied.num_checkpoints) == (("baseline", 1) if loses_packs else ("delta", 3))
    assert torch.equal(model.t, run.load()[0])


def test_a_checkpoint_that_was_replaced_under_its_name(tmp_path: Path) -> None:
    """Another one in the same directory, as after a restart that cleared it, is found and applied whole."""
    model = float_model(1)
    first = _save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    _save_tables(tmp_path / "1", 1, SCHEMES[2], first, 0.5)
    with following(model, tmp_path) as subscriber:
        subscriber.update()
        for file in (tmp_path / "1").iterdir():
            file.unlink()
        _save_tables(tmp_path / "1", 2, SCHEMES[2], first, 0.5)
        applied = subscriber.update()
        assert applied is not None
        assert (applied.path, applied.kind, applied.num_checkpoints) == (str(tmp_path / "1"), "baseline", 2)
    expected = load(float_model(2), tmp_path / "1")
    assert all(torch.equal(rows, expected[table]) for table, rows in looked_up(model).items())


def test_pieces_of_quantized_rows_are_not_enough(tmp_path: Path) -> None:
    """A delta that has some columns of a row only is quantized from the whole lineage, as a load does it."""
    fqn, size = "model.ebc.embedding_bags.a.weight", (NUM_ROWS, DIM)
    boxes = (Box((0, 0), (NUM_ROWS, 4)), Box((0, 4), (NUM_ROWS, 4)))
    generator = torch.Generator().manual_seed(0)

    def save(number: int, parent: Checkpoint | None, rows: Sequence[Sequence[int]]) -> Checkpoint:
        parts = [
            Part(box, torch.randn(box.sizes, generator=generator), mask, NoQuantization())
            for box, chosen in zip(boxes, rows, strict=True)
            for mask in [None if parent is None else hand_made.mask_of(chosen, NUM_ROWS)]
        ]
        other = {"model.ebc.embedding_bags.b.weight": hand_made.whole(torch.ones(size), is_table=True)}
        content = {fqn: Content(size, tuple(parts), is_table=True), **other}
        return hand_made.write(tmp_path / str(number), content, parent=parent)

    model, fresh = (quantize_embeddings(Served(), torch.qint8, inplace=False) for _ in range(2))
    newest = first = save(0, None, ((), ()))
    kinds = []
    with following(model, tmp_path) as subscriber:
        columns: list[tuple[Sequence[int], Sequence[int], bool]] = [
            ((1, 5), (1, 5), False),
            ((1, 5, 6), (1, 5, 6), True),
            ((1, 5), (1, 9), False),
            ((7, 8), (7, 8), False),
        ]
        for number, (left, right, is_on_first) in enumerate(columns, 1):
            subscriber.update()
            newest = save(number, first if is_on_first else newest, (left, right))
            applied = subscriber.update()
            assert applied is not None
            kinds.append(applied.kind)
            planner = cnr.CNRLoadPlanner(inference=cnr.InferenceTables(fresh))
            reader = cnr.CNRStorageReader(newest.store.url)
            dcp.load({"model": fresh.state_dict()}, storage_reader=reader, planner=planner)
            assert torch.equal(model(_all_rows()), fresh(_all_rows()))
    assert kinds == ["delta", "delta", "baseline", "delta"]


def _wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_thread_follows_until_it_is_closed(tmp_path: Path) -> None:
    """It applies what comes, logs and outlives what it cannot apply, tells of each update, and ends."""
    model, told = float_model(1), []
    first = _save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    with cnr.RowSubscriber(model, tmp_path, interval_secs=0.01, on_applied=told.append) as subscriber:
        assert [applied.path for applied in told] == [str(tmp_path / "0")]
        with pytest.raises(cnr.ConfigurationError, match="follows already"):
            subscriber.start()
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "manifest.json").write_bytes(b"{}")
        _wait_until(lambda: subscriber.failure is not None)
        (tmp_path / "1" / "manifest.json").unlink()
        second = _save_tables(tmp_path / "2", 2, SCHEMES[2], first, 0.5)
        _wait_until(lambda: len(told) == 2)
        _wait_until(lambda: subscriber.failure is None)
    assert (told[1].sha256, told[1].kind) == (second.sha256, "delta")
    assert not any(thread.name == "cnr-follow" for thread in threading.enumerate())
    assert "forward" not in vars(model)
    with pytest.raises(cnr.ConfigurationError, match="closed"):
        subscriber.update()


def test_a_failure_that_lasts_is_raised_at_the_end(tmp_path: Path) -> None:
    """Who leaves the block learns that the model is not what it should be; what he raised himself goes first."""
    _save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)

    def follow(failing: type[Exception] | None) -> None:
        with cnr.RowSubscriber(float_model(1), tmp_path, interval_secs=0.01) as subscriber:
            (tmp_path / "1").mkdir(exist_ok=True)
            (tmp_path / "1" / "manifest.json").write_bytes(b"{}")
            _wait_until(lambda: subscriber.failure is not None)
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
    first = _save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    with cnr.RowSubscriber(model, markers, interval_secs=600) as subscriber:
        assert (subscriber.applied, subscriber.lag) == (None, cnr.Lag(0, 0.0, None))
        markers.found.append(cnr.Commit(first.store.url, first.created_ns))
        markers.news.set()
        _wait_until(lambda: subscriber.applied == first.store.url)


def test_lag_is_what_is_not_applied(tmp_path: Path) -> None:
    """It counts checkpoints, and the time since the oldest of them."""
    first = _save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    with following(float_model(1), tmp_path) as subscriber:
        subscriber.update()
        assert subscriber.lag.num_checkpoints == 0
        assert subscriber.lag.age_secs == pytest.approx((time.time_ns() - first.created_ns) / 1e9, abs=5)
        newest = first
        for number in range(1, 4):
            newest = _save_tables(tmp_path / str(number), number, SCHEMES[2], newest, 0.5)
            flip(next((tmp_path / str(number)).glob("*.safetensors")), -3)
        with pytest.raises(cnr.DamagedError):
            subscriber.update()
        assert subscriber.lag.num_checkpoints == 3
        assert 0 < subscriber.lag.waiting_secs <= (subscriber.lag.age_secs or 0)


def test_looking_costs_nothing_where_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a root has come to rest, no file is read and nothing is listed; a new checkpoint is read alone."""
    first = _save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    _save_tables(tmp_path / "1", 1, SCHEMES[2], first, 0.5)
    commits = cnr.RootCommits(tmp_path)
    time.sleep(1.1)
    assert len(commits.newest_first()) == 2
    used: list[str] = []
    read, listing = Store.read, Store.listing
    monkeypatch.setattr(Store, "read", lambda self, *args: used.append(self.path) or read(self, *args))
    monkeypatch.setattr(Store, "listing", lambda self: used.append("listing") or listing(self))
    assert len(commits.newest_first()) == 2
    assert used == []
    _save_tables(tmp_path / "2", 2, SCHEMES[2], first, 0.5)
    used.clear()
    assert commits.newest_first()[0].path == str(tmp_path / "2")
    assert used == ["listing", str(tmp_path / "2")]


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """What checkpoints do not have, or have otherwise, is an error, and nothing is overwritten."""
    _save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    model = nn.Module()
    model.over, model.other = nn.Linear(32, 1), nn.Linear(2, 2)
    before = model.over.weight.detach().clone()
    with following(model, tmp_path) as subscriber, pytest.raises(cnr.StateMismatchError, match="allow_partial_load"):
        subscriber.update()
    with following(float_model(1), tmp_path, key="modle") as subscriber, pytest.raises(cnr.StateMismatchError):
        subscriber.update()
    model.over.bias = nn.Parameter(torch.zeros(3))
    with following(model, tmp_path, allow_partial_load=True) as subscriber, pytest.raises(cnr.StateMismatchError):
        subscriber.update()
    assert torch.equal(model.over.weight, before)
    with pytest.raises(cnr.ConfigurationError, match="interval_secs"):
        cnr.RowSubscriber(model, tmp_path, interval_secs=0)


def test_a_forward_that_fails_holds_nothing_off(tmp_path: Path) -> None:
    """The next swap does not wait for it; from within a forward, none can be waited for."""
    _save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    model = float_model(1)
    with following(model, tmp_path) as subscriber:
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever TorchRec says to this
            model("nothing")
        with subscriber.looking_up(), pytest.raises(cnr.ConfigurationError, match="within a lookup"):
            subscriber.update()
        assert subscriber.update() is not None


def test_a_lookup_may_wait_for_another_one() -> None:
    """A lookup that one which has begun waits for, in another thread, is not held off for ever."""
    lookups, done = ForwardLock(), []

    def swap() -> None:
        with lookups.exclusive():
            done.append("swap")

    def look() -> None:
        with lookups.shared():
            done.append("lookup")

    swapping, looking = threading.Thread(target=swap), threading.Thread(target=look)
    with lookups.shared():
        swapping.start()
        _wait_until(lambda: lookups._num_waiting == 1)
        looking.start()
        looking.join(30)
        assert done == ["lookup"]
    swapping.join(30)
    assert done == ["lookup", "swap"]


def test_a_swap_that_fails_is_made_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a swap ended half-way, everything is read again at the next update."""
    first = _save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    model = float_model(1)
    with following(model, tmp_path) as subscriber:
        subscriber.update()
        _save_tables(tmp_path / "1", 1, SCHEMES[2], first, 0.5)
        with monkeypatch.context() as patch:
            patch.setattr(UpdateRows, "swap_in", faults.raising("swap"))
            with pytest.raises(faults.InjectedError):
                subscriber.update()
        applied = subscriber.update()
        assert applied is not None
        assert applied.kind == "baseline"
    expected = load(float_model(2), tmp_path / "1")
    assert all(torch.equal(rows, expected[table]) for table, rows in looked_up(model).items())
