"""The pause of the garbage collector."""

import gc
from collections.abc import Iterator

import pytest

from torchrec_cnr.gc_pause import paused_gc

NUM_MANY = 50_000


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    gc.collect()
    yield
    gc.unfreeze()


def test_many_new_objects_count_as_old() -> None:
    """The next collection of young objects does not look through them."""
    num_old = len(gc.get_objects(generation=2))
    with paused_gc():
        assert not gc.isenabled()
        made = [[number] for number in range(NUM_MANY)]
    assert gc.isenabled()
    assert gc.get_count()[0] < NUM_MANY
    assert len(gc.get_objects(generation=2)) >= num_old + len(made)


def test_objects_that_a_user_has_frozen_stay_frozen() -> None:
    """After few and after many new objects."""
    gc.freeze()
    num_frozen = gc.get_freeze_count()
    for num_new in (10, NUM_MANY):
        with paused_gc():
            made = [[number] for number in range(num_new)]
        assert gc.get_freeze_count() == num_frozen
        del made


def test_frozen_objects_are_not_counted_after_few_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """To count a million takes 30 ms, and small manifests are parsed often."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("counted"))
    with paused_gc():
        pass
