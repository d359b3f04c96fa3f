"""Marking on a GPU, in one launch, marks what a loop over features and ids does.

Without a GPU, Triton's interpreter runs the kernel, in a process of its own: it must be asked for before kernels are
defined.
"""

import sys
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import pytest
import torch

from tests.kernels.interpreter import interpret
from torchrec_cnr.kernels.gpu import mark_rows

NUM_CASES = 60


def mismatches(device: torch.device) -> Iterator[str]:
    """What random lookups get wrong: ids that are no rows, empty bags, several features of a table, many ids."""
    generator = np.random.default_rng(0)
    for case in range(NUM_CASES):
        num_rows = generator.integers(1, 50, size=generator.integers(1, 4))
        bounds = [0, *accumulate(map(int, num_rows))]
        of_feature = sorted(int(table) for table in generator.integers(len(num_rows), size=generator.integers(1, 6)))
        num_bags = int(generator.integers(1, 5))
        lengths = generator.integers(0, 1500 if case % 20 == 0 else 4, size=(len(of_feature), num_bags))
        ids = [
            generator.integers(-2, num_rows[table] + 2, size=sum(own))
            for table, own in zip(of_feature, lengths, strict=True)
        ]
        dtype = torch.int64 if case % 2 else torch.int32
        beyond = generator.integers(0, 3, size=case % 3)  # ids after the last bag
        marked = torch.zeros(bounds[-1], dtype=torch.bool, device=device)
        mark_rows.mark_rows(
            torch.tensor(np.concatenate([*ids, beyond]), dtype=dtype, device=device),
            torch.tensor([0, *accumulate(map(int, lengths.ravel()))], dtype=dtype, device=device),
            num_bags,
            torch.tensor([bounds[table] for table in of_feature], device=device),
            torch.tensor([bounds[table + 1] for table in of_feature], device=device),
            marked,
        )
        expected = {
            bounds[table] + int(value)
            for table, own in zip(of_feature, ids, strict=True)
            for value in own
            if 0 <= value < num_rows[table]
        }
        if set(marked.nonzero().squeeze(1).tolist()) != expected:
            yield f"case {case}: marked {marked.nonzero().squeeze(1).tolist()}, expected {sorted(expected)}"


@pytest.mark.long
def test_interpreted_marks_are_those_of_a_loop() -> None:
    """In Triton's interpreter."""
    interpret("tests.kernels.test_gpu_marks")


@pytest.mark.gpu
def test_compiled_marks_are_those_of_a_loop() -> None:
    """On a GPU; not the first if there are several."""
    assert list(mismatches(torch.device("cuda", torch.cuda.device_count() - 1))) == []


if __name__ == "__main__":
    sys.exit("\n".join(mismatches(torch.device("cpu"))) or 0)
