"""Runs with rows in Kafka."""

import shutil
from pathlib import Path

import torchrec_cnr as cnr
from tests.support.models import Whole
from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.manifest import MANIFEST_FILE, Pack
from torchrec_cnr.lineage import marker_commit
from torchrec_cnr.lineage.checkpoint import read_checkpoint

NAMES = ("step-1", "step-2", "step-3")


class LoggedRun:
    """A run with rows in Kafka, in a root of its own; what it held at each save."""

    def __init__(self, root: Path, rows: cnr.KafkaRows, held: dict[str, Whole]) -> None:
        self.root = root
        self.rows = rows
        self.held = held

    @property
    def option(self) -> str:
        """For the command line."""
        return f"--kafka={self.rows.bootstrap}/{self.rows.topic}"

    def packs_in_log(self, name: str) -> list[Pack]:
        """Of a checkpoint as it is now."""
        return [pack for pack in read_checkpoint(self.root / name).manifest.packs if pack.log is not None]

    def copy(self, folder: Path) -> "LoggedRun":
        """The same, whose files may be changed."""
        shutil.copytree(self.root, folder / "run")
        return LoggedRun(folder / "run", self.rows, self.held)

    def unpublish(self, name: str) -> None:
        """As if its job had died between the marker and the manifest's name, some time ago."""
        place = self.root / name
        manifest, _ = manifest_json.loads((place / MANIFEST_FILE).read_bytes(), name)
        (place / MANIFEST_FILE).rename(place / marker_commit.uncommitted_name(manifest.save_id))
        (place / f"{'0' * 16}.{1:020d}.save.lease").touch()
