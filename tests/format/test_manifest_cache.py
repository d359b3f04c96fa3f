"""Manifests that were parsed: what is kept is what would be parsed, and no more than may be."""

from collections import OrderedDict
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.golden import reader
from torchrec_cnr.errors import DamagedError
from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import History, Manifest, Shard, TensorEntry
from torchrec_cnr.format.manifest_json import KnownManifests
from torchrec_cnr.format.manifest_parser import ManifestParser
from torchrec_cnr.format.row_sets import RowSet
from torchrec_cnr.quantization import NoQuantization

GOLDENS = Path(reader.__file__).parent
SOME = sorted(GOLDENS.rglob("manifest.json"))[0]


def _manifest(num_shards: int) -> Manifest:
    """Of a size of 2 and a shard more each: itself, its row set, and its shards."""
    shards = (Shard(Box((0,), (0,)), RowSet(()), (), NoQuantization()),) * num_shards
    tensors = {"t": TensorEntry("float32", (0,), shards)}
    return Manifest(0, "id", "save", None, "Full", History(0), 0, 1, "test", (), tensors)


@hypothesis.given(
    most=st.integers(0, 12), uses=st.lists(st.tuples(st.booleans(), st.sampled_from("abcdef"), st.integers(1, 5)))
)
def test_what_was_used_last_is_kept(most: int, uses: list[tuple[bool, str, int]]) -> None:
    """Against a dictionary in the order of use, cut from its old end; one that is larger than all is not kept."""
    known = KnownManifests(most)
    model: OrderedDict[str, tuple[Manifest, int]] = OrderedDict()
    for is_added, digest, num_shards in uses:
        if is_added:
            manifest = _manifest(num_shards)
            known.add(digest, manifest)
            if num_shards + 2 > most:
                continue
            model.pop(digest, None)
            model[digest] = (manifest, num_shards + 2)
            while sum(size for _, size in model.values()) > most:
                model.popitem(last=False)
        elif digest in model:
            model.move_to_end(digest)
            assert known.get(digest) is model[digest][0]
        else:
            assert known.get(digest) is None


def test_only_so_many_small_manifests_are_kept() -> None:
    """A job that saves every second would otherwise keep thousands."""
    known = KnownManifests()
    for number in range(2 * manifest_json._MAX_CACHED):
        known.add(str(number), _manifest(1))
    kept = [number for number in range(2 * manifest_json._MAX_CACHED) if known.get(str(number)) is not None]
    assert kept == list(range(manifest_json._MAX_CACHED, 2 * manifest_json._MAX_CACHED))


def test_a_manifest_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are hashed each time: those of another one are not taken for it, wherever they lie."""
    calls = []
    parse = ManifestParser.manifest

    def counted(self: ManifestParser, value: dict[str, object]) -> Manifest:
        calls.append(self.where)
        return parse(self, value)

    monkeypatch.setattr(ManifestParser, "manifest", counted)
    data = SOME.read_bytes()
    manifest_json.forget()
    first, digest = manifest_json.loads(data, "here")
    assert manifest_json.loads(data, "there") == (first, digest)
    assert calls == ["here"]
    with pytest.raises(DamagedError, match="there: sha256"):
        manifest_json.loads(data.replace(b'"id":"', b'"id":"x'), "there")
    manifest_json.forget()
    again, _ = manifest_json.loads(data, "there")
    assert calls == ["here", "there"]
    assert again == first
    assert again is not first


def test_what_was_committed_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save parses its own manifest before it commits, and nobody after it in the same process."""
    manifest, _ = manifest_json.loads(SOME.read_bytes(), "here")
    manifest_json.forget()
    data, digest = manifest_json.dumps_valid(manifest, "here")

    def refuse(self: ManifestParser, value: dict[str, object]) -> Manifest:
        raise AssertionError("parsed again")

    monkeypatch.setattr(ManifestParser, "manifest", refuse)
    assert manifest_json.loads(data, "there") == (manifest, digest)
