"""Relative paths from one checkpoint to another."""

import pytest

from torchrec_cnr.errors import (
    ConfigurationError,
)
from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.manifest import (
    CheckpointRef,
    History,
    Manifest,
)
from torchrec_cnr.lineage.checkpoint import relative_path
from torchrec_cnr.storage.store import Store


@pytest.mark.parametrize(
    ("place", "other", "expected"),
    [
        ("/job/step-2", "/job/step-1", "../step-1"),
        ("/job/b/step-2", "/job/a/step-1", "../../a/step-1"),
        ("/job/step-2", "/step-1", "../../step-1"),
        ("/step-2", "/job/step-1", "../job/step-1"),
        ("/job/step-2", "/job/step-2", None),
        ("/job/step-2", "/job/step-2/", None),
        ("/job/step-2", "/job/step-2/below", None),
        ("/job/step-2/below", "/job/step-2", None),
        ("/job/step-2", "/", None),
        ("/job/deltas/step-2", "/job", None),
    ],
)
@pytest.mark.parametrize("protocol", ["", "memory://"])
def test_relative_paths_lead_to_the_parent(protocol: str, place: str, other: str, expected: str | None) -> None:
    """A path goes up first and then down by names, and leads there; what cannot be named so has none."""
    store = Store.open(protocol + place)
    found = relative_path(store, protocol + other)
    assert found == expected
    if found is not None:
        assert store.at(found) == Store.open(protocol + other)


@pytest.mark.parametrize(
    "other", ["/job/step-1", "/job", "/", "/job/back\\slash", "/job/new\nline", "/job/é", "/job/\x7f"]
)
def test_whatever_path_is_written_is_read(other: str) -> None:
    """A manifest accepts each relative path that a delta would be given; other names are refused from the start."""
    try:
        path = relative_path(Store.open("/job/deltas/step-2"), other)
    except ConfigurationError:
        return
    if path is None:
        return
    manifest = Manifest(1, "", "save", CheckpointRef(path, "0" * 64), "", History(0), 0, 1, "", (), {})
    assert manifest_json.loads(manifest_json.dumps(manifest)[0], "here")[0] == manifest


def test_other_file_systems_have_no_relative_path() -> None:
    """Between two file systems no relative path leads."""
    assert relative_path(Store.open("/job/step-2"), "memory://job/step-1") is None
    assert relative_path(Store.open("memory://job/step-2"), "/job/step-1") is None
