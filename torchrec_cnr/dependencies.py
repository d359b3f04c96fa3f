"""The versions of PyTorch, TorchRec and FBGEMM that belong together.

FBGEMM is compiled for one minor version of PyTorch, and TorchRec needs operators of one minor version of FBGEMM. Other
combinations fail later, with errors of the dynamic linker or of missing operators that do not name the cause.
"""

import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, version

PAIRS = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8", "2.14": "1.9"}  # TorchRec's version, and FBGEMM's, by PyTorch's

_FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu")  # the CUDA build and that for CPUs

logger = logging.getLogger(__name__)


@cache
def check_versions() -> None:
    """Check the installed versions, once in a process. Packages that import TorchRec call this before they do.

    Raises:
        ImportError: They do not belong together; the message names those that do.
    """
    torch, torchrec = _minor("torch"), _minor("torchrec")
    fbgemm = next((found for name in _FBGEMM if (found := _minor(name)) is not None), None)
    if torch is None or torchrec is None:
        return
    is_known = torch in PAIRS or torchrec in PAIRS.values()
    if PAIRS.get(torch, torchrec) == torchrec and fbgemm in (None, torchrec) and (torch in PAIRS or not is_known):
        if not is_known:
            logger.warning("PyTorch %s with TorchRec %s is untested; tested are %s", torch, torchrec, _pairs_text())
        return
    fbgemm_text = "" if fbgemm is None else f" and FBGEMM {fbgemm}"
    raise ImportError(
        f"PyTorch {torch}, TorchRec {torchrec}{fbgemm_text} do not belong together: install {_pairs_text()}"
    )


def _minor(package: str) -> str | None:
    """Return the first two numbers of a package's version, or None if it is not installed."""
    try:
        return ".".join(version(package).split(".")[:2])
    except PackageNotFoundError:
        return None


def _pairs_text() -> str:
    pairs = [f"PyTorch {torch} with TorchRec and FBGEMM {torchrec}" for torch, torchrec in PAIRS.items()]
    return f"{', '.join(pairs[:-1])}, or {pairs[-1]}"
