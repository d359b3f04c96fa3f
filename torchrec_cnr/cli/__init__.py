"""The command line ``cnr``: what lies under a root, whether it is right, and what differs.

``app`` holds the table of commands, each of which is a function in a module of its own, imported when it is called.
Nothing else in the package imports this one. It needs the extra ``cli``.
"""

import sys
from importlib.util import find_spec
from pkgutil import resolve_name

_NEEDED = ("typer", "rich")


def main() -> None:
    """Run the command line of this process."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f"cnr: error: {' and '.join(missing)} not installed: pip install 'torchrec-cnr[cli]'")
    resolve_name("torchrec_cnr.cli.app:app")()
