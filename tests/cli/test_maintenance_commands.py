"""The commands that change something, cnr prune, compact, export, import and report: what they do, say, and refuse."""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

import torchrec_cnr as cnr
from tests.support import runs
from tests.support.command_line import cnr_json, cnr_result, cnr_text
from tests.support.faults import flip, flip_middle
from tests.support.lineages import is_same, objects_of
from tests.support.roots import HOUR_NS, Root
from torchrec_cnr.errors import StoreError
from torchrec_cnr.human_text import bytes_text
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.maintenance.catalog import read_catalog
from torchrec_cnr.maintenance.compaction.plan import plan_compaction
from torchrec_cnr.maintenance.read_run_history import read_run_history
from torchrec_cnr.maintenance.tags_and_metrics import tag, write_metrics
from torchrec_cnr.storage.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

NAMES = ("step-1", "step-2", "step-3", "step-4")
FORMATS = ("dcp", "safetensors", "torch")

Files = dict[str, bytes | None]


def _refused(folder: Path, *args: str | Path | int, status: int = 1) -> str:
    """The one line on stderr of a command that fails, with and without --json, and changes nothing in a folder."""
    before, lines = _files(folder), set()
    for options in ([], ["--json"]):
        result = cnr_result(*args, *options)
        assert (result.exit_code, result.stdout) == (status, ""), result.output
        assert re.fullmatch(r"cnr: error: .*\n", result.stderr)
        assert _files(folder) == before
        lines.add(result.stderr)
    (line,) = lines
    return line


def _files(folder: Path) -> Files:
    """All that lies in a folder; directories have no bytes."""
    return {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _tensors(path: str | Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, as a load gives them."""
    return {fqn: cnr.load_table(path, fqn) for fqn in cnr.read_checkpoint(path).manifest.tensors}


def _differing(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that are not the same, bit for bit."""
    assert first.keys() == second.keys()
    return [fqn for fqn in first if not is_same(first[fqn], second[fqn])]


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A baseline and three deltas, quantized, which is left alone by tests."""
    root = tmp_path_factory.mktemp("run")
    runs.save_run(root, NAMES, quantization=cnr.Asymmetric(4), rows=(400, 12))
    return root


@pytest.fixture
def run(saved_run: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(saved_run, tmp_path / "run"))


# prune


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A baseline and a delta on one day, a baseline on the next, and a baseline and a delta on the last."""
    root = Root(tmp_path / "root")
    root.save("a", HOUR_NS)
    root.save("a-1", 2 * HOUR_NS, "a", range(8))
    root.save("b", 25 * HOUR_NS)
    root.save("c", 49 * HOUR_NS)
    root.save("c-1", 50 * HOUR_NS, "c", range(6, 12))
    for name, auc in (("a", 0.9), ("b", 0.5), ("c", 0.7)):
        write_metrics(root.at(name), {"auc": auc, "loss": 1 - auc})
    tag(root.at("b"), "release")
    return root


def test_prune_says_what_it_would_do(root: Root, tmp_path: Path) -> None:
    """Without --execute, every checkpoint is listed with its size and why it stays, and nothing is touched."""
    before = _files(tmp_path)
    sizes = {name: _num_bytes(Path(root.at(name))) for name in root.checkpoints}
    text = cnr_text("prune", root.url, "--last", 1, "--no-tagged")
    assert re.match(r"keep the last\n", text)
    goes = re.findall(r"goes +(\S+ \S+) +(\S+)", text)
    assert goes == [(bytes_text(sizes[name]), name) for name in ("b", "a-1", "a")]
    assert re.search(rf"stays +{bytes_text(sizes['c'])} +c +needed by c-1", text)
    assert re.search(rf"stays +{bytes_text(sizes['c-1'])} +c-1 +one of the last", text)
    freed, left = sizes["a"] + sizes["a-1"] + sizes["b"], sizes["c"] + sizes["c-1"]
    last = f"3 checkpoints would go, {bytes_text(freed)} be freed, {bytes_text(left)} be left; --execute does it"
    assert text.splitlines()[-1] == last

    document = cnr_json("prune", root.url, "--last", 1, "--no-tagged")
    assert document == {
        "keep": "the last",
        "goes": [{"name": name, "bytes": sizes[name]} for name in ("b", "a-1", "a")],
        "stays": {"c": ["needed by c-1"], "c-1": ["one of the last"]},
        "freed_bytes": freed,
        "left_bytes": left,
        "executed": False,
        "failed": {},
    }
    assert _files(tmp_path) == before


def test_prune_does_what_it_said(root: Root) -> None:
    """With --execute exactly that goes; what is left loads, and another prune finds nothing to do."""
    said = cnr_json("prune", root.url, "--last", 1, "--no-tagged")
    assert root.directories() == set(root.checkpoints)
    done = cnr_json("prune", root.url, "--last", 1, "--no-tagged", "--execute")
    assert done == {**said, "executed": True}
    assert root.directories() == {"c", "c-1"} == set(done["stays"])
    assert sum(root.files().values()) == done["left_bytes"]
    root.assert_loads(["c", "c-1"])
    text = cnr_text("prune", root.url, "--last", 1, "--no-tagged", "--execute")
    assert text.splitlines()[-1] == "✓ 0 checkpoints removed, 0 B freed"


def test_prune_says_what_it_did(root: Root) -> None:
    """In text, too."""
    text = cnr_text("prune", root.url, "--last", 1, "--execute")
    assert root.directories() == {"b", "c", "c-1"}
    assert re.search(r"goes .* a-1 *\ngoes .* a *\nstays .* b +tagged 'release'", text)
    assert re.match(r"✓ 2 checkpoints removed, [\d.]+ KB freed", text.splitlines()[-1])


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
    cnr_text("prune", root.url, *options, "--execute")
    assert root.directories() == wanted
    root.assert_loads(wanted)


def test_prune_tells_what_could_not_be_removed(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its status as well; what it needs stays with it."""
    remove = Store.remove

    def refuse(store: Store, name: str, is_durable: bool = False) -> None:
        if store.path.endswith("/a-1"):
            raise StoreError(f"cannot remove {name}: PermissionError")
        remove(store, name, is_durable)

    monkeypatch.setattr(Store, "remove", refuse)
    result = cnr_result("prune", root.url, "--last", 1, "--execute")
    assert (result.exit_code, result.stderr) == (1, "")
    assert "not removed: a-1  cannot remove manifest.json: PermissionError\n" in result.stdout
    assert root.directories() == {"a", "a-1", "b", "c", "c-1"}
    b_bytes = _num_bytes(Path(root.at("b")))
    result = cnr_result("prune", root.url, "--last", 1, "--no-tagged", "--execute", "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, list(document["failed"])) == (1, ["a-1", "a"])
    assert document["freed_bytes"] == b_bytes
    assert root.directories() == {"a", "a-1", "c", "c-1"}
    root.assert_loads(["a-1", "c-1"])


def test_prune_leaves_alone_what_is_not_ours(root: Root) -> None:
    """Other files and directories are listed as such; so is what is damaged, with what it may stand on."""
    root.put("notes", "todo.txt")
    root.put("a", "mine.txt")
    file = Path(root.at("c"), "manifest.json")
    flip_middle(file)
    before = _files(Path(root.url))
    text = cnr_text("prune", root.url, "--last", 1, "--execute")
    assert re.search(r"stays .* notes +not recognised", text)
    assert re.search(r"stays .* c +cannot be read: .*sha256", text)
    assert re.search(r"stays .* a +.*c, which cannot be read, may need it", text)
    assert _files(Path(root.url)) == before


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--last", "-1"], 2, "'--last'"),
        (["--last", "many"], 2, "'--last'"),
        (["--daily", "-1"], 2, "'--daily'"),
        (["--last", "0", "--no-tagged"], 2, "nothing would be kept"),
        (["--best", ""], 2, "--best needs the name of a metric"),
        (["--best", "-"], 2, "--best needs the name of a metric"),
        (["--best", "acu"], 2, "no checkpoint has the metric 'acu'; metrics that are there: 'auc', 'loss'"),
        (["--bets", "auc"], 2, "No such option: --bets"),
    ],
)
def test_prune_refuses_what_cannot_work(
    root: Root, tmp_path: Path, options: list[str], status: int, words: str
) -> None:
    """Nothing is removed by mistake."""
    assert words in _refused(tmp_path, "prune", root.url, "--execute", *options, status=status)


def test_prune_of_an_empty_root_has_nothing_to_do(tmp_path: Path) -> None:
    """A run that has saved nothing yet is no error, whatever is to be kept."""
    assert cnr_json("prune", tmp_path, "--execute", "--best", "auc")["goes"] == []


# compact


def test_compact_says_what_it_would_do(run: Path, tmp_path: Path) -> None:
    """With --dry-run the figures of the plan are told, and nothing is touched."""
    before = _files(tmp_path)
    plan = plan_compaction(run / "step-4")
    assert len(plan.run) == 4
    assert 0 < len(plan.victims) < len(plan.uses)
    lines = cnr_text("compact", run, "--dry-run").splitlines()
    assert lines == [
        f"{run}/step-4: 4 checkpoints would become one",
        f"rewritten: {len(plan.victims)} of {len(plan.uses)} files, {bytes_text(plan.moved_bytes)} copied",
        f"a restore reads {plan.bytes_after / plan.live_bytes:.2f} times what it needs, "
        f"before {plan.bytes_before / plan.live_bytes:.2f} times",
    ]
    assert cnr_json("compact", run, "--dry-run") == {
        "checkpoint": f"{run}/step-4",
        "folded": [f"{run}/{name}" for name in NAMES],
        "rewritten_files": len(plan.victims),
        "files": len(plan.uses),
        "moved_bytes": plan.moved_bytes,
        "live_bytes": plan.live_bytes,
        "bytes_before": plan.bytes_before,
        "bytes_after": plan.bytes_after,
        "executed": False,
    }
    assert _files(tmp_path) == before


def test_compact_does_what_it_said(run: Path) -> None:
    """The checkpoint stands alone and loads as before, from as many bytes as were told; then there is nothing to do."""
    tensors, objects = _tensors(run / "step-4"), objects_of(cnr.read_checkpoint(run / "step-4"))
    others = {name: _files(run / name) for name in NAMES[:3]}
    said = cnr_json("compact", run, "--dry-run")
    assert cnr_json("compact", run) == {**said, "executed": True}
    checkpoint = cnr.read_checkpoint(run / "step-4")
    assert (checkpoint.kind, checkpoint.is_compacted) == ("baseline", True)
    assert _differing(_tensors(run / "step-4"), tensors) == []
    assert objects_of(checkpoint) == objects
    new = [pack for pack in checkpoint.manifest.packs if pack not in checkpoint.committed.packs]
    # Of small blobs, that are split, parts take more than their part.
    assert sum(pack.num_bytes - pack.header_bytes for pack in new) == pytest.approx(said["moved_bytes"], rel=0.1)
    # Headers of small files count: one new file has one, where three were planned for.
    assert 0.7 * said["bytes_after"] < checkpoint.manifest.pack_bytes <= said["bytes_after"]
    assert said["bytes_after"] < 0.5 * said["bytes_before"]
    assert {name: _files(run / name) for name in NAMES[:3]} == others
    assert not list(run.glob("*/*.lease"))
    assert cnr_text("compact", run) == f"{run}/step-4: nothing to compact\n"
    assert not cnr_json("compact", run)["executed"]


def test_compact_says_what_it_did(run: Path) -> None:
    """In text, too; and again, where less room is to be left than the first time."""
    lines = cnr_text("compact", run / "step-3", "--max-ratio", "99").splitlines()
    assert lines[0] == f"{run}/step-3: 3 checkpoints became one"
    assert lines[1] == "rewritten: 0 of 3 files, 0 B copied"
    lines = cnr_text("compact", run / "step-3").splitlines()
    assert lines[0] == f"{run}/step-3: was compacted"
    assert re.fullmatch(r"rewritten: [12] of 3 files, [\d.]+ KB copied", lines[1])


def test_compact_since_an_ancestor(run: Path) -> None:
    """Only what lies above it is folded, and stands on it."""
    before = _tensors(run / "step-4")
    document = cnr_json("compact", run, "--since", run / "step-2")
    assert document["folded"] == [f"{run}/step-3", f"{run}/step-4"]
    assert [one.store.url for one in read_lineage(run / "step-4").checkpoints] == [
        f"{run}/{name}" for name in ("step-1", "step-2", "step-4")
    ]
    assert _differing(_tensors(run / "step-4"), before) == []


@pytest.mark.parametrize("is_self_contained", [False, True])
def test_compact_self_contained(run: Path, is_self_contained: bool) -> None:
    """Without the others, only a checkpoint that was compacted so loads."""
    before = _tensors(run / "step-4")
    cnr_text("compact", run, "--max-ratio", "99", *(["--self-contained"] if is_self_contained else []))
    assert _differing(_tensors(run / "step-4"), before) == []
    for name in NAMES[:3]:
        shutil.rmtree(run / name)
    if is_self_contained:
        assert _differing(_tensors(run / "step-4"), before) == []
    else:
        with pytest.raises(cnr.CNRError):
            _tensors(run / "step-4")


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (
            ["--since", "{run}/step-4"],
            1,
            "/step-4 is not below {run}/step-3, which stands on {run}/step-2, {run}/step-1",
        ),
        (["--since", "{run}/nothing"], 1, "/nothing is not below {run}/step-3"),
        (["--since", "no-such-protocol://x"], 2, "not a path or URL that fsspec can open"),
        (["--max-ratio", "0.9"], 2, "'--max-ratio'"),
        (["--max-ratio", "-1"], 2, "'--max-ratio'"),
        (["--max-ratio", "nan"], 2, "'--max-ratio'"),
        (["--threads", "0"], 2, "'--threads'"),
    ],
)
def test_compact_refuses_what_cannot_work(
    run: Path, tmp_path: Path, options: list[str], status: int, words: str
) -> None:
    """An ancestor that is none, numbers out of their bounds."""
    args = [option.format(run=run) for option in options]
    assert words.format(run=run) in _refused(tmp_path, "compact", run / "step-3", *args, status=status)


def test_an_ancestor_of_many_is_told_in_few_words(tmp_path: Path) -> None:
    """Of a long lineage the next five are named, and how many more there are."""
    root = Root(tmp_path / "long")
    for number in range(9):
        root.save(f"step-{number}", (1 + number) * HOUR_NS, f"step-{number - 1}" if number else None, range(number))
    line = _refused(tmp_path, "compact", root.url, "--since", tmp_path)
    assert line.endswith(f"{root.at('step-4')}, {root.at('step-3')} and 3 more\n")


# export


def _exported(path: Path, to: str, like: Mapping[str, Tensor]) -> dict[str, Any]:
    """What an export holds, by stock means, by FQN."""
    if to == "safetensors":
        return dict(load_file(path / "model.safetensors"))
    if to == "torch":
        return dict(flatten_state_dict(torch.load(path, weights_only=True))[0])
    target = {fqn: torch.full_like(value, 7) for fqn, value in like.items()}
    dcp.load(target, storage_reader=FileSystemReader(path))
    return target


@pytest.mark.parametrize("to", FORMATS)
def test_exports_load_by_stock_means(saved_run: Path, tmp_path: Path, to: str) -> None:
    """Bit for bit as the checkpoint loads; what was written is told."""
    out = tmp_path / "new" / "plain"
    expected = _tensors(saved_run / "step-3")
    assert _differing(expected, _tensors(saved_run / "step-4")) != []
    document = cnr_json("export", saved_run / "step-3", out, "--to", to)
    files = [out] if to == "torch" else sorted(out.iterdir())
    assert document == {
        "checkpoint": f"{saved_run}/step-3",
        "files": [str(file) for file in files],
        "bytes": sum(value.nbytes for value in expected.values()),
        "left_out": [],
    }
    found = {fqn: value for fqn, value in _exported(out, to, expected).items() if isinstance(value, Tensor)}
    assert _differing(found, expected) == []


def test_export_says_what_it_did(saved_run: Path, tmp_path: Path) -> None:
    """Of a root its newest checkpoint, which is named."""
    size = bytes_text(sum(value.nbytes for value in _tensors(saved_run / "step-4").values()))
    text = cnr_text("export", saved_run, tmp_path / "model.pt", "--to", "torch")
    assert text == f"{saved_run}/step-4: {size} of values in 1 file\n"
    (tmp_path / "empty").mkdir()
    assert cnr_text("export", saved_run, tmp_path / "empty", "--to", "dcp").endswith(" in 2 files\n")


def test_export_tells_what_a_format_cannot_hold(tmp_path: Path) -> None:
    """Objects that JSON would change are left out of safetensors files, and named."""
    runs.save_state(tmp_path / "odd", {"weight": torch.ones(3), "seen": {1, 2}, "epoch": 4})
    lines = cnr_text("export", tmp_path / "odd", tmp_path / "plain", "--to", "safetensors").splitlines()
    assert lines[1:] == ["left out, because safetensors cannot hold them: seen"]
    assert cnr_json("export", tmp_path / "odd", tmp_path / "more", "--to", "safetensors")["left_out"] == ["seen"]
    assert cnr_json("export", tmp_path / "odd", tmp_path / "all", "--to", "torch")["left_out"] == []


@pytest.mark.parametrize("to", FORMATS)
def test_export_writes_over_nothing(saved_run: Path, tmp_path: Path, to: str) -> None:
    """Neither over a file, nor into a directory with something in it, nor where it cannot."""
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_bytes(b"mine")
    for out in ("file", "full"):
        assert "is there already" in _refused(tmp_path, "export", saved_run, tmp_path / out, "--to", to, status=2)
    assert "cannot create" in _refused(tmp_path, "export", saved_run, tmp_path / "file" / "out", "--to", to)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["{run}", "{out}"], "Missing option '--to'"),
        (["{run}", "{out}", "--to", "onnx"], "'onnx' is not one of 'dcp', 'safetensors', 'torch'"),
        (["{run}", "--to", "dcp"], "Missing argument 'OUT'"),
        (["{run}", "no-such-protocol://x", "--to", "dcp"], "not a path or URL that fsspec can open"),
        (["{run}", "{out}", "--to", "dcp", "--threads", "-1"], "'--threads'"),
    ],
)
def test_export_refuses_what_cannot_work(run: Path, tmp_path: Path, args: list[str], words: str) -> None:
    """Before anything is written."""
    filled = [arg.format(run=run, out=tmp_path / "out") for arg in args]
    assert words in _refused(tmp_path, "export", *filled, status=2)


def test_export_of_a_root_tells_what_it_passed_over(run: Path, tmp_path: Path) -> None:
    """Where the newest cannot be read, the one before is exported, and both are named."""
    file = run / "step-4" / "manifest.json"
    file.write_bytes(file.read_bytes()[:-1])
    result = cnr_result("export", run, tmp_path / "model.pt", "--to", "torch")
    assert result.exit_code == 0
    assert re.fullmatch(rf"cnr: warning: passed over .*{re.escape(str(file))}.*\n", result.stderr)
    assert result.stdout.startswith(f"{run}/step-3: ")


# import

TABLE, MINE = "ebc.embedding_bags.t.weight", "mine.weight"


@pytest.fixture
def stock(tmp_path: Path) -> dict[str, Any]:
    """What ``stock`` in the folder holds: a table by TorchRec's name, another matrix, and more, saved by DCP alone."""
    torch.manual_seed(3)
    state = {
        "ebc": {"embedding_bags": {"t": {"weight": torch.rand(300, 16)}}},
        "mine": {"weight": torch.rand(200, 16)},
        "bias": torch.rand(9),
        "progress": {"epoch": 3, "betas": (0.9, 0.99)},
    }
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "stock", sync_files=False))
    return state


def _stock_tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {fqn: value for fqn, value in flatten_state_dict(state)[0].items() if isinstance(value, Tensor)}


def test_import_and_back_is_exact(stock: dict[str, Any], tmp_path: Path) -> None:
    """A stock checkpoint becomes a baseline, and that a stock checkpoint again, bit for bit, objects included."""
    expected, path = _stock_tensors(stock), tmp_path / "runs" / "b" / "step-0"
    document = cnr_json("import", tmp_path / "stock", path)
    assert document == {
        "checkpoint": str(path),
        "bytes": _num_bytes(path),
        "rows": 300,
        "tensors": 3,
        "quantized": [],
    }
    assert cnr.read_checkpoint(path).kind == "baseline"
    assert _differing(_tensors(path), expected) == []
    cnr_text("export", path.parent, tmp_path / "back", "--to", "dcp")
    target = {
        "ebc": {"embedding_bags": {"t": {"weight": torch.zeros(300, 16)}}},
        "mine": {"weight": torch.zeros(200, 16)},
        "bias": torch.zeros(9),
        "progress": {"epoch": 0, "betas": None},
    }
    dcp.load(target, storage_reader=FileSystemReader(tmp_path / "back"))
    assert _differing(_stock_tensors(target), expected) == []
    assert target["progress"] == stock["progress"]


@pytest.mark.parametrize(
    ("bits", "tables", "quantized"),
    [
        (8, [], [TABLE]),
        (4, [], [TABLE]),
        (2, [], [TABLE]),
        (4, ["mine.*"], [MINE]),
        (4, ["nothing.*", "*.weight"], [TABLE, MINE]),
    ],
)
def test_import_quantizes_tables(
    stock: dict[str, Any], tmp_path: Path, bits: int, tables: Sequence[str], quantized: list[str]
) -> None:
    """By TorchRec's names or by patterns: they are smaller and close, and all else is exact."""
    expected, path = _stock_tensors(stock), tmp_path / "step-0"
    cnr_text("import", tmp_path / "stock", tmp_path / "exact")
    options = [word for pattern in tables for word in ("--table", pattern)]
    assert cnr_json("import", tmp_path / "stock", path, "--bits", bits, *options)["quantized"] == quantized
    found = _tensors(path)
    assert _differing(found, expected) == quantized
    for fqn in quantized:
        schemes = [shard.scheme for shard in cnr.read_checkpoint(path).manifest.tensors[fqn].shards]
        assert [scheme.to_json()["bits"] for scheme in schemes] == [bits]
        assert float((found[fqn] - expected[fqn]).abs().max()) < 1.1 / (2**bits - 1)
    values = sum(expected[fqn].nbytes for fqn in quantized)
    saved = _num_bytes(tmp_path / "exact") - _num_bytes(path)
    assert saved == pytest.approx(values * (1 - bits / 32), rel=0.2)  # scales and biases take their part


def test_import_says_what_it_did(stock: dict[str, Any], tmp_path: Path) -> None:
    """In text, too."""
    path = tmp_path / "step-0"
    text = cnr_text("import", tmp_path / "stock", path, "--bits", 4)
    assert text == f"{path}: a baseline, 3 tensors, 1 of them quantized, {bytes_text(_num_bytes(path))}\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--bits", "5"], "--bits must be one of 2, 3, 4, 8, 32 (got 5)"),
        (["--bits", "-4"], "--bits must be one of 2, 3, 4, 8, 32 (got -4)"),
        (["--bits", "four"], "'--bits'"),
        (["--table", "mine.*"], "--table says what is quantized, so that it needs --bits, too"),
        (
            ["--bits", "4", "--table", "model.*"],
            f"nothing would be quantized: no tensor is named model.*; give patterns for its tables; its matrices are "
            f"'{TABLE}', '{MINE}'\n",
        ),
        (["--threads", "0"], "'--threads'"),
    ],
)
def test_import_refuses_what_cannot_work(stock: dict[str, Any], tmp_path: Path, options: list[str], words: str) -> None:
    """Before anything is written."""
    assert words in _refused(tmp_path, "import", tmp_path / "stock", tmp_path / "step-0", *options, status=2)


def test_bits_that_no_table_gets_are_refused(tmp_path: Path) -> None:
    """A model of other names than TorchRec's is not imported exactly, against what was asked for."""
    state = {f"t{number}": torch.rand(9, 16) for number in range(7)}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "stock", sync_files=False))
    line = _refused(tmp_path, "import", tmp_path / "stock", tmp_path / "step-0", "--bits", 4, status=2)
    assert "no tensor is named *embedding_bags.*.weight or *embeddings.*.weight" in line
    assert line.endswith("its matrices are 't0', 't1', 't2', 't3', 't4' and 2 more\n")


def test_import_writes_over_nothing(stock: dict[str, Any], tmp_path: Path, saved_run: Path) -> None:
    """A checkpoint that is there stays, and files are no directories."""
    shutil.copytree(saved_run / "step-1", tmp_path / "step-1")
    (tmp_path / "file").write_bytes(b"mine")
    source = tmp_path / "stock"
    assert "holds a committed checkpoint already" in _refused(tmp_path, "import", source, tmp_path / "step-1")
    for out in ("file", "file/step-1"):
        assert "cannot create" in _refused(tmp_path, "import", source, tmp_path / out)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_import_refuses_what_is_damaged(stock: dict[str, Any], tmp_path: Path, damage: str) -> None:
    """Nothing is left of it, and the file is named."""
    metadata, values = tmp_path / "stock" / ".metadata", tmp_path / "stock" / "__0_0.distcp"
    if damage == "flipped":
        flip(metadata, 0)
    elif damage == "truncated":
        values.write_bytes(values.read_bytes()[:-900])
    else:
        values.unlink()
    line = _refused(tmp_path, "import", tmp_path / "stock", tmp_path / "step-0")
    assert str(metadata if damage == "flipped" else values) in line


# report


def test_report_writes_a_page_of_the_facts(run: Path, tmp_path: Path) -> None:
    """Names, kinds and figures of what is kept, and of what was compacted and pruned; figures that JSON has exactly."""
    page = tmp_path / "new" / "folder" / "page.html"
    assert cnr_text("report", run, "-o", page) == f"{page}: 4 events, 4 checkpoints kept\n"
    first = page.read_text()
    assert f"<bdi>{run}</bdi>" in first
    assert all(f"<bdi>{name}</bdi>" in first for name in NAMES)
    assert "1 baseline and 3 deltas; 4 are kept" in first
    assert "lay here before" not in first

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
    before = _files(tmp_path)
    document = cnr_json("report", run)
    assert _files(tmp_path) == before
    assert document == json.loads(json.dumps(asdict(read_run_history(read_catalog(run)))))
    assert list(document) == ["root", "events", "kept", "left_bytes", "unreadable"]
    assert [(event["kind"], event["name"]) for event in document["events"]] == [
        ("baseline", "step-1"), ("delta", "step-2"), ("delta", "step-3"), ("delta", "step-4"),
    ]  # fmt: skip
    for kept in document["kept"]:
        checkpoint = cnr.read_checkpoint(run / kept["name"])
        assert kept["created_ns"] == checkpoint.created_ns
        assert kept["num_bytes"] == checkpoint.num_bytes == _num_bytes(run / kept["name"])
    cnr_text("report", run)
    assert (tmp_path / "report.html").exists()


def test_report_tells_what_cannot_be_read(run: Path, tmp_path: Path) -> None:
    """On the page and beside it; what is left of the run is drawn."""
    (run / "step-2" / "manifest.json").write_bytes(b"{}")
    text = cnr_text("report", run, "-o", tmp_path / "page.html")
    assert text.endswith("3 events, 3 checkpoints kept, 1 that cannot be read\n")
    page = (tmp_path / "page.html").read_text()
    assert "What cannot be read is not in this report: step-2." in page
    assert "its parent is not here" in page
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
    assert f"{bytes_text(left)} of checkpoints that were removed lie here still, in packs that others use." in page
    assert f"{bytes_text(sum(root.files().values()))}; at most" in page
    assert "that no event removed" not in page


def test_report_of_an_empty_root_says_so(tmp_path: Path) -> None:
    """A run that has saved nothing yet is no error."""
    (tmp_path / "run").mkdir()
    out = tmp_path / "page.html"
    assert cnr_text("report", tmp_path / "run", "-o", out) == f"{out}: 0 events, 0 checkpoints kept\n"
    assert "No checkpoints yet" in out.read_text()


def test_report_replaces_nothing_but_pages(run: Path, tmp_path: Path) -> None:
    """A file of another kind, or a directory, stays; an empty file may be there, as mktemp makes one."""
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "empty").write_bytes(b"")
    for out, status, words in (
        (tmp_path / "file", 2, "is there already, and no page"),
        (run / "step-4" / "manifest.json", 2, "is there already, and no page"),
        (tmp_path, 2, "is a directory; name a file in it"),
        ("no-such-protocol://x", 2, "not a path or URL that fsspec can open"),
    ):
        before = _files(tmp_path)
        result = cnr_result("report", run, "-o", out)
        assert (result.exit_code, result.stdout) == (status, "")
        assert re.fullmatch(rf"cnr: error: .*{words}.*\n", result.stderr)
        assert _files(tmp_path) == before
    result = cnr_result("report", run, "-o", tmp_path / "file" / "page.html")
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(r"cnr: error: cannot create .*\n", result.stderr)
    cnr_text("report", run, "-o", tmp_path / "empty")
    assert (tmp_path / "empty").stat().st_size > 1000


# Places that are none


@pytest.fixture
def broken(saved_run: Path, tmp_path: Path) -> Path:
    """Places, each wrong in its own way, by name."""
    for name in ("empty", "foreign", "half-written"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_bytes(b"data")
    (tmp_path / "foreign" / "notes").write_bytes(b"notes")
    (tmp_path / "half-written" / "5a7e-0-0.safetensors").write_bytes(b"data")
    for name in ("manifest", "pack"):
        shutil.copytree(saved_run / "step-1", tmp_path / name)
    file = tmp_path / "manifest" / "manifest.json"
    flip_middle(file)
    (pack,) = (tmp_path / "pack").glob("*.safetensors")
    pack.write_bytes(pack.read_bytes()[:-1000])
    return tmp_path


NO_ROOT = (2, "a checkpoint, no root; give the directory that it lies in")
NO_CHECKPOINT = {
    "missing": (1, "nothing is there"),
    "file": (1, "a file, no directory"),
    "foreign": (1, "no checkpoint is here, nor in a directory of it"),
    "half-written": (1, "packs, but no manifest.json"),
}
OF_ROOTS = {**NO_CHECKPOINT, "manifest": NO_ROOT, "pack": NO_ROOT}
OF_CHECKPOINTS = {**NO_CHECKPOINT, "empty": (1, "an empty directory"), "manifest": (1, "/manifest.json: sha256 is")}
WRONG_PLACES = [
    *((["prune", "{place}", "--execute"], place, *found) for place, found in OF_ROOTS.items()),
    *((["report", "{place}", "--out", "{out}"], place, *found) for place, found in OF_ROOTS.items()),
    *((["compact", "{place}"], place, *found) for place, found in OF_CHECKPOINTS.items()),
    *((["export", "{place}", "{out}", "--to", "dcp"], place, *found) for place, found in OF_CHECKPOINTS.items()),
    *((["export", "{place}", "{out}", "--to", to], "pack", 1, "truncated: ") for to in FORMATS),
    *((["import", "{place}", "{out}"], place, 1, "no checkpoint of dcp.save") for place in (*OF_CHECKPOINTS, "pack")),
    *(([command, "{place}", *options], "no-such-protocol://x", 2, "not a path or URL that fsspec can open")
      for command, options in (
          ("prune", []), ("report", []), ("compact", []), ("export", ["{out}", "--to", "dcp"]), ("import", ["{out}"]),
      )),
]  # fmt: skip


@pytest.mark.parametrize(("args", "place", "status", "words"), WRONG_PLACES)
def test_wrong_places_are_told(broken: Path, args: list[str], place: str, status: int, words: str) -> None:
    """One line says what is wrong with which place, and nothing is written."""
    where = place if "://" in place else str(broken / place)
    line = _refused(broken, *(arg.format(place=where, out=broken / "out") for arg in args), status=status)
    assert words in line
    assert line.startswith(("cnr: error: " + where, f"cnr: error: '{where}'"))


@pytest.mark.parametrize("damage", ["manifest", "pack", "parent"])
def test_damage_further_down_is_told(run: Path, tmp_path: Path, damage: str) -> None:
    """What a checkpoint stands on is named where it is wrong, and nothing is left of what was begun."""
    if damage == "pack":
        (pack,) = (run / "step-2").glob("*.safetensors")
        pack.write_bytes(pack.read_bytes()[:-1000])
        words = f"{pack}: truncated"
    elif damage == "manifest":
        file = run / "step-2" / "manifest.json"
        flip_middle(file)
        words = f"{file}: sha256 is"
    else:
        (run / "step-2" / "manifest.json").unlink()
        words = f"its parent {run}/step-2 is missing"
    commands: list[list[str | Path]] = [
        ["compact", run],
        ["compact", run, "--dry-run"],
        ["compact", run, "--self-contained"],
    ]
    commands += [["export", run, tmp_path / "out", "--to", to] for to in FORMATS]
    for command in commands:
        assert words in _refused(tmp_path, *command)


# Other file systems


def test_all_works_on_any_store(tmp_path: Path) -> None:
    """Every command reads from, and writes to, a store in memory."""
    home = f"memory://{tmp_path}"
    root, fs = f"{home}/run", fsspec.filesystem("memory")
    runs.save_run(root, NAMES[:3], quantization=cnr.Asymmetric(4), rows=(400, 12))
    expected = _tensors(f"{root}/step-3")
    assert cnr_json("compact", root, "--dry-run")["folded"] == [f"{root}/{name}" for name in NAMES[:3]]
    assert cnr_json("prune", root, "--last", 1)["goes"] == []
    assert cnr_json("compact", root)["executed"]
    assert cnr_json("prune", root, "--last", 1)["goes"] != []
    assert fs.exists(f"{root}/step-1/manifest.json")
    document = cnr_json("prune", root, "--last", 1, "--execute")
    assert [removal["name"] for removal in document["goes"]] == ["step-2", "step-1"]
    assert not fs.exists(f"{root}/step-1/manifest.json")
    assert _differing(_tensors(f"{root}/step-3"), expected) == []

    cnr_text("export", root, tmp_path / "plain", "--to", "dcp")
    assert _differing(_exported(tmp_path / "plain", "dcp", expected), expected) == []
    for to in FORMATS:
        assert cnr_json("export", root, f"{home}/plain-{to}", "--to", to)["files"][0].startswith(home)
    assert cnr_json("import", f"{home}/plain-dcp", f"{home}/other/step-0")["checkpoint"] == f"{home}/other/step-0"
    assert _differing(_tensors(f"{home}/other/step-0"), expected) == []

    page = f"{home}/pages/page.html"
    assert cnr_text("report", root, "-o", page) == f"{page}: 5 events, 1 checkpoint kept\n"
    assert f"<bdi>{root}</bdi>" in fs.cat(page).decode()
    assert [event["kind"] for event in cnr_json("report", root)["events"]][-2:] == ["compaction", "prune"]


def test_wrong_places_of_any_store_are_told(tmp_path: Path) -> None:
    """As on a disk."""
    home, fs = f"memory://{tmp_path}", fsspec.filesystem("memory")
    fs.pipe(f"{home}/foreign/notes", b"mine")
    commands: list[list[str | Path]] = [
        ["prune", "{}"],
        ["report", "{}"],
        ["compact", "{}"],
        ["export", "{}", tmp_path / "out", "--to", "dcp"],
    ]
    for place, words in (("nothing", "nothing is there"), ("foreign", "no checkpoint is here")):
        for command in commands:
            line = _refused(tmp_path, *(str(arg).format(f"{home}/{place}") for arg in command))
            assert line.startswith(f"cnr: error: {home}/{place}: {words}")
    for to in FORMATS:
        runs.save_state(tmp_path / to, {"weight": torch.ones(3)})
        out = f"{home}/foreign/notes" if to == "torch" else f"{home}/foreign"
        assert "is there already" in _refused(tmp_path, "export", tmp_path / to, out, "--to", to, status=2)
    assert "no page" in cnr_result("report", tmp_path, "-o", f"{home}/foreign/notes").stderr
    assert fs.cat(f"{home}/foreign/notes") == b"mine"
