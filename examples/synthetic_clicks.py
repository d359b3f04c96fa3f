"""Synthetic clicks, for a machine without a data set: Zipf's law, articles that come and go, labels to be learned."""

from collections.abc import Iterator

import numpy as np
from delimited import Floats, Int64Array
from numpy.typing import NDArray
from samples import Feature, Ids, Samples, unit_floats


class SyntheticClicks:
    """Synthetic clicks: readers and articles by Zipf's law, articles that come and go, and labels that can be learned.

    Samples are drawn in chunks of fixed size, each from the seed and its own number. The popularity of an article
    changes over time, so the number of rows modified since a baseline grows as in a real stream.
    """

    CHUNK_SAMPLES = 4096
    NUM_USERS, NUM_ARTICLES, NUM_CONTEXTS = 200_000, 60_000, 24
    USER_SKEW, ARTICLE_SKEW = 0.7, 1.05
    SAMPLES_PER_NEW_ARTICLE = 1024
    features = (Feature("user_id"), Feature("article_id"), Feature("section", 1, 4096), Feature("context", 3, 1024))
    num_dense = 4

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def samples(self, start: int) -> Iterator[Samples]:
        chunk, skip = divmod(start, self.CHUNK_SAMPLES)
        while True:
            yield self._chunk(chunk)[skip:]
            chunk, skip = chunk + 1, 0

    def _chunk(self, number: int) -> Samples:
        random = np.random.default_rng([self._seed, number])
        positions = number * self.CHUNK_SAMPLES + np.arange(self.CHUNK_SAMPLES)
        users = zipf_ranks(random.random(self.CHUNK_SAMPLES), self.NUM_USERS, self.USER_SKEW)
        popularity = zipf_ranks(random.random(self.CHUNK_SAMPLES), self.NUM_ARTICLES, self.ARTICLE_SKEW)
        # The ranks of articles shift over time: each one rises to the top, and later falls to the end.
        articles = (popularity + positions // self.SAMPLES_PER_NEW_ARTICLE) % self.NUM_ARTICLES
        contexts = random.integers(self.NUM_CONTEXTS, size=(self.CHUNK_SAMPLES, 3)) * 3 + np.arange(3)
        dense = random.standard_normal((self.CHUNK_SAMPLES, self.num_dense)).astype(np.float32)
        ids = np.column_stack([users, articles, articles // 32, contexts]).astype(np.uint64)
        labels = random.random(self.CHUNK_SAMPLES) < self._click_probability(ids, dense)
        return Samples(dense, ids, labels.astype(np.float32))

    def _click_probability(self, ids: Ids, dense: Floats) -> NDArray[np.float64]:
        """Return the probability of each click: a function of its article, section, contexts, reader and numbers."""
        users, articles, sections, contexts = ids[:, 0], ids[:, 1], ids[:, 2], ids[:, 3:]
        seed = np.uint64(self._seed)
        score = 3.0 * (unit_floats(articles ^ seed) - 0.5) + 3.0 * (unit_floats(sections + np.uint64(1 << 32)) - 0.5)
        score += 2.0 * (unit_floats(users + np.uint64(1 << 33)) - 0.5)
        score += (unit_floats(contexts + np.uint64(1 << 34)) - 0.5).sum(axis=1)
        score += 0.8 * dense[:, 0] - 0.5 * dense[:, 1]
        return 1 / (1 + np.exp(-score))


def zipf_ranks(uniform: NDArray[np.float64], num_ranks: int, skew: float) -> Int64Array:
    """Convert uniform numbers to ranks 0 to ``num_ranks`` - 1 by Zipf's law.

    The probability of a rank is about proportional to (rank + 1) ** -``skew``; ``skew`` must not be 1. The function
    inverts the distribution function of the continuous law, so it needs no array of ``num_ranks`` elements.
    """
    top = float(num_ranks + 1) ** (1 - skew)
    ranks: NDArray[np.float64] = (1 + uniform * (top - 1)) ** (1 / (1 - skew)) - 1
    return np.minimum(ranks, num_ranks - 1).astype(np.int64)
