"""A hook of MkDocs for each page on its way to the site, besides what mkdocs.yml says."""

import re

_ROLE = re.compile(r":(?:attr|class|func|meth|mod):(?=<code>)")
_CODE = re.compile(r"(<(pre|code)\b.*?</\2>)", re.DOTALL)
_UNIT = re.compile(r"(?<=\d) (?=(?:×|%|[KMGT]i?B|m?s|min|bits?)(?![\w-]))")


def on_page_content(html: str, **_: object) -> str:
    """Keep numbers and their units on one line, and leave out what docstrings say of a name that they refer to.

    This is ``:func:``, for example; the name itself stays.
    """
    parts = _CODE.split(_ROLE.sub("", html))  # text, code, the name of its tag, text, ...
    parts[::3] = (_UNIT.sub("\N{NO-BREAK SPACE}", text) for text in parts[::3])
    del parts[2::3]
    return "".join(parts)
