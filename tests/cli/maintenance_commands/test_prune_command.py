"""cnr prune: what it does, says and refuses."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.maintenance_commands.checks import bytes_in, files_in, refused
from tests.support.command_line import cnr_json, cnr_result, cnr_text
from tests.support.faults import flip_middle
from tests.support.roots import Root
from torchrec_cnr.errors import StoreError
from torchrec_cnr.human_text import bytes_text
from torchrec_cnr.storage.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def test_prune_says_what_it_would_do(root: Root, tmp_path: Path) -> None:
    """Without --execute, every checkpoint is listed with its size and why it stays, and nothing is touched."""
    before = files_in(tmp_path)
    sizes = {name: bytes_in(Path(root.at(name))) for name in root.checkpoints}
    text = cnr_text("prune", root.url, "--last", 1, "--no-tagged")
    assert re.match(r"keep the newest\n", text)
    goes = re.findall(r"^remove +(\S+ \S+) +(\S+) *$", text, re.M)
    assert goes == [(bytes_text(sizes[name]), name) for name in ("a", "a-1", "b")], "oldest first, as cnr ls lists them"
    assert re.search(rf"keep +{bytes_text(sizes['c'])} +c +needed by c-1", text)
    assert re.search(rf"keep +{bytes_text(sizes['c-1'])} +c-1 +newest", text)
    freed, left = sizes["a"] + sizes["a-1"] + sizes["b"], sizes["c"] + sizes["c-1"]
    last = (
        f"Dry run: would remove 3 checkpoints, free {bytes_text(freed)} and keep {bytes_text(left)}. "
        "Add --execute to remove them"
    )
    assert text.splitlines()[-1] == last

    document = cnr_json("prune", root.url, "--last", 1, "--no-tagged")
    assert document == {
        "rules": "the newest",
        "remove": [{"name": name, "bytes": sizes[name], "is_checkpoint": True} for name in ("b", "a-1", "a")],
        "keep": [
            {"name": "c", "bytes": sizes["c"], "reasons": ["needed by c-1"]},
            {"name": "c-1", "bytes": sizes["c-1"], "reasons": ["newest"]},
        ],
        "freed_bytes": freed,
        "kept_bytes": left,
        "executed": False,
        "failed": [],
    }
    assert files_in(tmp_path) == before


def test_prune_does_what_it_said(root: Root) -> None:
    """With --execute exactly that goes; what is left loads, and another prune finds nothing to do."""
    said = cnr_json("prune", root.url, "--last", 1, "--no-tagged")
    assert root.directories() == set(root.checkpoints)
    done = cnr_json("prune", root.url, "--last", 1, "--no-tagged", "--execute")
    assert done == {**said, "executed": True}
    assert root.directories() == {"c", "c-1"} == {item["name"] for item in done["keep"]}
    assert sum(root.files().values()) == done["kept_bytes"]
    root.assert_loads(["c", "c-1"])
    text = cnr_text("prune", root.url, "--last", 1, "--no-tagged", "--execute")
    assert text.splitlines()[-1] == "✓ removed 0 checkpoints, freed 0 B"


def test_prune_says_what_it_did(root: Root) -> None:
    """In text, too."""
    text = cnr_text("prune", root.url, "--last", 1, "--execute")
    assert root.directories() == {"b", "c", "c-1"}
    assert re.search(r"remove .* a *\nremove .* a-1 *\nkeep .* b +tagged 'release'", text)
    assert re.match(r"✓ removed 2 checkpoints, freed [\d.]+ KB", text.splitlines()[-1])


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], {"b", "c", "c-1"}),  # the last three
        (["--last", "2"], {"c", "c-1", "b"}),  # b has a tag
        (["--last", "2", "--no-tagged"], {"c", "c-1"}),
        (["--last", "0"], {"b"}),
        (["--last", "0", "--daily", "2", "--no-tagged"], {"b", "c-1", "c"}),
        (["--last", "0", "--daily", "9", "--no-tagged"], {"a", "a-1", "b", "c-1", "c"}),
        (["--last", "0", "--best", "auc", "--no-tagged"], {"a"}),
        (["--last", "0", "--best=-auc", "--no-tagged"], {"b"}),
        (["--last", "0", "--best", "-loss", "--no-tagged"], {"a"}),
        (["--last", "1", "--best", "auc"], {"a", "b", "c", "c-1"}),
    ],
)
def test_prune_keeps_what_it_is_told(root: Root, options: list[str], wanted: set[str]) -> None:
    """By number, by day, by a metric, by tags; with what these need."""
    said = cnr_text("prune", root.url, *options)
    assert ("this removes the newest checkpoint, c-1\n" in said) == ("c-1" not in wanted)
    cnr_text("prune", root.url, *options, "--execute")
    assert root.directories() == wanted
    root.assert_loads(wanted)


def test_prune_tells_what_could_not_be_removed(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its status as well; what it needs stays with it."""
    remove = Store.remove

    def refuse(store: Store, name: str, is_durable: bool = False) -> None:
        if store.path.endswith("/a-1"):
            raise StoreError(f"cannot remove {name}: PermissionError\x1b[2J")
        remove(store, name, is_durable)

    monkeypatch.setattr(Store, "remove", refuse)
    result = cnr_result("prune", root.url, "--last", 1, "--execute")
    assert (result.exit_code, result.stderr) == (1, "")
    assert "not removed: a-1  cannot remove manifest.json: PermissionError\\x1b[2J\n" in result.stdout
    assert root.directories() == {"a", "a-1", "b", "c", "c-1"}
    b_bytes = bytes_in(Path(root.at("b")))
    result = cnr_result("prune", root.url, "--last", 1, "--no-tagged", "--execute", "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, [item["name"] for item in document["failed"]]) == (1, ["a-1", "a"])
    assert document["freed_bytes"] == b_bytes
    assert root.directories() == {"a", "a-1", "c", "c-1"}
    root.assert_loads(["a-1", "c-1"])


def test_prune_leaves_alone_what_is_not_ours(root: Root) -> None:
    """Other files and directories are listed as such; so is what is damaged, with what it may stand on."""
    root.put("notes", "todo.txt")
    root.put("a", "mine.txt")
    file = Path(root.at("c"), "manifest.json")
    flip_middle(file)
    before = files_in(Path(root.url))
    text = cnr_text("prune", root.url, "--last", 1, "--execute")
    assert re.search(r"keep .* notes +not a checkpoint", text)
    assert re.search(r"keep .* c +cannot be read: .*sha256", text)
    assert re.search(r"keep .* a +.*c, which cannot be read, may need it", text)
    assert files_in(Path(root.url)) == before


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--last", "-1"], 2, "'--last'"),
        (["--last", "many"], 2, "'--last'"),
        (["--daily", "-1"], 2, "'--daily'"),
        (["--last", "0", "--no-tagged"], 2, "nothing would be kept"),
        (["--best", ""], 2, "--best needs the name of a metric"),
        (["--best", "-"], 2, "--best needs the name of a metric"),
        (["--best", "acu"], 2, "no checkpoint has the metric 'acu'; known metrics: 'auc', 'loss'"),
        (["--bets", "auc"], 2, "No such option: --bets"),
    ],
)
def test_prune_refuses_what_cannot_work(
    root: Root, tmp_path: Path, options: list[str], status: int, words: str
) -> None:
    """Nothing is removed by mistake."""
    assert words in refused(tmp_path, "prune", root.url, "--execute", *options, status=status)


def test_prune_of_an_empty_root_has_nothing_to_do(tmp_path: Path) -> None:
    """A run that has saved nothing yet is no error, whatever is to be kept."""
    assert cnr_json("prune", tmp_path, "--execute", "--best", "auc")["remove"] == []
