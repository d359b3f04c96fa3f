"""``cnr tag`` and ``cnr untag``: names that keep a checkpoint from being pruned."""

from typing import Annotated

import typer
from rich.text import Text

from torchrec_cnr.cli.output import name_cell, stdout
from torchrec_cnr.maintenance.catalog import checkpoint_at
from torchrec_cnr.maintenance.tags_and_metrics import tag as add_tag
from torchrec_cnr.maintenance.tags_and_metrics import untag as remove_tag

_PATH = typer.Argument(metavar="PATH", help="A checkpoint; or a root, for its newest checkpoint.")
_NAME = typer.Argument(metavar="TAG", help="Up to 100 letters, digits, '.', '_' and '-'.")


def tag(path: Annotated[str, _PATH], name: Annotated[str, _NAME]) -> None:
    """Give a checkpoint a tag, so that pruning keeps it.

    A checkpoint may have several tags. A tag that the checkpoint already has is no error.

    Examples:

    - `cnr tag runs/a/step-300 release`
    - `cnr tag runs/a before-migration`
    """
    found = checkpoint_at(path).url
    add_tag(found, name)
    stdout().print(Text.assemble(f"tagged {name}: ", name_cell(found)))


def untag(path: Annotated[str, _PATH], name: Annotated[str, _NAME]) -> None:
    """Remove a tag from a checkpoint.

    Retention then decides again whether pruning keeps the checkpoint. A tag that is not there is no error.

    Examples:

    - `cnr untag runs/a/step-300 release`
    """
    found = checkpoint_at(path).url
    remove_tag(found, name)
    stdout().print(Text.assemble(f"removed tag {name}: ", name_cell(found)))
