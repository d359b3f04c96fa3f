"""How ``write`` moves packs into a log: the first checkpoints again, with packs of the deltas in a log.

The log is kept as ``log.json``, record by record. One pack has a key of its own, as in a log that keeps the last record
of each key. The last manifest is packed besides.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from tests.golden import copy_of
from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.manifest import MANIFEST_FILE, CheckpointRef, LogRange, Pack
from torchrec_cnr.storage.row_log import Marker

STEPS = ("step-1", "step-2", "step-3")
TOPIC = "golden-rows"
PART_BYTES = 1000
IN_FILES = ("5a7e000000000002-1-0.safetensors",)  # packs of deltas that are in no log
KEYS = {"5a7e000000000003-0-1.safetensors": "rows/7/0"}  # of packs
FOREIGN = {"key": "somebody-else", "part": "0/1", "value": "00"}


def write_logged(golden: Path, folder: Path) -> None:
    """Copy a lineage, and move packs of its deltas into a log."""
    digests: dict[str, str] = {}
    records: list[dict[str, Any]] = []
    for step in STEPS:
        copy_of(golden / step, folder / step)
        manifest, old = manifest_json.loads((golden / step / MANIFEST_FILE).read_bytes(), step)
        if manifest.parent is not None:
            parent = CheckpointRef(manifest.parent.path, digests[manifest.parent.sha256])
            packs = tuple(_moved(pack, folder / step, records) for pack in manifest.packs)
            manifest = replace(manifest, parent=parent, packs=packs)
        with patch.object(manifest_json, "PLAIN_BYTES", 0 if step == STEPS[-1] else manifest_json.PLAIN_BYTES):
            data, digests[old] = manifest_json.dumps(manifest)
        (folder / step / MANIFEST_FILE).write_bytes(data)
    (folder / "log.json").write_text(json.dumps(records, indent=1) + "\n")


def _moved(pack: Pack, folder: Path, records: list[dict[str, Any]]) -> Pack:
    """A pack whose bytes go to the end of the log, with a record of somebody else behind the first."""
    if pack.name in IN_FILES:
        return pack
    data = (folder / pack.name).read_bytes()
    (folder / pack.name).unlink()
    parts = [data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES)]
    first, key = len(records), KEYS.get(pack.name)
    for number, part in enumerate(parts):
        named = {"key": pack.name} if key is None else {"key": f"{key}/{number}", "pack": pack.name}
        records.append({**named, "part": f"{number}/{len(parts)}", "value": part.hex()})
        if number == 0:
            records.append(FOREIGN)
    return replace(pack, log=LogRange(TOPIC, 0, first, len(records) - 1, PART_BYTES, key))


@dataclass(frozen=True)
class KeptLog:
    """A log that is kept in a file; it is only read, and has no markers."""

    path: Path
    topic: str = TOPIC

    def records(self) -> list[dict[str, str]]:
        """All, by offset."""
        found: list[dict[str, str]] = json.loads(self.path.read_text())
        return found

    def read(self, name: str, num_bytes: int, place: LogRange, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Bytes of a pack."""
        data = b"".join(self._parts(name, place))
        assert len(data) == num_bytes
        return np.frombuffer(bytearray(data[start:stop]), dtype=np.uint8)

    def _parts(self, name: str, place: LogRange) -> Iterator[bytes]:
        for record in self.records()[place.first : place.last + 1]:
            if record.get("pack", record["key"]) == name:
                yield bytes.fromhex(record["value"])

    def open(self, *, may_make: bool) -> bool:
        """It is there."""
        return True

    def target(self, root: str, rank: int) -> Any:
        """Nothing is written to it."""
        raise NotImplementedError

    def mark(self, marker: Marker, check: Any) -> None:
        """Nothing is written to it."""
        raise NotImplementedError

    def markers(self, root: str, most: int) -> tuple[Marker, ...]:
        """There are none."""
        return ()
