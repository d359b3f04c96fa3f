"""The fuzzer's parts: what it changes, what it measures, and what it keeps."""

import io
import json
import random
import zipfile
from pathlib import Path

import pytest
import torch

import torchrec_cnr as cnr
from tests.attacks import corpus, limits
from tests.attacks.limits import cost_of
from tests.attacks.readers import READERS
from tests.attacks.seeds import seeds
from tests.attacks.structure import mutated, smaller
from torchrec_cnr.errors import DamagedError, VersionError
from torchrec_cnr.format import manifest_json


def _mutants(data: bytes) -> list[bytes]:
    return [mutated(data, random.Random(seed), lambda part: part[:-1]) for seed in range(60)]


def test_a_mutation_keeps_digests_and_archives() -> None:
    """Most mutants of a manifest file have a digest that fits, also of a packed body; most of an archive open."""
    for file in (data for data in seeds("manifest_files") if len(data) < 3_000):
        told = []
        for mutant in _mutants(file):
            try:
                manifest_json.loads(mutant, "here")
            except (DamagedError, VersionError) as error:
                told.append(str(error))
        assert sum("sha256" in text or "no complete" in text for text in told) < 25
        assert len({*told}) > 15
    archive = seeds("archives")[1]
    mutants = _mutants(archive)
    assert len({*mutants}) > 20
    assert sum(zipfile.is_zipfile(io.BytesIO(mutant)) for mutant in mutants) > 30


def test_an_input_gets_smaller_by_parts_of_its_structure() -> None:
    """What is left is still JSON, a manifest file, or bytes of which a piece was cut out."""
    assert json.loads(next(smaller(b'{"a":[1,2]}'))) == {}
    assert list(smaller(b"abcd")) == [b"cd", b"ab", b"bcd", b"acd", b"abd", b"abc"]
    assert b'"sha256":"' in next(smaller(seeds("manifest_files")[-1]))


def _refused(data: bytes) -> None:
    raise cnr.StoreError("refused")


def _raises(data: bytes) -> None:
    raise RecursionError(data)


@pytest.mark.parametrize("make", [bytearray, lambda size: torch.ones(size, dtype=torch.uint8)])
def test_what_an_input_costs_is_measured(make: object) -> None:
    """Memory of Python and of torch, time, and errors that are not typed; a typed error is none."""
    assert callable(make)
    assert cost_of(_refused, b"").complaint is None
    assert str(cost_of(_raises, b"").complaint).startswith("RecursionError at test_fuzz.py")
    assert cost_of(lambda _: make(60 << 20), b"").complaint is None
    assert cost_of(lambda _: make(66 << 20), b"").complaint == "more than 64 MiB of memory"
    assert cost_of(lambda _: make(66 << 20), bytes(4 << 20)).complaint is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "MAX_SECS", 0.0)
        assert cost_of(lambda _: sum(range(1000)), b"").complaint == "more than 0 s of processor time"


def test_an_input_that_reaches_new_code_is_kept_once_and_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two inputs that reach the same, one is kept, without what it does not need."""
    monkeypatch.setattr(corpus, "FOLDER", tmp_path)
    monkeypatch.setattr(corpus, "READERS", {"markers": READERS["markers"]})
    corpus._reached.cache_clear()
    found = [b"[[[[", b"[x", *seeds("markers")]
    assert corpus.keep("markers", found, 60.0) == 1
    assert corpus.inputs("markers") == [b"x"]
    assert corpus.keep("markers", found, 60.0) == 0
