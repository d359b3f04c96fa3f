"""Flattening: a run of checkpoints as if one had stored all of it, with the files as they are.

The shards of each tensor follow one another, those of the oldest checkpoint first, so that later ones overwrite earlier
ones as they did before. Packs are named from the newest checkpoint's directory, and numbered through.
"""

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torchrec_cnr.format.manifest import Pack, Shard, TensorEntry
from torchrec_cnr.format.renumbering import Renumbering
from torchrec_cnr.format.row_sets import Blob
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.reading.plan import held


@dataclass(frozen=True)
class Flat:
    """A run of checkpoints, flattened.

    Attributes:
        packs: All packs; directories are relative to the newest checkpoint's.
        written_ns: For each pack, when the newest of its rows was stored first: Unix time in nanoseconds.
        tensors: Of the newest checkpoint, with the shards of all.
        objects: Of the newest checkpoint.
    """

    packs: tuple[Pack, ...]
    written_ns: tuple[int, ...]
    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, Blob]

    def row_space(self, entry: TensorEntry) -> tuple[int, ...]:
        """The size whose rows a tensor's are: its own, or its table's."""
        return entry.size if entry.table is None else self.tensors[entry.table].size


def flatten(run: Sequence[Checkpoint]) -> Flat:
    """Flatten checkpoints of one lineage, oldest first, each the parent of the next.

    Raises:
        DamagedError: A checkpoint lacks a tensor that a later one has a delta of, or has it otherwise.
    """
    newest = run[-1]
    numbering = _Numbering(newest)
    renumbered = [Renumbering(partial(numbering.blob, checkpoint)) for checkpoint in run]
    in_newest = renumbered[-1]
    tensors = {}
    for fqn, head in newest.manifest.tensors.items():
        shards: list[Shard] = []
        for number, entry in held(run, fqn):
            shards[:0] = [renumbered[number].shard(shard) for shard in entry.shards if shard.blobs]
        is_folded = not head.is_whole
        tensors[fqn] = replace(head, shards=tuple(shards), folded=head.places) if is_folded else in_newest.tensor(head)
    objects = {fqn: in_newest.blob(blob) for fqn, blob in newest.manifest.objects.items()}
    return Flat(tuple(numbering.packs), tuple(numbering.written_ns), tensors, objects)


class _Numbering:
    """Packs as the newest checkpoint names them, each once."""

    def __init__(self, newest: Checkpoint) -> None:
        self._newest = newest
        self._numbers: dict[tuple[str, str], int] = {}
        self.packs: list[Pack] = []
        self.written_ns: list[int] = []

    def blob(self, checkpoint: Checkpoint, blob: Blob) -> Blob:
        return replace(blob, pack=self._number_of(checkpoint, checkpoint.manifest.packs[blob.pack]))

    def _number_of(self, checkpoint: Checkpoint, pack: Pack) -> int:
        store = checkpoint.store if pack.directory is None else checkpoint.store.at(pack.directory)
        key = ("" if pack.log is not None else store.path, pack.name)
        if key not in self._numbers:
            self._numbers[key] = len(self.packs)
            above = None
            if pack.log is None and store.path != self._newest.store.path:
                above = posixpath.relpath(store.path, self._newest.store.path)
            self.packs.append(replace(pack, directory=above))
            self.written_ns.append(checkpoint.created_ns if pack.written_ns is None else pack.written_ns)
        return self._numbers[key]
