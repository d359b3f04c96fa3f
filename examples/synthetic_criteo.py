"""Synthetic ads with the shape of Criteo's: 13 numbers, 26 categories with 3 to 10 million values, learnable labels."""

from collections.abc import Iterator

import numpy as np
from samples import Feature, Samples, unit_floats
from synthetic_clicks import zipf_ranks


class SyntheticCriteo:
    """Synthetic ads. Samples are drawn in chunks of fixed size, each from the seed and its own number.

    Args:
        seed: Seed of all samples.
    """

    CHUNK_SAMPLES = 4096
    NUM_INTS, NUM_CATEGORIES = 13, 26
    SKEW = 1.05
    # Criteo's categories also have from 3 values to 10 million.
    NUM_VALUES = tuple(int(3 * 10 ** (6.5 * number / 25)) for number in range(NUM_CATEGORIES))
    features = tuple(Feature(f"cat_{number}", 1, num_values) for number, num_values in enumerate(NUM_VALUES))
    num_dense = NUM_INTS

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def samples(self, start: int) -> Iterator[Samples]:
        """Yield samples from a global position."""
        chunk, skip = divmod(start, self.CHUNK_SAMPLES)
        while True:
            yield self._chunk(chunk)[skip:]
            chunk, skip = chunk + 1, 0

    def _chunk(self, number: int) -> Samples:
        random = np.random.default_rng([self._seed, number])
        size = self.CHUNK_SAMPLES
        dense = np.log1p(random.geometric(0.05, size=(size, self.NUM_INTS))).astype(np.float32)
        ranks = [zipf_ranks(random.random(size), num_values, self.SKEW) for num_values in self.NUM_VALUES]
        ids = np.column_stack(ranks).astype(np.uint64)
        # The number of the feature distinguishes equal values of two features, so that their effects are independent.
        liked = unit_floats(ids + (np.arange(self.NUM_CATEGORIES, dtype=np.uint64) << np.uint64(40))) - 0.5
        score = liked.sum(axis=1) + 0.5 * (dense[:, 0] - dense[:, 1])
        labels = random.random(size) < 1 / (1 + np.exp(-score))
        return Samples(dense, ids, labels.astype(np.float32))
