"""Inputs that the fuzzer has found, in ``tests/attacks/corpus``, and its seeds: each through its reader."""

import pytest

from tests.attacks import corpus
from tests.attacks.limits import cost_of
from tests.attacks.readers import READERS
from tests.attacks.seeds import seeds
from torchrec_cnr.errors import FencedError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:.*TypedStorage is deprecated")


@pytest.mark.parametrize("name", READERS)
def test_what_the_fuzzer_found_is_read_or_refused(name: str) -> None:
    """A typed error or none, in little time and memory."""
    for data in corpus.inputs(name):
        assert cost_of(READERS[name], data).complaint is None, data


@pytest.mark.parametrize("name", READERS)
def test_what_the_library_writes_is_read(name: str) -> None:
    """The fuzzer starts from inputs that are read to their end."""
    for data in seeds(name):
        try:
            READERS[name](data)
        except FencedError:
            assert name == "fence_files"


def test_the_corpus_is_small() -> None:
    """It is in the repository, and has inputs for each reader."""
    assert {path.stem for path in corpus.FOLDER.iterdir()} == READERS.keys()
    assert corpus.num_bytes() < corpus.MAX_BYTES
