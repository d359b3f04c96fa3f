"""Rows in Kafka: times of saves, stalls and loads, relative to files, and the rate of rows."""

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from confluent_kafka import Producer
from torch import Tensor

import torchrec_cnr as cnr
from benchmarks.support.data.clicks import NUM_COLUMNS, click_ids, trained_on
from benchmarks.support.jobs.table_models import TableModel, TableSizes, one_rank
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report
from benchmarks.support.rounds import Candidate, Setup, Taken, Timings, interleave, ratios, round_name, times_table
from benchmarks.support.servers import broker
from torchrec_cnr.kafka import KafkaRows

FILES, KAFKA, BARE = "files", "Kafka", "bare producer"
DIM = 64
RUN, QUICK_RUN = TableSizes(NUM_COLUMNS, 400_000, DIM), TableSizes(NUM_COLUMNS, 2_000, DIM)
NUM_CLICKS, NUM_QUICK_CLICKS = 3_000_000, 3_000
BATCH_CLICKS, QUICK_BATCH_CLICKS = 8192, 128
NUM_CHECKPOINTS, NUM_QUICK_CHECKPOINTS = 20, 6
NUM_LOADS, NUM_QUICK_LOADS = 7, 1
STREAM, QUICK_STREAM = TableSizes(1, 2_000_000, DIM), TableSizes(1, 4_000, DIM)
SHARE = 0.26  # share of the streamed rows that are modified between two saves
NUM_SAVES, NUM_QUICK_SAVES = 7, 1
SCHEME = cnr.AdaptiveAsymmetric(4)
MIN_ROWS_A_SEC, MAX_LOAD_TIMES = 500_000, 1.5
BARE_RECORD_BYTES = 512 << 10
BARE_IN_FLIGHT_BYTES = 16 << 20
BARE_SECS = 60.0
NO_BROKER = "no Kafka here: nothing was timed"


def run(setup: Setup) -> Report:
    """Train two equal models, one saved to files and one to Kafka; load both; then measure the maximum rate of rows."""
    with broker(setup) as bootstrap:
        if bootstrap is None:
            return Report(NO_BROKER, (), ())
        topic = f"benchmark-{uuid.uuid4().hex}"
        with one_rank(setup.folder):
            saved = _train(setup, bootstrap, topic)
            loads = _time_loads(setup, saved, lambda number: KafkaRows(bootstrap, topic, timeout_secs=10 + number))
            streams, num_rows = _stream(setup, bootstrap, topic)
    rows_a_sec = [num_rows / took.secs for took in streams[KAFKA]]
    num_markers = len(saved[KAFKA].checkpoints)
    return Report(
        title=f"rows in Kafka, of {RUN if not setup.quick else QUICK_RUN}, 4 bits",
        notes=(
            f"Two models trained alike on {trained_on()}, {num_markers} checkpoints of each, sync and async by turns;",
            "each save was timed beside the other model's, the first of the two now here, now there.",
            "No file is forced to disk, and neither does the broker, which shares this machine's cores.",
            "Loads were compared bit for bit; each connects anew, as a job that was started again does.",
            f"Streamed: {100 * SHARE:g} % of {STREAM if not setup.quick else QUICK_STREAM}, {num_rows:,} rows a save, "
            "from the marks to the marker. A bare producer sends as many bytes, in transactions too.",
        ),
        figures=(
            Figure.over_rounds("rows a second to Kafka", rows_a_sec, "rows/s", at_least=MIN_ROWS_A_SEC),
            Figure.over_rounds("of what a bare producer sends", ratios(streams, BARE, KAFKA), "×"),
            Figure.over_rounds("time of such a save, of one to files", ratios(streams, KAFKA, FILES), "×"),
            Figure.over_rounds(
                "load from Kafka, as long as from files", ratios(loads, KAFKA, FILES), "×", at_most=MAX_LOAD_TIMES
            ),
            *_run_figures(saved),
        ),
        tables=(
            times_table("save of the run", {name: lineage.saves for name, lineage in saved.items()}),
            times_table("stall of the run", {name: lineage.stalls for name, lineage in saved.items()}),
            times_table("load of the run", loads),
            times_table("save of the stream", streams),
        ),
    )


@dataclass
class _Lineage:
    """A model, its checkpoints, and their times.

    Attributes:
        saves: Times of ``dcp.save``.
        stalls: Stalls of ``dcp.async_save``.
    """

    model: TableModel
    folder: Path
    rows: KafkaRows | None
    saves: list[Taken] = field(default_factory=list)
    stalls: list[Taken] = field(default_factory=list)
    checkpoints: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tracker = cnr.RowTracker(self.model.sharded)
        self._planner = cnr.CNRSavePlanner(self.tracker, policy=cnr.Consecutive())
        self._writer = cnr.CNRStorageWriter(self.folder, quantization=SCHEME, sync_files=False, row_log=self.rows)

    def save(self) -> None:
        """Save the next checkpoint, and wait for it."""
        self._begin(dcp.save)  # type: ignore[attr-defined]  # torch does not mark it as exported

    def async_save(self) -> Any:
        """Begin an asynchronous save of the next checkpoint, and return its future."""
        return self._begin(dcp.async_save)  # type: ignore[attr-defined]

    def _begin(self, how: Callable[..., Any]) -> Any:
        self.checkpoints.append(self.folder / f"step-{len(self.checkpoints)}")
        return how(
            self.model.state(),
            checkpoint_id=self.checkpoints[-1],
            storage_writer=self._writer,
            planner=self._planner,
        )

    def checkpoint(self, number: int) -> None:
        """Save, alternately asynchronously and not. The baseline and the first delta of each kind do not count."""
        start, processor_start = time.perf_counter(), time.process_time()
        is_async = number % 2 == 0
        future = None
        if is_async:
            future = self.async_save()
        else:
            self.save()
        took = Taken(time.perf_counter() - start, time.process_time() - processor_start)
        if future is not None:
            future.result()
        if number > 2:
            (self.stalls if is_async else self.saves).append(took)

    def num_bytes(self, *, in_log: bool) -> int:
        """Return the bytes of the deltas' packs, in the Kafka topic or in files."""
        manifests = [cnr.read_checkpoint(path).manifest for path in self.checkpoints[1:]]
        packs = [pack for manifest in manifests for pack in manifest.packs]
        return sum(pack.num_bytes for pack in packs if (pack.log is not None) is in_log)


def _train(setup: Setup, bootstrap: str, topic: str) -> Mapping[str, _Lineage]:
    """Train and save two equal models, one with files and one with Kafka."""
    sizes = QUICK_RUN if setup.quick else RUN
    setup.say(f"making {sizes}, twice, and reading clicks")
    lineages = {
        FILES: _Lineage(TableModel(sizes), setup.folder / "files", None),
        KAFKA: _Lineage(TableModel(sizes), setup.folder / "kafka", KafkaRows(bootstrap, topic)),
    }
    ids = click_ids(NUM_QUICK_CLICKS if setup.quick else NUM_CLICKS) % sizes.num_rows
    batches = ids.split(QUICK_BATCH_CLICKS if setup.quick else BATCH_CLICKS)
    num_checkpoints = NUM_QUICK_CHECKPOINTS if setup.quick else NUM_CHECKPOINTS
    every = max(1, len(batches) // num_checkpoints)
    for number in range(num_checkpoints):
        setup.say(f"training, checkpoint {number + 1} of {num_checkpoints}")
        for batch in batches[number * every : (number + 1) * every]:
            for lineage in lineages.values():
                lineage.model.step(lineage.model.batch(list(batch.T.contiguous())))
        for lineage in sorted(lineages.values(), key=lambda lineage: (lineage.rows is None) is (number % 4 < 2)):
            lineage.checkpoint(number)
    return lineages


def _time_loads(setup: Setup, saved: Mapping[str, _Lineage], rows: Callable[[int], KafkaRows]) -> Timings:
    """Load both checkpoint chains alternately, each into its own model, and check that the models are equal."""

    def candidate(lineage: _Lineage) -> Candidate:
        def load(number: int) -> None:
            log = None if lineage.rows is None else rows(number)
            head = cnr.latest(lineage.folder, row_log=log)
            assert head is not None
            lineage.model.load(cnr.CNRStorageReader(head, row_log=log), cnr.CNRLoadPlanner(lineage.tracker))

        return Candidate(run=load, before=lambda number: lineage.model.clear())

    num_loads = NUM_QUICK_LOADS if setup.quick else NUM_LOADS
    candidates = {name: candidate(lineage) for name, lineage in saved.items()}
    timings = interleave(candidates, num_loads, lambda number: setup.say(f"loading: {round_name(number, num_loads)}"))
    for one, other in zip(*(_values(lineage.model) for lineage in saved.values()), strict=True):
        assert one.any(), "nothing was loaded"
        assert torch.equal(one, other), "what was loaded differs"
    return timings


def _values(model: TableModel) -> Sequence[Tensor]:
    state = model.sharded.fused_optimizer.state_dict()["state"].values()
    return [*model.tables(), *(each.local_shards()[0].tensor for values in state for each in values.values())]


def _stream(setup: Setup, bootstrap: str, topic: str) -> tuple[Timings, int]:
    """Save deltas of random rows alternately with a bare producer of the same bytes; return also the rows per delta."""
    sizes = QUICK_STREAM if setup.quick else STREAM
    setup.say(f"making {sizes}, twice")
    lineages = {
        FILES: _Lineage(TableModel(sizes), setup.folder / "streamed files", None),
        KAFKA: _Lineage(TableModel(sizes), setup.folder / "streamed", KafkaRows(bootstrap, f"{topic}-stream")),
    }
    num_rows = round(SHARE * sizes.num_rows)

    def mark(number: int) -> None:
        for lineage in lineages.values():
            lineage.tracker.mark("t0", torch.randperm(sizes.num_rows)[:num_rows])

    for lineage in lineages.values():
        lineage.save()
    mark(0)
    lineages[KAFKA].save()
    packs = cnr.read_checkpoint(lineages[KAFKA].checkpoints[-1]).manifest.packs
    bare = BareProducer(bootstrap, f"{topic}-stream", [pack.num_bytes for pack in packs if pack.log is not None])
    sends = {name: lineage.save for name, lineage in lineages.items()} | {BARE: bare.send}
    candidates = {name: Candidate(partial(_call, send)) for name, send in sends.items()}
    num_saves = NUM_QUICK_SAVES if setup.quick else NUM_SAVES

    def before(number: int) -> None:
        setup.say(f"streaming: {round_name(number, num_saves)}")
        mark(number)

    return interleave(candidates, num_saves, before), num_rows


def _call(send: Callable[[], None], _: int) -> None:
    send()


def _run_figures(saved: Mapping[str, _Lineage]) -> list[Figure]:
    kafka = saved[KAFKA]
    num_deltas = len(kafka.checkpoints) - 1
    saves, stalls = ({name: getattr(each, what) for name, each in saved.items()} for what in ("saves", "stalls"))
    return [
        Figure.over_rounds("save of the run to Kafka, as long as to files", ratios(saves, KAFKA, FILES), "×"),
        Figure.over_rounds("stall of the run with Kafka, as long as with files", ratios(stalls, KAFKA, FILES), "×"),
        Figure("bytes of a delta to Kafka", kafka.num_bytes(in_log=True) / num_deltas / 1e6, "MB"),
        Figure("and to files", kafka.num_bytes(in_log=False) / num_deltas / 1e6, "MB"),
    ]


class BareProducer:
    """A producer without overhead, for comparison: it sends random bytes, each transaction to one partition.

    Args:
        bootstrap: ``host:port`` of the broker.
        topic: The topic to send to.
        sizes: The bytes of each transaction.
    """

    def __init__(self, bootstrap: str, topic: str, sizes: Sequence[int]) -> None:
        settings: dict[str, str | int | float | bool] = {
            "bootstrap.servers": bootstrap,
            "transactional.id": f"bare-{uuid.uuid4()}",
            "message.max.bytes": 2 * BARE_RECORD_BYTES,
            "queue.buffering.max.kbytes": 4 * BARE_IN_FLIGHT_BYTES >> 10,
            "linger.ms": 0,
        }
        self._producer = Producer(settings)
        self._producer.init_transactions(BARE_SECS)
        self._topic = topic
        self._num_partitions = len(self._producer.list_topics(topic, BARE_SECS).topics[topic].partitions)
        self._transactions = [
            [os.urandom(min(BARE_RECORD_BYTES, size - at)) for at in range(0, size, BARE_RECORD_BYTES)]
            for size in sizes
        ]

    def send(self) -> None:
        """Send all bytes, and return when they are committed."""
        for number, values in enumerate(self._transactions):
            self._producer.begin_transaction()
            for value in values:
                self._producer.produce(self._topic, value, partition=number % self._num_partitions)
            self._producer.commit_transaction(BARE_SECS)


BENCHMARK = Benchmark(run, "saves, stalls and loads with rows in Kafka, relative to files, and the rate of rows")
