"""Markers as records: what was written comes back, and what is no marker of ours is none."""

import json
from typing import Any

import pytest

pytest.importorskip("confluent_kafka")

from torchrec_cnr.kafka.records import marker_json, marker_of
from torchrec_cnr.storage.row_log import Marker

MARKER = Marker("0123456789abcdef", "step 100", "save-1", "a" * 64, "b" * 64, 1 << 60, 7)

STRANGE: dict[str, list[Any]] = {
    "format": ["", "torchrec_cnr journal", None],
    "version": [0, 2, "1", None],
    "root": ["0" * 15, "0" * 17, "0" * 16 + "\n", "A" * 16, 0, None],
    "name": ["", ".", "..", "a/b", "a\\b", "a\n", "a\ud800", "a" * 1025, 1, None],
    "save_id": ["", "a/b", "a\n", "a" * 201, 1, None],
    "sha256": ["a" * 63, "a" * 65, "a" * 64 + "\n", "A" * 64, 1, None],
    "parent_sha256": ["", "a" * 63, "a" * 64 + "\n", 1],
    "created_ns": [1.0, True, "1", None],
}


@pytest.mark.parametrize("marker", [MARKER, Marker("0" * 16, "..a", "1", "0" * 64, None, 0, 0)])
def test_a_marker_comes_back(marker: Marker) -> None:
    """Its offset is that of the record; what else a record holds is ignored."""
    record = json.loads(marker_json(marker))
    assert marker_of(json.dumps({**record, "later": [1]}).encode(), marker.offset) == marker


@pytest.mark.parametrize("key", STRANGE)
def test_what_is_no_marker_is_none(key: str) -> None:
    """A field that is missing, of another type or out of bounds."""
    record = json.loads(marker_json(MARKER))
    assert marker_of(json.dumps(record).encode(), 0) is not None
    for value in STRANGE[key]:
        assert marker_of(json.dumps({**record, key: value}).encode(), 0) is None, value
    del record[key]
    assert marker_of(json.dumps(record).encode(), 0) is None


@pytest.mark.parametrize("value", [None, b"", b"\xff", b"[]", b"1", b"[" * 100_000, b"1" * 5000], ids=range(7))
def test_a_value_that_is_no_object_is_none(value: bytes | None) -> None:
    """Tombstones, too, which have no value."""
    assert marker_of(value, 0) is None
