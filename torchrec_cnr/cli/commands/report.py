"""``cnr report``: write a page that plots what a run has written, kept and read."""

import posixpath
from dataclasses import asdict
from typing import Annotated

import typer

from torchrec_cnr.cli.options import AsJson
from torchrec_cnr.cli.output import print_json, progress_bar, stdout
from torchrec_cnr.cli.report.page import BEGINNING, render
from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.human_text import count_text, name_text
from torchrec_cnr.maintenance.catalog import check_root, read_catalog
from torchrec_cnr.maintenance.read_run_history import read_run_history
from torchrec_cnr.storage.store import Store


def report(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="A directory of checkpoints, as a path or URL.")],
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="FILE", help="Path or URL of the page; an old page is replaced.")
    ] = "report.html",
    as_json: AsJson = False,
) -> None:
    """Plot what a run has written, kept and read.

    The result is one HTML page. It includes checkpoints that were pruned. With --json, the history is printed and no
    page is written.

    Examples:

    - `cnr report runs/a`
    - `cnr report s3://bucket/runs/a -o page.html`
    """
    place = Store.open(out)
    if not as_json:
        _check_out(place)
    with progress_bar("reading manifests", not as_json) as progress:
        catalog = read_catalog(root, progress)
    check_root(catalog)
    history = read_run_history(catalog)
    if as_json:
        print_json(asdict(history))
        return
    page, directory = render(history).encode(), place.at("..")
    directory.make()
    with directory.create(posixpath.basename(place.path)) as stream:
        stream.write(page)
    num_events, num_kept = count_text(len(history.events), "event"), count_text(len(history.kept), "checkpoint")
    unreadable = f", {len(history.unreadable):,} that cannot be read" if history.unreadable else ""
    stdout().print(f"{name_text(place.url)}: {num_events}, {num_kept} kept{unreadable}")


def _check_out(place: Store) -> None:
    """Refuse a place that contains something other than an older page."""
    if place.is_directory():
        raise ConfigurationError(f"{place.url} is a directory; give the name of a file in it")
    directory, name = place.at(".."), posixpath.basename(place.path)
    if directory.exists(name) and not BEGINNING.startswith(directory.read(name, 0, len(BEGINNING))):
        raise ConfigurationError(f"{place.url} already exists and is not a report page; choose another name")
