"""``cnr estimate``: what it takes, what it prints, and what it refuses."""

import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchrec_cnr as cnr
from tests.repository.pages.test_snippets import parse_blocks
from tests.support.command_line import cnr_json, cnr_result, cnr_text
from torchrec_cnr.sizing.estimate import estimate
from torchrec_cnr.sizing.inputs import Sizing, Table

DOCS = Path(__file__).parents[3] / "docs"
BILLION = ("estimate", "--rows", "1e9", "--dim", "64")


def test_json_is_the_estimate() -> None:
    """Every option reaches the estimate."""
    options: list[str | int] = [
        "--modified",
        "10%",
        "--bits",
        "8",
        "--interval",
        "10m",
        "--optimizer-state",
        "none",
        "--ranks",
        16,
    ]
    options += ["--policy", "intermittent", "--keep", 5, "--within", "2m", "--run", "7d", "--gpu"]
    found = cnr_json("estimate", "--table", "1e9x64", "--table", "400M×128", *options)
    sizing = Sizing(
        tables=(Table(10**9, 64), Table(400 * 10**6, 128)),
        modified=0.1,
        scheme=cnr.Asymmetric(8),
        state=None,
        interval_secs=600.0,
        policy=cnr.Intermittent(),
        num_ranks=16,
        keep_last=5,
        save_secs=120.0,
        run_secs=7 * 86400.0,
        is_on_gpu=True,
    )
    inputs = found.pop("inputs")
    assert found == json.loads(json.dumps(asdict(estimate(sizing))))
    assert inputs["tables"] == [[10**9, 64], [400 * 10**6, 128]]
    assert (inputs["modified"], inputs["bits"], inputs["policy"]) == (0.1, "8", "intermittent")


@pytest.mark.parametrize("rows", ["1e9", "1000M", "1B", "1G", "1,000,000,000", "1_000_000_000", "1.0e9", "1000000k"])
def test_rows_may_be_written_as_people_do(rows: str) -> None:
    """All of these are a billion; a share may be in percent."""
    assert cnr_json("estimate", "--rows", rows, "--dim", "64", "--modified", "0.26") == cnr_json(*BILLION)


def test_tables_may_be_those_of_a_checkpoint(run: Path) -> None:
    """Of a checkpoint or a root: rows, dims, ranks, and whether there is row-wise state."""
    sizes = [entry.size for entry in cnr.read_checkpoint(run / "step-3").manifest.tensors.values() if entry.is_table]
    assert len(sizes) == 2
    tables = [option for rows, dim in sizes for option in ("--table", f"{rows}x{dim}")]
    tables += ["--optimizer-state", "none"]
    newest = cnr.read_checkpoint(run / "step-3").manifest
    assert (newest.kind, newest.policy) == ("delta", "Consecutive"), "so its rows are those that one interval modified"
    share = str(newest.num_rows / sum(rows for rows, _ in sizes))
    assert cnr_json("estimate", run / "step-3") == cnr_json("estimate", *tables, "--modified", share)
    assert cnr_json("estimate", run / "step-3", "--modified", 0.26) == cnr_json("estimate", *tables)
    assert cnr_json("estimate", run / "step-1") == cnr_json("estimate", *tables), "a baseline"
    assert cnr_json("estimate", run) == cnr_json("estimate", run / "step-3")
    assert cnr_json("estimate", run, "--ranks", 3)["inputs"]["num_ranks"] == 3
    assert cnr_json("estimate", run, "--optimizer-state", "bf16")["inputs"]["optimizer_state"] == "bf16"


def test_state_as_large_as_a_table_is_named(tmp_path: Path) -> None:
    """An estimate counts row-wise state; that of Adam would be most of the bytes."""
    model = torch.nn.EmbeddingBag(50, 4, sparse=True)
    state = {"model": model.state_dict(), "exp_avg": torch.rand(50, 4), "bias": torch.rand(4)}
    tracker = cnr.RowTracker(model)
    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp.save(state, storage_writer=cnr.CNRStorageWriter(tmp_path / "0"), planner=cnr.CNRSavePlanner(tracker))
    told = cnr_result("estimate", tmp_path).stderr
    assert "optimizer state none" in cnr_result("estimate", tmp_path).stdout
    assert "left out 1 tensor as large as a table" in told
    del state["exp_avg"]
    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp.save(state, storage_writer=cnr.CNRStorageWriter(tmp_path / "1"), planner=cnr.CNRSavePlanner(tracker))
    assert cnr_result("estimate", tmp_path / "1").stderr == ""
    tracker.close()


def test_what_is_printed_is_the_estimate() -> None:
    """In units that people read, beside plain DCP; notes say what an estimate assumes."""
    text = cnr_text(*BILLION, "--policy", "intermittent")
    assert text.startswith("1,000,000,000 rows x 64, 26.0 % of them modified in 30 minutes (assumed)\n4 bits, ")
    assert "  baseline " in text
    assert " 260 GB " in text
    assert "0.26 + 0.105 ln i" in text
    assert "staging_bytes, 8.59 GB" in text
    assert "the whole chain" in cnr_text(*BILLION, "--policy", "consecutive")
    full = cnr_text(*BILLION, "--policy", "full", "--ranks", "64", "--bits", "exact")
    assert " delta" not in full
    assert "staging_bytes" not in full
    assert "    values " in full


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "give either --rows and --dim, or --table, or CHECKPOINT"),
        (["--rows", "1e9"], "--rows needs --dim"),
        (["--dim", "64"], "--dim needs --rows"),
        (["--rows", "1e9", "--dim", "64", "--table", "1e9x64"], "give either"),
        (["--rows", "many", "--dim", "64"], "--rows must be a whole number from 1"),
        (["--rows", "2,5e9", "--dim", "64"], "--rows must be a whole number from 1"),
        (["--rows", "1e9", "--dim", "6e9"], "--dim must be a whole number from 1 to 1,000,000, such as 64 or 128"),
        ([*BILLION[1:], "--interval", "2h", "--run", "1h"], "--interval must be at most --run, which is 1h (got 2h)"),
        ([*BILLION[1:], "--interval", "1h 30"], "--interval must be a time"),
        (["--rows", "1.5", "--dim", "64"], "--rows must be a whole number from 1"),
        (["--rows", "1e99", "--dim", "64"], "--rows must be a whole number from 1"),
        (["--rows", "-1", "--dim", "64"], "--rows must be a whole number from 1"),
        (["--rows", "1e9", "--dim", "0"], "--dim must be a whole number from 1"),
        (["--table", "1e9"], "--table must be ROWSxDIM"),
        (["--table", "1e9x1e9"], "--table: DIM must be a whole number from 1"),
        ([*BILLION[1:], "--modified", "26"], "--modified must be a share such as 0.26 or 26%"),
        ([*BILLION[1:], "--modified", "nan"], "--modified must be"),
        ([*BILLION[1:], "--modified", "0"], "--modified must be"),
        ([*BILLION[1:], "--bits", "5"], "--bits must be one of 2, 3, 4, 8, exact"),
        ([*BILLION[1:], "--interval", "30"], "--interval must be a time such as 90s, 30m"),
        ([*BILLION[1:], "--interval", "0m"], "--interval must be a time"),
        ([*BILLION[1:], "--run", "long"], "--run must be a time"),
        ([*BILLION[1:], "--within", "1h"], "--within must be at most --interval, which is 30m (got 1h)"),
        ([*BILLION[1:], "--ranks", "0"], "'--ranks'"),
        ([*BILLION[1:], "--keep", "0"], "'--keep'"),
        ([*BILLION[1:], "--policy", "oneshot"], "'--policy'"),
        ([*BILLION[1:], "--optimizer-state", "fp8"], "'--optimizer-state'"),
    ],
)
def test_wrong_options_are_named(args: list[str], words: str) -> None:
    """In one line, with the exit status of a wrong command line, and without a traceback."""
    result = cnr_result("estimate", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("cnr: error: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_place_without_tables_is_refused(tmp_path: Path) -> None:
    """Neither nothing nor a checkpoint of other tensors has rows."""
    result = cnr_result("estimate", tmp_path)
    assert result.exit_code == 1
    assert str(tmp_path) in result.stderr


@pytest.mark.parametrize("page", ["guides/sizing.md", "reference/cli.md"])
def test_pages_show_what_is_printed(page: str) -> None:
    """The output after a call of ``cnr estimate`` on a page is what this call prints."""
    blocks = list(parse_blocks((DOCS / page).read_text()))
    shown = {
        block.lines[0]: after.lines
        for block, after in pairwise(blocks)
        if block.info == "bash" and after.info == "text" and block.lines[0].startswith("cnr estimate ")
    }
    assert shown
    for command, lines in shown.items():
        assert [line.rstrip() for line in cnr_text(*command.split()[1:]).splitlines()] == list(lines)


def test_ratios_on_the_page_are_those_of_the_estimate() -> None:
    """How much smaller a delta is than a full fp32 checkpoint, by values per row and bits."""
    text = (DOCS / "guides" / "sizing.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.endswith(" × |")]
    assert [dim for dim, *_ in lines] == ["16", "64", "128"]
    for dim, *ratios in lines:
        for bits, ratio in zip(("2", "4", "8", "exact"), ratios, strict=True):
            found = cnr_json("estimate", "--rows", "1e9", "--dim", dim, "--bits", bits)
            assert f"{found['full_fp32_bytes'] / found['delta']['num_bytes']:.1f} ×" == ratio


@pytest.mark.parametrize(
    ("text", "secs"), [("1h30m", 5400.0), ("1h 30 min", 5400.0), ("2w", 1_209_600.0), ("1d12h", 129_600.0)]
)
def test_times_may_have_several_units(text: str, secs: float) -> None:
    """As people write them."""
    options = ["--interval", text, "--run", "9w", "--modified", "1e-3"]
    inputs = cnr_json(*BILLION, *options)["inputs"]
    assert (inputs["interval_secs"], inputs["modified"]) == (secs, 0.001)
