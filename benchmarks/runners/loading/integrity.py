"""The cost of integrity: a load compares the digests of all blobs and manifests before it uses anything."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torchrec_cnr as cnr
from benchmarks.support.jobs.table_models import TableModel, TableSizes, one_rank
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table
from benchmarks.support.rounds import Candidate, Setup, interleave, processor_ratios, ratios, times_table
from torchrec_cnr.format.blob_bytes import Bytes
from torchrec_cnr.storage.pack_reader import Span

FULL, QUICK = TableSizes(8, 250_000, 64), TableSizes(2, 500, 64)
NUM_ROUNDS, QUICK_ROUNDS = 25, 2
NUM_DELTAS, SHARE = 3, 0.1
MAX_RATIO = 1 / 0.9  # digests take at most a tenth of a load
SCHEMES: Mapping[str, cnr.Scheme] = {"4 bits": cnr.AdaptiveAsymmetric(4), "exact": cnr.NoQuantization()}


class _Expected:
    """A digest that was not computed; it equals any expected digest."""

    def __init__(self, *_: object) -> None:
        pass

    def hexdigest(self) -> "_Expected":
        return self

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class _ExpectedDigests:
    """Digests of a span that were not computed."""

    def __init__(self, span: Span) -> None:
        self.found = [_Expected()] * len(span.blobs)

    def extend(self, piece: Bytes) -> None:
        pass


@contextmanager
def unchecked() -> Iterator[None]:
    """Disable the computation of digests, which the library itself does not offer, for the duration of the context."""
    with (
        patch("torchrec_cnr.storage.pack_reader.SpanDigests", _ExpectedDigests),
        patch("torchrec_cnr.format.manifest_json.hashlib.sha256", _Expected),
    ):
        yield


def run(setup: Setup) -> Report:
    """Load a checkpoint chain with and without digests, alternately."""
    sizes, num_rounds = (QUICK, QUICK_ROUNDS) if setup.quick else (FULL, NUM_ROUNDS)
    figures: list[Figure] = []
    tables: list[Table] = []
    with one_rank(setup.folder):
        for name, scheme in SCHEMES.items():
            setup.say(f"saving and loading a baseline and {NUM_DELTAS} deltas, {name}")
            model = TableModel(sizes)
            head = _save(model, setup, name, scheme)
            load = partial(_load, model, head)
            timings = interleave(
                {"checked": Candidate(partial(_checked, load)), "unchecked": Candidate(partial(_unchecked, load))},
                num_rounds,
                partial(_clear, model),
            )
            what = f"a load with digests, of one without, {name}"
            processor = processor_ratios(timings, "checked", "unchecked")
            figures.append(Figure.over_rounds(f"{what}, processor time", processor, "×", at_most=MAX_RATIO))
            clock = ratios(timings, "checked", "unchecked")
            figures.append(Figure.over_rounds(f"{what}, time by the clock", clock, "×", at_most=MAX_RATIO))
            tables.append(times_table(f"load, {name}", timings))
            shutil.rmtree(setup.folder / name)
    return Report(
        title=f"cost of digests in loads of {sizes}, a baseline and {NUM_DELTAS} deltas of {100 * SHARE:g} % each",
        notes=(
            "Loads in turns, with all digests worked out and compared, and with none. Files are in the page cache.",
        ),
        figures=tuple(figures),
        tables=tuple(tables),
    )


def _save(model: TableModel, setup: Setup, name: str, scheme: cnr.Scheme) -> str:
    tracker = cnr.RowTracker(model.sharded)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    for number in range(NUM_DELTAS + 1):
        if number:
            model.modify(SHARE)
        model.save(cnr.CNRStorageWriter(setup.folder / name / str(number), quantization=scheme), planner)
    tracker.close()
    return str(setup.folder / name / str(NUM_DELTAS))


def _load(model: TableModel, head: str) -> None:
    model.load(cnr.CNRStorageReader(head), cnr.CNRLoadPlanner())


def _clear(model: TableModel, _: int) -> None:
    model.clear()


def _checked(load: partial[None], _: int) -> None:
    load()


def _unchecked(load: partial[None], _: int) -> None:
    with unchecked():
        load()


BENCHMARK = Benchmark(run, "share of a load's time that the verification of digests takes")
