"""Metrics: the time that recording metrics and spans takes, as a share of the steps between two saves."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import torchrec_cnr as cnr
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report
from benchmarks.support.rounds import Setup
from torchrec_cnr import telemetry

NUM_ROWS, DIM, NUM_IDS = 200_000, 64, 4096
STEPS_PER_SAVE, NUM_SAVES = 20, 30
MAX_SHARE = 0.005
LONG_STEP_SECS = 0.1  # of a model that one would train on several ranks
RECORDED = ("record_write", "record_commit", "record_stall", "record_root_size")


def run(setup: Setup) -> Report:
    """Train and save with OpenTelemetry's SDK, and time each call that records something."""
    num_rows, num_saves = (1_000, 2) if setup.quick else (NUM_ROWS, NUM_SAVES)
    reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
    meters, tracers = MeterProvider([reader]), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(num_rows, DIM, sparse=True), torch.nn.Linear(DIM, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model.state_dict(), "optimizer": optimizer}
    manager = cnr.CheckpointManager(setup.folder / "run", cnr.RowTracker(model), every_steps=STEPS_PER_SAVE)
    step_secs, recording_secs, of_saves = list[float](), list[float](), list[float]()
    setup.say(f"{num_saves} saves, one after each {STEPS_PER_SAVE} steps")
    instruments, tracer = telemetry.Instruments(meters.get_meter("benchmark")), tracers.get_tracer("benchmark")
    with patch.multiple(telemetry, instruments=instruments, tracer=tracer), _timed(recording_secs):
        for step in range(1, STEPS_PER_SAVE * num_saves + 1):
            began = time.perf_counter()
            model(torch.randint(num_rows, (NUM_IDS // 8, 8))).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step_secs.append(time.perf_counter() - began)
            recording_secs.clear()
            if manager.save(step, state) is not None:
                of_saves.append(sum(recording_secs))
        manager.close()
    if not spans.get_finished_spans() or reader.get_metrics_data() is None:
        raise RuntimeError("nothing was recorded, so no time can be measured")
    between_saves = [
        sum(step_secs[first : first + STEPS_PER_SAVE]) for first in range(0, len(step_secs), STEPS_PER_SAVE)
    ]
    return Report(
        title=f"metrics and spans of {num_saves} saves, a table of {num_rows:,} × {DIM}",
        notes=(
            "OpenTelemetry's SDK keeps values and spans in memory. Saves are synchronous; of an asynchronous one, all",
            "but one value is recorded in the background. The model is small, so that its steps are short.",
        ),
        figures=(
            Figure.over_rounds("time of recording of a save", [1e3 * secs for secs in of_saves], "ms"),
            Figure.over_rounds(
                f"the same, of {STEPS_PER_SAVE} steps of {1000 * LONG_STEP_SECS:g} ms",
                [secs / (STEPS_PER_SAVE * LONG_STEP_SECS) for secs in of_saves],
                "×",
                at_most=MAX_SHARE,
            ),
            Figure.over_rounds(
                f"the same, of {STEPS_PER_SAVE} steps of this model",
                [secs / steps for secs, steps in zip(of_saves, between_saves, strict=True)],
                "×",
            ),
            Figure.over_rounds("a step of this model", [1e3 * secs for secs in step_secs], "ms"),
        ),
    )


@contextmanager
def _timed(secs: list[float]) -> Iterator[None]:
    """Append the time of each call of a function that records."""

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                secs.append(time.perf_counter() - began)

        return call

    with ExitStack() as stack:
        for name in RECORDED:
            stack.enter_context(patch.object(telemetry, name, timed(getattr(telemetry, name))))
        yield


BENCHMARK = Benchmark(run, "time of recording metrics and spans by OpenTelemetry, as a share of 20 steps")
