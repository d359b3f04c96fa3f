"""Objects: what a checkpoint holds beside tensors, each as ``torch.save`` wrote it; read without running code."""

import io
from collections.abc import Collection, Iterator
from typing import Any

import torch

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.format import safe_pickle
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.storage.pack_reader import PackReader


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
        yield by_key[key], unpickled(data.tobytes(), f"{url}: {key}")


def serialized(value: Any, where: str) -> io.BytesIO:
    """An object as DCP hands it to planners, which unpickle it without any check.

    Raises:
        DamagedError: It cannot be pickled again, because it is nested too deeply.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:  # torch may find anything wrong with a tensor that somebody made up
        raise DamagedError(f"{where}: it cannot be handed on ({error}); use another checkpoint") from error
    stream.seek(0)
    return stream


def unpickled(data: bytes, where: str) -> Any:
    """An object, from what ``torch.save`` made of it.

    Raises:
        DamagedError: It would run code, or take time or memory out of proportion.
    """
    try:
        return safe_pickle.load_state(data)
    except Exception as error:  # bytes that are no pickle may make the unpickler raise anything
        raise safe_pickle.unpickling_error(where, error) from error
