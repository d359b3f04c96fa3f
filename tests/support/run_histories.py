"""Histories of runs that never were, for tests of what is made of them."""

import random
from dataclasses import replace

from torchrec_cnr.maintenance.run_history import Event, KeptCheckpoint, RunHistory

MODEL = 178_000_000_000
OUTLIER = 1_234  # the delta that is much greater than all others


def run_of(num: int) -> RunHistory:
    """A run of that many saves, half an hour apart. One of many has a compaction and a prune after each save."""
    rng, at_ns, events = random.Random(num), 1_762_000_000 * 10**9, []
    kept: list[KeptCheckpoint] = []
    for number in range(1, num + 1):
        at_ns += rng.randrange(1_790, 1_810) * 10**9
        share = None if number % 13 == 1 else 0.9 if number == OUTLIER else rng.uniform(0.05, 0.3)
        size = MODEL if share is None else int(MODEL * share)
        base = None if share is None else next(one.name for one in reversed(kept) if one.kind == "baseline")
        restore = size if share is None else MODEL + size
        kind = "baseline" if share is None else "delta"
        kept.append(KeptCheckpoint(f"step-{number}", kind, at_ns, size, base, restore))
        events.append(Event(at_ns, kind, kept[-1].name, size, 0, share, restore, MODEL))
        if num > 2:
            kept.append(KeptCheckpoint(f"step-{number}-full", "baseline", at_ns + 5, MODEL, None, MODEL))
            events.append(Event(at_ns + 5, "compaction", kept[-1].name, MODEL, 0, None, MODEL, MODEL))
            gone, kept = kept[:-4], kept[-4:]
            freed = sum(checkpoint.num_bytes for checkpoint in gone)
            events.append(Event(at_ns + 9, "prune", "old", 0, freed, None, None, MODEL))
    return RunHistory("s3://bucket/runs/dlrm", tuple(events), tuple(kept))


def saves_of(num: int) -> RunHistory:
    """The saves of `run_of` alone, all of which lie there; in no order."""
    history = run_of(num)
    saves = tuple(event for event in history.events if event.is_save)
    kept = []
    for event in saves:
        parent = "step-1" if event.kind == "delta" else None
        restore = event.restore_bytes or 0
        kept.append(KeptCheckpoint(event.name, event.kind, event.at_ns, event.written_bytes, parent, restore))
    return RunHistory(history.root, saves, tuple(random.Random(0).sample(kept, len(kept))))


def random_run(seed: int) -> RunHistory:
    """A run of any length, with sizes and times of any order of magnitude, some of them the same."""
    rng, events = random.Random(seed), []
    num, model = rng.choice([3, 4, 5, 9, 11, 19, 99, 199, 201, 999]), 10 ** rng.uniform(0, 16)
    at_ns, gap_ns = rng.randrange(2 * 10**18), 10 ** rng.uniform(9, 18) / num
    for number in range(num):
        at_ns += rng.choice([0, 1, 1, 1]) * int(gap_ns * rng.uniform(0.2, 1.8))
        kind = rng.choice(["baseline", "delta", "delta", "delta", "compaction", "prune"])
        written = 0 if kind == "prune" else int(model * rng.uniform(0, 2) ** 3)
        freed = int(model * max(0, rng.uniform(-4, 1)))
        share = rng.random() if kind == "delta" else None
        restore = None if kind == "prune" else int(model * 10 ** rng.uniform(-0.1, rng.choice([0.2, 2])))
        events.append(Event(at_ns, kind, str(number), written, freed, share, restore, int(model * rng.uniform(1, 2))))
    return RunHistory("root", tuple(events), ())


# Parts of a history are missing, or extreme.
PARTIAL = {
    "all pruned": replace(run_of(2), kept=()),
    "events unknown": replace(run_of(2), events=()),
    "prunes only": RunHistory("root", (Event(9, "prune", "a", 0, 7_000, None, None, 5_000),), ()),
    "compactions only": RunHistory("root", (Event(9, "compaction", "a", 7_000, 0, None, 7_000, 7_000),), ()),
    "nothing in bytes": RunHistory("root", (Event(0, "baseline", "a", 0, 0, None, 0, 1),), ()),
    "as great as can be": RunHistory(
        "root", tuple(Event(1 << 62, "baseline", "a", 1 << 62, 0, None, 1 << 62, 1) for _ in range(9)), ()
    ),
    "146 years": RunHistory(
        "root", tuple(Event(at, "delta", "a", 5, 2, 1.0, 9, 7) for at in (0, 1 << 61, 1 << 62)), ()
    ),
}
