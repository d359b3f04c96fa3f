"""Damage: what of one checkpoint is not as it was committed.

Tensors are decoded as a load decodes them, though into nothing: whatever the size of a table, no more than a few blocks
of it are in memory. That reads nearly all blobs. Those of tensors that could not be decoded, and what belongs to no
tensor, are then looked at one by one, so that everything that is wrong is found, and named by file and blob.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

from torchrec_cnr.errors import DamagedError, LoadError, StoreError
from torchrec_cnr.format.manifest import Manifest
from torchrec_cnr.format.row_sets import Blob
from torchrec_cnr.lineage.checkpoint import Checkpoint, Lineage, read_checkpoint
from torchrec_cnr.reading.blocks import Block
from torchrec_cnr.reading.fold import fold
from torchrec_cnr.reading.plan import plan_fold, whole_box
from torchrec_cnr.reading.regions import Region
from torchrec_cnr.storage.pack_reader import Span, place_of, plan_spans, read_spans

_WAY_OUT = "; use another checkpoint"
_GROUP_ROWS = 1 << 26  # of tensors decoded together: of one that was folded, a byte is kept for each row

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Problem:
    """Something that is not as it was committed.

    Attributes:
        checkpoint: Path or URL of the checkpoint that is not right: the one whose manifest names what is wrong.
        file: Path or URL of the damaged or missing file, or which records of a log they are; None where no one is to
            blame.
        blob: What messages call the part of the file, such as a block of rows; None where all of it is meant.
        message: What is wrong.
    """

    checkpoint: str
    file: str | None
    blob: str | None
    message: str


def find_damage(checkpoint: Checkpoint, thread_count: int, advance: Advance) -> list[Problem]:
    """All that is wrong with the packs of a checkpoint, its own and those of others that it uses.

    ``advance`` is told how many bytes of blobs were read since it was called last.
    """
    decoded, failures = _decode(checkpoint, thread_count, advance)
    found = _read_blobs(checkpoint, decoded, thread_count, advance)
    files = {problem.file for problem in found if problem.file is not None}
    unexplained = [message for message in failures if not any(file in message for file in files)]
    found += [Problem(checkpoint.store.url, None, None, message) for message in unexplained]
    return found + list(_longer_packs(checkpoint))


def _longer_packs(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Packs with something behind what was committed: loads do not read it, other readers refuse the file."""
    sizes: dict[str, Mapping[str, int]] = {}
    for pack in checkpoint.manifest.packs:
        if pack.log is not None:
            continue
        store = checkpoint.store.at(pack.directory or ".")
        if store.path not in sizes:
            try:
                sizes[store.path] = store.listing().files
            except StoreError:  # what is missing is found when it is read
                sizes[store.path] = {}
        num_bytes = sizes[store.path].get(pack.name, 0)
        if num_bytes > pack.num_bytes:
            file = store.child(pack.name)
            message = (
                f"{file}: has {num_bytes} bytes, the manifest says {pack.num_bytes}; nothing that a load reads is wrong"
            )
            yield Problem(checkpoint.store.url, file, None, message)


def find_dead_damage(checkpoints: Sequence[Checkpoint], thread_count: int) -> list[Problem]:
    """What is wrong with bytes of packs that no load needs any more: those that compactions have left behind.

    The manifests under which they were written have digests of them, as far as these are still there. Where they or
    whole packs are gone, nothing is missed. Those in a log are not looked at: it forgets them. Nor is what the
    checkpoints need now.
    """
    alive = {_place(checkpoint, blob) for checkpoint in checkpoints for _, blob in checkpoint.manifest.blobs()}
    found: dict[Problem, None] = {}
    earlier = [(checkpoint, manifest) for checkpoint in checkpoints for manifest in checkpoint.manifests[:-1]]
    beside = [(checkpoint, manifest) for checkpoint in _beside(checkpoints) for manifest in checkpoint.manifests]
    for checkpoint, manifest in [*earlier, *beside]:
        then = replace(checkpoint, manifest=manifest)
        in_logs = {index for index, pack in enumerate(manifest.packs) if pack.log is not None}
        known = {key for key, blob in manifest.blobs() if blob.pack in in_logs or _place(then, blob) in alive}
        for problem in _read_blobs(then, known, thread_count, lambda _: None):
            message = f"{problem.message.removesuffix(_WAY_OUT)}; no load needs it any more"
            if problem.blob is not None:
                found[replace(problem, message=message)] = None
    return list(found)


def _place(checkpoint: Checkpoint, blob: Blob) -> tuple[str, int, int]:
    """Which bytes of which file a blob is."""
    pack = checkpoint.manifest.packs[blob.pack]
    return checkpoint.store.at(pack.directory or ".").child(pack.name), blob.offset, blob.num_bytes


def _beside(checkpoints: Sequence[Checkpoint]) -> Iterator[Checkpoint]:
    """Other checkpoints that packs belong to, where these are still there."""
    paths = {checkpoint.store.path for checkpoint in checkpoints}
    for checkpoint in checkpoints:
        for directory in sorted({pack.directory for pack in checkpoint.manifest.packs if pack.directory is not None}):
            store = checkpoint.store.at(directory)
            if store.path not in paths:
                paths.add(store.path)
                with suppress(LoadError, StoreError):
                    yield read_checkpoint(store)


def find_contradictions(lineage: Lineage) -> Iterator[Problem]:
    """Deltas of tensors that the checkpoints which they stand on do not have, or have otherwise."""
    url = lineage.newest.store.url
    for fqn in lineage.newest.manifest.tensors:
        try:
            plan_fold(lineage, [_Discarded(fqn, whole_box(lineage.newest.manifest, fqn), lambda _: None)])
        except DamagedError as error:
            yield Problem(url, None, None, str(error))


@dataclass(eq=False)
class _Discarded(Region):
    """A region that is decoded and let go."""

    advance: Advance

    def write(self, block: Block) -> None:
        """Decode."""
        values = block.values
        self.advance(len(values) * block.codes.shape[1])


def _decode(checkpoint: Checkpoint, thread_count: int, advance: Advance) -> tuple[set[str], list[str]]:
    """Decode all tensors; names of the blobs that were read, and what went wrong."""
    decoded: set[str] = set()
    failures: list[str] = []
    groups = list(_groups(checkpoint.manifest))
    while groups:
        fqns = groups.pop(0)
        regions = [_Discarded(fqn, whole_box(checkpoint.manifest, fqn), advance) for fqn in fqns]
        try:
            plans = plan_fold(Lineage((checkpoint,)), regions)
            fold(plans, regions, thread_count, are_complete=checkpoint.manifest.parent is None)
            decoded.update(key for plan in plans for key in (*plan.reads, *plan.row_blocks))
            advance(sum(block.blob.num_bytes for plan in plans for block in plan.row_blocks.values() if block.blob))
        except (LoadError, StoreError) as error:
            if len(fqns) > 1:
                groups += [[fqn] for fqn in fqns]
            else:
                failures.append(str(error))
    return decoded, failures


def _groups(manifest: Manifest) -> Iterator[list[str]]:
    """Tensors that are decoded together, so that many small ones take few requests."""
    group: list[str] = []
    num_rows = 0
    for fqn in manifest.tensors:
        own_rows = whole_box(manifest, fqn).num_rows
        if group and num_rows + own_rows > _GROUP_ROWS:
            yield group
            group, num_rows = [], 0
        group.append(fqn)
        num_rows += own_rows
    if group:
        yield group


def _read_blobs(checkpoint: Checkpoint, known: set[str], thread_count: int, advance: Advance) -> list[Problem]:
    """Compare blobs with their digests, but for those known to be right, and headers that were not read with these."""
    manifest = checkpoint.manifest
    touched = {blob.pack for key, blob in manifest.blobs() if key in known}
    wanted = [(key, blob) for key, blob in manifest.blobs() if key not in known]
    for index, pack in enumerate(manifest.packs):
        if index not in touched:
            wanted.append((f"header of {pack.name}", Blob(index, 0, pack.header_bytes, pack.header_crc32c)))
    spans = plan_spans(wanted)
    found: dict[Problem, None] = {}  # a missing pack is found with each of its blobs
    with ThreadPoolExecutor(thread_count, thread_name_prefix="cnr-verify") as threads:
        try:
            results = threads.map(lambda span: _read_span(checkpoint, span), spans)
            for span, problems in zip(spans, results, strict=True):
                found.update(dict.fromkeys(problems))
                advance(sum(blob.num_bytes for _, blob in span.blobs))
        finally:
            threads.shutdown(cancel_futures=True)
    return list(found)


def _read_span(checkpoint: Checkpoint, span: Span) -> list[Problem]:
    manifest = checkpoint.manifest
    try:
        for _ in read_spans(checkpoint.store, manifest.packs, [span], thread_count=1):
            pass
    except (DamagedError, StoreError) as error:
        if len(span.blobs) > 1:
            return [problem for blob in span.blobs for problem in _read_span(checkpoint, *plan_spans([blob]))]
        ((key, _),) = span.blobs
        pack = manifest.packs[span.pack]
        store = checkpoint.store if pack.directory is None else checkpoint.store.at(pack.directory)
        is_there = pack.log is not None or store.exists(pack.name)
        return [Problem(checkpoint.store.url, place_of(store, pack), key if is_there else None, str(error))]
    return []
