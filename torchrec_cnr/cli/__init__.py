"""The command line ``cnr``: list, inspect, verify, compare, prune, compact, export, import, plot and size checkpoints.

It needs the extra ``cli``. A command's module is imported only when the command runs, because importing torch takes
seconds.

- ``__main__``: makes ``python -m torchrec_cnr.cli`` the same as ``cnr``.
- ``app``: the table of commands, and what all of them share: help, errors as one line on stderr, exit status.
- ``commands/``: one module for each command.
- ``options``: arguments and options that several commands accept.
- ``quantities``: counts, shares and times as people write them, such as ``2.5e9``, ``26%`` and ``30m``.
- ``output``: text and JSON on stdout, progress bars and errors on stderr.
- ``contents``: prints what one checkpoint contains; used by ``cnr inspect``.
- ``report/``: the HTML page that ``cnr report`` writes.
"""

import sys
from importlib.util import find_spec
from pkgutil import resolve_name

_NEEDED = ("typer", "rich")


def main() -> None:
    """Run ``cnr`` with the arguments of this process."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f"cnr: error: {' and '.join(missing)} not installed: pip install 'torchrec-cnr[cli]'")
    resolve_name("torchrec_cnr.cli.app:app")()
