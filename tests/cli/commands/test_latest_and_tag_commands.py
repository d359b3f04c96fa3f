"""cnr latest, cnr tag and cnr untag."""

import shutil
from pathlib import Path

import pytest

import torchrec_cnr as cnr
from tests.support.command_line import cnr_json, cnr_result, cnr_text
from torchrec_cnr.maintenance.pruning.plan import plan_prune
from torchrec_cnr.maintenance.pruning.retention import Keep

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def test_latest_is_a_path_for_scripts(run: Path, tmp_path: Path) -> None:
    """The path alone, or in JSON; without a checkpoint, an error and status 1."""
    assert cnr_text("latest", run) == f"{cnr.latest(run)}\n"
    assert cnr_json("latest", run) == {"path": cnr.latest(run)}
    result = cnr_result("latest", tmp_path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"cnr: error: {tmp_path}: an empty directory\n"


def test_a_tag_keeps_a_checkpoint(run: Path, tmp_path: Path) -> None:
    """Until it is removed; a root stands for its newest checkpoint."""
    root = tmp_path / "run"
    shutil.copytree(run, root)
    newest = cnr.latest(root)
    assert cnr_text("tag", root / "step-1", "release") == f"tagged release: {root}/step-1\n"
    assert cnr_text("tag", root, "v1.0") == f"tagged v1.0: {newest}\n"
    stays = plan_prune(root, Keep(last=1)).stays
    assert "tagged 'release'" in stays["step-1"]
    assert cnr_json("tag", root / "step-1", "a") == {"path": f"{root}/step-1", "tags": ["a", "release"]}
    assert cnr_json("untag", root / "step-1", "a") == {"path": f"{root}/step-1", "tags": ["release"]}
    assert cnr_text("untag", root / "step-1", "release") == f"removed tag release: {root}/step-1\n"
    assert "tagged 'release'" not in plan_prune(root, Keep(last=1)).stays.get("step-1", ())


def test_wrong_tags_and_places_are_one_line(run: Path, tmp_path: Path) -> None:
    """A tag that is no name is a wrong command line; a checkpoint that is not there is an error."""
    result = cnr_result("tag", run, "no/name")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "'no/name'" in result.stderr
    for command in ("tag", "untag"):
        result = cnr_result(command, tmp_path / "none", "v1")
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
