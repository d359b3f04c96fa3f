"""A hook of MkDocs for each page on its way to the site, besides what mkdocs.yml says."""

import re

_ROLE = re.compile(r":(?:attr|class|func|meth|mod):(?=<code>)")


def on_page_content(html: str, **_: object) -> str:
    """Leave out what docstrings say of a name that they refer to, such as ``:func:``; the name itself stays."""
    return _ROLE.sub("", html)
