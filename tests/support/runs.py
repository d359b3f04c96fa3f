"""Small runs with real checkpoints: what upkeep and the command line are tried on."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

import torchrec_cnr as cnr
from tests.support import models
from tests.support.models import Whole, plain_job, state, torchrec_job, train, whole
from torchrec_cnr.storage.row_log import RowLog


def save_run(
    root: str | Path,
    names: Sequence[str],
    *,
    load: str | None = None,
    seed: int = 1,
    quantization: cnr.Quantization | None = None,
    rows: tuple[int, int] = (40, 12),
    row_log: RowLog | None = None,
) -> list[Whole]:
    """Train and save a job in this process, one checkpoint for each name: deltas on what is loaded, or on a baseline.

    Args:
        root: Where checkpoints lie.
        names: Of the checkpoints.
        load: Name of the checkpoint to continue from.
        seed: Of weights and training.
        quantization: None for exact values.
        rows: Of the two tables, which are ``model.bag.weight`` and ``model.item.weight``.
        row_log: Where the rows of deltas go, if not to files.

    Returns:
        What the job held at each save.
    """
    job = plain_job(seed, "rowwise_adagrad", rows=rows)
    tracker = cnr.RowTracker(job.model)
    if load is not None:
        models.load(job, f"{root}/{load}", tracker, position=0)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    held = []
    for number, name in enumerate(names):
        train(job, 100 * seed + number)
        saved = state(job, position=100 * seed + number)
        options = {"quantization": quantization or cnr.NoQuantization(), "row_log": row_log}
        writer = models.writer(f"{root}/{name}", **options)
        dcp.save(saved, storage_writer=writer, planner=planner)
        held.append(whole(saved))
    tracker.close()
    return held


def save_sharded_run(
    rank: int, root: str, names: Sequence[str], shardings: Sequence[str], trained: Sequence[bool], bits: int | None
) -> Whole:
    """On the ranks of a group: a lineage whose links are sharded differently, each loaded from the one before.

    Args:
        rank: This one.
        root: Where checkpoints lie.
        names: Of the checkpoints.
        shardings: Of each.
        trained: Before which of them the job trains.
        bits: Of codes; None for exact values.

    Returns:
        What all ranks hold at the end.
    """
    quantization = cnr.Asymmetric(bits) if bits else cnr.NoQuantization()
    for number, (name, sharding) in enumerate(zip(names, shardings, strict=True)):
        job = torchrec_job(1 + number, sharding)
        tracker = cnr.RowTracker(job.model)
        if number:
            dcp.load(
                state(job),
                storage_reader=cnr.CNRStorageReader(f"{root}/{names[number - 1]}"),
                planner=cnr.CNRLoadPlanner(tracker),
            )
        if trained[number]:
            train(job, number)
        planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
        writer = models.writer(f"{root}/{name}", quantization=quantization)
        dcp.save(state(job), storage_writer=writer, planner=planner)
        tracker.close()
    return whole(state(job))


def change_manifest(path: Path, pattern: bytes, replacement: bytes) -> None:
    """Change what a pattern matches, which is there once, in a checkpoint's manifest, and make its digest fit."""
    file = path / "manifest.json"
    body = file.read_bytes().removesuffix(b"}\n").partition(b'"manifest":')[2]
    changed, num_changes = re.subn(pattern, replacement, body)
    assert num_changes == 1
    assert changed != body
    digest = hashlib.sha256(changed).hexdigest().encode()
    file.write_bytes(b'{"sha256":"%s","manifest":%s}\n' % (digest, changed))


def save_state(path: Path, saved: dict[str, Any]) -> None:
    """Save a state dict as a baseline."""
    dcp.save(saved, storage_writer=models.writer(path))
