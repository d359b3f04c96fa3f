"""cnr compact: what it does, says and refuses."""

import re
import shutil
from pathlib import Path

import pytest

import torchrec_cnr as cnr
from tests.cli.maintenance_commands.checks import NAMES, differing, files_in, refused, tensors_of
from tests.support.command_line import cnr_json, cnr_text
from tests.support.lineages import objects_of
from tests.support.roots import HOUR_NS, Root
from torchrec_cnr.human_text import bytes_text
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.maintenance.compaction.plan import plan_compaction

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def test_compact_says_what_it_would_do(run: Path, tmp_path: Path) -> None:
    """With --dry-run the figures of the plan are told, and nothing is touched."""
    before = files_in(tmp_path)
    plan = plan_compaction(run / "step-4")
    assert len(plan.run) == 4
    assert 0 < len(plan.rewritten) < len(plan.uses)
    lines = cnr_text("compact", run, "--dry-run").splitlines()
    assert lines == [
        f"{run}/step-4: would merge 4 checkpoints into one",
        f"rewritten: {len(plan.rewritten)} of {len(plan.uses)} files ({bytes_text(plan.moved_bytes)} copied)",
        f"restore read amplification: {plan.bytes_before / plan.live_bytes:.2f}x → "
        f"{plan.bytes_after / plan.live_bytes:.2f}x",
    ]
    assert cnr_json("compact", run, "--dry-run") == {
        "checkpoint": f"{run}/step-4",
        "folded": [f"{run}/{name}" for name in NAMES],
        "rewritten_files": len(plan.rewritten),
        "files": len(plan.uses),
        "moved_bytes": plan.moved_bytes,
        "live_bytes": plan.live_bytes,
        "bytes_before": plan.bytes_before,
        "bytes_after": plan.bytes_after,
        "executed": False,
    }
    assert files_in(tmp_path) == before


def test_compact_does_what_it_said(run: Path) -> None:
    """The checkpoint stands alone and loads as before, from as many bytes as were told; then there is nothing to do."""
    tensors, objects = tensors_of(run / "step-4"), objects_of(cnr.read_checkpoint(run / "step-4"))
    others = {name: files_in(run / name) for name in NAMES[:3]}
    said = cnr_json("compact", run, "--dry-run")
    assert cnr_json("compact", run) == {**said, "executed": True}
    checkpoint = cnr.read_checkpoint(run / "step-4")
    assert (checkpoint.kind, checkpoint.parent, checkpoint.is_compacted) == ("delta", None, True)
    assert differing(tensors_of(run / "step-4"), tensors) == []
    assert objects_of(checkpoint) == objects
    new = [pack for pack in checkpoint.manifest.packs if pack not in checkpoint.committed.packs]
    # Of small blobs, that are split, parts take more than their part.
    assert sum(pack.num_bytes - pack.header_bytes for pack in new) == pytest.approx(said["moved_bytes"], rel=0.1)
    # Headers of small files count: one new file has one, where three were planned for.
    assert 0.7 * said["bytes_after"] < checkpoint.manifest.pack_bytes <= said["bytes_after"]
    assert said["bytes_after"] < 0.5 * said["bytes_before"]
    assert {name: files_in(run / name) for name in NAMES[:3]} == others
    assert not list(run.glob("*/*.lease"))
    assert cnr_text("compact", run) == f"{run}/step-4: nothing to compact\n"
    assert not cnr_json("compact", run)["executed"]


def test_compact_says_what_it_did(run: Path) -> None:
    """In text, too; and again, where less room is to be left than the first time."""
    lines = cnr_text("compact", run / "step-3", "--max-ratio", "99").splitlines()
    assert lines[0] == f"{run}/step-3: merged 3 checkpoints into one"
    assert lines[1] == "rewritten: 0 of 3 files (0 B copied)"
    lines = cnr_text("compact", run / "step-3").splitlines()
    assert lines[0] == f"{run}/step-3: was compacted"
    assert re.fullmatch(r"rewritten: [12] of 3 files \([\d.]+ KB copied\)", lines[1])


def test_compact_since_an_ancestor(run: Path) -> None:
    """Only what lies above it is folded, and stands on it."""
    before = tensors_of(run / "step-4")
    document = cnr_json("compact", run, "--since", run / "step-2")
    assert document["folded"] == [f"{run}/step-3", f"{run}/step-4"]
    assert [one.store.url for one in read_lineage(run / "step-4").checkpoints] == [
        f"{run}/{name}" for name in ("step-1", "step-2", "step-4")
    ]
    assert differing(tensors_of(run / "step-4"), before) == []


@pytest.mark.parametrize("is_self_contained", [False, True])
def test_compact_self_contained(run: Path, is_self_contained: bool) -> None:
    """Without the others, only a checkpoint that was compacted so loads."""
    before = tensors_of(run / "step-4")
    cnr_text("compact", run, "--max-ratio", "99", *(["--self-contained"] if is_self_contained else []))
    assert differing(tensors_of(run / "step-4"), before) == []
    for name in NAMES[:3]:
        shutil.rmtree(run / name)
    if is_self_contained:
        assert differing(tensors_of(run / "step-4"), before) == []
    else:
        with pytest.raises(cnr.CNRError):
            tensors_of(run / "step-4")


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (
            ["--since", "{run}/step-4"],
            1,
            "/step-4 is not an ancestor of {run}/step-3; its ancestors are {run}/step-2, {run}/step-1",
        ),
        (["--since", "{run}/nothing"], 1, "/nothing is not an ancestor of {run}/step-3"),
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
    assert words.format(run=run) in refused(tmp_path, "compact", run / "step-3", *args, status=status)


def test_an_ancestor_of_many_is_told_in_few_words(tmp_path: Path) -> None:
    """Of a long lineage the next five are named, and how many more there are."""
    root = Root(tmp_path / "long")
    for number in range(9):
        root.save(f"step-{number}", (1 + number) * HOUR_NS, f"step-{number - 1}" if number else None, range(number))
    line = refused(tmp_path, "compact", root.url, "--since", tmp_path)
    assert line.endswith(f"{root.at('step-4')}, {root.at('step-3')} and 3 more\n")
