"""What a notebook shows of public objects: one short line that says what they are."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import KeyedOptimizer

import torchrec_cnr as cnr
from tests.support import models
from torchrec_cnr.human_text import url_text
from torchrec_cnr.storage.store import Store
from torchrec_cnr.tracking import row_tracker

MAX_CHARS = 200
PROTOCOLS = {"Commits", "Policy", "Quantization", "Scheme"}
SECRET = "hunter2"
NOW_NS = 1_795_000_000 * 10**9

CLASSES = {name for name in cnr.__all__ if inspect.isclass(getattr(cnr, name))}
ERRORS = {name for name in CLASSES if issubclass(getattr(cnr, name), Exception)}
VALUES: Mapping[str, Any] = {
    "AdaptiveAsymmetric": cnr.AdaptiveAsymmetric(4, cnr.GreedySearch()),
    "Asymmetric": cnr.Asymmetric(8),
    "Background": cnr.Background(cpu_share=0.5),
    "ByErrorBudget": cnr.ByErrorBudget(3),
    "ByExpectedRestores": cnr.ByExpectedRestores(3),
    "Best": cnr.Best("loss", largest=False),
    "Compacted": cnr.Compacted(),
    "Consecutive": cnr.Consecutive(),
    "Full": cnr.Full(),
    "GreedySearch": cnr.GreedySearch(),
    "HalfPrecision": cnr.HalfPrecision(),
    "Intermittent": cnr.Intermittent(),
    "KMeans": cnr.KMeans(4),
    "KafkaRows": cnr.KafkaRows("host:9092", "rows", compacted=True, config={"sasl.password": SECRET}),
    "Keep": cnr.Keep(daily=7, best=cnr.Best("auc")),
    "LeastSquares": cnr.LeastSquares((0.1, 0.2)),
    "NoQuantization": cnr.NoQuantization(),
    "OneShot": cnr.OneShot(),
    "Preemption": cnr.Preemption(),
    "Prune": cnr.Prune(NOW_NS, "step-1", 2000),
    "RandomState": cnr.RandomState(),
    "Symmetric": cnr.Symmetric(2),
    "TransformCoded": cnr.TransformCoded(cnr.AdaptiveAsymmetric(3)),
}


def _quantized_model() -> torch.nn.Module:
    table = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=1200, feature_names=["f"])
    return quantize_embeddings(torch.nn.Sequential(EmbeddingBagCollection(tables=[table])), torch.qint8, inplace=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Any]]:
    """An object of each public class, by the name of the class: those of a job, and what functions return."""
    root = tmp_path_factory.mktemp("reprs") / "job"
    job = models.plain_job(0, rows=(1000, 12))
    tracker = cnr.RowTracker(job.model)
    manager = cnr.CheckpointManager(root, tracker, policy=cnr.Consecutive(), keep=cnr.Keep(last=1))
    saved = None
    for step in (100, 200):
        models.train(job, step)
        saved = manager.save(step, models.state(job))
    path, first = root / "step-200", root / "step-100"
    planner = cnr.CNRLoadPlanner(tracker)
    reader = cnr.CNRStorageReader(path)
    torch.distributed.checkpoint.load(models.state(job), storage_reader=reader, planner=planner)
    tracker.mark("bag", torch.arange(7))
    serving = models.plain_job(1, rows=(1000, 12))
    subscriber = cnr.RowSubscriber(serving.model, root, key="model", allow_partial_load=True)
    prune_plan = cnr.plan_prune(root, cnr.Keep(last=1))
    values = [
        *(getattr(cnr, name)("it failed") for name in ERRORS),
        tracker,
        manager,
        saved,
        planner,
        reader,
        cnr.LocalCopies(root.parent / "copies"),
        cnr.LocalCheckpoints("/dev/shm/run", every_secs=1.0),
        cnr.CNRSavePlanner(),
        cnr.CNRStorageWriter(root / "step-300", quantization=cnr.AdaptiveAsymmetric(4)),
        subscriber,
        subscriber.update(),
        subscriber.lag,
        cnr.InferenceTables(_quantized_model()),
        cnr.ReaderState([1, 2, 3]),
        cnr.ParamGroups(KeyedOptimizer({}, {}, [])),
        planner.report,
        cnr.read_checkpoint(path),
        cnr.plan_compaction(path),
        prune_plan,
        cnr.execute(prune_plan),
        cnr.PrunedCheckpoint("step-1", NOW_NS, "delta", 2000, 300, 1000, "../step-0", None, NOW_NS),
        cnr.Commit(str(path), NOW_NS),
        cnr.RootCommits(root),
        cnr.verify(path),
        cnr.compare(first, path),
        cnr.export(path, root.parent / "out.pt", to="torch"),
    ]
    yield VALUES | {type(value).__name__: value for value in values}
    subscriber.close()
    manager.close()
    tracker.close()


@pytest.mark.parametrize("name", sorted(CLASSES - PROTOCOLS))
def test_a_repr_is_one_short_line(made: Mapping[str, Any], name: str) -> None:
    """It names the class and no address of memory, and is short enough to be read; no class is left out."""
    text = repr(made[name])
    assert text.startswith(f"{name}(")
    assert len(text) <= MAX_CHARS
    assert text.isprintable()
    assert " at 0x" not in text
    assert SECRET not in text


@pytest.mark.parametrize("name", sorted(PROTOCOLS))
def test_protocols_have_no_objects(name: str) -> None:
    """Only protocols are left out above."""
    assert getattr(getattr(cnr, name), "_is_protocol", False)


@pytest.mark.parametrize("name", sorted(VALUES.keys() - {"KafkaRows"}))
def test_the_repr_of_a_value_makes_it_again(name: str) -> None:
    """Policies, schemes and rules can be copied out of a notebook into code."""
    assert (
        eval(repr(VALUES[name]), {**vars(cnr), "torch": torch, **{n: getattr(cnr, n) for n in CLASSES}}) == VALUES[name]
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (cnr.Keep(), "Keep(last=3)"),
        (cnr.Keep(last=0, daily="all", tagged=False), "Keep(last=0, daily='all', tagged=False)"),
        (cnr.Keep(best=cnr.Best("loss", largest=False)), "Keep(last=3, best=Best(metric='loss', largest=False))"),
        (VALUES["KafkaRows"], "KafkaRows(bootstrap='host:9092', topic='rows', compacted=True)"),
        (cnr.Compacted(), "Compacted(max_deltas=64, max_ratio=1.16)"),
        (cnr.Saved(1, "s3://u@b/x?sig=1", "delta", 12_345_678, 1234, 0.1, 1.5, None, 0),  # type: ignore[arg-type]
         "Saved(step 1, delta, 1,234 rows, 12.3 MB, 1.50 s, s3://b/x)"),
        (cnr.Commit("/job/step-1", NOW_NS), "Commit(/job/step-1, 2026-11-18 11:06:40 UTC)"),
        (cnr.Commit("/job/step-1", float("inf")), "Commit(/job/step-1, at an unknown time)"),
        (cnr.Lag(2, 3.0, 12.5), "Lag(2 checkpoints behind for 3.00 s, applied commit is 12.5 s old)"),
        (cnr.Lag(0, 0.0, None), "Lag(0 checkpoints behind for 0 s, nothing applied)"),
        (cnr.PruneResult(("a",), 0, {"c": ("why",)}), "PruneResult(removed 1 checkpoint, freed 0 B, 1 failed)"),
        (cnr.Export(("a",), 12_000, ("b",)), "Export(1 file, 12.0 KB, 1 left out)"),
        (cnr.LoadReport("/a", ("x",), missing=("y", "z")), "LoadReport(1 loaded, 2 missing, /a)"),
        (cnr.VerifyReport(("a",), ("a", "b"), 3, 12_000, ()), "VerifyReport(2 checkpoints, 12.0 KB, 0 problems)"),
        (cnr.CNRLoadPlanner(allow_partial_load=True), "CNRLoadPlanner(no tracker, allow_partial_load=True)"),
        (cnr.CNRSavePlanner(), "CNRSavePlanner(no tracker, policy=Full())"),
        (cnr.CNRStorageReader("memory:///job/step-1"), "CNRStorageReader(memory:///job/step-1)"),
        (cnr.CNRStorageWriter("memory:///job/step-1", quantization={"*": cnr.Symmetric(4)}),
         "CNRStorageWriter(memory:///job/step-1, 1 pattern)"),
    ],
    ids=lambda value: value.partition("(")[0] if isinstance(value, str) else "",
)  # fmt: skip
def test_reprs_say_what_matters(value: Any, expected: str) -> None:
    """Only what was set, sizes in human units, and no credentials."""
    assert repr(value) == expected


def test_reprs_of_a_job(made: Mapping[str, Any]) -> None:
    """They count what the job has."""
    root = url_text(Store.open(made["CheckpointManager"]._root).url)
    checkpoint, tracker = made["Checkpoint"], made["RowTracker"]
    assert repr(tracker) == f"RowTracker(2 tables, {tracker.num_modified} of 1,012 rows modified)"
    assert tracker.num_modified == 7
    assert repr(made["CheckpointManager"]) == f"CheckpointManager({root}, newest step-200, keep=Keep(last=1))"
    assert repr(checkpoint).startswith(f"Checkpoint(delta, {checkpoint.num_rows} rows, ")
    assert repr(checkpoint).endswith(f" KB, {url_text(checkpoint.store.url)})")
    assert repr(made["InferenceTables"]) == "InferenceTables(1 table, 1,200 rows)"
    assert repr(made["CNRLoadPlanner"]) == "CNRLoadPlanner(with a tracker)"
    assert repr(made["RowSubscriber"]).startswith(f"RowSubscriber({url_text(checkpoint.store.url)}, Lag(0 checkpoints")
    assert repr(made["CompactionPlan"]).startswith("CompactionPlan(merges 2 checkpoints, rewrites ")


def test_a_tracker_has_a_repr_at_all_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also once it is closed, and where its device fails; it waits for a device once, however many tables there are."""
    tracker = cnr.RowTracker(models.plain_job(0).model)
    tracker.mark("bag", torch.arange(3))
    waits: list[int] = []
    convert = torch.Tensor.__int__
    monkeypatch.setattr(torch.Tensor, "__int__", lambda tensor: waits.append(1) or convert(tensor))
    assert repr(tracker) == "RowTracker(2 tables, 3 of 52 rows modified)"
    assert len(waits) == 1
    tracker.close()
    assert repr(tracker) == "RowTracker(2 tables, 3 of 52 rows modified, closed)"

    def fail(_: Any) -> int:
        raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr(row_tracker.RowTracker, "num_modified", property(fail))
    assert repr(tracker) == "RowTracker(2 tables, ? of 52 rows modified, closed)"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("/data/a@b?c", "/data/a@b?c"),
        (f"https://user:{SECRET}@host/a", "https://host/a"),
        (f"https://host/a?sig={SECRET}", "https://host/a"),
        (f"simplecache::sftp://{SECRET}@host/a", "simplecache::sftp://host/a"),
        ("/a\nb", "/a\\nb"),
        ("/data/" + 60 * "x", "…" + 59 * "x"),
    ],
)
def test_urls_are_shown_without_credentials(url: str, expected: str) -> None:
    """On one line, of at most 60 characters, the end of long ones."""
    assert url_text(url) == expected
