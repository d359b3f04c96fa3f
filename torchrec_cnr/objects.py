"""Objects: what a checkpoint holds beside tensors, each as ``torch.save`` wrote it; read without running code."""

import io
from collections.abc import Collection, Iterator
from typing import Any

import torch

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.lineage import Checkpoint
from torchrec_cnr.pack_reader import PackReader


def read_objects(checkpoint: Checkpoint, fqns: Collection[str], thread_count: int) -> Iterator[tuple[str, Any]]:
    """Read objects, and yield each with its FQN, in their order in the packs.

    Args:
        checkpoint: The checkpoint; objects are stored whole in each.
        fqns: Which of its objects.
        thread_count: Requests in flight at once.

    Raises:
        DamagedError: A pack is not what was committed, or an object would run code.
        StoreError: A pack cannot be read.
    """
    if not fqns:
        return
    manifest, url = checkpoint.manifest, checkpoint.store.url
    by_key = {f"object {fqn!r}": fqn for fqn in fqns}
    wanted = [(key, manifest.objects[fqn]) for key, fqn in by_key.items()]
    for key, data in PackReader(checkpoint.store, manifest.packs, thread_count).read(wanted):
        yield by_key[key], _unpickled(data.tobytes(), f"{url}: {key}")


def serialized(value: Any) -> io.BytesIO:
    """An object as DCP hands it to planners, which unpickle it without any check."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def _unpickled(data: bytes, where: str) -> Any:
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:  # bytes that are no pickle may make the unpickler raise anything
        raise DamagedError(
            f"{where}: refused by the weights-only unpickler, which runs no code; if its types are yours, register "
            "them with torch.serialization.add_safe_globals"
        ) from error
