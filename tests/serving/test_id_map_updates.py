"""Served models with id maps: after each update they have the maps of the newest checkpoint, sorted, bit for bit."""

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

import torchrec_cnr as cnr
from tests.serving.served_models import following
from tests.tracking.id_map_jobs import IdMapJob, IdMapModel, assert_equal, buffers

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor"),
]
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("look up"), st.lists(st.integers(0, 40), min_size=1, max_size=6)),
        st.tuples(st.just("look up"), st.lists(st.integers(0, 40), min_size=1, max_size=6)),
        st.tuples(st.just("place"), st.integers(0, 12), st.integers(0, 1000)),
        st.tuples(st.just("go back"), st.integers(0, 3)),
        st.sampled_from(["save", "save", "update", "update"]),
    ),
    min_size=3,
    max_size=16,
)


@pytest.mark.parametrize("policy", [cnr.Consecutive(), cnr.OneShot()])
@given(operations=OPERATIONS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
def test_a_model_has_the_newest_map_after_each_update(
    tmp_path_factory: pytest.TempPathFactory, policy: cnr.Policy, operations: list[Any]
) -> None:
    """Along a chain, from one delta of a baseline to the next, and when a job goes on from an older checkpoint."""
    job, model = IdMapJob(tmp_path_factory.mktemp("run"), policy), IdMapModel()
    with following(model, job.root, key="model") as subscriber:
        for operation in ("save", *operations, "save", "update"):
            match operation:
                case ("look up", ids):
                    job.model.look_up(ids)
                case ("place", row, raw_id):
                    job.model.place(row, raw_id)
                case ("go back", number):
                    job.restore(number % len(job.saved))
                case "save":
                    job.save()
                case "update":
                    subscriber.update()
                    assert_equal(buffers(model), job.saved[-1][1])
    job.tracker.close()


@pytest.mark.parametrize("policy", [cnr.Consecutive(), cnr.OneShot()])
def test_an_update_reads_deltas_alone(tmp_path: Path, policy: cnr.Policy) -> None:
    """And not the whole chain, as it would if the values of a map could not be applied without the others."""
    job, model = IdMapJob(tmp_path, policy), IdMapModel()
    job.model.look_up([5, 6, 7])
    job.save()
    with following(model, tmp_path, key="model") as subscriber:
        assert subscriber.update() is not None
        for ids in ([1, 6, 8], [2, 9]):
            job.model.look_up(ids)
            job.save()
            applied = subscriber.update()
            assert applied is not None
            assert (applied.kind, applied.num_checkpoints, applied.num_rows) == ("delta", 1, 0)
            assert_equal(buffers(model), job.saved[-1][1])
    job.tracker.close()
