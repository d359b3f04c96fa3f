"""Paths and URLs of stores: checks that checkpoints can refer to them, and that they contain no secrets."""

import os
import posixpath
import re

import fsspec

from torchrec_cnr.errors import ConfigurationError

OBSTORE = "s3+obstore"
OWN_S3FS = "s3+s3fs"
S3FS = frozenset({"s3", "s3a"})
OBJECT_STORES = frozenset({*S3FS, OBSTORE, "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "r2"})

# Imported only when such a URL is opened, since it needs optional packages.
fsspec.register_implementation(
    OBSTORE,
    "torchrec_cnr.storage.obstore_s3.ObstoreS3",
    errtxt='s3+obstore:// needs obstore and boto3: pip install "torchrec_cnr[obstore]"',
)

# Registered under a separate name, so that other packages get the original s3fs.
fsspec.register_implementation(
    OWN_S3FS,
    "torchrec_cnr.storage.s3fs_client.S3",
    errtxt='s3:// needs s3fs: pip install "torchrec_cnr[s3]"',
)

_MANIFEST_FILE = "manifest.json"  # a copy, since ``format.manifest`` imports torch
_NO_PATH = re.compile(r"[\\\x00-\x1f]")
_CONTAINER_AT_ACCOUNT = frozenset({"abfs", "abfss", "az", "adl"})
_BUCKETS = "|".join(map(re.escape, sorted(OBJECT_STORES - _CONTAINER_AT_ACCOUNT)))
# Passwords can contain slashes and @. Names of buckets contain neither a colon nor an @. The number after the colon of
# a host is a port if a slash follows it, and the path can contain an @.
_PASSWORD = re.compile(rf"((?:{_BUCKETS})://)[^/\s]*(?::\S*)?@|(https?://)[^/\s]*@|(://)[^/@\s]*:(?!\d+/)\S*@")
_SIGNED = re.compile(
    r"([?&#][\w.-]*(?:signature|credential|token|secret|password|pwd|auth|key|sig|sas)[\w.-]*=)[^&\s'\")]+", re.I
)


def without_client(url: str) -> str:
    """Return the URL that all clients of a service share: ``s3://`` for the obstore client, too."""
    return url.replace(f"{OBSTORE}://", "s3://", 1) if url.startswith(OBSTORE) else url


def without_secrets(text: str) -> str:
    """Return a URL, or a message that contains URLs, without passwords and signatures."""
    return _SIGNED.sub(r"\1…", _PASSWORD.sub(r"\1\2\3…@", text))


def checked_url(url: str | os.PathLike[str]) -> str:
    """Return the path or URL as text, after checking it.

    Raises:
        ConfigurationError: It is empty, names no bucket, or contains a password or a signature. Or a delta or fsspec
            could not resolve it, because of a backslash, a control character or ``::`` in a name.
    """
    if not isinstance(url, str | os.PathLike):
        raise ConfigurationError(f"{url!r}: expected a path or URL, got {type(url).__name__}")
    name = os.fspath(url)
    if name == "":
        raise ConfigurationError("'': names no directory; pass '.' for the working directory")
    if protocol_of(name) in OBJECT_STORES and not name.partition("://")[2].strip("/"):
        raise ConfigurationError(f"{name!r}: names no bucket; pass a URL such as {protocol_of(name)}://bucket/job")
    unspaced = re.sub(r"\s", "_", name)  # in a URL, unlike in text, a password may contain spaces
    if without_secrets(unspaced) != unspaced:
        raise ConfigurationError(
            f"{without_secrets(unspaced)!r}: a URL must not contain credentials, since logs and errors show it; "
            "configure them in the file system, such as by the environment or fsspec's configuration files"
        )
    if _NO_PATH.search(name) or _leads_elsewhere(name):
        raise ConfigurationError(
            f"{name!r}: checkpoints cannot refer to this path or URL; use names without '\\', '::' and "
            "control characters"
        )
    return name


def _leads_elsewhere(name: str) -> bool:
    """Return whether fsspec would drop the text after ``::``, which chains protocols and cannot be in a name."""
    before_mark, mark, after_mark = name.partition("::")
    return bool(mark) and ("://" not in after_mark or protocol_of(before_mark) in OBJECT_STORES)


def protocol_of(name: str) -> str:
    """Return the protocol of a URL; an empty string for a path."""
    return name.partition("://")[0] if "://" in name else ""


def canonical_path(path: str, is_local: bool) -> str:
    """Return the canonical spelling of a path. Paths identify jobs, and checkpoints refer to each other by path.

    Args:
        path: A path in an fsspec file system, without the protocol.
        is_local: Whether to resolve symbolic links. A link can be changed, and ``..`` after a link does not lead to
            the directory that contains the link.

    Raises:
        ConfigurationError: The path leads out of its bucket or host.
    """
    if is_local:
        return _real_path(path)
    front, mark, names = path.rpartition("://")  # some file systems, such as HTTP's, keep the protocol
    relative = names.lstrip("/")
    normalized = posixpath.normpath(f"/{relative}")
    if ".." in names.split("/") and normalized.split("/")[1] != relative.split("/")[0]:
        raise ConfigurationError(f"{path!r}: '..' leads out of the bucket; write the path without '..'")
    return f"{front}{mark}{normalized if names.startswith('/') else normalized[1:]}" or "/"


def _real_path(path: str) -> str:
    """Return a local path without symbolic links, except for a link that replaces a checkpoint that was moved away.

    The checkpoints that it is based on are in the root that contains the link, not next to the moved directory.
    """
    real_path, root = os.path.realpath(path), os.path.realpath(os.path.dirname(path))
    if os.path.islink(path) and os.path.dirname(real_path) != root and os.path.isfile(f"{real_path}/{_MANIFEST_FILE}"):
        return os.path.join(root, os.path.basename(path))
    return real_path
