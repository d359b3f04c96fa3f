"""Which paths and URLs may name a store: those that checkpoints can refer to, and that hold no secrets."""

import os
import re

import fsspec

from torchrec_cnr.errors import ConfigurationError

OBSTORE = "s3+obstore"

# Not imported before such a URL is opened: what it needs is an extra.
fsspec.register_implementation(
    OBSTORE,
    "torchrec_cnr.storage.obstore_s3.ObstoreS3",
    errtxt='s3+obstore:// needs obstore and boto3: pip install "torchrec_cnr[obstore]"',
)

_NO_PATH = re.compile(r"[\\\x00-\x1f]")
_PASSWORD = re.compile(r"://[^/@]*:[^/@]*@")


def without_client(url: str) -> str:
    """The URL that all clients of a service share: ``s3://`` for obstore's, too."""
    return url.replace(f"{OBSTORE}://", "s3://", 1) if url.startswith(OBSTORE) else url


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
