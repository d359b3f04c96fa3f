"""Jobs that something happens to, and manifests that are forged: after each mishap the job must go on."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlanner

import torchrec_cnr as cnr
from tests.support import faults
from tests.support.jobs import SavingJob
from tests.support.models import plain_job, state


def manifest(run: SavingJob, number: int) -> Path:
    """A checkpoint's manifest."""
    return Path(run.path(number), "manifest.json")


def goes_on(run: SavingJob, last: int | None = 2) -> None:
    """The last checkpoint loads, and the job's next save does; it holds all that was trained."""
    if last is not None:
        run.assert_loads(last)
    run.train_and_save("next")
    run.assert_loads("next")


def load_failure(path: str, planner: LoadPlanner | None = None, target: dict[str, Any] | None = None) -> str:
    """Load a checkpoint that must be refused; the error's type and message."""
    target = target if target is not None else state(plain_job(99, "adagrad"))
    reader = cnr.CNRStorageReader(path)
    cause = faults.failure_of(lambda: dcp.load(target, storage_reader=reader, planner=planner or cnr.CNRLoadPlanner()))
    assert isinstance(cause, cnr.CNRError), f"not one of ours: {cause!r}"
    return f"{type(cause).__name__}: {cause}"


def forge(path: str, change: Callable[[dict[str, Any]], None]) -> str:
    """Change a manifest, and make its digest right again; the new digest."""
    file = Path(path, "manifest.json")
    body = json.loads(file.read_bytes())["manifest"]
    change(body)
    return write_manifest(file, body)


def write_manifest(file: Path, body: Any) -> str:
    """Write a manifest with a digest that is right."""
    text = json.dumps(body, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    file.write_text(f'{{"sha256":"{digest}","manifest":{text}}}\n')
    return digest


def adopt(child: str, digest: str) -> str:
    """Have a child accept a parent of this digest."""
    return forge(child, lambda body: body["parent"].update(sha256=digest))
