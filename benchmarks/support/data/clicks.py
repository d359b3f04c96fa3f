"""Clicks in time order, and samples of them for a model that predicts whether a reader clicks an article.

The data contains only clicks, so each click gets a partner, which is a negative sample. It has the same reader and
context, and the article of one of the 65,536 clicks before it, drawn at random. So the popularity of an article alone
is a poor predictor.
"""

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Real clicks, if the file is next to the project; otherwise synthetic ones with about the same skew.
CLICKS = Path(__file__).parents[4] / "shared" / "data" / "clicks.csv.gz"
NUM_COLUMNS = 3
BATCH_CLICKS = 1024
RECENT_CLICKS = 1 << 16
TABLES = ("readers", "articles", "context")
CONTEXT_COLUMNS = range(4, 10)
DAY_SECS = 86_400
NUM_DENSE = 4
_MADE_UP = ((320_000, 0.6), (1_000_000, 0.1), (46_000, 1.05))  # number of ids, and their skew


def trained_on() -> str:
    """Return a description of the clicks of :func:`click_ids`."""
    return "real news clicks" if CLICKS.exists() else "made-up clicks"


def click_ids(num_clicks: int) -> Tensor:
    """Return reader, session and article of the first clicks, int64 [num_clicks or less, NUM_COLUMNS]."""
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


@dataclass(frozen=True, eq=False)
class Clicks:
    """Clicks in time order.

    Attributes:
        readers: Rows of the table of readers, int64 [N].
        articles: Rows of the table of articles, int64 [N].
        context: Rows of the table of context, int64 [N, k]: device, place, and referrer.
        secs: Unix times, float64 [N].
    """

    readers: NDArray[np.int64]
    articles: NDArray[np.int64]
    context: NDArray[np.int64]
    secs: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.readers)

    def num_rows(self) -> tuple[int, ...]:
        """Return the number of rows of each of ``TABLES``, which is the largest row number plus one."""
        return tuple(int(rows.max()) + 1 for rows in (self.readers, self.articles, self.context))


@dataclass(frozen=True, eq=False)
class Lookup:
    """The lookups of a batch in one table.

    Attributes:
        rows: The different rows, int64 [m], ascending.
        places: For each sample, the positions in ``rows`` of its k ids, whose vectors are summed, int32 [n, k].
    """

    rows: Tensor
    places: Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of clicks and their partners.

    Attributes:
        lookups: The lookups in each of ``TABLES``: readers and context of n clicks, and articles of these and then of
            their partners.
        dense: The dense features, float32 [n, NUM_DENSE].
    """

    lookups: tuple[Lookup, ...]
    dense: Tensor


def read_clicks(num_clicks: int) -> Clicks:
    """Read the first clicks; return synthetic ones if there are no real ones."""
    if not CLICKS.exists():
        return _made_up_clicks(num_clicks)
    with gzip.open(CLICKS, "rt") as file:
        found = np.loadtxt(file, np.int64, delimiter=",", skiprows=1, max_rows=num_clicks)
    context = np.empty((len(found), len(CONTEXT_COLUMNS)), dtype=np.int64)
    num_values = 0
    for at, column in enumerate(CONTEXT_COLUMNS):  # equal values of two columns have different rows
        values, numbers = np.unique(found[:, column], return_inverse=True)
        context[:, at] = numbers + num_values
        num_values += len(values)
    return Clicks(found[:, 0], found[:, 2], context, found[:, 3] / 1000)


def _made_up_clicks(num_clicks: int) -> Clicks:
    """Return synthetic clicks. In half of them the context selects one of few articles, so that models can learn it."""
    random = np.random.default_rng(1)
    ids = click_ids(num_clicks).numpy()
    context = random.integers(0, 8, (len(ids), len(CONTEXT_COLUMNS))) + 8 * np.arange(len(CONTEXT_COLUMNS))
    liked = ids[:, 2] % 32 * 8 + context[:, 0]
    articles = np.where(random.random(len(ids)) < 0.5, liked, ids[:, 2])
    return Clicks(ids[:, 0], articles, context, np.linspace(0, 4 * DAY_SECS, len(ids)))


def batches(clicks: Clicks, first: int, last: int, seed: int) -> list[Batch]:
    """Return batches of clicks ``first`` to ``last - 1``, without an incomplete one; the seed selects the partners."""
    generator = np.random.default_rng(seed)
    numbers = np.arange(len(clicks))
    back = generator.integers(1, np.clip(numbers, 1, RECENT_CLICKS), endpoint=True)
    partners = clicks.articles[np.maximum(numbers - back, 0)]
    dense = torch.from_numpy(time_of_week(clicks.secs))
    found = []
    for start in range(first, last - BATCH_CLICKS + 1, BATCH_CLICKS):
        part = slice(start, start + BATCH_CLICKS)
        articles = np.concatenate([clicks.articles[part], partners[part]])
        looked_up = (clicks.readers[part, None], articles[:, None], clicks.context[part])
        found.append(Batch(tuple(_lookup(ids) for ids in looked_up), dense[part]))
    return found


def _lookup(ids: NDArray[np.int64]) -> Lookup:
    rows, places = np.unique(ids, return_inverse=True)
    return Lookup(torch.from_numpy(rows), torch.from_numpy(places.reshape(ids.shape).astype(np.int32)))


def time_of_week(secs: NDArray[np.float64]) -> NDArray[np.float32]:
    """Convert Unix times [N] to float32 [N, NUM_DENSE]: sine and cosine of the time of day and of the time of week."""
    angles = [2 * np.pi * (secs % period) / period for period in (DAY_SECS, 7 * DAY_SECS)]
    return np.column_stack([wave(angle) for angle in angles for wave in (np.sin, np.cos)]).astype(np.float32)
