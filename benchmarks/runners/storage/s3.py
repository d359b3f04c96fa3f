"""S3 by s3fs and by obstore: elapsed time and processor time of saves and loads."""

from collections.abc import Mapping
from functools import partial
from itertools import count

import fsspec
from torch import Tensor

import torchrec_cnr as cnr
from benchmarks.support.jobs.table_models import TableModel, TableSizes, one_rank
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table
from benchmarks.support.rounds import Candidate, Setup, interleave, processor_ratios, ratios, round_name, times_table
from benchmarks.support.servers import bucket

FULL, QUICK = TableSizes(8, 100_000, 64), TableSizes(2, 500, 64)
NUM_ROUNDS, QUICK_ROUNDS = 11, 1
NUM_THREADS = 8
PROTOCOLS: Mapping[str, str] = {"s3fs": "s3", "obstore": "s3+obstore"}
SCHEMES: Mapping[str, cnr.Scheme] = {"exact": cnr.NoQuantization(), "4 bits": cnr.AdaptiveAsymmetric(4)}
NO_SERVER = "no S3 here: nothing was timed"


def run(setup: Setup) -> Report:
    """Save and load baselines by each client, alternately."""
    sizes, num_rounds = (QUICK, QUICK_ROUNDS) if setup.quick else (FULL, NUM_ROUNDS)
    figures: list[Figure] = []
    tables: list[Table] = []
    with bucket(setup) as root, one_rank(setup.folder):
        if root is None:
            return Report(NO_SERVER, (), ())
        model = TableModel(sizes)
        for name, scheme in SCHEMES.items():
            loaded: list[Tensor] = []
            clients = [
                _Client(model, scheme, f"{protocol}://{root}", client, loaded) for client, protocol in PROTOCOLS.items()
            ]
            say = partial(_say, setup, name, num_rounds)
            saves = {client.name: Candidate(client.save, after=client.remove_earlier) for client in clients}
            loads = {client.name: Candidate(client.load, client.clear, client.check) for client in clients}
            for what, candidates in (("save", saves), ("load", loads)):
                timings = interleave(candidates, num_rounds, say)
                clock, processor = (of(timings, "s3fs", "obstore") for of in (ratios, processor_ratios))
                ratio = f"{what}, {name}: time by s3fs, of that by obstore"
                figures.append(Figure.over_rounds(f"{ratio}, by the clock", clock, "×"))
                figures.append(Figure.over_rounds(f"{ratio}, of the processor", processor, "×"))
                tables.append(times_table(f"{what}, {name}", timings))
            for client in clients:
                client.remove()
    return Report(
        title=f"S3 by s3fs and by obstore: baselines of {sizes}, {NUM_THREADS} threads",
        notes=(
            "By each client in turns. Unless `--s3` names a bucket, the server is moto, on loopback, without TLS: it",
            "shares this machine's cores, and both clients wait for it. Processor time is that of the job alone.",
        ),
        figures=tuple(figures),
        tables=tuple(tables),
    )


def _say(setup: Setup, name: str, num_rounds: int, number: int) -> None:
    setup.say(f"{name}, {round_name(number, num_rounds)}")


class _Client:
    """Saves and loads of a model by one client.

    Attributes:
        name: Name of the client.
    """

    def __init__(self, model: TableModel, scheme: cnr.Scheme, root: str, name: str, loaded: list[Tensor]) -> None:
        self.name = name
        self._model = model
        self._scheme = scheme
        self._root = f"{root}/{name}"
        self._loaded = loaded
        self._numbers = count()
        self._saved: list[str] = []

    def save(self, _: int) -> None:
        url = f"{self._root}/{next(self._numbers)}"
        self._model.save(cnr.CNRStorageWriter(url, quantization=self._scheme, thread_count=NUM_THREADS))
        self._saved.append(url)

    def load(self, _: int) -> None:
        self._model.load(cnr.CNRStorageReader(self._saved[-1], thread_count=NUM_THREADS), cnr.CNRLoadPlanner())

    def clear(self, _: int) -> None:
        self._model.clear()

    def check(self, _: int) -> None:
        rows = self._model.sampled_rows()
        self._loaded.append(rows)
        if not rows.any() or not rows.equal(self._loaded[0]):
            raise RuntimeError(f"{self.name} did not load what was saved")

    def remove_earlier(self, _: int) -> None:
        for url in self._saved[:-1]:
            _remove(url)
        del self._saved[:-1]

    def remove(self) -> None:
        _remove(self._root)


def _remove(url: str) -> None:
    fs, path = fsspec.core.url_to_fs(url)
    fs.rm(path, recursive=True)


BENCHMARK = Benchmark(run, "saves and loads by each of the two S3 clients")
