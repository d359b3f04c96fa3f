"""Pages, docstrings, comments and messages follow the rules of language that a program can check."""

from pathlib import Path

import pytest

from tests.repository.pages.language import FOLDERS, ROOT, findings

MODULE = '''"""What it does."""


def load(path: str) -> None:
    """Read a file.

    Args:
        path: The file, which somebody has written.
    """
    # Nobody reads this anew; `whoever` and "somebody" are names here.
    raise ValueError(f"{path} was passed over")
'''
PAGE = """# Upkeep

A sentence that says nothing, and which goes on and on, and has more words than anyone who reads it can hold in mind
until the end of it, because it has no end where a reader would look for one, as it goes on.

```text
whoever
```
"""


# What is left to be rewritten; these numbers only fall.
MAX_FINDINGS = {
    "torchrec_cnr": 2,
    "docs": 0,
    "examples": 0,
    "README.md": 0,
    "CONTRIBUTING.md": 0,
    "CHANGELOG.md": 0,
}


@pytest.mark.parametrize("name", FOLDERS)
def test_language(name: str) -> None:
    """No text that is added breaks a rule."""
    found = [str(finding) for finding in findings([ROOT / name])]
    assert len(found) <= MAX_FINDINGS[name], "\n".join(found)


def test_rules_are_found_where_they_are_broken(tmp_path: Path) -> None:
    """In docstrings, comments, messages and pages; names and code are no prose."""
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "page.md").write_text(PAGE)
    found = [(finding.path.name, finding.line, finding.rule.rpartition(".")[2]) for finding in findings([tmp_path])]
    assert sorted(found) == [
        ("module.py", 1, "fragment"),
        ("module.py", 5, "somebody"),
        ("module.py", 10, "anew"),
        ("module.py", 10, "nobody"),
        ("module.py", 11, "passed_over"),
        ("page.md", 1, "upkeep"),
        ("page.md", 3, "length"),
    ]
