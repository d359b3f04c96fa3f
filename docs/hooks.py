"""Hooks of MkDocs for each page on its way to the site, besides what mkdocs.yml says."""

import re
from typing import Any

_ROLE = re.compile(r":(?:attr|class|func|meth|mod):(?=<code>)")
_CODE = re.compile(r"(<(pre|code)\b.*?</\2>)", re.DOTALL)
_UNIT = re.compile(r"(?<=\d) (?=(?:×|%|[KMGT]i?B|m?s|min|bits?)(?![\w-]))")

_NAME = re.compile(r"<!-- site\n(.*?)-->\n.*?<!-- end of name -->\n", re.DOTALL)

_SEARCH_WEIGHTS = {"benchmarks/": 0.3, "design/": 0.3, "get-started/": 2.0, "guides/": 2.0, "operations/": 2.0}


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Let the search find what to do before what was measured or designed, and take names from their docstrings."""
    folder = page.file.src_uri.partition("/")[0] + "/"
    page.meta["search"] = {"boost": _SEARCH_WEIGHTS.get(folder, 1.0)}
    return _NAME.sub(r"\1", markdown)


def on_page_content(html: str, **_: object) -> str:
    """Keep numbers and their units on one line, and leave out what docstrings say of a name that they refer to.

    This is ``:func:``, for example; the name itself stays.
    """
    parts = _CODE.split(_ROLE.sub("", html))  # text, code, the name of its tag, text, ...
    parts[::3] = (_UNIT.sub("\N{NO-BREAK SPACE}", text) for text in parts[::3])
    del parts[2::3]
    return "".join(parts)
