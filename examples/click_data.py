"""Endless streams of samples in time order: news clicks, MovieLens ratings, Criteo's display ads.

    stream = open_stream("clicks", Path("clicks.csv.gz"), seed=0)
    for batch in global_batches(stream, start=0, batch_size=1024):
        ...

After its last line, a file is read again from the beginning. Nothing is cached: files are parsed while they are read,
which takes a few seconds for a million lines. A stream that begins in the middle of a file reads all lines before it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from delimited import DataError, Floats, Int64Array, LineBlock, read_blocks
from numpy.typing import NDArray
from samples import Feature, Samples, Stream, endless, hash_words, mix64
from synthetic_clicks import SyntheticClicks

FORMATS = ("synthetic", "clicks", "movielens", "criteo")
DAY_SECS = 86_400


def open_stream(data_format: str, path: Path | None, seed: int) -> Stream:
    """Return the stream of one of ``FORMATS``, after checking the beginning of the file."""
    if (path is None) != (data_format == "synthetic"):
        needs = "does not take a file" if data_format == "synthetic" else "needs a file"
        raise DataError(f"--format {data_format} {needs} (--data)")
    if path is None:
        return SyntheticClicks(seed)
    readers: dict[str, Callable[[Path], Stream]] = {"clicks": NewsClicks, "movielens": MovieLens, "criteo": Criteo}
    stream = readers[data_format](path)
    next(stream.samples(0))
    return stream


class NewsClicks:
    """Clicks of a news portal's readers, with one negative sample for each click.

    The file contains only clicks. The negative sample of a click has the same reader and context, with an article that
    another reader clicked recently. The click's number determines this article. Sample 2n is click n, and sample 2n + 1
    is its negative sample.
    """

    HEADER = (
        "user_id,session_id,click_article_id,click_timestamp,click_environment,click_deviceGroup,"
        "click_os,click_country,click_region,click_referrer_type"
    )
    RECENT_CLICKS = 1 << 16
    CONTEXT_FIELDS = (4, 5, 6, 7, 8, 9)
    features = (Feature("user_id"), Feature("session_id"), Feature("article_id"), Feature("context", 6, 1024))
    num_dense = 4

    def __init__(self, path: Path) -> None:
        self._path = path

    def samples(self, start: int) -> Iterator[Samples]:
        return endless(self, start)

    def one_pass(self) -> Iterator[Samples]:
        recent: Int64Array = np.empty(0, dtype=np.int64)
        num_before = 0
        for block in read_blocks(self._path, ",", 10, self.HEADER):
            articles = np.concatenate([recent, block.ints(2)])
            drawn = self._recent_articles(articles, len(recent), num_before)
            yield self._pairs(block, articles[len(recent) :], drawn)
            num_before += len(block)
            recent = articles[-self.RECENT_CLICKS :]

    def _recent_articles(self, articles: Int64Array, num_recent: int, num_before: int) -> Int64Array:
        """Return, for each click after the first ``num_recent``, the article of one of the RECENT_CLICKS before it."""
        at = np.arange(num_recent, len(articles))
        numbers = np.arange(num_before, num_before + len(at))
        # The very first click has no earlier click, and draws itself.
        reach = np.clip(numbers, 1, self.RECENT_CLICKS).astype(np.uint64)
        back = mix64(numbers.astype(np.uint64)) % reach + np.uint64(1)
        return articles[at - np.minimum(back.astype(np.int64), at)]

    def _pairs(self, block: LineBlock, articles: Int64Array, drawn: Int64Array) -> Samples:
        ids = np.empty((len(block), 2, 9), dtype=np.int64)
        ids[:, :, 0] = block.ints(0)[:, None]
        ids[:, :, 1] = block.ints(1)[:, None]
        ids[:, 0, 2], ids[:, 1, 2] = articles, drawn
        for at, field in enumerate(self.CONTEXT_FIELDS):
            # All context fields share one table; the field's number distinguishes equal values of two fields.
            ids[:, :, 3 + at] = (block.ints(field) * 16 + field)[:, None]
        dense = np.repeat(time_of_week(block.ints(3) / 1000), 2, axis=0)
        labels = np.tile(np.array([1, 0], dtype=np.float32), len(block))
        return Samples(dense, ids.reshape(-1, 9).astype(np.uint64), labels)


class MovieLens:
    """MovieLens ratings (``ratings.csv``, or ``ratings.dat`` with ``::``), sorted by time; the label is 1 from 4 stars.

    The file is ordered by user, so it is read as a whole, which takes about 20 bytes of memory per rating.
    """

    HEADER = "userId,movieId,rating,timestamp"
    BLOCK_SAMPLES = 1 << 16
    LIKED = 4.0
    features = (Feature("user_id"), Feature("movie_id"))
    num_dense = 4

    def __init__(self, path: Path) -> None:
        with_header = ".dat" not in path.suffixes
        blocks = read_blocks(path, "," if with_header else "::", 4, self.HEADER if with_header else None)
        columns = [(b.ints(0), b.ints(1), b.floats(2) >= self.LIKED, b.ints(3)) for b in blocks]
        users, movies, liked, times = (np.concatenate(column) for column in zip(*columns, strict=True))
        # A stable sort keeps the file's order for equal times, so that the stream is always the same.
        order = np.argsort(times, kind="stable")
        self._ids = np.stack([users[order], movies[order]], axis=1).astype(np.uint64)
        self._liked, self._times = liked[order], times[order]

    def samples(self, start: int) -> Iterator[Samples]:
        return endless(self, start)

    def one_pass(self) -> Iterator[Samples]:
        for at in range(0, len(self._liked), self.BLOCK_SAMPLES):
            part = slice(at, at + self.BLOCK_SAMPLES)
            dense = time_of_week(self._times[part].astype(np.float64))
            yield Samples(dense, self._ids[part], self._liked[part].astype(np.float32))


class Criteo:
    """Criteo's display ads (Kaggle's ``train.txt``, or a ``day_N`` file), in file order, which is time order."""

    NUM_INTS, NUM_CATEGORIES = 13, 26
    features = tuple(Feature(f"cat_{number}") for number in range(NUM_CATEGORIES))
    num_dense = NUM_INTS

    def __init__(self, path: Path) -> None:
        self._path = path

    def samples(self, start: int) -> Iterator[Samples]:
        return endless(self, start)

    def one_pass(self) -> Iterator[Samples]:
        for block in read_blocks(self._path, "\t", 1 + self.NUM_INTS + self.NUM_CATEGORIES):
            counts = np.stack([block.ints(1 + n, missing=0) for n in range(self.NUM_INTS)], axis=1)
            dense = np.log1p(np.maximum(counts, 0)).astype(np.float32)
            words = [block.strings(1 + self.NUM_INTS + n) for n in range(self.NUM_CATEGORIES)]
            ids = np.stack([hash_words(word) for word in words], axis=1)
            yield Samples(dense, ids, block.floats(0))


def time_of_week(seconds: NDArray[np.float64]) -> Floats:
    """Convert Unix times [N] to four dense features: sine and cosine of the time of day and of the time of week."""
    day = 2 * np.pi * (seconds % DAY_SECS) / DAY_SECS
    week = 2 * np.pi * (seconds % (7 * DAY_SECS)) / (7 * DAY_SECS)
    return np.stack([np.sin(day), np.cos(day), np.sin(week), np.cos(week)], axis=1).astype(np.float32)
