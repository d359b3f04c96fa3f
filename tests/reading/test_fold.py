"""Folding: a lineage loads as the dictionary has it however it is read, and no row is decoded that a later one has."""

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.lineages import COLS, ROWS, HotLineage, RandomRoot, Save, is_same
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.quantization import Asymmetric, NoQuantization, Scheme
from torchrec_cnr.reading import fold as fold_module
from torchrec_cnr.reading.blocks import Block
from torchrec_cnr.reading.fold import fold
from torchrec_cnr.reading.plan import plan_fold
from torchrec_cnr.reading.regions import TensorRegion


def _saves(seed: int) -> list[Save]:
    """A baseline, and deltas on top of one another."""
    rng = np.random.default_rng(seed)
    cuts = rng.integers(0, 4, 6)
    return [Save(None if n == 0 else 0, seed + n, float(rng.random()), int(num)) for n, num in enumerate(cuts)]


@pytest.mark.long
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    early_bytes=st.sampled_from([0, 300, 1 << 20]),
    most_turns=st.sampled_from([3, 1 << 16]),
)
def test_windows_of_any_size_load_the_same(
    tmp_path_factory: pytest.TempPathFactory, seed: int, early_bytes: int, most_turns: int
) -> None:
    """Row numbers are read of one checkpoint at a time or of many; boxes of any columns, tables of any width."""
    random_root = RandomRoot(tmp_path_factory.mktemp("root"), seed)
    for operation in _saves(seed):
        random_root.save(operation)
    with (
        mock.patch.object(fold_module, "_EARLY_BYTES", early_bytes),
        mock.patch.object(fold_module, "MAX_TURNS", most_turns),
        mock.patch.object(fold_module, "_MIN_COLS", 1),
    ):
        random_root.check(random_root.names[:2])


@pytest.mark.parametrize("scheme", [NoQuantization(), Asymmetric(4)], ids=["exact", "4 bits"])
def test_rows_that_are_overwritten_later_are_not_decoded(tmp_path: Path, scheme: Scheme) -> None:
    """Of ten deltas each row is written once, for all rows and for some; the values are those of one by one."""
    run = HotLineage(tmp_path, scheme)
    run.save(10)
    lineage = read_lineage(run.path)
    for rows in (range(ROWS), range(777, 9_001)):
        regions = [
            TensorRegion("t", Box((rows.start, 0), (len(rows), COLS)), torch.zeros(len(rows), COLS)) for _ in "ab"
        ]
        written = _rows_written(lineage, regions[0])
        num_modified = int((run.stored[rows.start : rows.stop] > 0).sum())
        assert sum(written[1:]) == num_modified < len(rows) == written[0]
        with mock.patch.object(fold_module, "_EARLY_BYTES", 0):
            assert sum(_rows_written(lineage, regions[1])[1:]) > 2 * num_modified
        assert is_same(regions[0].target, regions[1].target)


def _rows_written(lineage: object, region: TensorRegion) -> list[int]:
    """Fold; the rows of each block that were written, the baseline's together and first."""
    counts = [0]
    write = region.write

    def counting(block: Block) -> None:
        found = block.rows.within(region.box)
        assert found is not None
        num = len(range(*found[0].indices(ROWS))) if isinstance(found[0], slice) else len(found[0])
        if block.is_delta:
            counts.append(num)
        else:
            counts[0] += num
        write(block)

    with mock.patch.object(region, "write", counting):
        fold(plan_fold(lineage, [region]), [region], 2)
    return counts
