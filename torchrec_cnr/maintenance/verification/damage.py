"""Finds the corrupt and missing bytes of one checkpoint.

Tensors are decoded like in a load, but the values are discarded. So only a few blocks are in memory, whatever the size
of a table. This reads nearly all blobs. The others are then checked one by one: those of tensors that could not be
decoded, and those that belong to no tensor. So every problem is found, and reported with its file and blob.
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
_GROUP_ROWS = 1 << 26  # of tensors that are decoded together: a merged one needs a byte of memory per row

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Problem:
    """Something that is not as it was committed.

    Attributes:
        checkpoint: The path or URL of the checkpoint whose manifest names the corrupt data.
        file: The path or URL of the corrupt or missing file, or the records of a Kafka topic; None if the problem is
            not in a single file.
        blob: The name of the corrupt part of the file, such as a block of rows; None for the whole file.
        message: What is wrong.
        offset: Where the corrupt part begins in the file, in bytes; 0 if nothing of the file can be read. None for
            a manifest, and for bytes after the end of a data file.
    """

    checkpoint: str
    file: str | None
    blob: str | None
    message: str
    offset: int | None = None


def find_damage(checkpoint: Checkpoint, thread_count: int, advance: Advance) -> list[Problem]:
    """Return all problems of the data files that a checkpoint uses, its own and those of others.

    Args:
        checkpoint: The checkpoint.
        thread_count: Number of requests in flight at the same time.
        advance: Called with the number of bytes of blobs that were read since its last call.
    """
    decoded, failures = _decode(checkpoint, thread_count, advance)
    problems = _read_blobs(checkpoint, decoded, thread_count, advance)
    files = {problem.file for problem in problems if problem.file is not None}
    unexplained = [message for message in failures if not any(file in message for file in files)]
    problems += [Problem(checkpoint.store.url, None, None, message) for message in unexplained]
    return problems + list(_longer_packs(checkpoint))


def _longer_packs(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Yield a problem for each data file that is too long. Loads ignore that, but other readers refuse the file."""
    sizes: dict[str, Mapping[str, int]] = {}
    for pack in checkpoint.manifest.packs:
        if pack.log is not None:
            continue
        store = checkpoint.store.at(pack.directory or ".")
        if store.path not in sizes:
            try:
                sizes[store.path] = store.listing().files
            except StoreError:  # files that are missing are found when they are read
                sizes[store.path] = {}
        num_bytes = sizes[store.path].get(pack.name, 0)
        if num_bytes > pack.num_bytes:
            file = store.child(pack.name)
            message = f"{file}: has {num_bytes} bytes, the manifest says {pack.num_bytes}; loads ignore the extra bytes"
            yield Problem(checkpoint.store.url, file, None, message)


def find_dead_damage(checkpoints: Sequence[Checkpoint], thread_count: int) -> list[Problem]:
    """Return the problems of bytes in data files that no load needs any more, because of a compaction.

    They are compared with the digests of the manifests under which they were written, if these still exist. Missing
    manifests and missing files are not problems. Data in Kafka is not checked, since a topic deletes its records. Data
    that the checkpoints need now is not checked here, either.
    """
    live_places = {_place(checkpoint, blob) for checkpoint in checkpoints for _, blob in checkpoint.manifest.blobs()}
    problems: dict[Problem, None] = {}
    earlier_manifests = [(checkpoint, manifest) for checkpoint in checkpoints for manifest in checkpoint.manifests[:-1]]
    other_manifests = [
        (checkpoint, manifest) for checkpoint in _beside(checkpoints) for manifest in checkpoint.manifests
    ]
    for checkpoint, manifest in [*earlier_manifests, *other_manifests]:
        view = replace(checkpoint, manifest=manifest)
        in_logs = {index for index, pack in enumerate(manifest.packs) if pack.log is not None}
        known_keys = {
            key for key, blob in manifest.blobs() if blob.pack in in_logs or _place(view, blob) in live_places
        }
        for problem in _read_blobs(view, known_keys, thread_count, lambda _: None):
            message = f"{problem.message.removesuffix(_WAY_OUT)}; no load needs it any more"
            if problem.blob is not None:
                problems[replace(problem, message=message)] = None
    return list(problems)


def _place(checkpoint: Checkpoint, blob: Blob) -> tuple[str, int, int]:
    """Return the file, the offset and the size in bytes of a blob."""
    pack = checkpoint.manifest.packs[blob.pack]
    return checkpoint.store.at(pack.directory or ".").child(pack.name), blob.offset, blob.num_bytes


def _beside(checkpoints: Sequence[Checkpoint]) -> Iterator[Checkpoint]:
    """Yield the other checkpoints to which data files belong, if these still exist."""
    paths = {checkpoint.store.path for checkpoint in checkpoints}
    for checkpoint in checkpoints:
        for directory in sorted({pack.directory for pack in checkpoint.manifest.packs if pack.directory is not None}):
            store = checkpoint.store.at(directory)
            if store.path not in paths:
                paths.add(store.path)
                with suppress(LoadError, StoreError):
                    yield read_checkpoint(store)


def find_contradictions(lineage: Lineage) -> Iterator[Problem]:
    """Yield a problem for each delta of a tensor that its ancestors lack, or have in another form."""
    url = lineage.newest.store.url
    for fqn in lineage.newest.manifest.tensors:
        try:
            plan_fold(lineage, [_Discarded(fqn, whole_box(lineage.newest.manifest, fqn), lambda _: None)])
        except DamagedError as error:
            yield Problem(url, None, None, str(error))


@dataclass(eq=False)
class _Discarded(Region):
    """A region whose values are decoded and discarded."""

    advance: Advance

    def write(self, block: Block) -> None:
        """Decode a block, and discard the values."""
        values = block.values
        self.advance(len(values) * block.codes.shape[1])


def _decode(checkpoint: Checkpoint, thread_count: int, advance: Advance) -> tuple[set[str], list[str]]:
    """Decode all tensors. Return the names of the blobs that were read, and the errors."""
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
    """Yield groups of tensors that are decoded together, so that many small ones need few requests."""
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


def _read_blobs(checkpoint: Checkpoint, known_keys: set[str], thread_count: int, advance: Advance) -> list[Problem]:
    """Compare all blobs except ``known_keys`` with their digests, and the headers of files without a known blob."""
    manifest = checkpoint.manifest
    touched_packs = {blob.pack for key, blob in manifest.blobs() if key in known_keys}
    blobs = [(key, blob) for key, blob in manifest.blobs() if key not in known_keys]
    for index, pack in enumerate(manifest.packs):
        if index not in touched_packs:
            blobs.append((f"header of {pack.name}", Blob(index, 0, pack.header_bytes, pack.header_crc32c)))
    spans = plan_spans(blobs)
    all_problems: dict[Problem, None] = {}  # a missing file is found once per blob
    with ThreadPoolExecutor(thread_count, thread_name_prefix="cnr-verify") as threads:
        try:
            results = threads.map(lambda span: _read_span(checkpoint, span), spans)
            for span, problems in zip(spans, results, strict=True):
                all_problems.update(dict.fromkeys(problems))
                advance(sum(blob.num_bytes for _, blob in span.blobs))
        finally:
            threads.shutdown(cancel_futures=True)
    return list(all_problems)


def _read_span(checkpoint: Checkpoint, span: Span) -> list[Problem]:
    manifest = checkpoint.manifest
    try:
        for _ in read_spans(checkpoint.store, manifest.packs, [span], thread_count=1):
            pass
    except (DamagedError, StoreError) as error:
        if len(span.blobs) > 1:
            return [problem for blob in span.blobs for problem in _read_span(checkpoint, *plan_spans([blob]))]
        ((key, blob),) = span.blobs
        pack = manifest.packs[span.pack]
        store = checkpoint.store if pack.directory is None else checkpoint.store.at(pack.directory)
        has_pack = pack.log is not None or store.exists(pack.name)
        named = key if has_pack else None
        return [Problem(checkpoint.store.url, place_of(store, pack), named, str(error), blob.offset if has_pack else 0)]
    return []
