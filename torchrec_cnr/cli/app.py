"""The application: which commands there are, and what holds for all of them.

A new command is a function and a line in `COMMANDS`. Importing torch takes seconds, so a command's module is imported
when the command is called; the help of ``cnr`` itself needs the table alone.

Every error of this package becomes one line on stderr. The exit status is 0, 1 after an error, 2 where the command line
is wrong, and 130 after Ctrl-C.
"""

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from torchrec_cnr.cli.output import print_error
from torchrec_cnr.errors import CNRError, ConfigurationError
from torchrec_cnr.human_text import name_text
from torchrec_cnr.version import __version__

_MARKUP: Literal["markdown"] = "markdown"  # of help texts


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        function: Where it is: ``module:function``.
        summary: The first line of its docstring.
    """

    function: str
    summary: str


COMMANDS: Mapping[str, Command] = {
    "ls": Command("torchrec_cnr.cli.commands.ls:ls", "List the checkpoints under a root, and what stands on what."),
    "inspect": Command("torchrec_cnr.cli.commands.inspect:inspect", "Show what one checkpoint holds."),
    "verify": Command("torchrec_cnr.cli.commands.verify:verify", "Read a whole lineage, and check every byte of it."),
    "latest": Command("torchrec_cnr.cli.commands.latest:latest", "Print the path of the newest committed checkpoint."),
    "diff": Command("torchrec_cnr.cli.commands.diff:diff", "Show what differs between two checkpoints."),
    "prune": Command("torchrec_cnr.cli.commands.prune:prune", "Remove the checkpoints that are not to be kept."),
    "tag": Command("torchrec_cnr.cli.commands.tag:tag", "Give a checkpoint a tag, so that pruning keeps it."),
    "untag": Command("torchrec_cnr.cli.commands.tag:untag", "Remove a tag from a checkpoint."),
    "compact": Command("torchrec_cnr.cli.commands.compact:compact", "Fold a lineage into one checkpoint."),
    "export": Command(
        "torchrec_cnr.cli.commands.export:export", "Write a checkpoint as plain files of full precision."
    ),
    "import": Command("torchrec_cnr.cli.commands.export:import_", "Make a baseline of a stock DCP checkpoint."),
    "report": Command("torchrec_cnr.cli.commands.report:report", "Draw what a run has written, kept and read."),
}


class Commands(TyperGroup):
    """The commands of `COMMANDS`, and one way to fail for all of them."""

    # Types of typer's own copy of click have no public names, hence `Any`.
    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command that was called, in place of the stub that stood for it in the help."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else _load(name), rest

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command line and exit."""
        with _warnings_as_lines():
            sys.exit(self._status(*args, **{**options, "prog_name": "cnr", "standalone_mode": False}))

    def _status(self, *args: Any, **options: Any) -> int:
        try:
            status = super().main(*args, **options)
            sys.stdout.flush()  # says now whether anybody reads it
        except typer.TyperException as error:
            print_error(_usage_text(error))
            return error.exit_code
        except CNRError as error:
            print_error(str(error))
            return 2 if isinstance(error, ConfigurationError) else 1
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter will flush once more
            return 1
        return status if isinstance(status, int) else 0


def _load(name: str) -> Any:
    """The command of a name, from its module."""
    try:
        function = resolve_name(COMMANDS[name].function)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("torchrec_cnr"):
            raise
        raise typer.TyperException(f"{error.name} is not installed: pip install 'torchrec-cnr[cli]'") from error
    alone = typer.Typer(add_completion=False, rich_markup_mode=_MARKUP)
    alone.command(name)(function)
    return typer.main.get_command(alone)


def _usage_text(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    hint = "" if context is None else f"; see '{context.command_path} --help'"
    return error.format_message().rstrip(".") + hint


class _LineFormatter(logging.Formatter):
    """One line, with escapes for what does not print: messages hold names from stores."""

    def format(self, record: logging.LogRecord) -> str:
        return name_text(" ".join(super().format(record).split()))


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Warnings of the library are lines on stderr, too."""
    handler = logging.StreamHandler()
    handler.setFormatter(_LineFormatter("cnr: warning: %(message)s"))
    logger = logging.getLogger("torchrec_cnr")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


app = typer.Typer(cls=Commands, rich_markup_mode=_MARKUP, pretty_exceptions_enable=False, invoke_without_command=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cnr {__version__}")
        raise typer.Exit


@app.callback()
def cnr(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and exit.")
    ] = False,
) -> None:
    """Look after incremental, quantized checkpoints of TorchRec models.

    A root is a directory of checkpoints; paths may be local or any URL that fsspec can open, such as s3://bucket/run.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _stub() -> None:
    """Stands for a command in the help."""


for _name, _command in COMMANDS.items():
    app.command(_name, help=_command.summary)(_stub)
