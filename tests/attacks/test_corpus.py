"""Inputs that the fuzzer has found, in ``tests/attacks/corpus``, and its seeds: each through its reader."""

import pytest

from tests.attacks import corpus
from tests.attacks.limits import cost_of
from tests.attacks.readers import READERS
from tests.attacks.seeds import seeds
from torchrec_cnr.errors import FencedError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:.*TypedStorage is deprecated")


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_inputs_are_read_or_refused(name: str) -> None:
    """What the library writes is read; of what the fuzzer found, each input is read or refused within the limits."""
    for data in seeds(name):
        try:
            READERS[name](data)
        except FencedError:
            assert name == "fence_files"
    for data in corpus.inputs(name):
        assert cost_of(READERS[name], data).complaint is None, data


def test_the_corpus_is_small() -> None:
    """It is in the repository, and every file in it is read."""
    assert {path.stem for path in corpus.FOLDER.iterdir()} <= READERS.keys()
    assert corpus.num_bytes() < corpus.MAX_BYTES
