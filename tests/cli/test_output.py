"""What the command line prints fits on the screen: widths, names, colours and quantities."""

import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from tests.cli.empty_commits import LIMIT_SECS
from tests.support.command_line import cnr_text
from torchrec_cnr.cli.output import Dotted, common_prefix, print_columns
from torchrec_cnr.human_text import age_text, percent_text, ratio_text

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_cut_off(run: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """On a terminal of usual width, every number and name is there in full; a list needs 100 columns for that."""
    wide = [("inspect", run / "step-3"), ("verify", run), ("diff", run / "step-1", run / "step-3")]
    wide += [("ls", run)] * (width >= 100)
    expected = [cnr_text(*args) for args in wide]

    def console() -> Console:
        return Console(highlight=False, markup=False, emoji=False, width=width)

    for module in ("ls", "inspect", "verify", "diff"):
        monkeypatch.setattr(f"torchrec_cnr.cli.commands.{module}.stdout", console)
    for args, text in zip(wide, expected, strict=True):
        narrow = cnr_text(*args)
        assert max(map(len, narrow.splitlines())) <= width
        assert sorted(_letters(narrow)) == sorted(_letters(text))


def _letters(text: str) -> str:
    """What is left if wrapping makes no difference; ages may."""
    return re.sub(r"\s|\d+ ?s", "", text)


@pytest.mark.parametrize(
    ("width", "shown"),
    [(40, "table rows of all"), (33, "table rows of all"), (32, "table rows"), (25, "table rows"), (24, "table")],
)
def test_columns_are_left_out_before_parts_of_names_are_broken(width: int, shown: str) -> None:
    """A name may continue after a dot, if all of its parts fit; numbers are never cut."""
    console = Console(width=width, file=open(os.devnull, "w"))  # noqa: SIM115 - nothing is written
    columns = {"table": [Dotted("model.user_history")], ">rows": ["1,234,567"], ">of all": ["12.3%"]}
    with console.capture() as captured:
        print_columns(console, columns, [">of all", ">rows"])
    text = captured.get()
    assert " ".join(text.splitlines()[0].split()) == shown
    assert max(map(len, text.splitlines())) <= width
    assert "user_history" in text


def test_an_estimate_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 60 columns, the ratio is left out, and no label is broken."""
    arguments = ("estimate", "--rows", "1e9", "--dim", "64")
    wide = cnr_text(*arguments)
    monkeypatch.setattr(
        "torchrec_cnr.cli.commands.estimate.stdout", lambda: Console(highlight=False, markup=False, width=60)
    )
    narrow = cnr_text(*arguments)
    assert max(map(len, narrow.splitlines())) <= 60
    assert "plain/ours" in wide
    assert "plain/ours" not in narrow.splitlines()[3]
    assert "a wider terminal also shows: plain/ours\n" in narrow
    assert "  before the oldest is removed       95.1 GB" in narrow


def test_names_are_broken_at_dots() -> None:
    """A long name goes on in the next line, behind a dot where it has one."""
    console = Console(width=20, file=open(os.devnull, "w"))  # noqa: SIM115 - nothing is written
    with console.capture() as captured:
        console.print(Dotted("model.sparse.bags.t0.weight"))
    assert captured.get().split("\n")[:2] == ["model.sparse.bags.", "  t0.weight"]


def test_common_beginnings_end_with_a_dot() -> None:
    """Of several names; a single one keeps all of it."""
    assert common_prefix(["a.b.c1.w", "a.b.c2.w", "a.b.c.x"]) == "a.b."
    assert common_prefix(["ab.c", "ac.c"]) == ""
    assert common_prefix(["a.b", "a.b"]) == "a."
    assert common_prefix(["a.b.c"]) == common_prefix([]) == ""


@pytest.mark.long
def test_a_terminal_gets_colours_and_a_bar(run: Path) -> None:
    """On a terminal there is a progress bar, which is gone in the end; elsewhere neither it nor colours."""
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "torchrec_cnr.cli", "verify", str(run)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(command, stdout=child, stderr=child, stdin=child, env=environment)
    os.close(child)
    chunks = []
    deadline = time.monotonic() + LIMIT_SECS
    while time.monotonic() < deadline:
        try:
            chunk = os.read(parent, 65536)
        except OSError:  # how a terminal of Linux says that nobody is left
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(parent)
    assert process.wait(LIMIT_SECS) == 0
    text = b"".join(chunks).decode()
    assert "verifying" in text
    assert "\x1b[2K" in text, "the bar's line is erased"
    assert "\x1b[1;32m✓ no problems" in text
    assert "\x1b" not in cnr_text("verify", run)


def test_quantities_are_short() -> None:
    """Ages in one unit, shares with one digit, ratios with three, however small."""
    second = 10**9
    ages = {
        0: "0 s",
        -5: "0 s",
        -7_200: "in 2 h",
        119: "119 s",
        120: "2 min",
        7_199: "119 min",
        7_200: "2 h",
        172_800: "2 d",
    }
    assert {age: age_text(age * second) for age in ages} == ages
    shares = {0.0: "0.0%", 0.0004: "<0.1%", 0.0005: "0.1%", 0.123: "12.3%", 1.0: "100.0%"}
    assert {share: percent_text(share) for share in shares} == shares
    ratios = {0.0: "0.00", 0.00312: "0.00312", 1.2: "1.20", 999.4: "999", 1234.5: "1,234", 1.5e-7: "1.50e-07"}
    assert {ratio: ratio_text(ratio) for ratio in ratios} == ratios
