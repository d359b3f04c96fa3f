"""Which paths and URLs may name a store: those that checkpoints can refer to, and that hold no secrets."""

import os
import posixpath
import re

import fsspec

from torchrec_cnr.errors import ConfigurationError

OBSTORE = "s3+obstore"
OWN_S3FS = "s3+s3fs"
S3FS = frozenset({"s3", "s3a"})
OBJECT_STORES = frozenset({*S3FS, OBSTORE, "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "r2"})

# Not imported before such a URL is opened: what it needs is an extra.
fsspec.register_implementation(
    OBSTORE,
    "torchrec_cnr.storage.obstore_s3.ObstoreS3",
    errtxt='s3+obstore:// needs obstore and boto3: pip install "torchrec_cnr[obstore]"',
)

# Under a name of its own, so that others get s3fs as it is.
fsspec.register_implementation(
    OWN_S3FS,
    "torchrec_cnr.storage.s3fs_client.S3",
    errtxt='s3:// needs s3fs: pip install "torchrec_cnr[s3]"',
)

_MANIFEST_FILE = "manifest.json"  # as in ``format.manifest``, which imports torch
_NO_PATH = re.compile(r"[\\\x00-\x1f]")
_CONTAINER_AT_ACCOUNT = frozenset({"abfs", "abfss", "az", "adl"})
_BUCKETS = "|".join(map(re.escape, sorted(OBJECT_STORES - _CONTAINER_AT_ACCOUNT)))
# Passwords may hold slashes and @. The name of a bucket holds neither a colon nor an @. The number after the colon of a
# host is a port if a slash follows it, and the path may hold an @.
_PASSWORD = re.compile(rf"((?:{_BUCKETS})://)[^/\s]*(?::\S*)?@|(https?://)[^/\s]*@|(://)[^/@\s]*:(?!\d+/)\S*@")
_SIGNED = re.compile(
    r"([?&#][\w.-]*(?:signature|credential|token|secret|password|pwd|auth|key|sig|sas)[\w.-]*=)[^&\s'\")]+", re.I
)


def without_client(url: str) -> str:
    """The URL that all clients of a service share: ``s3://`` for obstore's, too."""
    return url.replace(f"{OBSTORE}://", "s3://", 1) if url.startswith(OBSTORE) else url


def without_secrets(text: str) -> str:
    """A URL, or a message in which there are some, without passwords and signatures."""
    return _SIGNED.sub(r"\1…", _PASSWORD.sub(r"\1\2\3…@", text))


def checked_url(url: str | os.PathLike[str]) -> str:
    """The path or URL as text.

    Raises:
        ConfigurationError: It is empty or names no bucket, or it has a password or a signature, a backslash, a control
            character, or, in a name, ``::``: a delta or fsspec could not follow it.
    """
    if not isinstance(url, str | os.PathLike):
        raise ConfigurationError(f"{url!r}: not a path or URL, but {type(url).__name__}")
    name = os.fspath(url)
    if name == "":
        raise ConfigurationError("'': names no directory; for the working directory give '.'")
    if protocol_of(name) in OBJECT_STORES and not name.partition("://")[2].strip("/"):
        raise ConfigurationError(f"{name!r}: names no bucket; give a URL such as {protocol_of(name)}://bucket/job")
    unspaced = re.sub(r"\s", "_", name)  # a password may hold spaces, where text has other words
    if without_secrets(unspaced) != unspaced:
        raise ConfigurationError(
            f"{without_secrets(unspaced)!r}: credentials in a URL come into logs and errors; give them to the "
            "file system by its own configuration, such as the environment or fsspec's configuration files"
        )
    if _NO_PATH.search(name) or _leads_elsewhere(name):
        raise ConfigurationError(f"{name!r}: not a path or URL that checkpoints can refer to; choose plainer names")
    return name


def _leads_elsewhere(name: str) -> bool:
    """Whether fsspec would leave out what is behind ``::``, which chains protocols and cannot be in a name."""
    first, mark, behind = name.partition("::")
    return bool(mark) and ("://" not in behind or protocol_of(first) in OBJECT_STORES)


def protocol_of(name: str) -> str:
    """What a URL begins with; nothing for a path."""
    return name.partition("://")[0] if "://" in name else ""


def canonical_path(path: str, is_local: bool) -> str:
    """The one spelling of a path: checkpoints refer to each other, and jobs are kept apart, by their paths' names.

    Args:
        path: As a file system of fsspec's knows it, without the protocol.
        is_local: Whether symbolic links can be followed. One may be set to another place, and behind one, ``..``
            leads elsewhere than its name tells.

    Raises:
        ConfigurationError: It leads above its bucket or host.
    """
    if is_local:
        return _real_path(path)
    front, mark, names = path.rpartition("://")  # some file systems keep the protocol, as that of HTTP does
    within = names.lstrip("/")
    found = posixpath.normpath(f"/{within}")
    if ".." in names.split("/") and found.split("/")[1] != within.split("/")[0]:
        raise ConfigurationError(f"{path!r}: '..' leads out of the bucket; name the directory itself")
    return f"{front}{mark}{found if names.startswith('/') else found[1:]}" or "/"


def _real_path(path: str) -> str:
    """A local path without symbolic links, except one that a checkpoint has left in its root when it was moved away.

    There, and not where it lies now, are the checkpoints that it is based on.
    """
    found, root = os.path.realpath(path), os.path.realpath(os.path.dirname(path))
    if os.path.islink(path) and os.path.dirname(found) != root and os.path.isfile(f"{found}/{_MANIFEST_FILE}"):
        return os.path.join(root, os.path.basename(path))
    return found
