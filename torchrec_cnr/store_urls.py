"""Which paths and URLs may name a store: those that checkpoints can refer to, and that hold no secrets."""

import os
import re

from torchrec_cnr.errors import ConfigurationError

_NO_PATH = re.compile(r"[\\\x00-\x1f]")
_PASSWORD = re.compile(r"://[^/@]*:[^/@]*@")


def checked_url(url: str | os.PathLike[str]) -> str:
    """The path or URL as text.

    Raises:
        ConfigurationError: It has a password, a backslash, a control character, or, without a protocol, ``::``: a
            delta or fsspec could not follow it.
    """
    name = os.fspath(url)
    if _PASSWORD.search(name):
        raise ConfigurationError(
            f"{_PASSWORD.sub('://…@', name)!r}: credentials in a URL come into logs and errors; give them to the "
            "file system by its own configuration, such as the environment or fsspec's configuration files"
        )
    if _NO_PATH.search(name) or ("::" in name and "://" not in name):
        raise ConfigurationError(f"{name!r}: not a path or URL that checkpoints can refer to; choose plainer names")
    return name
