"""No lookup sees half of an update."""

import copy
import io
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchrec.inference.modules import quantize_embeddings

import torchrec_cnr as cnr
from tests.loading.quantized_models import float_model, load, looked_up
from tests.serving.served_models import DIM, NUM_ROWS, SCHEMES, Served, all_rows, following, save_tables, wait_until
from tests.support import faults, hand_made
from tests.support.hand_made import some_rows
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.serving.forward_lock import ForwardLock, share_forwards
from torchrec_cnr.serving.update_rows import UpdateRows

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
]


def _save_step(root: Path, step: int, parent: Checkpoint | None) -> Checkpoint:
    rows = torch.full((NUM_ROWS, DIM), float(step))
    contents = {
        f"model.ebc.embedding_bags.{name}.weight": hand_made.whole(rows, is_table=True)
        if parent is None
        else some_rows(rows, range(NUM_ROWS))
        for name in ("a", "b")
    }
    return hand_made.write(root / f"step-{step}", contents, parent=parent)


def _swap_in_halves(self: UpdateRows) -> None:
    """As it is, but slowly enough that a lookup which does not wait falls in between."""
    half = len(self.rows) // 2
    self.tensor.index_copy_(0, self.rows[:half], self.values[:half])
    time.sleep(0.003)
    self.tensor.index_copy_(0, self.rows[half:], self.values[half:])


def _torn_lookups(root: Path, model: nn.Module, num_steps: int, look_up: Callable[[], Tensor]) -> tuple[int, int]:
    """Look all rows up while steps are applied; how many lookups there were, and how many saw several steps."""
    newest, steps, num_torn = _save_step(root, 0, None), [], 0
    is_over = threading.Event()

    def look() -> None:
        nonlocal num_torn
        while not is_over.is_set():
            with torch.no_grad():
                rows = look_up()
            steps.append(float(rows[0, 0]))
            num_torn += bool((rows != rows[0, 0]).any())

    with following(model, root) as subscriber:
        subscriber.update()
        thread = threading.Thread(target=look)
        thread.start()
        try:
            for step in range(1, num_steps):
                newest = _save_step(root, step, newest)
                applied = subscriber.update()
                assert applied is not None
                assert (applied.kind, applied.num_rows) == ("delta", 2 * NUM_ROWS)
        finally:
            is_over.set()
            thread.join()
    assert len(set(steps)) > 1
    assert steps == sorted(steps)
    return len(steps), num_torn


@pytest.mark.long
@pytest.mark.parametrize("kind", ["float", "quantized", "a module within"])
def test_no_lookup_sees_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Hundreds of deltas while all rows are looked up: each lookup is of one step, in both tables."""
    monkeypatch.setattr(UpdateRows, "swap_in", _swap_in_halves)
    model = quantize_embeddings(Served(), torch.qint8, inplace=False) if kind == "quantized" else Served()
    features = all_rows()
    look_up = (lambda: model.ebc(features).values()) if kind == "a module within" else (lambda: model(features))
    num_lookups, num_torn = _torn_lookups(tmp_path, model, 150, look_up)
    assert num_lookups > 50
    assert num_torn == 0


@pytest.mark.long
def test_without_the_lock_lookups_are_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above sees what it looks for: with nothing to hold lookups off, some see two steps."""
    monkeypatch.setattr(UpdateRows, "swap_in", _swap_in_halves)
    monkeypatch.setattr(ForwardLock, "exclusive", lambda self: nullcontext())
    model, features = Served(), all_rows()
    assert _torn_lookups(tmp_path, model, 60, lambda: model(features))[1] > 0


def test_a_forward_that_fails_holds_nothing_off(tmp_path: Path) -> None:
    """The next swap does not wait for it; from within a forward, none can be waited for."""
    save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    model = float_model(1)
    with following(model, tmp_path) as subscriber:
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever TorchRec says to this
            model("nothing")
        with subscriber.looking_up(), pytest.raises(cnr.ConfigurationError, match="within a lookup"):
            subscriber.update()
        assert subscriber.update() is not None


def test_a_replay_of_a_cuda_graph_is_a_lookup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is swapped into any of the models that are followed meanwhile; afterwards replays are as they were."""
    graphs, models = [object(), object()], [float_model(1), float_model(2)]
    replayed: list[object] = []
    refused: list[str] = []
    subscribers: list[cnr.RowSubscriber] = []

    def replay(graph: object) -> None:
        replayed.append(graph)
        for subscriber in subscribers:
            with pytest.raises(cnr.ConfigurationError, match="within a lookup") as error:
                subscriber.update()
            refused.append(str(error.value))

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay)
    save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    with following(models[0], tmp_path) as first, following(models[1], tmp_path) as second:
        subscribers += [first, second]
        torch.cuda.CUDAGraph.replay(graphs[0])  # type: ignore[arg-type]
        assert len(refused) == 2
        subscribers.clear()
    torch.cuda.CUDAGraph.replay(graphs[1])  # type: ignore[arg-type]
    assert replayed == graphs
    assert torch.cuda.CUDAGraph.replay is replay


@pytest.mark.long
def test_a_lookup_may_wait_for_another_one() -> None:
    """A lookup that one which has begun waits for, in another thread, is not held off for ever."""
    lookups, done = ForwardLock(), []

    def swap() -> None:
        with lookups.exclusive():
            done.append("swap")

    def look() -> None:
        with lookups.shared():
            done.append("lookup")

    swapping, looking = threading.Thread(target=swap), threading.Thread(target=look)
    with lookups.shared():
        swapping.start()
        wait_until(lambda: lookups._num_waiting == 1)
        looking.start()
        looking.join(30)
        assert done == ["lookup"]
    swapping.join(30)
    assert done == ["lookup", "swap"]


@pytest.mark.parametrize("is_saved", [False, True], ids=["deepcopy", "torch.save"])
def test_a_copy_of_a_served_model_looks_up_in_itself(is_saved: bool) -> None:
    """Not in the original, whose lookups wait for swaps."""
    model = nn.Sequential(nn.EmbeddingBag(4, 2))
    lookups, file = ForwardLock(), io.BytesIO()
    hooks = share_forwards(model, lookups)
    if is_saved:
        torch.save(model, file)
        file.seek(0)
    other = torch.load(file, weights_only=False) if is_saved else copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.fill_(100.0)
    with lookups.exclusive():
        assert bool((other(torch.tensor([[1, 2]])) == 100.0).all())
    hooks.remove()


def test_a_swap_that_fails_is_made_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a swap ended half-way, everything is read again at the next update."""
    first = save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    model = float_model(1)
    with following(model, tmp_path) as subscriber:
        subscriber.update()
        save_tables(tmp_path / "1", 1, SCHEMES[2], first, 0.5)
        with monkeypatch.context() as patch:
            patch.setattr(UpdateRows, "swap_in", faults.raising("swap"))
            with pytest.raises(faults.InjectedError):
                subscriber.update()
        applied = subscriber.update()
        assert applied is not None
        assert applied.kind == "baseline"
    expected = load(float_model(2), tmp_path / "1")
    assert all(torch.equal(rows, expected[table]) for table, rows in looked_up(model).items())


def test_a_checkpoint_is_applied_while_the_next_is_swapped_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Monitoring that reads ``applied`` in that moment gets the checkpoint before, as lookups do."""
    first = save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    seen: list[str | None] = []
    with following(float_model(1), tmp_path) as subscriber:
        subscriber.update()
        save_tables(tmp_path / "1", 1, SCHEMES[2], first, 0.5)
        swap_in = UpdateRows.swap_in
        monkeypatch.setattr(UpdateRows, "swap_in", lambda rows: (seen.append(subscriber.applied), swap_in(rows)))
        subscriber.update()
        assert set(seen) == {str(tmp_path / "0")}
        assert subscriber.applied == str(tmp_path / "1")
