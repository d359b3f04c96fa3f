"""Clicks in time order, and as samples for a model: whether a reader clicked an article.

The data has clicks only, so each click has a partner, which is not one: the same reader and context with the article of
one of the 65,536 clicks before it, drawn at random. So an article's popularity alone tells little.
"""

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Real clicks, where they lie beside the project; else made-up ones with about the same skew.
CLICKS = Path(__file__).parents[4] / "shared" / "data" / "clicks.csv.gz"
NUM_COLUMNS = 3
BATCH_CLICKS = 1024
RECENT_CLICKS = 1 << 16
TABLES = ("readers", "articles", "context")
CONTEXT_COLUMNS = range(4, 10)
DAY_SECS = 86_400
NUM_DENSE = 4
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


@dataclass(frozen=True, eq=False)
class Clicks:
    """Clicks in time order.

    Attributes:
        readers: int64 [N], rows of the table of readers.
        articles: int64 [N], rows of the table of articles.
        context: int64 [N, k], rows of the table of context: device, place, and where the reader came from.
        secs: float64 [N], Unix time.
    """

    readers: NDArray[np.int64]
    articles: NDArray[np.int64]
    context: NDArray[np.int64]
    secs: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.readers)

    def num_rows(self) -> tuple[int, ...]:
        """Rows of each of ``TABLES``: as many as there are numbers up to the greatest one."""
        return tuple(int(rows.max()) + 1 for rows in (self.readers, self.articles, self.context))


@dataclass(frozen=True, eq=False)
class Lookup:
    """What a batch looks up in one table.

    Attributes:
        rows: int64 [m], different rows, ascending.
        places: int32 [n, k], for each sample the positions in ``rows`` of its k ids, whose vectors are added up.
    """

    rows: Tensor
    places: Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """Clicks, and the partner of each.

    Attributes:
        lookups: For each of ``TABLES``; readers and context of n clicks, articles of these and then of their partners.
        dense: float32 [n, NUM_DENSE].
    """

    lookups: tuple[Lookup, ...]
    dense: Tensor


def read_clicks(num_clicks: int) -> Clicks:
    """The first clicks; made-up ones where there are no real ones."""
    if not CLICKS.exists():
        return _made_up_clicks(num_clicks)
    with gzip.open(CLICKS, "rt") as file:
        found = np.loadtxt(file, np.int64, delimiter=",", skiprows=1, max_rows=num_clicks)
    context = np.empty((len(found), len(CONTEXT_COLUMNS)), dtype=np.int64)
    num_values = 0
    for at, column in enumerate(CONTEXT_COLUMNS):  # equal values of two columns are rows of their own
        values, numbers = np.unique(found[:, column], return_inverse=True)
        context[:, at] = numbers + num_values
        num_values += len(values)
    return Clicks(found[:, 0], found[:, 2], context, found[:, 3] / 1000)


def _made_up_clicks(num_clicks: int) -> Clicks:
    """Half of the clicks are on one of few articles that the context leads to, so that there is something to learn."""
    random = np.random.default_rng(1)
    ids = click_ids(num_clicks).numpy()
    context = random.integers(0, 8, (len(ids), len(CONTEXT_COLUMNS))) + 8 * np.arange(len(CONTEXT_COLUMNS))
    liked = ids[:, 2] % 32 * 8 + context[:, 0]
    articles = np.where(random.random(len(ids)) < 0.5, liked, ids[:, 2])
    return Clicks(ids[:, 0], articles, context, np.linspace(0, 4 * DAY_SECS, len(ids)))


def batches(clicks: Clicks, first: int, last: int, seed: int) -> list[Batch]:
    """Batches of clicks ``first`` to ``last`` without it, their partners drawn by the seed; the rest is left out."""
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
    """Unix times [N] as float32 [N, NUM_DENSE]: the angles of the hour in the day and of the day in the week."""
    angles = [2 * np.pi * (secs % period) / period for period in (DAY_SECS, 7 * DAY_SECS)]
    return np.column_stack([wave(angle) for angle in angles for wave in (np.sin, np.cos)]).astype(np.float32)
