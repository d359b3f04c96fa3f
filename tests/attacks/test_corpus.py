"""Inputs that a coverage-guided fuzzer has found, in ``tests/attacks/corpus``: each through the reader it is for.

Each line of a file is one input, in base64. New ones are grown with atheris from these.
"""

import base64
import hashlib
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

import torchrec_cnr as cnr
from tests.attacks.draft import archive_of
from torchrec_cnr.format import manifest_json, safe_pickle
from torchrec_cnr.format.row_sets import CodedRows, decode_row_numbers

CORPUS = Path(__file__).parent / "corpus"
MAX_BYTES = 300_000  # of all files
MOST_BYTES = 1 << 26  # of memory, beyond the input


def _manifest(data: bytes) -> None:
    digest = hashlib.sha256(data).hexdigest().encode()
    manifest_json.loads(b'{"sha256":"%s","manifest":%s}\n' % (digest, data), "here")


def _pickle(data: bytes) -> None:
    safe_pickle.serialized(safe_pickle.unpickled(archive_of(data), "here"), "here")


def _row_codes(data: bytes) -> None:
    """Coding, 4 bytes of span and 3 of rows, then the code."""
    span = int.from_bytes(data[1:5], "little") % (1 << 22) + 1
    num_rows = int.from_bytes(data[5:8], "little") % span + 1
    coding = "bitmap" if data[:1] == b"\1" else "gaps"
    if coding == "gaps" or span <= 64 * num_rows:  # as manifests are checked
        decode_row_numbers(CodedRows(coding, 1, span, data[8:]), num_rows, "here")


READERS: dict[str, Callable[[bytes], None]] = {"manifests": _manifest, "pickles": _pickle, "row_codes": _row_codes}


@pytest.mark.parametrize("name", READERS)
def test_what_a_fuzzer_found_is_read_or_refused(name: str) -> None:
    """A typed error or none, in little memory."""
    for line in (CORPUS / f"{name}.txt").read_text().splitlines():
        data = base64.b64decode(line, validate=True)
        tracemalloc.start()
        try:
            READERS[name](data)
        except cnr.CNRError:
            pass
        finally:
            peak_bytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak_bytes < MOST_BYTES + len(data), line


def test_the_corpus_is_small() -> None:
    """It is in the repository, and has an input for each reader."""
    sizes = {path.stem: path.stat().st_size for path in CORPUS.iterdir()}
    assert sizes.keys() == READERS.keys()
    assert sum(sizes.values()) < MAX_BYTES
