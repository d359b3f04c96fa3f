"""Clicks in time order: whom they are of, in which session, on which article."""

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# Real clicks, where they lie beside the project; else made-up ones with about the same skew.
CLICKS = Path(__file__).parents[4] / "shared" / "data" / "clicks.csv.gz"
NUM_COLUMNS = 3
_MADE_UP = ((320_000, 0.6), (1_000_000, 0.1), (46_000, 1.05))  # how many ids there are, and their skew


def trained_on() -> str:
    """What :func:`click_ids` gives."""
    return "real news clicks" if CLICKS.exists() else "made-up clicks"


def click_ids(num_clicks: int) -> Tensor:
    """int64 [num_clicks or less, NUM_COLUMNS]: reader, session and article of the first clicks."""
    if CLICKS.exists():
        with gzip.open(CLICKS, "rt") as file:
            found = np.loadtxt(
                file, np.int64, delimiter=",", skiprows=1, usecols=range(NUM_COLUMNS), max_rows=num_clicks
            )
        return torch.from_numpy(found)
    random = np.random.default_rng(0)
    weights = [1 / np.arange(1, num + 1) ** skew for num, skew in _MADE_UP]
    drawn = [random.choice(len(weight), num_clicks, p=weight / weight.sum()) for weight in weights]
    return torch.from_numpy(np.column_stack(drawn))
