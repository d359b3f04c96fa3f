"""The page of the command line has every command and every option of the help, and no others."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from torchrec_cnr.cli import app
from torchrec_cnr.cli.app import COMMANDS

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "cli.md"
OPTION = re.compile(r"(?<![\w-])(--[a-z][\w-]*|-[A-Za-z])\b")
# Described once for all commands: above the commands, and in a section of their own.
FOR_ALL = {"--json", "--threads", "--help", "-h"}
KAFKA = "rows in kafka"


def sections(page: str) -> Mapping[str, str]:
    """The text below each heading, by the heading in small letters; one that names two commands counts for both."""
    parts = re.split(r"^##+ (.*)\n", page, flags=re.M)
    found = {title.lower(): text for title, text in zip(parts[1::2], parts[2::2], strict=True)}
    return {name: text for title, text in found.items() for name in title.split(" and ")} | {KAFKA: found[KAFKA]}


def options(name: str) -> set[str]:
    """The options of a command that its help shows."""
    command: Any = app._load(name)
    params = command.get_params(command.make_context(name, [], resilient_parsing=True))
    named = [param for param in params if param.param_type_name == "option"]
    return {option for param in named for option in (*param.opts, *param.secondary_opts)}


def documented(text: str) -> set[str]:
    """The options that a text names in backticks or in code."""
    return {option for code in re.findall(r"```.*?```|`[^`\n]*`", text, re.S) for option in OPTION.findall(code)}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_has_what_the_help_has(name: str) -> None:
    """Every option is described, and what is described exists."""
    page = sections(PAGE.read_text())
    in_kafka = documented(page[KAFKA])
    own, described = options(name), documented(page[name])
    described_for_all = FOR_ALL | (in_kafka if "--kafka" in own else set())
    negative = {"--tagged"}  # on by default, so that only its opposite is an option that one passes
    assert own - described - described_for_all - negative == set()
    assert described - own == set()


def test_every_command_is_in_the_table() -> None:
    """With a link to its section."""
    linked = re.findall(r"^\| (\[`.*?) \|", PAGE.read_text(), re.M)
    assert set(re.findall(r"`(\w+)`", " ".join(linked))) == set(COMMANDS)
    assert set(COMMANDS) <= set(sections(PAGE.read_text()))


def test_commands_with_kafka_are_those_of_the_page() -> None:
    """The section of Kafka names the commands that read rows, and those that find commits."""
    lines = [line for line in sections(PAGE.read_text())[KAFKA].splitlines() if re.match(r"- `\w+`, ", line)]
    named = {name for line in lines for name in re.findall(r"`(\w+)`", line.partition(" read ")[0])}
    assert named == {name for name in COMMANDS if "--kafka" in options(name)}
