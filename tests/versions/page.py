"""Writes the tables of ``docs/reference/compatibility.md`` from ``docs/reference/versions.json``."""

import json
from pathlib import Path

from tests.repository.marks import between

PAGE = Path(__file__).parents[2] / "docs/reference/compatibility.md"
RESULTS = PAGE.with_name("versions.json")
MARKS = ("<!-- versions: begin; written by python -m tests.versions -->", "<!-- versions: end -->")


def tables() -> str:
    """Return both tables as Markdown."""
    results = json.loads(RESULTS.read_text())
    names = sorted({name for entry in results["versions"].values() for name in entry.get("suites", {})})
    lines = [
        f"| PyTorch | TorchRec | FBGEMM | {' | '.join(names)} |",
        f"|---|---|---|{'---|' * len(names)}",
    ]
    for torch, entry in sorted(results["versions"].items()):
        cells = [_suite_text(entry.get("suites", {}).get(name)) for name in names]
        lines.append(f"| {torch} | {entry['torchrec']} | {entry['fbgemm']} | {' | '.join(cells)} |")
    saved = sorted({other for loads in results["loads"].values() for other in loads})
    lines += ["", f"| saved with → | {' | '.join(saved)} |", f"|---|{'---|' * len(saved)}"]
    for torch, loads in sorted(results["loads"].items()):
        cells = [{True: "✓", False: "✗", None: "–"}[loads.get(other)] for other in saved]
        lines.append(f"| loaded with {torch} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _suite_text(suite: dict[str, object] | None) -> str:
    if suite is None:
        return "not run"
    failed = suite["failed"]
    assert isinstance(failed, list)
    return f"{suite['passed']:,} passed, {len(failed)} failed"


def with_tables(text: str) -> str:
    """Return the page's text with the present tables."""
    return between(text, MARKS, tables())


def write_page() -> None:
    """Write the page."""
    PAGE.write_text(with_tables(PAGE.read_text()))
