"""Check the language of pages, docstrings, comments and messages: banned words, terms, and the length of sentences.

Run ``python -m tests.repository.pages.language [PATH ...]``; it prints each finding, and their number by rule.

The rules are those of proselint that concern plain prose, and our own. They see words, not meaning: a text without
findings may still be unclear. Code, names in backticks, quotations in double quotes, tables of pages and the pages of
``EXEMPT`` are not checked.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from proselint.checks import __register__ as stock_checks
from proselint.registry.checks import Check, types

ROOT = Path(__file__).parents[3]
FOLDERS = ("torchrec_cnr", "docs", "examples", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
# Design records say what was decided then, in the words of then.
EXEMPT = ("docs/design",)
MAX_WORDS = 36  # in a sentence
# Rules of proselint for other texts than these, such as curly quotes; two take the place of a name for a word.
_NOT_OURS = (
    "annotations", "dates_times", "industrial_language", "lexical_illusions", "restricted", "spelling", "terms",
    "typography", "weasel_words",
)  # fmt: skip

# By term, what to write instead: private words that have a standard term, and turns of phrase that hide the actor.
TERMS = {
    "whoever": "name the actor",
    "nobody": "name the actor, or say that none does",
    "somebody": "name the actor",
    "that which": "what",
    "anew": "again",
    "for ever": "indefinitely",
    "of theirs": "their",
    "is told of": "is given",
    "are told of": "are given",
    "passed over": "skipped",
    "what may pass": "transient error",
    "makes? sense of": "understand",
    "taken at his word": "trusted",
    "behind training": "in the background",
    "beside training": "in the background",
    "beside the training": "in the background",
    "reader's position": "data loader state",
    "following a job": "online model updates",
    "stands? on": "is based on",
    "upkeep": "maintenance",
    "fate": "outcome",
    "dear": "valuable",
    "in the place of": "instead of",
    "likewise": "also",
}


@dataclass(frozen=True)
class Text:
    """A text to check.

    Attributes:
        path: The file.
        line: The line where the text begins, from 1.
        words: The text, without code and marks.
        begins_docstring: Whether it is the first paragraph of one.
    """

    path: Path
    line: int
    words: str
    begins_docstring: bool = False


@dataclass(frozen=True)
class Finding:
    """A place where a rule is broken.

    Attributes:
        path: The file.
        line: The line, from 1; of a docstring or paragraph, its first.
        rule: The rule's name.
        message: What is wrong.
    """

    path: Path
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.rule}: {self.message}"


# A docstring that begins so is a clause without its sentence; that functions' begin with an imperative, ruff checks.
_REPORTS = frozenset({"debug", "info", "warning", "error", "exception", "warn"})
FRAGMENT = re.compile(r"(?:What|Who|How|Where|When|Why|Of|By|As|With|If|After|Before|From|To|All that|That which)\b")

# What is read.


def _plain(text: str) -> str:
    """Return a text without code, links, quotations and marks."""
    text = re.sub(r"``[^`]*``|`[^`]*`|:\w+:`[^`]*`", "NAME", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"https?://\S+", "NAME", text)
    text = re.sub(r'"[^"\n]*"|“[^”]*”', "NAME", text)
    return re.sub(r"[*_#>]+(?=\S)|(?<=\S)\*+", "", text)


def page_texts(path: Path) -> Iterator[Text]:
    """Yield the paragraphs, items and headings of a page of Markdown."""
    is_code = False
    held: list[str] = []
    first = 1

    def flush() -> Iterator[Text]:
        if held:
            yield Text(path, first, _plain(" ".join(held)))
            held.clear()

    for number, line in enumerate(path.read_text().splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith(("```", "~~~")):
            is_code = not is_code
        begins = not stripped or stripped.startswith(("#", "|", "- ", "* ", "```", "~~~", ":::")) or is_code
        if begins or re.match(r"\d+\. ", stripped):
            yield from flush()
        if not is_code and stripped and not stripped.startswith(("|", "```", "~~~", ":::", "    options")):
            first = first if held else number
            held.append(re.sub(r"^(?:[-*]|\d+\.|#+) ", "", stripped))
    yield from flush()


def code_texts(path: Path) -> Iterator[Text]:
    """Yield the docstrings, comments and messages of a module."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                line = node.body[0].lineno
                for number, part in enumerate(_docstring_parts(docstring)):
                    yield Text(path, line, part, begins_docstring=number == 0)
        elif isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _is_report(node)):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
                    yield Text(path, part.lineno, _plain(part.value))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# (?:noqa|type:|pragma|fmt:)", token.string):
            yield Text(path, token.start[0], _plain(token.string.removeprefix("#").strip()))


def _is_report(call: ast.Call) -> bool:
    """Return whether a call logs or warns."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in _REPORTS


def _docstring_parts(docstring: str) -> Iterator[str]:
    """Yield the paragraphs and entries of a docstring; blocks of code are left out."""
    for paragraph in re.split(r"\n\s*\n", docstring):
        if ">>>" in paragraph or paragraph.startswith("    "):
            continue
        entries = re.split(r"\n\s+(?=[\w`*, .]+: )", paragraph)
        yield from (_plain(re.sub(r"\s+", " ", entry)) for entry in entries)


def texts(paths: Sequence[Path]) -> Iterator[Text]:
    """Yield the texts of files, and of those in folders."""
    for path in paths:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if any(file.is_relative_to(ROOT / exempt) for exempt in EXEMPT):
                continue
            if file.suffix == ".md":
                yield from page_texts(file)
            elif file.suffix == ".py":
                yield from code_texts(file)


# Rules.


def _checks() -> list[Check]:
    """Return the rules that are kept of proselint's, and ours."""
    ours = [
        Check(
            check_type=types.ExistenceSimple(pattern=rf"\b(?:{word})\b"),
            path=f"torchrec_cnr.terms.{re.sub(r'[^a-z]+', '_', word)}",
            message=f"{word!r}: {better}",
        )
        for word, better in TERMS.items()
    ]
    return [check for check in stock_checks if not check.path.startswith(_NOT_OURS)] + ours


def long_sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text that have more than ``MAX_WORDS`` words."""
    for sentence in re.split(r"(?<=[.!?:;])\s+", text):
        if len(re.findall(r"[A-Za-z][\w'’-]*", sentence)) > MAX_WORDS:
            yield sentence


def findings(paths: Sequence[Path]) -> list[Finding]:
    """Return what breaks a rule in files and folders."""
    checks = _checks()
    return [finding for text in texts(paths) for finding in _findings_in(text, checks)]


def _findings_in(text: Text, checks: Sequence[Check]) -> Iterator[Finding]:
    if text.begins_docstring and FRAGMENT.match(text.words):
        yield Finding(text.path, text.line, "fragment", f"begins with a clause: {text.words[:60]}")
    for sentence in long_sentences(text.words):
        yield Finding(text.path, text.line, "length", f"more than {MAX_WORDS} words: {sentence[:60]}")
    for check in checks:
        for result in check.check_with_flags(text.words):
            yield Finding(text.path, text.line, result.check_path, result.message)


def main() -> int:
    """Print the findings; 1 if there are some."""
    parser = argparse.ArgumentParser(prog="python -m tests.repository.pages.language", description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders; by default all that is checked")
    options = parser.parse_args()
    found = findings([path.resolve() for path in options.paths] or [ROOT / name for name in FOLDERS])
    sys.stdout.write("".join(f"{finding}\n" for finding in found))
    for rule, number in Counter(finding.rule for finding in found).most_common():
        sys.stdout.write(f"{number:6,}  {rule}\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
