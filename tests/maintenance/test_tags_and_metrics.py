"""Tags and metrics of checkpoints."""

import math
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.maintenance.pruning.roots_to_prune import NOON_NS, hourly
from tests.support.roots import Root
from torchrec_cnr.errors import CheckpointNotFoundError, ConfigurationError
from torchrec_cnr.maintenance.catalog import read_catalog
from torchrec_cnr.maintenance.tags_and_metrics import read_metrics, tag, untag, write_metrics

numbers = count()


# Metrics and tags


def test_metrics_are_merged(root: Root) -> None:
    """Of each metric the value that was written last counts; one that is not finite takes it away."""
    hourly(root, 1)
    write_metrics(root.at("0"), {"auc": 0.5, "loss": 2})
    write_metrics(root.at("0"), {"auc": 0.75, "ne": math.nan})
    assert read_catalog(root.url).entries["0"].metrics == {"auc": 0.75, "loss": 2.0}
    write_metrics(root.at("0"), {"loss": math.inf})
    assert read_catalog(root.url).entries["0"].metrics == {"auc": 0.75}
    root.assert_loads(["0"])


@pytest.mark.parametrize("metrics", [{"": 1.0}, {"a\n": 1.0}, {"x" * 201: 1.0}, {"auc": "high"}, {"auc": 10**400}])
def test_metrics_that_are_none_are_refused(root: Root, metrics: Any) -> None:
    """Before anything is written."""
    hourly(root, 1)
    before = root.files()
    with pytest.raises(ConfigurationError):
        write_metrics(root.at("0"), metrics)
    assert root.files() == before


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../x", "a b", "x" * 101, "é"])
def test_tags_that_are_none_are_refused(root: Root, name: str) -> None:
    """They are names of files."""
    hourly(root, 1)
    for act in (tag, untag):
        with pytest.raises(ConfigurationError):
            act(root.at("0"), name)


def test_only_checkpoints_are_annotated(root: Root) -> None:
    """Where nothing was committed there is nothing to annotate."""
    root.put_pack("died")
    for name in ("died", "missing"):
        with pytest.raises(CheckpointNotFoundError):
            tag(root.at(name), "release")
        with pytest.raises(CheckpointNotFoundError):
            write_metrics(root.at(name), {"auc": 1.0})
    assert [name for name in root.files() if name[1].endswith((".tag", ".json"))] == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"auc": "0.9", "a": [1], "b": null, "c": true, "d": NaN, "e": 1e999, "\\ud800": 1, "": 2}',
        b'{"auc": 1' + b"0" * 400 + b"}",
        b"[" * 100_000,
        b"1" * 5000,
        b'{"a": 1}' + b" " * (1 << 20),
    ],
    ids=range(8),
)
def test_hostile_metrics_are_passed_over(root: Root, content: bytes) -> None:
    """What is no finite number by a printable name is no metric; what is good beside it counts."""
    hourly(root, 1)
    write_metrics(root.at("0"), {"good": 1.0})
    root.put("0", f"metrics-{'9' * 20}-{'0' * 16}.json", content)
    assert read_catalog(root.url).entries["0"].metrics == {"good": 1.0}


@given(st.dictionaries(st.text(min_size=1, max_size=20), st.floats() | st.integers()))
def test_metrics_come_back(tmp_path_factory: pytest.TempPathFactory, metrics: dict[str, float]) -> None:
    """Every finite number by its name, bit for bit."""
    root = Root(f"memory://metrics-{next(numbers)}")
    root.save("0", NOON_NS)
    try:
        write_metrics(root.at("0"), metrics)
    except ConfigurationError:
        assert any(not name.isprintable() for name in metrics) or any(abs(v) > 1e300 for v in metrics.values())
        return
    finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
    assert read_metrics(root.store.at("0"), root.store.at("0").listing().files) == finite
    root.store.fs.rm(root.store.path, recursive=True)
