"""The README and the documentation do what they say: their Python runs, their commands exist.

The Python blocks of a page are one program, run in order in a process of its own and in an empty folder; then its bash
blocks are run there, as one script that ends at the first failure. The README's bash is only looked at. A block that is
not meant to run is fenced as ``text``.

Outputs that a page shows are compared with what is printed. Those of Python are blocks of text after a paragraph that
is "prints". Those of bash are blocks of text right after its block, after a paragraph that ends in "print:", and those
that begin with "$ "; their numbers, sizes and digests may be others.

A Python block that begins with the name of a file, ``# train.py``, is that file instead: not a part of the program, but
there for the bash blocks.
"""

import atexit
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.servers import s3_servers
from tests.support.ranks import FORK_SERVER

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
PAGES = sorted([*ROOT.glob("README.md"), *(ROOT / "docs").rglob("*.md")])
API_PAGES = sorted((ROOT / "docs/reference/api").glob("*.md"))  # with the examples of docstrings
LIMIT_SECS = 240

FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+|~~~+)\s*(?P<info>[^`]*?)\s*$")
# What may be code; of these, only plain ``python`` and ``bash`` are seen by the tests.
CODE = {"python", "py", "python3", "pycon", "ipython", "bash", "sh", "shell", "console", "zsh"}
FILE = re.compile(r"# (?P<name>\w+\.py)")  # the first line of a block that is a file
# A line that is one call of the command line, with nothing for the shell to expand but quotes.
CNR_LINE = re.compile(r"cnr( [\w./:=,'-]+)+")
# Several such lines in one process: most of the time of each would go into its imports.
CNR_LINES = """
import shlex, sys
from torchrec_cnr.cli import main
for line in sys.stdin.read().splitlines():
    sys.argv = shlex.split(line)
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
"""
# What differs from run to run: digests, and numbers with their units.
VALUE = re.compile(r"[0-9a-f]{16,}|\d[\d.,]*(?: (?:[KMGT]?B|min|[smhd])\b)?")
HOME = "/home/me"  # where pages say that they are run
KAFKA = "localhost:9092"  # where pages take a broker for granted
# Commands of the README besides `make`: each begins with one of these, or is a file of the repository.
ALLOWED = ("git clone ", "cd ", "pip install ", "python -m pip install ")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        info: What stands behind the opening fence, such as ``python``.
        first_line: Number of the first line between the fences, from 1.
        lines: What stands between the fences, without the fence's indentation.
    """

    info: str
    first_line: int
    lines: tuple[str, ...]

    @property
    def file(self) -> str | None:
        """The file that a Python block is, if it is one."""
        named = FILE.fullmatch(self.lines[0]) if self.info == "python" and self.lines else None
        return named["name"] if named else None


def parse_blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page of Markdown."""
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        opening = FENCE.match(line)
        if opening is None:
            continue
        inside = []
        for _, inner in lines:
            if inner.strip() == opening["fence"]:
                break
            inside.append(inner.removeprefix(opening["indent"]))
        else:
            raise ValueError(f"line {number}: the fenced block has no end")
        yield Block(opening["info"], number + 1, tuple(inside))


def python_program(blocks: list[Block]) -> str:
    """Join Python blocks to one program, in which each line has the number that it has in its page."""
    program: list[str] = []
    for block in blocks:
        program += [""] * (block.first_line - 1 - len(program))
        program += block.lines
    return "\n".join(program) + "\n"


def _blocks(page: Path, info: str) -> list[Block]:
    return [block for block in parse_blocks(page.read_text()) if block.info == info]


def split_commands(script: str) -> list[list[str]]:
    """Split a shell script into commands and these into words, without comments."""
    commands: list[list[str]] = [[]]
    for line in script.replace("\\\n", " ").splitlines():
        for word in shlex.shlex(line, posix=True, punctuation_chars=True):
            if word in ("&&", "||", ";", "|"):
                commands.append([])
            else:
                commands[-1].append(word)
        commands.append([])
    return [command for command in commands if command]


def _readme_commands() -> list[list[str]]:
    if not README.exists():
        return []
    return [command for block in _blocks(README, "bash") for command in split_commands("\n".join(block.lines))]


def _page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=_page_id)
def test_blocks_are_seen(page: Path) -> None:
    """Code is fenced as ``python`` or ``bash`` without more, or else as text; ``pycon`` is of tested docstrings."""
    fences = [(block.first_line - 1, block.info) for block in parse_blocks(page.read_text())]
    code = [(line, info) for line, info in fences if CODE.intersection(info.split())]
    tested = ("python", "bash", *(("pycon",) if page in API_PAGES else ()))
    assert [(line, info) for line, info in code if info not in tested] == []


def _program(page: Path) -> str:
    blocks = [block for block in _blocks(page, "python") if block.file is None]
    return python_program(blocks) if blocks else ""


def _promised_output(page: Path) -> list[str]:
    """Return the lines that a page says its Python prints: blocks of text after a paragraph that is ``prints``."""
    lines = page.read_text().splitlines()
    blocks = [block for block in parse_blocks(page.read_text()) if lines[: block.first_line - 2][-2:] == ["prints", ""]]
    return [line for block in blocks for line in block.lines]


def _shown_output(text: str) -> list[str]:
    """Return the lines that a page says its bash prints."""
    lines, shown = text.splitlines(), []
    for before, block in itertools.pairwise([Block("", 0, ()), *parse_blocks(text)]):
        follows = before.info == "bash" and block.first_line - before.first_line == len(before.lines) + 3
        is_named = "".join(lines[: block.first_line - 2][-2:-1]).endswith(" print:")
        is_call = block.lines[:1] != () and block.lines[0].startswith("$ ")
        if block.info == "text" and (follows or is_named or is_call):
            shown += [line for line in block.lines if line.strip() and not line.startswith("$ ")]
    return shown


def without_values(line: str) -> str:
    """A line without what differs from run to run, and without the spaces that align it."""
    return " ".join(VALUE.sub("#", line).split())


def _files(page: Path) -> dict[str, str]:
    """The files that a page gives, by name."""
    blocks = [(block.file, block.lines) for block in _blocks(page, "python")]
    return {file: "\n".join(lines) + "\n" for file, lines in blocks if file is not None}


def _script(page: Path) -> str:
    """All bash of a page but the README's."""
    return "" if page == README else "\n".join(line for block in _blocks(page, "bash") for line in block.lines)


def in_one_process(script: str) -> str:
    """Have runs of plain calls of the command line share a process; all else stays as it is."""
    lines: list[str] = []
    for is_call, group in itertools.groupby(
        filter(str.strip, script.splitlines()), lambda line: CNR_LINE.fullmatch(line) is not None
    ):
        calls = list(group)
        lines += ["cnr-lines <<'END'", *calls, "END"] if is_call and len(calls) > 1 else calls
    return "\n".join(lines)


def _run(command: list[str], page: Path, folder: Path, environment: Mapping[str, str]) -> str:
    """Run a part of a page, and return what it printed."""
    environment = {**os.environ, **environment}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_SECS, check=False, env=environment
    )
    assert done.returncode == 0, f"{_page_id(page)}:\n{done.stdout}{done.stderr}"
    return done.stdout


def _run_program(program: Path, page: Path, folder: Path, environment: Mapping[str, str]) -> str:
    """Run the Python of a page in a process that has already imported what takes seconds; return what it printed."""
    outputs = [program.with_suffix(suffix) for suffix in (".out", ".err")]
    process = FORK_SERVER.Process(target=_be_program, args=(program, folder, {**os.environ, **environment}, outputs))
    process.start()
    process.join(LIMIT_SECS)
    if process.exitcode is None:
        process.kill()
        process.join()
    printed, errors = (output.read_text() for output in outputs)
    assert process.exitcode == 0, f"{_page_id(page)} ended with {process.exitcode}:\n{printed}{errors}"
    return printed


def _be_program(program: Path, folder: Path, environment: Mapping[str, str], outputs: list[Path]) -> None:
    """Do what ``python program`` does in a folder."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for output, stream in zip(outputs, (sys.stdout, sys.stderr), strict=True):
        with output.open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    sys.argv, sys.path[0] = [str(program)], str(program.parent)
    runpy.run_path(str(program), run_name="__main__")
    atexit._run_exitfuncs()  # the end of a process of multiprocessing skips them


@pytest.mark.long
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if _blocks(page, "python") or (page != README and _blocks(page, "bash"))],
    ids=_page_id,
)
def test_code_of_a_page_runs(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The blocks of a page run in order, Python first; line numbers of an error are those of the page."""
    text = _program(page)
    if KAFKA in text:
        text = text.replace(KAFKA, request.getfixturevalue("kafka").bootstrap)
    program = tmp_path / f"{page.stem}.py"
    program.write_text(text)
    folder = tmp_path / "cwd"
    folder.mkdir()
    for name, lines in _files(page).items():
        (folder / name).write_text(lines)
    with _surroundings(page, tmp_path) as environment:
        printed = _run_program(program, page, folder, environment)
        assert [line for line in _promised_output(page) if line not in printed.splitlines()] == []
        if _script(page):
            path = f"{_make_commands(tmp_path)}:{os.environ.get('PATH', os.defpath)}"
            script = in_one_process(_script(page))
            printed = _run(["bash", "-euo", "pipefail", "-c", script], page, folder, {**environment, "PATH": path})
            there = {without_values(line) for line in printed.replace(str(folder), HOME).splitlines()}
            assert printed
            assert [line for line in _shown_output(page.read_text()) if without_values(line) not in there] == []


@pytest.mark.long
def test_a_program_that_fails_is_shown(tmp_path: Path) -> None:
    """With what it printed, and the line of its page; one that exits at once, too."""
    for text, shown in (("\nprint('rows')\nrows[0]\n", r"with 1:\n +rows\n(?s:.*)line 3"), ("exit(3)", "with 3")):
        program = tmp_path / "page.py"
        program.write_text(text)
        with pytest.raises(AssertionError, match=shown):
            _run_program(program, README, tmp_path, {})


@contextmanager
def _surroundings(page: Path, tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """What a page takes for granted: a bucket, if its Python names one."""
    if f'"s3://{s3_servers.BUCKET}/' not in _program(page):
        yield {}
        return
    folder = tmp_path / "s3"
    folder.mkdir()
    with s3_servers.running(s3_servers.Moto(folder)) as server:
        yield server.variables()


def _make_commands(tmp_path: Path) -> Path:
    """A folder with the commands that pages use: this Python, and the package's scripts as pip would install them."""
    folder = tmp_path / "bin"
    folder.mkdir()
    commands = {
        "python": [],
        "cnr": ["-m", "torchrec_cnr.cli"],
        "torchrun": ["-m", "torch.distributed.run"],
        "cnr-lines": ["-c", CNR_LINES],
    }
    for name, args in commands.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, *args])} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize("command", _readme_commands(), ids=shlex.join)
def test_command_of_the_readme_exists(command: list[str]) -> None:
    """A command of the README is a target of the Makefile, a file of the repository, or allowed."""
    if command[0] == "make":
        # A make that runs these tests passes its own flags on.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        dry_run = [command[0], "--dry-run", *command[1:]]
        done = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
    else:
        is_script = command[0] == "python" and (ROOT / command[1]).is_file()
        known = is_script or shlex.join(command).startswith(ALLOWED) or os.access(ROOT / command[0], os.X_OK)
        assert known, f"{shlex.join(command)!r} is neither a file here nor in ALLOWED"


def test_blocks_are_parsed() -> None:
    """Blocks come with what is behind their fence, their line and their text, free of indentation."""
    page = "a\n```python\nx = 1\n```\n\n- b\n  ~~~text\n  ```\n  ~~~\n"
    assert list(parse_blocks(page)) == [Block("python", 3, ("x = 1",)), Block("text", 8, ("```",))]
    with pytest.raises(ValueError, match="line 2: the fenced block has no end"):
        list(parse_blocks("a\n```python\nx = 1\n"))


def test_outputs_of_bash_are_seen() -> None:
    """Right after its block, or where the page says so; other text is none, and numbers do not count."""
    page = (
        "```bash\nls\n```\n\n```text\na  1.5 KB\n\nb\n```\n\nIt is like this:\n\n```text\nc\n```\n\n"
        "`ls` and `cat` print:\n\n```text\nd\n```\n\n```text\n$ cnr ls\ne\n```\n\n```python\n```\n\n```text\nf\n```\n"
    )
    assert _shown_output(page) == ["a  1.5 KB", "b", "d", "e"]
    assert without_values("step-3  1,234  5.0%  12.3 KB  7 s ab12cd34ab12cd34-0-0.x") == "step-# # #% # # #-#-#x"
    assert without_values("a  10 B each") != without_values("a  10 x each")


def test_blocks_that_are_files_are_told_apart() -> None:
    """A Python block whose first line is no more than the name of a Python file is that file."""
    texts = ["# train.py\nx = 1", "# train.py trains\nx = 1", "x = 1", "# notes.txt"]
    page = "".join(f"```python\n{text}\n```\n" for text in texts) + "```text\n# train.py\n```\n"
    assert [block.file for block in parse_blocks(page)] == ["train.py", None, None, None, None]


def test_commands_are_split() -> None:
    """Commands end at line ends and operators, and go on over a backslash; comments are none."""
    script = "# set up\ncd a && make test # all\n\nmake \\\n  demo; pip install 'b==1'\n"
    assert split_commands(script) == [["cd", "a"], ["make", "test"], ["make", "demo"], ["pip", "install", "b==1"]]


def test_calls_of_the_command_line_share_a_process() -> None:
    """Only those that the shell would pass on as they are, and only where several follow one another."""
    script = "cnr ls a\n\ncnr verify a --all\ncnr ls $a\ncnr ls b\ncnr ls a | wc"
    shared = ["cnr-lines <<'END'", "cnr ls a", "cnr verify a --all", "END", "cnr ls $a", "cnr ls b", "cnr ls a | wc"]
    assert in_one_process(script).splitlines() == shared


def test_program_keeps_line_numbers_and_names() -> None:
    """Blocks of a page share their names, and an error is found at its line of the page."""
    page = "# Title\n\n```python\nx = 1\n```\n\nthen\n\n```python\ny = x + 1\n```\n"
    program = python_program([block for block in parse_blocks(page) if block.info == "python"])
    assert program.splitlines()[9] == "y = x + 1"
    names: dict[str, object] = {}
    exec(program, names)
    assert names["y"] == 2
