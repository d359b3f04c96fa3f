"""Which files in a checkpoint's directory are ours, told by their names, and in which order they may be removed.

Whatever is not named like one of ours is somebody else's and stays.
"""

import re
from collections.abc import Iterable, Mapping

from torchrec_cnr.format.manifest import MANIFEST_FILE, PACK_SUFFIX, UNCOMMITTED_SUFFIX, Manifest, replacement_name
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.maintenance.tags_and_metrics import is_annotation
from torchrec_cnr.storage.leases import is_lease

_PACK = re.compile(r"(?P<save_id>[0-9a-f]{16})-\d+-\d+" + re.escape(PACK_SUFFIX))
_NUMBERED = re.compile(r"(?P<save_id>.+)-\d+-\d+" + re.escape(PACK_SUFFIX))
_REPLACEMENT = re.compile(r"manifest-[0-9a-f]{64}\.json")
_TEMPORARY = re.compile(r"[0-9a-f]{16}\.(manifest(-[0-9a-f]{64})?|uncommitted|metrics-\d{20}-[0-9a-f]{16})\.json")


def is_pack(name: str) -> bool:
    """Whether a file is named like the packs that saves and compactions write."""
    return _PACK.fullmatch(name) is not None


def is_temporary(name: str) -> bool:
    """Whether a file is named like one that is written before it gets its name: a manifest's, or metrics'."""
    return _TEMPORARY.fullmatch(name) is not None


def is_uncommitted(name: str) -> bool:
    """Whether a file is named like a manifest that a marker in a log may have committed, or may yet."""
    return name.endswith(UNCOMMITTED_SUFFIX) and is_temporary(name)


def is_replacement(name: str) -> bool:
    """Whether a file is named like a manifest that replaces another."""
    return _REPLACEMENT.fullmatch(name) is not None


def is_beside_packs(name: str) -> bool:
    """Whether a file is named like any of ours but a pack."""
    return name == MANIFEST_FILE or is_replacement(name) or is_temporary(name) or is_annotation(name) or is_lease(name)


def save_id(pack: str) -> str:
    """What a pack's name begins with: the id of the save or compaction that wrote it, or all of another name."""
    found = _NUMBERED.fullmatch(pack)
    return found["save_id"] if found else pack


def packs_of(checkpoint: Checkpoint) -> set[str]:
    """The packs in a checkpoint's own directory that any of its manifests names."""
    packs = (pack for manifest in checkpoint.manifests for pack in manifest.packs)
    return {pack.name for pack in packs if pack.is_own_file}


def written_bytes(manifest: Manifest, files: Mapping[str, int]) -> int:
    """What was written with a manifest: the packs of its save or compaction, and itself.

    With the manifest that committed a checkpoint also what was put beside it, such as tags.

    Args:
        manifest: One of a checkpoint's.
        files: Sizes of the files in its directory, by name.
    """
    packs = {name: num_bytes for name, num_bytes in files.items() if name.endswith(PACK_SUFFIX)}
    # Some of them may be gone.
    packs |= {pack.name: pack.num_bytes for pack in manifest.packs if pack.log is None}
    num_bytes = sum(num_bytes for name, num_bytes in packs.items() if save_id(name) == manifest.save_id)
    if manifest.replaces is not None:
        return num_bytes + files.get(replacement_name(manifest.replaces), 0)
    beside = (name for name in files if not (name.endswith(PACK_SUFFIX) or is_replacement(name)))
    return num_bytes + sum(files[name] for name in beside)


def log_bytes(manifest: Manifest) -> int:
    """Bytes in packs that lie in a log, which are no files of anybody's."""
    return sum(pack.num_bytes for pack in manifest.packs if pack.log is not None)


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """In the order in which a directory's files are removed: without its manifest a checkpoint is gone, and the leases
    that have run out, by which what a save left is recognised, go last."""
    return tuple(sorted(names, key=lambda name: (_rank(name), name)))


def _rank(name: str) -> int:
    if name == MANIFEST_FILE:
        return 0
    if is_replacement(name):
        return 1
    if is_lease(name):
        return 4
    return 3 if is_temporary(name) or is_annotation(name) else 2
