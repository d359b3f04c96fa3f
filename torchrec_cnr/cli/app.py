"""The application: the table of commands, and the handling of errors and warnings for all of them.

A new command is a function and a line in ``COMMANDS``. Importing torch takes seconds, so a command's module is imported
only when the command is called. The help of ``cnr`` itself needs only the table.

Every error of this package is printed as one line on stderr. The exit status is 0 for success, 1 after an error, 2 if
the command line is wrong, and 130 after Ctrl-C.
"""

import errno
import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from torchrec_cnr.cli.output import print_error
from torchrec_cnr.errors import CNRError, ConfigurationError
from torchrec_cnr.human_text import name_text
from torchrec_cnr.version import __version__

_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_MARKUP: Literal["markdown"] = "markdown"  # of help texts
_HELP = {"help_option_names": ["-h", "--help"]}


@dataclass(frozen=True)
class Command:
    """A command of ``cnr``.

    Attributes:
        function: The function that runs it, as ``module:function``.
        summary: The first line of the function's docstring.
    """

    function: str
    summary: str


COMMANDS: Mapping[str, Command] = {
    "ls": Command("torchrec_cnr.cli.commands.ls:ls", "List the checkpoints under a root, the newest last."),
    "inspect": Command("torchrec_cnr.cli.commands.inspect:inspect", "Show what one checkpoint contains."),
    "verify": Command("torchrec_cnr.cli.commands.verify:verify", "Check every byte of a checkpoint chain."),
    "latest": Command("torchrec_cnr.cli.commands.latest:latest", "Print the path of the newest committed checkpoint."),
    "diff": Command("torchrec_cnr.cli.commands.diff:diff", "Show what differs between two checkpoints."),
    "prune": Command("torchrec_cnr.cli.commands.prune:prune", "Remove the checkpoints that need not be kept."),
    "tag": Command("torchrec_cnr.cli.commands.tag:tag", "Give a checkpoint a tag, so that pruning keeps it."),
    "untag": Command("torchrec_cnr.cli.commands.tag:untag", "Remove a tag from a checkpoint."),
    "compact": Command("torchrec_cnr.cli.commands.compact:compact", "Merge a checkpoint chain into one checkpoint."),
    "export": Command(
        "torchrec_cnr.cli.commands.export:export", "Write a checkpoint as plain files in full precision."
    ),
    "import": Command("torchrec_cnr.cli.commands.export:import_", "Make a baseline from a plain DCP checkpoint."),
    "report": Command("torchrec_cnr.cli.commands.report:report", "Plot what a run has written, kept and read."),
    "estimate": Command(
        "torchrec_cnr.cli.commands.estimate:estimate_",
        "Estimate bytes, bandwidth, disk and memory of a model's checkpoints.",
    ),
}


# `Any`, because the types of typer's own copy of click have no public names.
def _without_types(params: list[Any]) -> list[Any]:
    """Let the help of arguments and flags show no type, which would be ``<str>`` or ``<bool>`` for all of them."""
    for param in params:
        if param.param_type_name == "argument" or param.is_flag:
            param.display_type_rich = lambda ctx: None
    return params


class _OneCommand(TyperCommand):
    """A command with a help that shows no types of arguments and flags."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        return _without_types(super().get_params(ctx))


class Commands(TyperGroup):
    """The commands of ``COMMANDS``. Errors of all of them are printed in the same way."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        return _without_types(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the command that was called, instead of the stub that represents it in the help."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else _load(name), rest

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command line and exit."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # an encoding that lacks a mark is no reason to fail
        with _warnings_as_lines():
            sys.exit(self._status(*args, **{**options, "prog_name": "cnr", "standalone_mode": False}))

    def _status(self, *args: Any, **options: Any) -> int:
        try:
            status = super().main(*args, **options)
            sys.stdout.flush()  # raises BrokenPipeError now if the reader has closed the pipe
        except typer.TyperException as error:
            print_error(_usage_text(error))
            return error.exit_code
        except CNRError as error:
            print_error(str(error))
            return 2 if isinstance(error, ConfigurationError) else 1
        except OSError as error:
            if error.filename is not None or error.errno not in _OUTPUT_ERRORS:
                raise  # not of stdout; what a store raises is a StoreError
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes again at exit
            if not isinstance(error, BrokenPipeError):
                print_error(f"cannot write the output: {error.strerror}")
            return 1
        return status if isinstance(status, int) else 0


def _load(name: str) -> Any:
    """Import the module of a command, and return the command."""
    try:
        function = resolve_name(COMMANDS[name].function)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("torchrec_cnr"):
            raise
        raise typer.TyperException(f"{error.name} is not installed: pip install 'torchrec-cnr[cli]'") from error
    alone = typer.Typer(add_completion=False, rich_markup_mode=_MARKUP, context_settings=_HELP)
    alone.command(name, cls=_OneCommand)(function)
    return typer.main.get_command(alone)


def _usage_text(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    hint = "" if context is None else f"; see '{context.command_path} --help'"
    return (_invalid_value_text(error) or error.format_message().rstrip(".")) + hint


def _invalid_value_text(error: typer.TyperException) -> str | None:
    """Return what an option must be and what it got, if pydantic, with which Typer checks options, refused it."""
    details = getattr(error.__cause__, "errors", None)
    option = getattr(error, "param", None)
    if details is None or option is None:
        return None
    detail = details()[0]
    bounds = detail.get("ctx", {})
    match detail["type"]:
        case "int_parsing" | "int_type" | "int_from_float":
            what = "must be a whole number"
        case "greater_than_equal":
            what = f"must be at least {bounds['ge']:g}"
        case "less_than_equal":
            what = f"must be at most {bounds['le']:g}"
        case "value_error":
            what = str(bounds["error"]).rstrip(".")
        case _:
            what = str(detail["msg"])
    given = f" (got {detail['input']!r})" * (repr(detail["input"]) not in what)
    return f"'{option.opts[-1]}'{':' * (not what.startswith('must'))} {what}{given}"


class _LineFormatter(logging.Formatter):
    """Formats a message as one line. Names in it come from stores, so characters that do not print are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return name_text(" ".join(super().format(record).split()))


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Print the library's warnings as lines on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(_LineFormatter("cnr: warning: %(message)s"))
    logger = logging.getLogger("torchrec_cnr")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


app = typer.Typer(
    cls=Commands,
    rich_markup_mode=_MARKUP,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
    context_settings=_HELP,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cnr {__version__}")
        raise typer.Exit


@app.callback()
def cnr(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Inspect and maintain incremental, quantized checkpoints of TorchRec models.

    A root is a directory that contains the checkpoints of a run. Paths may be local, or URLs that fsspec can open, for
    example s3://bucket/run.

    Examples:

    - `cnr ls runs/a`
    - `cnr verify s3://bucket/runs/a`
    - `cnr prune --help`
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _stub() -> None:
    """Represent a command in the help, so that its module need not be imported."""


for _name, _command in COMMANDS.items():
    app.command(_name, help=_command.summary)(_stub)
