"""Golden checkpoints of version 4: the first ones of version 3, with packed manifests.

``python -m tests.golden.pack_v4 FOLDER`` wrote them. A manifest as small as these is never written so.
"""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.manifest import MANIFEST_FILE, CheckpointRef

STEPS = ("step-1", "step-2", "step-3")


def pack_golden(golden: Path, folder: Path) -> None:
    """Copy a lineage of version 3, and pack its manifests."""
    digests: dict[str, str] = {}
    for step in STEPS:
        shutil.copytree(golden / step, folder / step)
        manifest, old = manifest_json.loads((golden / step / MANIFEST_FILE).read_bytes(), step)
        if manifest.parent is not None:
            parent = CheckpointRef(manifest.parent.path, digests[manifest.parent.sha256])
            manifest = replace(manifest, parent=parent)
        with patch.object(manifest_json, "PLAIN_BYTES", 0):
            data, digests[old] = manifest_json.dumps(manifest)
        (folder / step / MANIFEST_FILE).write_bytes(data)
    expected = json.loads((golden / "expected.json").read_text())
    text = json.dumps({step: expected[step] for step in STEPS}, indent=1)
    (folder / "expected.json").write_text(text + "\n")


if __name__ == "__main__":
    pack_golden(Path(__file__).parent / "v3", Path(sys.argv[1]))
