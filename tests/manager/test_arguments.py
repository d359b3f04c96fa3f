"""Arguments that cannot work are refused at once and by name, before anything is saved or begun."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import torchrec_cnr as cnr
from tests.support.models import plain_job, state, train
from tests.support.ranks import RankPools

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

MANAGER: list[dict[str, Any]] = [
    {"background": "skip"},
    {"policy": "full"},
    {"policy": cnr.Compacted},
    {"keep": 3},
    {"every_secs": "10"},
    {"every_steps": "10"},
    {"every_steps": 1.5},
    {"every_steps": True},
    {"num_retries": -1},
    {"num_retries": "2"},
    {"thread_count": "2"},
    {"timeout_secs": "1800"},
    {"timeout_secs": -1.0},
    {"timeout_secs": 1e10},
    {"every_secs": 1e10},
    {"quantization": 4},
    {"quantization": cnr.AdaptiveAsymmetric},
    {"row_log": "localhost:9092"},
    {"on_saved": "print"},
    {"on_progress": 3},
]


@pytest.mark.parametrize("options", MANAGER, ids=str)
def test_a_manager_names_the_argument(tmp_path: Path, options: dict[str, Any]) -> None:
    """And has begun nothing."""
    tracker = cnr.RowTracker(plain_job(1).model)
    threads = threading.active_count()
    with pytest.raises(cnr.ConfigurationError, match=f"'{next(iter(options))}' must be"):
        cnr.CheckpointManager(tmp_path / "run", tracker, **options)
    assert threading.active_count() == threads
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"when_busy": "drop"},
        {"cpu_share": "1"},
        {"cpu_share": 0},
        {"max_bytes_per_sec": 0},
        {"max_bytes_per_sec": "1e6"},
        {"staging_bytes": "8"},
        {"compacts": "no"},
    ],
    ids=str,
)
def test_settings_of_the_background_name_the_argument(options: dict[str, Any]) -> None:
    """Before a manager is made with them."""
    with pytest.raises(cnr.ConfigurationError, match=f"'{next(iter(options))}' must be"):
        cnr.Background(**options)


def test_ranks_with_different_arguments(tmp_path: Path, rank_pool: RankPools) -> None:
    """All are told which one differs, before one of them waits for others that do something else."""
    found = rank_pool(2).run(_made_with_different_arguments, str(tmp_path))
    assert found[0] == found[1]
    assert [text.partition(" must be")[0] for text in found[0]] == [
        "'num_retries'",
        "'when_busy'",
        "'every_steps'",
        "'every_secs'",
        "'timeout_secs'",
    ]
    assert found[0][0].endswith("(got 0 on rank 0, 1 on rank 1)")


def _made_with_different_arguments(rank: int, root: str) -> list[str]:
    given: list[dict[str, Any]] = [
        {"num_retries": rank},
        {"background": cnr.Background(when_busy="skip" if rank else "wait")},
        {"every_steps": 1 + rank},
        {"every_secs": None if rank else 5.0},
        {"timeout_secs": 50.0 + rank},
    ]
    tracker, texts = cnr.RowTracker(plain_job(1).model), []
    for options in given:
        with pytest.raises(cnr.ConfigurationError) as raised:
            cnr.CheckpointManager(root, tracker, **options)
        texts.append(str(raised.value))
    cnr.CheckpointManager(root, tracker).close()
    return texts


def test_a_model_where_a_tracker_belongs(tmp_path: Path) -> None:
    """By the manager and by the planner."""
    model: Any = plain_job(1).model
    with pytest.raises(cnr.ConfigurationError, match="'tracker' must be a RowTracker"):
        cnr.CheckpointManager(tmp_path, model)
    with pytest.raises(cnr.ConfigurationError, match="'tracker' must be a RowTracker"):
        cnr.CNRSavePlanner(model)
    with pytest.raises(cnr.ConfigurationError, match="'tracker' must be a RowTracker"):
        cnr.CNRLoadPlanner(model)
    with pytest.raises(cnr.ConfigurationError, match="'model' must be a torch module"):
        cnr.RowTracker(model.state_dict())


def test_what_is_saved_and_when(tmp_path: Path) -> None:
    """A step is a whole number, a state a mapping; a model is not called."""
    job = plain_job(1)
    train(job, 1)
    manager = cnr.CheckpointManager(tmp_path, cnr.RowTracker(job.model), every_steps=100)
    save: Any
    for save in (manager.save, manager.async_save):
        for step in (-5, "1", 1.5, 10**18, None):
            with pytest.raises(cnr.ConfigurationError, match="'step' must be"):
                save(step, state(job))
        for wrong in (job.model, [1], None):
            with pytest.raises(cnr.ConfigurationError, match="'state' must be a mapping"):
                save(1, wrong)
        with pytest.raises(cnr.ConfigurationError, match="'state' must be a mapping"):
            save(1, lambda: job.model, force=True)
    for wrong in (job.model, [1], None):
        with pytest.raises(cnr.ConfigurationError, match="'state' must be"):
            manager.restore(wrong)
    assert not list(tmp_path.glob("*/manifest.json"))
    manager.close()


def test_a_manager_that_was_closed(tmp_path: Path, rank_pool: RankPools) -> None:
    """Each rank would otherwise save for itself."""
    texts = rank_pool(2).run(_use_after_close, str(tmp_path / "run"))
    assert texts == [["this manager was closed; create another one to save or restore"] * 3] * 2
    assert not (tmp_path / "run").exists()


def _use_after_close(rank: int, root: str) -> list[str]:
    job, texts = plain_job(1), []
    manager = cnr.CheckpointManager(root, cnr.RowTracker(job.model))
    manager.close()
    for call in (manager.restore, partial(manager.save, 1), partial(manager.async_save, 1)):
        with pytest.raises(cnr.ConfigurationError) as raised:
            call(state(job))
        texts.append(str(raised.value))
    return texts


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    """A restore would otherwise find no checkpoint, and the job would begin anew."""
    (tmp_path / "run").write_text("")
    job = plain_job(1)
    manager = cnr.CheckpointManager(tmp_path / "run", cnr.RowTracker(job.model))
    with pytest.raises(cnr.ConfigurationError, match="run: a file, not a directory"):
        manager.restore(state(job))
    manager.close()


def test_a_root_without_a_name() -> None:
    """A variable that is empty must not become the working directory."""
    for use in (lambda: cnr.CheckpointManager("", cnr.RowTracker(plain_job(1).model)), lambda: cnr.latest("")):
        with pytest.raises(cnr.ConfigurationError, match=r"names no directory; pass '\.' for the working directory"):
            use()


@pytest.mark.parametrize("root", ["s3://", "s3:///", "s3+obstore://", "gs://"])
def test_a_root_without_a_bucket(root: str) -> None:
    """A variable that is empty must not become the root of all buckets."""
    with pytest.raises(cnr.ConfigurationError, match="names no bucket"):
        cnr.CheckpointManager(root, cnr.RowTracker(plain_job(1).model))


def test_a_root_that_is_no_path() -> None:
    """Such as None."""
    root: Any
    for root in (None, 3, b"run"):
        with pytest.raises(cnr.ConfigurationError, match="expected a path or URL"):
            cnr.CheckpointManager(root, cnr.RowTracker(plain_job(1).model))


@pytest.mark.parametrize(
    "options",
    [
        {"thread_count": 0},
        {"thread_count": "1"},
        {"pack_bytes": 12},
        {"pack_bytes": "1"},
        {"staging_bytes": -1},
        {"cpu_share": "1"},
        {"cpu_share": 2.0},
        {"timeout_secs": 0},
        {"timeout_secs": 1e10},
        {"max_bytes_per_sec": "1"},
        {"progress": 3},
        {"row_log": "kafka"},
        {"quantization": "int8"},
        {"quantization": {5: cnr.Asymmetric(4)}},
        {"sync_files": "no"},
    ],
    ids=str,
)
def test_a_writer_names_the_argument(tmp_path: Path, options: dict[str, Any]) -> None:
    """So does a manager, which passes them on."""
    with pytest.raises(cnr.ConfigurationError, match=f"'{next(iter(options))}' must be"):
        cnr.CNRStorageWriter(tmp_path, **options)


@pytest.mark.parametrize("policy", ["full", cnr.Full, 3])
def test_a_planner_wants_a_policy(policy: Any) -> None:
    """Not its name or its class."""
    with pytest.raises(cnr.ConfigurationError, match="'policy' must be a policy"):
        cnr.CNRSavePlanner(policy=policy)


@pytest.mark.parametrize(
    "options",
    [{"best": "auc"}, {"last": "3"}, {"last": 1.5}, {"daily": "some"}, {"last": -1}, {"tagged": "no"}],
    ids=str,
)
def test_retention_names_the_argument(tmp_path: Path, options: dict[str, Any]) -> None:
    """At once, not when the first checkpoint is pruned."""
    with pytest.raises(cnr.ConfigurationError, match=f"'{next(iter(options))}' must be"):
        cnr.Keep(**options)
    largest: Any = "no"
    with pytest.raises(cnr.ConfigurationError, match="'largest' must be"):
        cnr.Best("auc", largest=largest)
    keep: Any = 3
    with pytest.raises(cnr.ConfigurationError, match="'keep' must be a Keep"):
        cnr.plan_prune(tmp_path, keep)


@pytest.mark.parametrize(
    "options",
    [
        {"model": "x"},
        {"interval_secs": "0.2"},
        {"interval_secs": 0},
        {"interval_secs": 1e10},
        {"on_applied": 3},
        {"row_log": "kafka"},
    ],
    ids=str,
)
def test_a_subscriber_names_the_argument(tmp_path: Path, options: dict[str, Any]) -> None:
    """Before it wraps the forwards of the model."""
    model = plain_job(1).model
    with pytest.raises(cnr.ConfigurationError, match=f"'{next(iter(options))}' must be"):
        cnr.RowSubscriber(**{"model": model, "root": tmp_path} | options)
    assert "forward" not in vars(model)


def test_maintenance_names_the_argument(tmp_path: Path) -> None:
    """Numbers that are none, and metrics that are no mapping."""
    job = plain_job(1)
    manager = cnr.CheckpointManager(tmp_path, cnr.RowTracker(job.model))
    manager.save(1, state(job))
    manager.close()
    wrong: Any = "5"
    with pytest.raises(cnr.ConfigurationError, match="'now_ns' must be"):
        cnr.plan_prune(tmp_path, now_ns=wrong)
    with pytest.raises(cnr.ConfigurationError, match="'max_moved_bytes' must be"):
        cnr.compact(tmp_path / "step-1", max_moved_bytes=wrong)
    with pytest.raises(cnr.ConfigurationError, match="'metrics' must be"):
        cnr.write_metrics(tmp_path / "step-1", wrong)
