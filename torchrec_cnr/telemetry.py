"""Telemetry: metrics and spans by OpenTelemetry's API. Without the package ``opentelemetry-api``, nothing is recorded.

The API alone does nothing: the program chooses where values go, with OpenTelemetry's SDK. Names and units of metrics
are part of the public interface; docs/operations/metrics.md lists them.

Nothing here raises: a save that was committed must not seem to have failed because a processor of spans raised.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torchrec_cnr.progress import Saved, SavePhases
from torchrec_cnr.version import __version__

try:
    from opentelemetry import metrics, trace
except ImportError:
    _has_api = False
else:
    _has_api = True

logger = logging.getLogger(__name__)

_NAME = "torchrec_cnr"
# The default boundaries of OpenTelemetry are meant for milliseconds.
_BOUNDS_SECS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)


class Instruments:
    """The metrics. Those of whole checkpoints are recorded by one rank only, so that sums over ranks are right.

    Args:
        meter: OpenTelemetry's meter that makes them.
    """

    def __init__(self, meter: Any) -> None:

        def seconds(name: str, description: str) -> Any:
            return meter.create_histogram(
                f"{_NAME}.{name}", "s", description, explicit_bucket_boundaries_advisory=_BOUNDS_SECS
            )

        self.save = seconds("save.duration", "Time from the beginning of a save to its commit, on the coordinator")
        self.stall = seconds("save.stall", "Time for which training waited for a save of a manager, on each rank")
        self.phase = seconds("save.phase.duration", "Time of a phase of a save, on each rank")
        self.bytes = meter.create_counter(f"{_NAME}.save.size", "By", "Bytes of committed checkpoints")
        self.rows = meter.create_counter(f"{_NAME}.save.rows", "{row}", "Table rows of committed checkpoints")
        self.failures = meter.create_counter(
            f"{_NAME}.save.failures", "{attempt}", "Failed attempts of a manager to save"
        )
        self.chain = meter.create_gauge(f"{_NAME}.chain.length", "{checkpoint}", "Checkpoints from baseline to latest")
        self.root = meter.create_gauge(f"{_NAME}.root.size", "By", "Bytes of all files under the root after a prune")
        self.operation = seconds("operation.duration", "Time of a load, of maintenance, or of an update, and its error")
        self.lag = meter.create_gauge(f"{_NAME}.update.lag", "s", "Time since the oldest commit that is not applied")


instruments = Instruments(metrics.get_meter(_NAME, __version__)) if _has_api else None
tracer = trace.get_tracer(_NAME, __version__) if _has_api else None


@dataclass(frozen=True)
class Phase:
    """A part of an operation, for a span.

    Attributes:
        name: Its name.
        began_secs: When it began, by ``time.monotonic``.
        ended_secs: When it ended.
        attributes: Further values.
    """

    name: str
    began_secs: float
    ended_secs: float
    attributes: Mapping[str, str | int | float]


Params = ParamSpec("Params")
Result = TypeVar("Result")

_has_failed: set[str] = set()  # names of functions whose failure was logged


def _guarded(record: Callable[Params, Result]) -> Callable[Params, Result | None]:
    """Return a function that logs an exception of OpenTelemetry's, the first time, and returns None."""

    @wraps(record)
    def guarded(*args: Params.args, **kwargs: Params.kwargs) -> Result | None:
        try:
            return record(*args, **kwargs)
        except Exception as error:  # from processors and exporters that the program has set
            if record.__name__ not in _has_failed:
                _has_failed.add(record.__name__)
                logger.warning("metrics or spans cannot be recorded; this is logged once", exc_info=error)
            return None

    return guarded


@_guarded
def record_write(phases: SavePhases, began_secs: float, path: str, rank: int) -> Any:
    """Record that a rank has written its part of a checkpoint.

    Args:
        phases: What this took.
        began_secs: When ``dcp.save`` began, by ``time.monotonic``.
        path: The checkpoint.
        rank: This rank.

    Returns:
        The span of the save, as the parent of that of the commit; None without OpenTelemetry.
    """
    if instruments is None:
        return None
    for name in ("stage", "plan", "encode", "wait", "upload"):
        instruments.phase.record(getattr(phases, f"{name}_secs"), {"phase": name})
    now_secs, planned_secs = time.monotonic(), began_secs + phases.plan_secs
    written = {"encode_secs": phases.encode_secs, "wait_secs": phases.wait_secs, "size": phases.num_bytes}
    parts = [Phase("plan", began_secs, planned_secs, {}), Phase("write", planned_secs, now_secs, written)]
    if phases.stage_secs:
        staged_secs = began_secs - phases.stage_secs
        parts.insert(0, Phase("stage", staged_secs, began_secs, {"size": phases.staged_bytes}))
    whole = Phase("save", parts[0].began_secs, now_secs, {"checkpoint": path, "rank": rank})
    return _traced(whole, parts)


@_guarded
def record_commit(
    began_secs: float, commit_began_secs: float, parent: Any, kind: str, num_bytes: int, num_rows: int, num_links: int
) -> None:
    """Record a commit. Only the coordinator calls this.

    Args:
        began_secs: When the save began, by ``time.monotonic``.
        commit_began_secs: When the commit began.
        parent: What :func:`record_write` returned.
        kind: ``baseline`` or ``delta``.
        num_bytes: Bytes of the checkpoint.
        num_rows: Table rows of the checkpoint.
        num_links: Number of checkpoints from its baseline to itself.
    """
    if instruments is None:
        return
    attributes, now_secs = {"kind": kind}, time.monotonic()
    instruments.phase.record(now_secs - commit_began_secs, {"phase": "commit"})
    instruments.save.record(now_secs - began_secs, attributes)
    instruments.bytes.add(num_bytes, attributes)
    instruments.rows.add(num_rows, attributes)
    instruments.chain.set(num_links)
    _traced(Phase("save.commit", commit_began_secs, now_secs, attributes), (), parent)


@_guarded
def record_stall(report: Saved) -> None:
    """Record for how long training waited for a manager's save, on this rank."""
    if instruments is not None:
        instruments.stall.record(report.stall_secs, {"kind": report.kind})


@contextmanager
def failures_of_saves() -> Iterator[None]:
    """Count an attempt of a manager to save that fails within this block, by the class of the first rank's error."""
    try:
        yield
    except BaseException as error:
        _failed(error)
        raise


@_guarded
def _failed(error: BaseException) -> None:
    if instruments is not None:
        instruments.failures.add(1, {"error.type": _error_type(error)})


@contextmanager
def operation(name: str, **attributes: str) -> Iterator[None]:
    """Record the time of an operation, as a metric and as a span, and the class of its error."""
    began_secs, error_type = time.monotonic(), dict[str, str]()
    try:
        yield
    except BaseException as error:
        error_type = {"error.type": _error_type(error)}
        raise
    finally:
        _ended(name, began_secs, attributes, error_type)


@_guarded
def _ended(name: str, began_secs: float, attributes: Mapping[str, str], error_type: Mapping[str, str]) -> None:
    if instruments is not None:
        now_secs = time.monotonic()
        instruments.operation.record(now_secs - began_secs, {"operation": name, **error_type})
        _traced(Phase(name, began_secs, now_secs, {**attributes, **error_type}), ())


@_guarded
def record_root_size(num_bytes: int) -> None:
    """Record how many bytes all files under a root have."""
    if instruments is not None:
        instruments.root.set(num_bytes)


@_guarded
def record_lag(lag_secs: float) -> None:
    """Record for how long the oldest checkpoint waits that a served model has not applied; 0 if there is none."""
    if instruments is not None:
        instruments.lag.set(lag_secs)


def _error_type(error: BaseException) -> str:
    """Return the class of an error, or of the first rank's error in DCP's ``CheckpointException``."""
    failures = getattr(error, "failures", None)
    first = next(iter(failures.values()))[0] if isinstance(failures, dict) and failures else error
    return type(first).__name__


def _traced(whole: Phase, parts: Sequence[Phase], parent: Any = None) -> Any:
    """Record a span that has ended, and those of its parts. Return its context, for spans within it."""
    assert tracer is not None
    offset_ns = time.time_ns() - time.monotonic_ns()  # spans have the time of day

    def ns(secs: float) -> int:
        return round(secs * 1e9) + offset_ns

    span = tracer.start_span(
        f"{_NAME}.{whole.name}", parent, attributes=dict(whole.attributes), start_time=ns(whole.began_secs)
    )
    context = trace.set_span_in_context(span, parent)
    for part in parts:
        child = tracer.start_span(
            f"{_NAME}.{whole.name}.{part.name}",
            context,
            attributes=dict(part.attributes),
            start_time=ns(part.began_secs),
        )
        child.end(ns(part.ended_secs))
    if "error.type" in whole.attributes:
        span.set_status(trace.StatusCode.ERROR)
    span.end(ns(whole.ended_secs))
    return context
