"""Roots of checkpoints of one small table, written by hand, with a model of what each checkpoint holds and needs.

``Root`` writes baselines, deltas and replaced manifests that use packs of other checkpoints, in real files, and beside
them whatever else may lie there. What it knows of them it knows from writing them: it never reads a manifest.
"""

import copy
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import torchrec_cnr as cnr
from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import (
    MANIFEST_FILE,
    CheckpointRef,
    History,
    Manifest,
    Pack,
    Place,
    Shard,
    TensorEntry,
    replacement_name,
)
from torchrec_cnr.format.row_sets import Blob, RowBlock, RowSet
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.maintenance.catalog import read_journal
from torchrec_cnr.maintenance.pruning.execute import PruneResult, run_prune
from torchrec_cnr.maintenance.pruning.plan import plan_prune
from torchrec_cnr.maintenance.pruning.retention import Keep
from torchrec_cnr.quantization import NoQuantization
from torchrec_cnr.storage.leases import Lease
from torchrec_cnr.storage.pack_reader import PackReader
from torchrec_cnr.storage.pack_writer import PackWriter
from torchrec_cnr.storage.store import Store

TABLE = "ebc.t0.weight"
NUM_ROWS, NUM_COLS, BLOCK_ROWS = 24, 2, 8
HOUR_NS = 3600 * 10**9
DAY_NS = 24 * HOUR_NS
_WHOLE = Box((0, 0), (NUM_ROWS, NUM_COLS))

File = tuple[str, str]  # directory, and file in it


@dataclass(frozen=True, eq=False)
class Stored:
    """A block of rows in a pack: what overwrites it comes behind it in lists."""

    rows: range
    file: File
    pack: Pack
    blob: Blob


@dataclass(eq=False)
class Written:
    """A checkpoint as it was written.

    Attributes:
        values: What it loads as.
        created_ns: Time of its commit.
        saved_on: The parent that it was saved on.
        parents: By each of its manifests, oldest first.
        stored: By each of its manifests, what it stores.
        sha256s: Digests of its manifests.
        packs: Names of the packs that were written for it.
    """

    values: Tensor
    created_ns: int
    saved_on: str | None
    parents: list[str | None]
    stored: list[list[Stored]]
    sha256s: list[str]
    packs: set[str] = field(default_factory=set)

    def uses(self, index: int) -> set[File]:
        """Directory and file of each pack that one of its manifests uses."""
        return {stored.file for stored in self.stored[index]}


class Root:
    """A directory of checkpoints.

    Args:
        url: Where.
        seed: Of the values.
    """

    def __init__(self, url: str | Path, seed: int = 0) -> None:
        self.store = Store.open(url, sync_files=False)
        self.store.make()
        self.checkpoints: dict[str, Written] = {}
        self._values = torch.Generator().manual_seed(seed)
        self._ids = np.random.default_rng(seed)

    @property
    def url(self) -> str:
        """Its path or URL."""
        return self.store.url

    def moved(self, url: str | Path) -> "Root":
        """The same, of a copy of the directory."""
        found = copy.copy(self)
        found.store = Store.open(url, sync_files=False)
        return found

    def at(self, name: str) -> str:
        """Path or URL of a checkpoint."""
        return self.store.at(name).url

    def new_id(self) -> str:
        """A save id."""
        return self._ids.bytes(8).hex()

    def new_values(self, num_rows: int) -> Tensor:
        """Random rows."""
        return torch.randn(num_rows, NUM_COLS, generator=self._values)

    # Checkpoints.

    def save(self, name: str, created_ns: int, parent: str | None = None, rows: range = range(NUM_ROWS)) -> None:
        """Commit a baseline, or a delta of some rows."""
        values = torch.empty(NUM_ROWS, NUM_COLS) if parent is None else self.checkpoints[parent].values.clone()
        rows = range(NUM_ROWS) if parent is None else rows
        values[rows.start : rows.stop] = self.new_values(len(rows))
        save_id, stored = self._write(name, values, rows)
        written = Written(values, created_ns, parent, [], [], [], {one.file[1] for one in stored})
        self.checkpoints[name] = written
        self._commit(name, save_id, parent, stored)

    def compact(self, name: str, since: str | None = None, num_moved: int = 0) -> None:
        """Replace a checkpoint's manifest by one that stands on ``since``, an ancestor, or on nothing.

        Args:
            name: The checkpoint.
            since: Its new parent.
            num_moved: Without a parent, of as many of the oldest checkpoints the rows are written anew; the packs of
                all others are used where they lie, but for those of which all rows are overwritten.
        """
        written = self.checkpoints[name]
        lineage = list(self.lineage(name))
        above = lineage[lineage.index(since) + 1 :] if since is not None else lineage[num_moved:]
        stored = [one for link in above for one in self.checkpoints[link].stored[-1]]
        save_id, moved = self.new_id(), list[Stored]()
        if since is None and num_moved:
            values = self.checkpoints[lineage[num_moved - 1]].values
            save_id, moved = self._write(name, values, range(NUM_ROWS))
        alive = list(_alive(moved + stored))
        used = {one.file for one in alive}
        for _, pack in {one.file for one in moved} - used:  # a compaction copies live rows only
            self.store.at(name).remove(pack)
        written.packs |= {one.file[1] for one in moved if one.file in used}
        self._commit(name, save_id, since, alive)

    def lineage(self, name: str, index: int = -1) -> Iterator[str]:
        """From the baseline to a checkpoint, by the manifests that hold now."""
        parent = self.checkpoints[name].parents[index]
        if parent is not None:
            yield from self.lineage(parent)
        yield name

    def needs(self, name: str, there: Collection[str], by_any: bool = False) -> tuple[set[str], set[File]]:
        """The checkpoints and packs that one needs, of those that are there.

        Args:
            name: The checkpoint.
            there: Checkpoints that were not removed yet.
            by_any: Whether what it needed by manifests that were replaced counts, too.
        """
        names, packs = {name}, set()
        written = self.checkpoints[name]
        for index in range(len(written.parents)) if by_any else (-1,):
            packs |= written.uses(index)
            parent = written.parents[index]
            if parent is not None and parent in there:
                above, used = self.needs(parent, there, by_any)
                names, packs = names | above, packs | used
        return names, packs

    def saved_on(self, name: str) -> Iterator[str]:
        """What a checkpoint was saved on, from itself to the baseline."""
        link: str | None = name
        while link is not None:
            yield link
            link = self.checkpoints[link].saved_on

    def _write(self, name: str, values: Tensor, rows: range) -> tuple[str, list[Stored]]:
        """Write rows in packs of one block each."""
        store, save_id = self.store.at(name), self.new_id()
        store.make()
        writer = PackWriter(store, f"{save_id}-0", 1, pack_bytes=1)
        blocks = [
            range(first, min(first + BLOCK_ROWS, rows.stop)) for first in range(rows.start, rows.stop, BLOCK_ROWS)
        ]
        for block in blocks:
            data = values[block.start : block.stop].contiguous().view(torch.uint8).numpy().reshape(-1)
            writer.add(TABLE, "float32", (len(block), NUM_COLS), data)
        packs, blobs = writer.finish()
        writer.close()
        places = ((packs[blob.pack], blob) for blob in blobs)
        return save_id, [
            Stored(rows, (name, pack.name), pack, blob) for rows, (pack, blob) in zip(blocks, places, strict=True)
        ]

    def _commit(self, name: str, save_id: str, parent: str | None, stored: list[Stored]) -> None:
        """Write a manifest: the first, or one that replaces the last."""
        written, store = self.checkpoints[name], self.store.at(name)
        directories = [None if one.file[0] == name else f"../{one.file[0]}" for one in stored]
        packs = list(dict.fromkeys(replace(one.pack, directory=d) for one, d in zip(stored, directories, strict=True)))
        shards = []
        for one, directory in zip(stored, directories, strict=True):
            rows = RowSet((RowBlock("all", one.rows.start, len(one.rows), len(one.rows), None),))
            blob = replace(one.blob, pack=packs.index(replace(one.pack, directory=directory)))
            shards.append(Shard(_WHOLE, rows, (blob,), NoQuantization()))
        replaces = written.sha256s[-1] if written.sha256s else None
        if replaces is None:
            rows = RowSet(tuple(block for shard in shards for block in shard.rows.blocks))
            shards = [Shard(_WHOLE, rows, tuple(blob for shard in shards for blob in shard.blobs), NoQuantization())]
        folded = None if replaces is None else (Place(_WHOLE),)
        manifest = Manifest(
            created_ns=written.created_ns,
            checkpoint_id=name,
            save_id=save_id,
            parent=None if parent is None else CheckpointRef(f"../{parent}", self.checkpoints[parent].sha256s[0]),
            policy="Consecutive",
            history=History(0, () if parent is None else (0,)),
            num_restores=0,
            world_size=1,
            writer="tests",
            packs=tuple(packs),
            tensors={TABLE: TensorEntry("float32", (NUM_ROWS, NUM_COLS), tuple(shards), is_table=True, folded=folded)},
            replaces=replaces,
        )
        data, sha256 = manifest_json.dumps(manifest)
        store.put_new(MANIFEST_FILE if replaces is None else replacement_name(replaces), data, save_id)
        written.parents.append(parent)
        written.stored.append(stored)
        written.sha256s.append(sha256)

    # What else lies there.

    def put(self, directory: str, name: str, data: bytes = b"data") -> str:
        """Write a file; returns its name."""
        store = self.store.at(directory)
        store.make()
        store.put(name, [data])
        return name

    def put_pack(self, directory: str) -> str:
        """A file named like a pack of a save of its own."""
        return self.put(directory, f"{self.new_id()}-0-0.safetensors")

    def lease(self, directory: str, until_ns: int, purpose: str = "load") -> str:
        """A lease."""
        return self.put(directory, Lease.until(self.store.at(directory), purpose, until_ns).name)

    def files(self) -> dict[File, int]:
        """Sizes of all files in the directories, and in the root with ``""`` for a directory; not of the journal."""
        listed = self.store.listing()
        found = {("", name): num_bytes for name, num_bytes in listed.files.items()}
        for directory in listed.directories:
            for name, num_bytes in self.store.at(directory).listing().files.items():
                found[directory, name] = num_bytes
        return {file: num_bytes for file, num_bytes in found.items() if file[0] != "journal"}

    def directories(self) -> set[str]:
        """Those that are there, but for the journal."""
        return set(self.store.listing().directories) - {"journal"}

    def assert_loads(self, names: Iterable[str]) -> None:
        """Each checkpoint loads as what was saved, and each blob of what it stands on is what was written."""
        read: set[str] = set()
        for name in names:
            assert torch.equal(cnr.load_table(self.at(name), TABLE), self.checkpoints[name].values), name
            for checkpoint in read_lineage(self.at(name)).checkpoints:
                if checkpoint.store.path not in read:
                    read.add(checkpoint.store.path)
                    manifest = checkpoint.manifest
                    found = dict(PackReader(checkpoint.store, manifest.packs, 1).read(manifest.blobs()))
                    assert len(found) == len(list(manifest.blobs()))


def _alive(stored: list[Stored]) -> Iterator[Stored]:
    """Blocks of which some row is not overwritten by those behind."""
    for number, one in enumerate(stored):
        overwritten = {row for later in stored[number + 1 :] for row in later.rows}
        if not overwritten.issuperset(one.rows):
            yield one


def newest(root: Root, names: Collection[str]) -> list[str]:
    """Names by time of commit, newest first."""
    return sorted(names, key=lambda name: root.checkpoints[name].created_ns, reverse=True)


def prune(root: Root | str, keep: Keep | None = None, now_ns: int | None = None) -> PruneResult:
    """Plan and execute."""
    return run_prune(plan_prune(root if isinstance(root, str) else root.url, keep, now_ns=now_ns))


def pruned_names(root: str) -> list[str]:
    """What a journal tells was pruned."""
    return [checkpoint.name for checkpoint in read_journal(root)]
