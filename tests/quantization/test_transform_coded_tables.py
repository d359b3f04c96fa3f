"""Transform-coded tables that are saved and loaded, whatever is in them, beside the scheme whose error they meet.

A table of which every row is in the sample is a property test. In others, the sample is not quite the table.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from hypothesis import strategies as st
from torch import Tensor

import torchrec_cnr as cnr
from tests.golden.edits import bytes_of
from torchrec_cnr.format.row_sets import Blob
from torchrec_cnr.quantization import Scheme, TransformCoded, Transformed
from torchrec_cnr.quantization.row_transform import Basis

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:torch.distributed is")]

Floats = npt.NDArray[np.float64]
ErrorOf = cnr.AdaptiveAsymmetric | cnr.Asymmetric | cnr.Symmetric

NUM_SAMPLED = 512  # up to so many rows, all of them are in the sample
FRAME_BYTES = 64  # by which a transform may be longer than its content
HEADER_BYTES = 1_000  # of the data files of a checkpoint with one table
ERRORS: list[ErrorOf] = [cnr.AdaptiveAsymmetric(4), cnr.AdaptiveAsymmetric(2), cnr.Asymmetric(8), cnr.Symmetric(4)]
numbers = itertools.count()


def _few_dimensions(random: np.random.Generator, rows: Floats) -> Floats:
    basis = np.linalg.qr(random.normal(size=(rows.shape[1], rows.shape[1])))[0]
    return rows * np.exp(-np.arange(rows.shape[1]) / 2) @ basis


def _huge_row(random: np.random.Generator, rows: Floats) -> Floats:
    rows[random.integers(len(rows))] *= 10.0 ** random.integers(2, 30)
    return rows


def _huge_component(random: np.random.Generator, rows: Floats) -> Floats:
    rows[:, random.integers(rows.shape[1])] *= 10.0 ** random.integers(1, 8)
    return rows


def _clusters(random: np.random.Generator, rows: Floats) -> Floats:
    return random.normal(size=(2, rows.shape[1]))[random.integers(0, 2, len(rows))] + 1e-4 * rows


def _not_finite(random: np.random.Generator, rows: Floats) -> Floats:
    chosen = random.integers(len(rows), size=1 + len(rows) // 8)
    rows[chosen, random.integers(rows.shape[1], size=len(chosen))] = random.choice([np.nan, np.inf, -np.inf])
    return rows


TABLES: Mapping[str, Callable[[np.random.Generator, Floats], Floats]] = {
    "gaussian": lambda random, rows: rows,
    "uniform": lambda random, rows: random.random(rows.shape),
    "integers": lambda random, rows: random.integers(-3, 4, rows.shape).astype(np.float64),
    "few dimensions": _few_dimensions,
    "constant": lambda random, rows: np.full_like(rows, 0.25),
    "constant rows": lambda random, rows: np.repeat(rows[:, :1], rows.shape[1], 1),
    "zeros": lambda random, rows: np.zeros_like(rows),
    "mostly zeros": lambda random, rows: np.where(random.random(rows.shape) < 0.02, rows, 0.0),
    "huge component": _huge_component,
    "huge row": _huge_row,
    "two clusters": _clusters,
    "heavy tails": lambda random, rows: random.standard_cauchy(size=rows.shape),
    "heavy rows": lambda random, rows: rows * np.exp(3 * random.normal(size=(len(rows), 1))),
    "not finite": _not_finite,
    "tiny": lambda random, rows: rows * 1e-42,
    "large": lambda random, rows: rows * 1e37,
}


def table_of(kind: str, num_rows: int, num_cols: int, seed: int) -> Tensor:
    """An fp32 table."""
    random = np.random.default_rng(seed)
    rows = TABLES[kind](random, random.normal(size=(num_rows, num_cols)))
    with np.errstate(over="ignore"):
        return torch.from_numpy(rows.astype(np.float32))


@dataclass(frozen=True, eq=False)
class Saved:
    """A table after it was saved and loaded.

    Attributes:
        rows: What was saved.
        loaded: What was loaded.
        scheme: Its scheme, with its transform if it has one.
        num_bytes: Of the data files.
    """

    rows: Tensor
    loaded: Tensor
    scheme: Scheme
    num_bytes: int

    @classmethod
    def by(cls, path: Path, rows: Tensor, rule: ErrorOf | TransformCoded) -> "Saved":
        """Save and load a table."""
        writer = cnr.CNRStorageWriter(path, quantization={"*": rule}, sync_files=False)
        dcp.save({"t": rows}, storage_writer=writer, planner=cnr.CNRSavePlanner(), no_dist=True)
        (shard,) = cnr.read_checkpoint(path).manifest.tensors["t"].shards
        scheme = shard.scheme
        if isinstance(scheme, Transformed):
            assert shard.transform is not None
            stored = [bytes_of(path.parent, path.name, _place(blob)) for blob in shard.transform.blobs]
            num_cols = rows.shape[1]
            basis = Basis.parsed(stored[1], num_cols, "basis") if len(stored) > 1 else None
            scheme = scheme.with_data(zstandard.decompress(stored[0]), basis, num_cols, "transform")
        num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        return cls(rows, cnr.load_table(path, "t"), scheme, num_bytes)

    @property
    def is_exact(self) -> Tensor:
        """Whether each row is stored exactly."""
        found = torch.zeros(len(self.rows), dtype=torch.bool)
        found[self.scheme.encode(self.rows).exact] = True
        return found

    @property
    def errors(self) -> Tensor:
        """The l2 norm of the error of each row."""
        return (self.loaded.double() - self.rows.double()).norm(dim=1)

    @property
    def mean_error(self) -> float:
        """That of finite rows."""
        errors = self.errors[self.rows.isfinite().all(1)]
        return float(errors.mean()) if len(errors) else 0.0


def _place(blob: Blob) -> tuple[int, int, int, int]:
    return blob.pack, blob.offset, blob.num_bytes, blob.crc32c


def _bits(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.int32)


@hypothesis.settings(max_examples=150)
@hypothesis.given(
    kind=st.sampled_from(list(TABLES)),
    num_rows=st.one_of(st.integers(1, NUM_SAMPLED), st.integers(1, 3)),
    num_cols=st.one_of(st.integers(1, 40), st.integers(1, 2)),
    seed=st.integers(0, 2**32),
    error_of=st.sampled_from(ERRORS),
)
@hypothesis.example(kind="few dimensions", num_rows=500, num_cols=32, seed=0, error_of=ERRORS[0])
@hypothesis.example(kind="not finite", num_rows=500, num_cols=32, seed=0, error_of=ERRORS[0])
@hypothesis.example(kind="huge row", num_rows=500, num_cols=16, seed=0, error_of=ERRORS[2])
@hypothesis.example(kind="huge component", num_rows=500, num_cols=8, seed=0, error_of=ERRORS[0])
def test_whatever_is_in_a_table(
    tmp_path_factory: pytest.TempPathFactory, kind: str, num_rows: int, num_cols: int, seed: int, error_of: ErrorOf
) -> None:
    """Of a table that is all in the sample, bytes, mean error of coded rows, each row's bound, and exact rows."""
    folder = tmp_path_factory.getbasetemp() / f"table-{next(numbers)}"
    rows = table_of(kind, num_rows, num_cols, seed)
    saved, other = (Saved.by(folder / str(rule), rows, rule) for rule in (TransformCoded(error_of), error_of))
    if not isinstance(saved.scheme, Transformed):
        assert saved.scheme == other.scheme
        assert saved.num_bytes == other.num_bytes
        assert torch.equal(_bits(saved.loaded), _bits(other.loaded))
        return
    assert saved.num_bytes <= other.num_bytes
    is_exact = saved.is_exact
    assert bool(is_exact[~rows.isfinite().all(1)].all())
    assert torch.equal(_bits(saved.loaded[is_exact]), _bits(rows[is_exact]))
    assert saved.mean_error <= 1.05 * other.mean_error
    errors = saved.errors[~is_exact]
    norms = rows[~is_exact].double().norm(dim=1)
    assert bool((errors <= 0.85 * saved.scheme.known.step * num_cols**0.5 + 1e-6 * norms).all())


@pytest.mark.parametrize("kind", ["uniform", "integers"])
def test_bytes_are_not_more_than_those_of_split_blobs(tmp_path: Path, kind: str) -> None:
    """Scales and biases that are alike are compressed when ``error_of`` splits its blobs."""
    rows, error_of = table_of(kind, 6_000, 32, 0), ERRORS[0]
    saved, other = (Saved.by(tmp_path / str(rule), rows, rule) for rule in (TransformCoded(error_of), error_of))
    assert saved.num_bytes <= other.num_bytes


@pytest.mark.parametrize(("kind", "num_rows", "num_cols"), [("heavy tails", 6_000, 32), ("mostly zeros", 20_000, 8)])
def test_the_mean_error_of_larger_tables_is_not_larger(tmp_path: Path, kind: str, num_rows: int, num_cols: int) -> None:
    """Most of the error is that of rows of which a sample may have more or fewer than the table."""
    rows, error_of = table_of(kind, num_rows, num_cols, 0), cnr.Asymmetric(8)
    saved, other = (Saved.by(tmp_path / str(rule), rows, rule) for rule in (TransformCoded(error_of), error_of))
    assert saved.mean_error <= 1.01 * other.mean_error


def test_the_mean_error_counts_rows_that_the_other_scheme_stores_exactly(tmp_path: Path) -> None:
    """500 rows of 8 columns, one of which is a million times the others."""
    rows, error_of = table_of("gaussian", 500, 8, 0), ERRORS[0]
    rows[:, 4] *= 1e6
    saved, other = (Saved.by(tmp_path / str(rule), rows, rule) for rule in (TransformCoded(error_of), error_of))
    assert saved.mean_error <= 1.01 * other.mean_error
