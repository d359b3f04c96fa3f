"""Recognises by their names which files in a checkpoint's directory are ours, and orders them for removal.

A file with any other name belongs to someone else and is never removed.
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
    """Return whether a file has a name like the data files that saves and compactions write."""
    return _PACK.fullmatch(name) is not None


def is_temporary(name: str) -> bool:
    """Return whether a file has the temporary name of a manifest or of metrics, which is renamed once it is written."""
    return _TEMPORARY.fullmatch(name) is not None


def is_uncommitted(name: str) -> bool:
    """Return whether a file has the name of a manifest that a commit record in Kafka may have committed, or will."""
    return name.endswith(UNCOMMITTED_SUFFIX) and is_temporary(name)


def is_replacement(name: str) -> bool:
    """Return whether a file has a name like a manifest that replaces another."""
    return _REPLACEMENT.fullmatch(name) is not None


def is_beside_packs(name: str) -> bool:
    """Return whether a file has a name like any of our files other than data files."""
    return name == MANIFEST_FILE or is_replacement(name) or is_temporary(name) or is_annotation(name) or is_lease(name)


def save_id(pack: str) -> str:
    """Return the id of the save or compaction that wrote a data file, from its name. Other names are returned as is."""
    match = _NUMBERED.fullmatch(pack)
    return match["save_id"] if match else pack


def packs_of(checkpoint: Checkpoint) -> set[str]:
    """Return the data files in a checkpoint's own directory that any of its manifests names."""
    packs = (pack for manifest in checkpoint.manifests for pack in manifest.packs)
    return {pack.name for pack in packs if pack.is_own_file}


def written_bytes(manifest: Manifest, files: Mapping[str, int]) -> int:
    """Return the bytes that a save or a compaction wrote: its manifest and data files.

    Tags and other files next to the manifest count as written by the save.

    Args:
        manifest: The manifest that the save or the compaction wrote.
        files: The sizes in bytes of the files in the checkpoint's directory, by name.
    """
    packs = {name: num_bytes for name, num_bytes in files.items() if name.endswith(PACK_SUFFIX)}
    # Some data files may have been removed since.
    packs |= {pack.name: pack.num_bytes for pack in manifest.packs if pack.log is None}
    num_bytes = sum(num_bytes for name, num_bytes in packs.items() if save_id(name) == manifest.save_id)
    if manifest.replaces is not None:
        return num_bytes + files.get(replacement_name(manifest.replaces), 0)
    other_names = (name for name in files if not (name.endswith(PACK_SUFFIX) or is_replacement(name)))
    return num_bytes + sum(files[name] for name in other_names)


def saved_bytes(checkpoint: Checkpoint, files: Mapping[str, int]) -> int:
    """Return the bytes that the save of a checkpoint wrote to files and to Kafka, whatever was written since.

    Args:
        checkpoint: The checkpoint.
        files: The sizes in bytes of the files in its directory, by name.
    """
    return written_bytes(checkpoint.committed, files) + log_bytes(checkpoint.committed)


def log_bytes(manifest: Manifest) -> int:
    """Return the bytes of a manifest's data that is in Kafka and not in files."""
    return sum(pack.num_bytes for pack in manifest.packs if pack.log is not None)


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return the files of a directory in the order in which they are removed.

    The manifest is first: without it, there is no checkpoint. Expired leases are last: by them, the next prune
    recognises the remaining files of a save.
    """
    return tuple(sorted(names, key=lambda name: (_rank(name), name)))


def _rank(name: str) -> int:
    if name == MANIFEST_FILE:
        return 0
    if is_replacement(name):
        return 1
    if is_lease(name):
        return 4
    return 3 if is_temporary(name) or is_annotation(name) else 2
