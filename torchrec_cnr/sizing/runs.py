"""The bytes that a policy writes, keeps and reads over a run.

``Full``, ``OneShot`` and ``Intermittent`` decide here as they do in a run. ``Consecutive`` keeps its whole chain.
``Compacted`` has a bound: a restore reads at most ``max_ratio`` times what it needs. To stay within it, a compaction
frees files, and copies their live rows.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torchrec_cnr.format.manifest import History
from torchrec_cnr.policies import Compacted, Consecutive, Policy, Since

_MAX_SIMULATED = 2_000  # saves; later ones repeat what these do
# Measured over 2,000 saves that modify 26 % of the rows (docs/benchmarks/figures.md), and over shorter runs with 5 % to
# 80 %. Compactions copy less than this if always the same rows are modified.
_COPIED = 0.12  # bytes that compactions copy per save, per byte of a baseline
_MOST_COPIED = 2.0  # the most of them per byte of a delta
_MOST_NEEDED = 1.2  # the most bytes that another kept checkpoint needs, per byte that a save writes on average


@dataclass(frozen=True)
class Run:
    """The bytes of a run.

    Attributes:
        written: The bytes written per save, with compaction, as an average over the run.
        copied: Those of them that compactions write. One process copies them for all ranks.
        kept: The most bytes in the store after old checkpoints were removed.
        peak: The most bytes in the store while a new checkpoint exists, and the one that it replaces still does.
        restore: The most bytes that a restore reads.
        uncompacted_restore: The most bytes that it reads if the newest checkpoint is not compacted yet.
        largest_delta: The bytes of the largest delta; 0 if there is none.
        most_intervals: The number of intervals whose modified rows the largest delta contains; 0 if there is none.
    """

    written: int
    copied: int
    kept: int
    peak: int
    restore: int
    uncompacted_restore: int
    largest_delta: int
    most_intervals: int


def run_of(
    policy: Policy, baseline: int, row_numbers: int, delta: Callable[[int], int], num_saves: int, keep_last: int
) -> Run:
    """Return the bytes of a run.

    Args:
        policy: The policy.
        baseline: The bytes of a baseline.
        row_numbers: The bytes of the row numbers of all rows after compactions.
        delta: Returns the bytes of a delta that contains the rows modified in a number of intervals.
        num_saves: The number of checkpoints, at least 1.
        keep_last: The number of newest checkpoints that are kept.

    Examples:
        >>> run_of(Consecutive(), 100, 3, lambda num_intervals: 26, num_saves=3, keep_last=1).kept
        152
    """
    if isinstance(policy, Compacted | Consecutive):
        return _chained(policy, baseline, row_numbers, delta(1) if num_saves > 1 else 0, num_saves, keep_last)
    return _simulated(policy, baseline, delta, num_saves, keep_last)


def _chained(
    policy: Compacted | Consecutive, baseline: int, row_numbers: int, delta: int, num_saves: int, keep_last: int
) -> Run:
    """Return the bytes of a run in which each delta is based on the checkpoint before it."""
    chain = baseline + (num_saves - 1) * delta
    most_intervals = 1 if num_saves > 1 else 0
    if isinstance(policy, Consecutive):
        return Run(round(chain / num_saves), 0, chain, chain, chain, chain, delta, most_intervals)
    bound = policy.max_ratio * (baseline + row_numbers)
    num_compacted = max(0.0, chain - bound) / max(1, delta)  # saves with a compaction
    copied = max(0.0, min(_COPIED * baseline, _MOST_COPIED * delta, baseline - delta))
    per_save = delta + copied
    kept = bound + (keep_last - 1) * _MOST_NEEDED * per_save
    return Run(
        written=round((chain + copied * num_compacted) / num_saves),
        copied=round(copied * num_compacted / num_saves),
        kept=round(min(chain, kept)),
        peak=round(min(chain, kept + per_save)),
        restore=round(min(chain, bound)),
        uncompacted_restore=round(min(chain, bound + delta)),
        largest_delta=delta,
        most_intervals=most_intervals,
    )


def _simulated(policy: Policy, baseline: int, delta: Callable[[int], int], num_saves: int, keep_last: int) -> Run:
    """Return the bytes of a run in which a restore reads a baseline and at most one delta."""
    history: History | None = None
    newest: deque[tuple[int, int]] = deque(maxlen=keep_last + 1)  # the number of the baseline, and the bytes of a delta
    num_baselines = written = kept = peak = largest = most_intervals = 0
    num_simulated = min(num_saves, _MAX_SIMULATED)
    for _ in range(num_simulated):
        if history is None or policy.decide(history) is Since.EVER:
            history, own = History(baseline), 0
            num_baselines += 1
        else:
            num_intervals = len(history.delta_bytes) + 1
            own = delta(num_intervals)
            largest, most_intervals = max(largest, own), max(most_intervals, num_intervals)
            history = replace(history, delta_bytes=(*history.delta_bytes, own))
        newest.append((num_baselines, own))
        written += own or baseline
        peak = max(peak, _needed(newest, baseline))
        kept = max(kept, _needed(list(newest)[-keep_last:], baseline))
    restore = baseline + largest
    return Run(round(written / num_simulated), 0, kept, peak, restore, restore, largest, most_intervals)


def _needed(checkpoints: Iterable[tuple[int, int]], baseline: int) -> int:
    """Return the bytes of checkpoints and of the baselines that they need."""
    checkpoints = list(checkpoints)
    return baseline * len({number for number, _ in checkpoints}) + sum(own for _, own in checkpoints)
