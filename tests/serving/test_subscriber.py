"""Models that follow a job: after each update they have the newest checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import torchrec_cnr as cnr
from tests.loading.quantized_models import float_model, load_quantized, looked_up, quantized
from tests.serving.served_models import SCHEMES, following, save_tables
from tests.support import hand_made
from tests.support.hand_made import some_rows
from tests.support.lineages import E, Q, RandomRoot, Save, T, W, is_same
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.quantization import Scheme

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
]


class RandomRootModel(nn.Module):
    """The tensors of a random root, of other values; ``has_cube`` adds one whose rows are tensors themselves."""

    def __init__(self, random_root: RandomRoot, has_cube: bool) -> None:
        super().__init__()
        self.t, self.q = nn.Module(), nn.Module()
        for fqn in (T, E, Q, *([W] if has_cube else [])):
            module, name = fqn.split(".")
            dtype = random_root.quantized_dtype if fqn == Q else torch.float32
            getattr(self, module).register_buffer(name, torch.full(random_root.sizes[fqn], 7.0, dtype=dtype))


SAVES = st.builds(
    Save,
    parent=st.sampled_from([0, 0, 0, 0, 0, 1, 2, None]),
    seed=st.integers(0, 2**32 - 1),
    density=st.sampled_from([0.0, 0.05, 0.5]),
    num_cuts=st.integers(0, 3),
)
OPERATIONS = st.lists(
    st.one_of(
        SAVES,
        st.tuples(st.just("compact"), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("leave"), st.sampled_from([0, 0, 1])),
        st.just("update"),
    ),
    min_size=2,
    max_size=12,
)


def _follow(root: Path, seed: int, has_cube: bool, operations: Sequence[Any]) -> None:
    random_root = RandomRoot(root, seed)
    model = RandomRootModel(random_root, has_cube)
    with following(model, root, key=None) as subscriber:
        assert subscriber.update() is None
        for operation in (Save(None, seed, 1.0, 2), *operations, "update"):
            if isinstance(operation, Save):
                random_root.save(operation)
            elif operation == "update":
                subscriber.update()
                newest = random_root.names[0]
                assert subscriber.applied == random_root.path(newest)
                assert subscriber.update() is None
                assert subscriber.lag.num_checkpoints == 0
                for fqn, value in model.state_dict().items():
                    assert is_same(value, random_root.expected[newest].elements[fqn]), (newest, fqn)
            elif operation[0] == "compact":
                path = random_root.path(random_root.names[operation[1] % len(random_root.names)])
                cnr.compact(path, max_ratio=1.0, self_contained=operation[2], pack_bytes=random_root.pack_bytes)
            else:
                random_root.remove_all_but(random_root.names[operation[1] % len(random_root.names)])


@given(seed=st.integers(0, 99), has_cube=st.sampled_from([False, False, True]), operations=OPERATIONS)
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
def test_a_model_has_the_newest_checkpoint_after_each_update(
    tmp_path_factory: pytest.TempPathFactory, seed: int, has_cube: bool, operations: Sequence[Any]
) -> None:
    """Whatever was saved, branched, compacted and removed since: bit for bit what the dictionary has."""
    _follow(tmp_path_factory.mktemp("root"), seed, has_cube, operations)


@pytest.mark.slow
@given(seed=st.integers(0, 9999), has_cube=st.booleans(), operations=OPERATIONS)
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_many_models_have_the_newest_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, seed: int, has_cube: bool, operations: Sequence[Any]
) -> None:
    """The same, more often."""
    _follow(tmp_path_factory.mktemp("root"), seed, has_cube, operations)


@pytest.mark.long
@given(
    bits=st.sampled_from([torch.qint8, torch.quint4x2, torch.float16]),
    saves=st.lists(
        st.tuples(
            st.sampled_from([0, 0, 0, 1, None]), st.sampled_from(SCHEMES), st.sampled_from([0.0, 0.3, 1]), st.booleans()
        ),
        min_size=1,
        max_size=8,
    ),
)
@settings(max_examples=8)
def test_a_quantized_model_has_what_a_load_would_give(
    tmp_path_factory: pytest.TempPathFactory, bits: torch.dtype, saves: Sequence[tuple[Any, Scheme, float, bool]]
) -> None:
    """Rows of all schemes, codes taken over where they fit, also of several deltas at once and of branches."""
    root = tmp_path_factory.mktemp("run")
    model, fresh = quantized(float_model(1), bits), quantized(float_model(2), bits)
    saved = [save_tables(root / "first", 99, cnr.Asymmetric(4), None, 1.0)]
    with following(model, root) as subscriber:
        for number, (parent, scheme, density, is_looked_at) in enumerate([*saves, (0, SCHEMES[0], 0.3, True)]):
            below = None if parent is None else saved[-1 - parent % len(saved)]
            saved.append(save_tables(root / str(number), number, scheme, below, density))
            if not is_looked_at:
                continue
            before = looked_up(model)
            subscriber.update()
            expected, got = load_quantized(fresh, root / str(number)), looked_up(model)
            assert all(torch.equal(got[table], rows) for table, rows in expected.items())
            assert torch.equal(model.over.weight, fresh.over.weight)
            assert subscriber.update() is None
            assert density == 0 or any(not torch.equal(got[table], rows) for table, rows in before.items())


def _save_rows(path: Path, parent: Checkpoint | None, rows: Sequence[int]) -> Checkpoint:
    """A table of 40 rows in which only some are stored, with values of their own."""
    values = torch.randn(40, 8, generator=torch.Generator().manual_seed(int(path.name)))
    return hand_made.write(
        path, {"t": hand_made.whole(values, True) if parent is None else some_rows(values, rows)}, parent=parent
    )


def test_deltas_of_one_baseline_follow_one_another(tmp_path: Path) -> None:
    """One that holds all rows applied since the baseline is applied by itself; one that lacks some is not enough."""
    model, kinds = nn.Module(), []
    model.register_buffer("t", torch.zeros(40, 8))
    baseline = _save_rows(tmp_path / "0", None, ())
    saved = [_save_rows(tmp_path / "1", baseline, (1, 2))]
    with following(model, tmp_path, key=None) as subscriber:
        for number, (is_on_baseline, rows) in enumerate(
            [(True, (1, 2, 3)), (False, (9,)), (True, (1, 2, 3, 8, 9)), (True, (1, 2, 3, 8)), (True, (1, 2, 3, 8))], 2
        ):
            subscriber.update()
            saved.append(_save_rows(tmp_path / str(number), baseline if is_on_baseline else saved[-1], rows))
            applied = subscriber.update()
            assert applied is not None
            kinds.append((applied.kind, applied.num_rows))
            assert torch.equal(model.t, cnr.load_table(tmp_path / str(number), "t"))
    assert kinds == [("delta", 3), ("delta", 1), ("delta", 5), ("baseline", 40), ("delta", 4)]
