"""The command line, called in this process."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from torchrec_cnr.cli.app import app


def cnr_result(*args: str | Path | int) -> Result:
    """What a command prints and exits with."""
    return CliRunner().invoke(app, [str(arg) for arg in args])


def cnr_text(*args: str | Path | int) -> str:
    """What a command prints that succeeds; nothing on stderr."""
    result = cnr_result(*args)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def cnr_json(*args: str | Path | int) -> Any:
    """What a command with --json says."""
    return json.loads(cnr_text(*args, "--json"))
