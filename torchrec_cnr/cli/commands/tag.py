"""``cnr tag`` and ``cnr untag``: names that keep a checkpoint from being pruned."""

from typing import Annotated

import typer
from rich.text import Text

from torchrec_cnr.cli.options import AsJson
from torchrec_cnr.cli.output import name_cell, print_json, stdout
from torchrec_cnr.maintenance.catalog import checkpoint_at
from torchrec_cnr.maintenance.tags_and_metrics import tag as add_tag
from torchrec_cnr.maintenance.tags_and_metrics import tags as tags_among
from torchrec_cnr.maintenance.tags_and_metrics import untag as remove_tag
from torchrec_cnr.storage.store import Store

_PATH = typer.Argument(metavar="PATH", help="A checkpoint; or a root, for its newest checkpoint.")
_NAME = typer.Argument(metavar="TAG", help="Up to 100 letters, digits, '.', '_' and '-'.")


def tag(path: Annotated[str, _PATH], name: Annotated[str, _NAME], as_json: AsJson = False) -> None:
    """Give a checkpoint a tag, so that pruning keeps it.

    A checkpoint may have several tags. A tag that the checkpoint already has is no error.

    Examples:

    - `cnr tag runs/a/step-300 release`
    - `cnr tag runs/a before-migration`
    """
    found = checkpoint_at(path)
    add_tag(found.url, name)
    _print(found, f"tagged {name}", as_json)


def untag(path: Annotated[str, _PATH], name: Annotated[str, _NAME], as_json: AsJson = False) -> None:
    """Remove a tag from a checkpoint.

    Retention then decides again whether pruning keeps the checkpoint. A tag that is not there is no error.

    Examples:

    - `cnr untag runs/a/step-300 release`
    - `cnr untag runs/a/step-300 release --json`
    """
    found = checkpoint_at(path)
    had_tag = name in tags_among(found.names())
    remove_tag(found.url, name)
    _print(found, f"removed tag {name}" if had_tag else f"had no tag {name}", as_json)


def _print(checkpoint: Store, done: str, as_json: bool) -> None:
    """Print what was done; or, as JSON, the tags that the checkpoint has now."""
    if as_json:
        print_json({"path": checkpoint.url, "tags": tags_among(checkpoint.names())})
    else:
        stdout().print(Text.assemble(f"{done}: ", name_cell(checkpoint.url)))
