"""cnr report: what it does, says and refuses."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

import torchrec_cnr as cnr
from tests.cli.maintenance_commands.checks import NAMES, bytes_in, files_in
from tests.support.command_line import cnr_json, cnr_result, cnr_text
from tests.support.roots import Root
from torchrec_cnr.human_text import bytes_text
from torchrec_cnr.maintenance.catalog import read_catalog
from torchrec_cnr.maintenance.read_run_history import read_run_history

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.mark.long
def test_report_writes_a_page_of_the_facts(run: Path, tmp_path: Path) -> None:
    """Names, kinds and figures of what is kept, and of what was compacted and pruned; figures that JSON has exactly."""
    page = tmp_path / "new" / "folder" / "page.html"
    assert cnr_text("report", run, "-o", page) == f"{page}: 4 events, 4 checkpoints kept\n"
    first = page.read_text()
    assert f"<bdi>{run}</bdi>" in first
    assert all(f"<bdi>{name}</bdi>" in first for name in NAMES)
    assert "1 baseline and 3 deltas; 4 are kept" in first
    assert "stored here before" not in first

    cnr_text("compact", run)
    cnr_text("prune", run, "--last", 1, "--execute")
    assert cnr_text("report", run, "--out", page) == f"{page}: 6 events, 1 checkpoint kept\n"
    second = page.read_text()
    assert "1 baseline and 3 deltas; 1 is kept" in second
    assert "<bdi>step-4</bdi>" in second
    assert "<bdi>step-1</bdi>" not in second
    document = cnr_json("report", run)
    for num_bytes in (
        sum(event["written_bytes"] for event in document["events"]),
        sum(kept["num_bytes"] for kept in document["kept"]),
        document["kept"][0]["restore_bytes"],
    ):
        assert bytes_text(num_bytes) in second
        assert bytes_text(num_bytes) not in first
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]


def test_report_tells_programs_the_same(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document is the history, with keys that are fixed; no page is written."""
    monkeypatch.chdir(tmp_path)
    before = files_in(tmp_path)
    document = cnr_json("report", run)
    assert files_in(tmp_path) == before
    assert document == json.loads(json.dumps(asdict(read_run_history(read_catalog(run)))))
    assert list(document) == ["root", "events", "kept", "left_bytes", "unreadable", "exact_bytes"]
    assert [(event["kind"], event["name"]) for event in document["events"]] == [
        ("baseline", "step-1"), ("delta", "step-2"), ("delta", "step-3"), ("delta", "step-4"),
    ]  # fmt: skip
    for kept in document["kept"]:
        checkpoint = cnr.read_checkpoint(run / kept["name"])
        assert kept["created_ns"] == checkpoint.created_ns
        assert kept["num_bytes"] == checkpoint.num_bytes == bytes_in(run / kept["name"])
    cnr_text("report", run)
    assert (tmp_path / "report.html").exists()


def test_report_tells_what_cannot_be_read(run: Path, tmp_path: Path) -> None:
    """On the page and beside it; what is left of the run is drawn."""
    (run / "step-2" / "manifest.json").write_bytes(b"{}")
    text = cnr_text("report", run, "-o", tmp_path / "page.html")
    assert text.endswith("3 events, 3 checkpoints kept, 1 that cannot be read\n")
    page = (tmp_path / "page.html").read_text()
    assert "Directories that cannot be read are not in this report: step-2." in page
    assert "its parent is missing" in page
    assert cnr_json("report", run)["unreadable"] == ["step-2"]


def test_report_counts_packs_that_outlive_their_checkpoint(root: Root, tmp_path: Path) -> None:
    """What lies there is all that lies there, though no checkpoint is in its directory any more."""
    root.compact("c-1")
    cnr_text("prune", root.url, "--last", 1, "--no-tagged", "--execute")
    left = sum(num_bytes for (directory, _), num_bytes in root.files().items() if directory == "c")
    document = cnr_json("report", root.url)
    assert document["left_bytes"] == left > 0
    cnr_text("report", root.url, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert f"{bytes_text(left)} of removed checkpoints remain, in data files that other checkpoints use." in page
    assert f'<dd class="value">{bytes_text(sum(root.files().values()))}</dd>' in page
    assert "have disappeared" not in page


def test_report_of_an_empty_root_says_so(tmp_path: Path) -> None:
    """A run that has saved nothing yet is no error."""
    (tmp_path / "run").mkdir()
    out = tmp_path / "page.html"
    assert cnr_text("report", tmp_path / "run", "-o", out) == f"{out}: 0 events, 0 checkpoints kept\n"
    assert "No checkpoints yet" in out.read_text()


@pytest.mark.long
def test_report_replaces_nothing_but_pages(run: Path, tmp_path: Path) -> None:
    """A file of another kind, or a directory, stays; an empty file may be there, as mktemp makes one."""
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "empty").write_bytes(b"")
    for out, status, words in (
        (tmp_path / "file", 2, "already exists and is not a report page"),
        (run / "step-4" / "manifest.json", 2, "already exists and is not a report page"),
        (tmp_path, 2, "is a directory; give the name of a file in it"),
        ("no-such-protocol://x", 2, "not a path or URL that fsspec can open"),
    ):
        before = files_in(tmp_path)
        result = cnr_result("report", run, "-o", out)
        assert (result.exit_code, result.stdout) == (status, "")
        assert re.fullmatch(rf"cnr: error: .*{words}.*\n", result.stderr)
        assert files_in(tmp_path) == before
    result = cnr_result("report", run, "-o", tmp_path / "file" / "page.html")
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(r"cnr: error: cannot create .*\n", result.stderr)
    cnr_text("report", run, "-o", tmp_path / "empty")
    assert (tmp_path / "empty").stat().st_size > 1000
