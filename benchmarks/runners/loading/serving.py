"""Lag of online model updates: from the commit of a delta to the first lookup that returns its rows."""

import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.quant.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_cnr as cnr
from benchmarks.support.jobs.table_models import TableModel, TableSizes, one_rank
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table, quartiles
from benchmarks.support.rounds import Setup, round_name
from benchmarks.support.servers import broker
from torchrec_cnr.kafka import KafkaRows

SCHEME = cnr.AdaptiveAsymmetric(4)
SHARE = 0.1  # share of rows in each delta
FULL, QUICK = TableSizes(1, 1_000_000, 64), TableSizes(1, 2_000, 64)
NUM_ROUNDS, NUM_QUICK_ROUNDS = 15, 2
NUM_SECONDS, NUM_QUICK_SECONDS = 120, 3
NUM_LOOKED_UP = 1_000  # rows per lookup
PAUSE_SECS = 0.001  # between two lookups
LIMIT_SECS = 60.0
MAX_LAG_SECS = 1.0


class Lookups:
    """A thread that looks up the same rows again and again.

    Attributes:
        num_lookups: Number of lookups so far.
        longest_secs: Duration of the longest lookup, in seconds.
    """

    def __init__(self, model: nn.Module, features: KeyedJaggedTensor) -> None:
        self._model = model
        self._features = features
        self._changes: list[float] = []
        self._is_over = threading.Event()
        self.num_lookups = 0
        self.longest_secs = 0.0

    def run(self) -> None:
        """Look up rows until the thread is stopped."""
        before = self._look_up()
        while not self._is_over.wait(PAUSE_SECS):
            started = time.perf_counter()
            rows = self._look_up()
            self.longest_secs = max(self.longest_secs, time.perf_counter() - started)
            self.num_lookups += 1
            if not torch.equal(rows, before):
                self._changes.append(time.time())
                before = rows

    def _look_up(self) -> Tensor:
        with torch.no_grad():
            return torch.as_tensor(self._model(self._features).values())

    def next_change(self, num_before: int) -> float:
        """Return the Unix time of the first different answer after ``num_before`` different answers."""
        deadline = time.monotonic() + LIMIT_SECS
        while len(self._changes) <= num_before:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no lookup was answered with new rows within {LIMIT_SECS:.0f} s")
            time.sleep(PAUSE_SECS)
        return self._changes[num_before]

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Run the thread for the duration of the context."""
        thread = threading.Thread(target=self.run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()


@dataclass
class _Followed:
    """Measurements of a model with online updates.

    Attributes:
        lookups: The lookups of the model.
        lags: Seconds from each delta's commit to the first answer with its rows; the first delta does not count.
        applied: The subscriber's reports of these deltas.
    """

    lookups: Lookups
    lags: list[float] = field(default_factory=list)
    applied: list[cnr.Applied] = field(default_factory=list)


def run(setup: Setup) -> Report:
    """Save deltas while a quantized model applies them and answers lookups: first with rows in files, then in Kafka."""
    sizes = QUICK if setup.quick else FULL
    with broker(setup) as bootstrap, one_rank(setup.folder):
        followed = {"files": _follow(setup, sizes, setup.folder / "files", None)}
        if bootstrap is not None:
            rows = KafkaRows(bootstrap, f"benchmark-{uuid.uuid4().hex}")
            followed["Kafka"] = _follow(setup, sizes, setup.folder / "kafka", rows)
        lags = _follow_every_second(setup, sizes, setup.folder / "seconds")
    return _report(sizes, followed, lags)


def _follow_every_second(setup: Setup, sizes: TableSizes, root: Path) -> list[float]:
    """Save a delta every second. Return the seconds from the commit of each until lookups saw it, or a later one."""
    num_seconds = NUM_QUICK_SECONDS if setup.quick else NUM_SECONDS
    setup.say(f"following {num_seconds} deltas, one a second")
    model, served = TableModel(sizes), quantized_tables(sizes)
    planner = cnr.CNRSavePlanner(cnr.RowTracker(model.sharded), policy=cnr.Consecutive())
    writer = cnr.CNRStorageWriter(root / "delta-0", quantization=SCHEME)
    model.save(writer, planner)
    lookups = Lookups(served, model.batch([torch.arange(0, sizes.num_rows, max(1, sizes.num_rows // NUM_LOOKED_UP))]))
    applied: list[cnr.Applied] = []
    with cnr.RowSubscriber(served, root, on_applied=applied.append), lookups.going_on():
        began = time.monotonic()
        for number in range(1, num_seconds + 1):
            time.sleep(max(0.0, began + number - time.monotonic()))
            model.modify(SHARE)
            model.save(cnr.CNRStorageWriter(root / f"delta-{number}", quantization=SCHEME), planner)
        deadline = time.monotonic() + LIMIT_SECS
        while not applied or _number(applied[-1].path) < num_seconds:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the last delta was not applied within {LIMIT_SECS:.0f} s")
            time.sleep(PAUSE_SECS)
    committed = [cnr.read_checkpoint(root / f"delta-{number}").created_ns / 1e9 for number in range(num_seconds + 1)]
    lags = []
    for number in range(2, num_seconds + 1):  # the first delta warms up
        update = next(each for each in applied if _number(each.path) >= number)
        seen_at_secs = committed[_number(update.path)] + update.committed_to_applied_secs
        lags.append(seen_at_secs - committed[number])
    return lags


def _number(path: str) -> int:
    return int(path.rpartition("-")[2])


def _follow(setup: Setup, sizes: TableSizes, root: Path, rows: KafkaRows | None) -> _Followed:
    setup.say(f"making {sizes}")
    num_rounds = NUM_QUICK_ROUNDS if setup.quick else NUM_ROUNDS
    model = TableModel(sizes)
    planner = cnr.CNRSavePlanner(cnr.RowTracker(model.sharded), policy=cnr.Consecutive())
    model.save(cnr.CNRStorageWriter(root / "baseline", quantization=SCHEME, row_log=rows), planner)
    served = quantized_tables(sizes)
    ids = torch.arange(0, sizes.num_rows, max(1, sizes.num_rows // NUM_LOOKED_UP))
    found = _Followed(Lookups(served, model.batch([ids])))
    applied: list[cnr.Applied] = []
    with cnr.RowSubscriber(served, root, row_log=rows, on_applied=applied.append), found.lookups.going_on():
        for number in range(num_rounds + 1):
            setup.say(f"following rows in {root.name}: {round_name(number, num_rounds)}")
            model.modify(SHARE)
            path = root / f"delta-{number}"
            model.save(cnr.CNRStorageWriter(path, quantization=SCHEME, row_log=rows), planner)
            answered_at_secs = found.lookups.next_change(number)
            if number:
                found.lags.append(answered_at_secs - cnr.read_checkpoint(path).created_ns / 1e9)
    found.applied += [update for update in applied if update.kind == "delta"][1:]
    return found


def quantized_tables(sizes: TableSizes) -> nn.Module:
    """Return a 4-bit model of the same tables, without values."""
    tables = [
        EmbeddingBagConfig(
            name=f"t{index}",
            embedding_dim=sizes.dim,
            num_embeddings=sizes.num_rows,
            feature_names=[f"f_t{index}"],
            data_type=DataType.INT4,
        )
        for index in range(sizes.num_tables)
    ]
    return nn.Sequential(EmbeddingBagCollection(tables, is_weighted=False, device=torch.device("cpu")))


def _report(sizes: TableSizes, followed: Mapping[str, _Followed], lags_of_seconds: list[float]) -> Report:
    slow_secs = sorted(lags_of_seconds)[int(0.99 * (len(lags_of_seconds) - 1))]
    what = f"lag behind {len(lags_of_seconds)} deltas, one a second, 99th percentile"
    figures, cells = [Figure(what, slow_secs, "s", at_most=MAX_LAG_SECS)], []
    for place, found in followed.items():
        held_off = [1e3 * update.apply_secs for update in found.applied]
        what = f"commit of a delta in {place} to the first lookup of its rows"
        figures.append(Figure.over_rounds(what, found.lags, "s", at_most=MAX_LAG_SECS))
        figures.append(Figure.over_rounds(f"lookups held off, rows in {place}", held_off, "ms"))
        rows = {
            f"{place}: commit to the first answer with new rows": found.lags,
            f"{place}: of that, to read, verify and decode": [update.read_secs for update in found.applied],
            f"{place}: of that, to swap in, lookups held off": [update.apply_secs for update in found.applied],
        }
        for name, secs in rows.items():
            low, median, high = (1e3 * value for value in quartiles(secs))
            cells.append((name, f"{median:,.1f}", f"{low:,.1f} to {high:,.1f}"))
    num_deltas = len(followed["files"].lags)
    num_lookups = sum(found.lookups.num_lookups for found in followed.values())
    longest_ms = 1e3 * max(found.lookups.longest_secs for found in followed.values())
    return Report(
        title=f"lag of 4-bit tables behind deltas of {round(SHARE * sizes.num_rows):,} rows of {sizes.dim} values",
        notes=(
            f"{num_deltas} deltas after a warm-up, saved by the same process. A root is looked at every 0.2 s; markers",
            f"in Kafka come by themselves. Of {num_lookups:,} lookups of {NUM_LOOKED_UP:,} rows, 1 ms apart, the",
            f"longest took {longest_ms:,.1f} ms. The commit is when the manifest says: just before it was written.",
        ),
        figures=tuple(figures),
        tables=(Table(("", "median ms", "quartiles"), tuple(cells)),),
    )


BENCHMARK = Benchmark(run, "lag of online model updates: from the commit of a delta to the first lookup of its rows")
