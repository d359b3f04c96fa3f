"""Checkpoints made to do harm, in ``tests/attacks``: whoever reads one gets a typed error, and nothing else happens."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.walk import LIMIT_SECS, WAYS
from tests.attacks.write import ATTACKS, CODE_RAN, FOLDER, write

ROOT = Path(__file__).parents[2]
MAX_BYTES = 300_000  # of the folder
HARMLESS = {"nothing": "40.0 1"}  # a table of 32 ones, of which a delta makes eight twos; others load as its parent


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, str], Any]]:
    """Where the attacks were, and by attack and way of reading what came of it."""
    folder = tmp_path_factory.mktemp("attacks")
    write(folder)
    (folder / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.attacks.walk", str(folder)],
        cwd=folder / "empty",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (lines[-1], done.stderr[-2000:])
    return folder, {(line["attack"], line["way"]): line for line in lines if "kind" in line}


def test_each_attack_is_kept_as_it_is_written(tmp_path: Path) -> None:
    """The folder is what the script writes, and small; the list of attacks tells what each one tries."""
    write(tmp_path, is_for_repository=True)
    written = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    kept = {path.relative_to(FOLDER): path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}
    assert sorted(written) == sorted(kept)
    assert [str(path) for path in sorted(kept) if written[path] != kept[path]] == []
    assert sum(map(len, kept.values())) < MAX_BYTES
    listed = (FOLDER.parent / "README.md").read_text()
    assert [name for name, attack in ATTACKS.items() if f"| `{name}` | {attack.tries} |" not in listed] == []


@pytest.mark.long
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_ends_in_a_typed_error(walked: tuple[Path, dict[tuple[str, str], Any]], name: str) -> None:
    """A load is refused for the right reason, or right; other readers get a typed error too; each ends in time."""
    _, results = walked
    attack = ATTACKS[name]
    for way in WAYS:
        result = results[name, way]
        assert result["kind"] != "untyped", (way, result["outcome"])
        assert result["secs"] < LIMIT_SECS
    loaded = results[name, "load"]
    if attack.error is None:
        assert loaded["outcome"] == HARMLESS.get(name, "32.0 1")
    else:
        assert loaded["kind"] in ("DamagedError", "StateMismatchError")
        assert re.search(attack.error, f"{loaded['kind']}: {loaded['outcome']}")


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_opens_nothing_outside_of_its_root(
    walked: tuple[Path, dict[tuple[str, str], Any]], name: str
) -> None:
    """Nothing beside the root is opened, but for the one manifest that a lineage may lead to."""
    _, results = walked
    assert {file for way in WAYS for file in results[name, way]["opened"]} == set(ATTACKS[name].opens)


@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if attack.error is not None])
def test_verification_finds_an_attack(walked: tuple[Path, dict[tuple[str, str], Any]], name: str) -> None:
    """What does not load for what is in manifests and packs, is not said to be right; objects are not unpickled."""
    _, results = walked
    if not name.startswith("pickle"):
        assert results[name, "verify"]["outcome"].startswith("1 ")
        assert results[name, "verify root"]["outcome"].startswith("1 ")


def test_no_attack_runs_code(walked: tuple[Path, dict[tuple[str, str], Any]]) -> None:
    """The directory that each pickle with code in it would make where the process ran is not there."""
    folder, _ = walked
    assert os.listdir(folder / "empty") == []
    assert sum(CODE_RAN.encode() in path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()) == 4
