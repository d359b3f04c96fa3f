"""``cnr report``: a page that shows what a run has written, kept and read."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from torchrec_cnr.cli.options import AsJson
from torchrec_cnr.cli.output import print_json, progress_bar, stdout
from torchrec_cnr.cli.report_page import render
from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.maintenance.catalog import read_catalog
from torchrec_cnr.maintenance.histories import run_history
from torchrec_cnr.maintenance.places import no_checkpoint
from torchrec_cnr.quantities import count_text


def report(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="A directory of checkpoints, path or URL.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the page goes.")] = Path(
        "report.html"
    ),
    as_json: AsJson = False,
) -> None:
    """Draw what a run has written, kept and read.

    One HTML page. Checkpoints that were pruned are in it as well.

    Examples:

    - `cnr report runs/a`
    - `cnr report s3://bucket/runs/a -o page.html`
    """
    with progress_bar("reading manifests", not as_json) as progress:
        catalog = read_catalog(root, progress)
    if not catalog.entries and not catalog.root.exists(""):
        raise no_checkpoint(catalog.root)
    history = run_history(catalog)
    if as_json:
        print_json(asdict(history))
        return
    try:
        out.write_text(render(history), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write {out}: {error}") from error
    stdout().print(f"{out}: {count_text(len(history.events), 'event')}, {count_text(len(history.kept), 'checkpoint')}")
