"""Samples of an interaction stream, their batches, and the hashing of their ids into table rows.

A sample depends only on its global position. A trainer that continues at sample ``n`` on another number of ranks
therefore gets exactly the samples that the interrupted run would have got.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from delimited import BytesArray, Floats, Int64Array
from numpy.typing import NDArray

Ids = NDArray[np.uint64]


@dataclass(frozen=True)
class Feature:
    """A sparse feature, which has its own table.

    Attributes:
        name: Name of the feature and of its table.
        num_ids: Number of ids of the feature in each sample.
        max_rows: The most rows that its table needs, for features with few different ids.
    """

    name: str
    num_ids: int = 1
    max_rows: int = 1 << 40

    def num_rows(self, at_most: int) -> int:
        """Return the number of rows of its table, limited to ``at_most``."""
        return min(self.max_rows, at_most)


@dataclass(frozen=True, eq=False)
class Samples:
    """Consecutive samples of a stream.

    Attributes:
        dense: The dense features, float32 [N, num_dense].
        ids: The ids before hashing, uint64 [N, sum of the features' num_ids], in the order of the stream's features.
        labels: The labels, 0 or 1, float32 [N].
    """

    dense: Floats
    ids: Ids
    labels: Floats

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, part: slice) -> "Samples":
        return Samples(self.dense[part], self.ids[part], self.labels[part])


class Stream(Protocol):
    """An endless sequence of samples, addressed by global position."""

    @property
    def features(self) -> tuple[Feature, ...]: ...

    @property
    def num_dense(self) -> int: ...

    def samples(self, start: int) -> Iterator[Samples]:
        """Yield samples from global position ``start``, in blocks of any size."""
        ...


class OnePass(Protocol):
    """Samples that can be read from the beginning to the end, any number of times."""

    def one_pass(self) -> Iterator[Samples]: ...


def endless(one_pass: "OnePass", start: int) -> Iterator[Samples]:
    """Yield passes over a file, one after another, from global position ``start``."""
    while True:
        num_in_pass = 0
        for block in one_pass.one_pass():
            num_in_pass += len(block)
            if start < len(block):
                yield block[start:]
            start = max(start - len(block), 0)
        start %= num_in_pass


def global_batches(stream: Stream, start: int, batch_size: int) -> Iterator[Samples]:
    """Yield batches of exactly ``batch_size`` samples, from global position ``start``."""
    pending: list[Samples] = []
    num_pending = 0
    for block in stream.samples(start):
        pending.append(block)
        num_pending += len(block)
        if num_pending < batch_size:
            continue
        merged = concatenate(pending)
        num_whole = num_pending // batch_size * batch_size
        for at in range(0, num_whole, batch_size):
            yield merged[at : at + batch_size]
        pending = [merged[num_whole:]]
        num_pending -= num_whole


def rank_share(batch: Samples, rank: int, world_size: int) -> Samples:
    """Return the part of a global batch on which one rank trains."""
    share = len(batch) // world_size
    return batch[rank * share : (rank + 1) * share]


def concatenate(parts: list[Samples]) -> Samples:
    """Concatenate parts to one object."""
    return Samples(
        np.concatenate([part.dense for part in parts]),
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.labels for part in parts]),
    )


def mix64(values: Ids) -> Ids:
    """Hash 64-bit words by SplitMix64's finalizer, a bijection in which each input bit changes half of the output."""
    values = (values + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def table_rows(ids: Ids, num_rows: int) -> Int64Array:
    """Hash ids to rows of a table of ``num_rows`` rows: int64, of the shape of ``ids``."""
    return (mix64(ids) % np.uint64(num_rows)).astype(np.int64)


def unit_floats(ids: Ids) -> NDArray[np.float64]:
    """Return a fixed pseudo-random number in [0, 1) for each id."""
    return (mix64(ids) >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def hash_words(words: BytesArray) -> Ids:
    """Hash byte strings [N] to 64-bit ids, which do not depend on the machine or on the width of the column."""
    width = (words.dtype.itemsize + 7) // 8 * 8
    lanes = np.ascontiguousarray(words.astype(f"S{width}")).view("<u8").reshape(len(words), -1)
    hashed = np.zeros(len(words), dtype=np.uint64)
    for lane in lanes.T:
        hashed = np.where(lane != 0, mix64(hashed ^ lane), hashed)
    return hashed
