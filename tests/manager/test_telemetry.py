"""Telemetry: what OpenTelemetry's metrics and spans say of saves, loads, maintenance and updates."""

import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import torchrec_cnr as cnr
from tests.support import faults
from tests.support.models import plain_job, state, train
from torchrec_cnr import telemetry

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

ROOT = Path(__file__).parents[2]
Attributes = tuple[tuple[str, str], ...]


class _Recorded:
    """The values and spans that a test records."""

    def __init__(self) -> None:
        self._reader, self._spans = InMemoryMetricReader(), InMemorySpanExporter()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self.instruments = telemetry.Instruments(MeterProvider([self._reader]).get_meter("test"))
        self.tracer = tracers.get_tracer("test")

    def _points(self, name: str) -> dict[Attributes, Any]:
        data = self._reader.get_metrics_data()
        assert data is not None
        return {
            tuple(sorted(point.attributes.items())): point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
            if metric.name == f"torchrec_cnr.{name}"
        }

    def value(self, name: str, **attributes: str) -> float:
        """Return the value of a counter or gauge."""
        value: float = self._points(name)[tuple(sorted(attributes.items()))].value
        return value

    def counts(self, name: str) -> dict[Attributes, int]:
        """Return how many values a histogram got, by their attributes."""
        return {attributes: point.count for attributes, point in self._points(name).items()}

    @property
    def spans(self) -> list[Any]:
        return list(self._spans.get_finished_spans())


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> _Recorded:
    """What a test records; nothing of other tests."""
    made = _Recorded()
    monkeypatch.setattr(telemetry, "instruments", made.instruments)
    monkeypatch.setattr(telemetry, "tracer", made.tracer)
    return made


def test_saves_are_recorded(tmp_path: Path, recorded: _Recorded) -> None:
    """Bytes and rows are those of the manager's reports; each phase counts once per save."""
    job, reports = plain_job(1), list[cnr.Saved]()
    manager = cnr.CheckpointManager(
        tmp_path / "run", cnr.RowTracker(job.model), policy=cnr.Consecutive(), on_saved=reports.append
    )
    manager.save(1, state(job))
    for step in (2, 3):
        train(job, step)
        manager.async_save(step, state(job))
    manager.close()
    assert [report.kind for report in reports] == ["baseline", "delta", "delta"]
    for kind in ("baseline", "delta"):
        assert recorded.value("save.size", kind=kind) == sum(r.num_bytes for r in reports if r.kind == kind)
        assert recorded.value("save.rows", kind=kind) == sum(r.num_rows for r in reports if r.kind == kind)
    assert recorded.value("chain.length") == 3
    kinds = {(("kind", "baseline"),): 1, (("kind", "delta"),): 2}
    assert recorded.counts("save.stall") == recorded.counts("save.duration") == kinds
    phases = {"stage", "plan", "encode", "wait", "upload", "commit"}
    assert recorded.counts("save.phase.duration") == {(("phase", phase),): 3 for phase in phases}


def test_spans_of_a_save_are_in_one_trace(tmp_path: Path, recorded: _Recorded) -> None:
    """The span of a save contains those of its phases, in their order, and names checkpoint and rank."""
    job = plain_job(1)
    manager = cnr.CheckpointManager(tmp_path / "run", cnr.RowTracker(job.model))
    manager.async_save(1, state(job))
    manager.close()
    spans = {span.name.removeprefix("torchrec_cnr."): span for span in recorded.spans}
    whole, phases = spans["save"], [spans[f"save.{name}"] for name in ("stage", "plan", "write", "commit")]
    assert dict(whole.attributes) == {"checkpoint": str(tmp_path / "run" / "step-1"), "rank": 0}
    assert {span.parent.span_id for span in phases} == {whole.context.span_id}
    assert {span.context.trace_id for span in phases} == {whole.context.trace_id}
    assert whole.start_time == phases[0].start_time
    assert all(span.start_time <= span.end_time for span in phases)
    assert all(before.end_time <= after.start_time for before, after in itertools.pairwise(phases))


def test_failed_saves_are_counted_by_their_error(tmp_path: Path, recorded: _Recorded) -> None:
    """A failed attempt counts under the class of its error, whether the save is asynchronous or not."""
    job = plain_job(1)
    manager = cnr.CheckpointManager(tmp_path / "run", cnr.RowTracker(job.model))
    manager.save(1, state(job))
    for call in (manager.save, manager.async_save):

        def save(call: Callable[..., object] = call) -> None:
            call(1, state(job))
            manager.wait()

        assert isinstance(faults.failure_of(save), cnr.CheckpointExistsError)  # the name is taken
    manager.close()
    assert recorded.value("save.failures", **{"error.type": "CheckpointExistsError"}) == 2
    assert recorded.counts("save.stall") == {(("kind", "baseline"),): 1}


def test_loads_maintenance_and_updates_are_recorded(tmp_path: Path, recorded: _Recorded) -> None:
    """A served model, too; and an operation that fails has the class of its error."""
    job = plain_job(1)
    manager = cnr.CheckpointManager(tmp_path / "run", cnr.RowTracker(job.model), keep=cnr.Keep(last=1))
    assert manager.restore(state(job)) is None
    manager.save(1, state(job))
    manager.restore(state(job))
    manager.close()
    served = plain_job(2).model
    subscriber = cnr.RowSubscriber(served, tmp_path / "run", allow_partial_load=True)
    subscriber.update()
    assert recorded.value("update.lag") == 0
    names = {(("operation", name),): 1 for name in ("load", "maintenance", "update")}
    assert recorded.counts("operation.duration") == names
    assert recorded.value("root.size") >= sum(file.stat().st_size for file in (tmp_path / "run").rglob("*.safetensors"))
    train(job, 2)
    tracker = cnr.RowTracker(job.model)
    again = cnr.CheckpointManager(tmp_path / "run", tracker)
    again.save(2, state(job))
    again.close()
    for pack in (tmp_path / "run" / "step-2").glob("*.safetensors"):
        os.truncate(pack, 100)
    with pytest.raises(cnr.DamagedError):
        subscriber.update()
    subscriber.close()
    failed = (("error.type", "DamagedError"), ("operation", "update"))
    assert recorded.counts("operation.duration")[failed] == 1
    assert recorded.value("update.lag") > 0


def test_a_processor_that_raises_fails_no_save(
    tmp_path: Path, recorded: _Recorded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Saves, loads and maintenance go on, and it is logged once for each kind of record."""
    tracer = MagicMock()
    tracer.start_span.side_effect = ZeroDivisionError("of a processor")
    monkeypatch.setattr(telemetry, "tracer", tracer)
    monkeypatch.setattr(telemetry, "_has_failed", set())
    job = plain_job(1)
    manager = cnr.CheckpointManager(tmp_path / "run", cnr.RowTracker(job.model), keep=cnr.Keep(last=1))
    for step in (1, 2):
        train(job, step)
        manager.save(step, state(job))
    assert manager.restore(state(job)) == 2
    manager.close()
    assert tracer.start_span.call_count >= 7
    assert (
        caplog.text.count("metrics or spans cannot be recorded") == 3
    )  # what a rank writes, commits, other operations
    assert not recorded.spans


def test_nothing_is_recorded_without_the_package(tmp_path: Path) -> None:
    """The library works, and does not import it, where it is not installed."""
    program = """
        import sys
        sys.modules["opentelemetry"] = None  # as if it were not installed
        import torch
        import torchrec_cnr as cnr
        model = torch.nn.EmbeddingBag(100, 4)
        state = {"model": model.state_dict()}
        manager = cnr.CheckpointManager("run", cnr.RowTracker(model), keep=cnr.Keep(last=1))
        manager.async_save(1, state)
        manager.wait()
        print(manager.restore(state))
        manager.close()
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "1\n"


def test_the_dashboard_shows_metrics_that_exist() -> None:
    """Each expression of the dashboard names metrics, attributes and units of the documentation's table."""
    page = (ROOT / "docs/operations/metrics.md").read_text()
    rows = re.findall(r"^\| `(torchrec_cnr[\w.]+)` \| (\w+)(?:, (\w+))? \|([^|]*)\|", page, re.MULTILINE)
    known = {}
    for name, kind, unit, attributes in rows:
        suffix = {"s": "_seconds", "bytes": "_bytes"}.get(unit, "") + ("_total" if kind == "counter" else "")
        ends = ("_bucket", "_count", "_sum") if kind == "histogram" else ("",)
        labels = {attribute.replace(".", "_") for attribute in re.findall(r"`([\w.]+)`", attributes)} | {"le"}
        known |= {name.replace(".", "_") + suffix + end: labels for end in ends}
    dashboard = json.loads((ROOT / "docs/operations/grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    shown = {name for expression in expressions for name in re.findall(r"torchrec_cnr_\w+", expression)}
    assert shown <= known.keys()
    for expression in expressions:
        names = re.findall(r"torchrec_cnr_\w+", expression)
        used = re.findall(r"by \(([\w, ]+)\)", expression) + re.findall(r"(\w+)=~?\"", expression)
        labels = {label.strip() for part in used for label in part.split(",")}
        assert all(labels <= known[name] | {"job", "instance"} for name in names)
    assert {re.sub("_(bucket|count|sum)$", "", name) for name in known} == {
        re.sub("_(bucket|count|sum)$", "", name) for name in shown
    }


def test_the_page_lists_all_metrics() -> None:
    """The table of the documentation has the metrics that are made, and no others."""
    page = (ROOT / "docs/operations/metrics.md").read_text()
    listed = re.findall(r"^\| `(torchrec_cnr\.[\w.]+)`", page, re.MULTILINE)
    meter = MagicMock()
    telemetry.Instruments(meter)
    assert sorted(listed) == sorted(call.args[0] for call in meter.method_calls)
    assert len(listed) == 10
