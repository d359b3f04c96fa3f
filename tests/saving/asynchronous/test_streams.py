"""Training in a stream of its own, and saves and loads in another: no value is read before it is written."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import torchrec_cnr as cnr
from tests.support import faults, models
from torchrec_cnr import sharding
from torchrec_cnr.loading import reader
from torchrec_cnr.saving import cut, rank_writer, staging
from torchrec_cnr.serving import served_model

load_table = import_module("torchrec_cnr.reading.load_table")  # whose package has a function of its name

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Stream:
    """Work that a device has not done yet; it is done, at the latest, when somebody waits for the tensors."""

    def __init__(self, tensor: Tensor) -> None:
        self._values = tensor.detach().numpy()  # writes to which move no counter, as those of a kernel
        self._work: list[Callable[[], None]] = []
        self.seen: list[float] = []  # the first value, whenever it was waited for

    def add(self, value: float) -> None:
        """Overwrite the tensor later."""
        self._work.append(lambda: self._values.fill(value))

    def wait(self, items: Any) -> None:
        """In the place of ``sharding.wait_for_devices``."""
        shards = [shard.tensor for item in items for shard in sharding.local_shards(item)]
        if any(shard.data_ptr() == self._values.ctypes.data for shard in shards):
            while self._work:
                self._work.pop()()
            self.seen.append(float(self._values.flat[0]))


@pytest.fixture
def table() -> nn.EmbeddingBag:
    """A model with one table of zeros."""
    model = nn.EmbeddingBag(8, 4)
    nn.init.zeros_(model.weight)
    return model


@pytest.fixture
def stream(table: nn.EmbeddingBag, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    """A stream in which the table is trained."""
    found = Stream(table.weight)
    for module in (cut, rank_writer, staging, reader, load_table, served_model):
        monkeypatch.setattr(module, "wait_for_devices", found.wait)
    yield found
    assert found._work == []


def test_each_device_with_a_tensor_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, whichever device is the current one; a device without tensors is not waited for."""
    waits: list[torch.device | None] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waits.append(device))
    with FakeTensorMode():  # the devices need not be there
        sharding.wait_for_devices([torch.empty(2, device=device) for device in ("cuda:2", "cpu", "cuda:1", "cuda:2")])
    assert sorted(map(str, waits)) == ["cuda:1", "cuda:2"]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("planner", ["tracker", "no tracker", "DCP's"])
def test_a_save_holds_what_was_being_written(
    tmp_path: Path, table: nn.EmbeddingBag, stream: Stream, planner: str, is_async: bool
) -> None:
    """It waits for all streams before it reads a value, whatever the planner is."""
    tracker = cnr.RowTracker(table)
    planners = {
        "tracker": lambda: cnr.CNRSavePlanner(tracker),
        "no tracker": cnr.CNRSavePlanner,
        "DCP's": DefaultSavePlanner,
    }
    options: Any = {"storage_writer": models.writer(tmp_path / "0"), "planner": planners[planner]()}
    stream.add(3.0)
    if is_async:
        future: Any = dcp.async_save(table.state_dict(), **options)
        future.result()
    else:
        dcp.save(table.state_dict(), **options)
    assert stream.seen[0] == 3.0
    assert cnr.load_table(tmp_path / "0", "weight").unique().tolist() == [3.0]
    tracker.close()


def test_a_load_overwrites_what_was_being_written(tmp_path: Path, table: nn.EmbeddingBag, stream: Stream) -> None:
    """It waits for all streams before it writes, and after it: training may go on in any."""
    dcp.save({"weight": torch.ones(8, 4)}, storage_writer=models.writer(tmp_path / "0"))
    stream.add(3.0)
    dcp.load(table.state_dict(), storage_reader=cnr.CNRStorageReader(tmp_path / "0"), planner=cnr.CNRLoadPlanner())
    assert table.weight.unique().tolist() == [1.0]
    assert stream.seen == [3.0, 1.0]


def test_a_table_is_read_over_what_was_being_written(tmp_path: Path, table: nn.EmbeddingBag, stream: Stream) -> None:
    """The same where load_table has a tensor to write to."""
    dcp.save({"weight": torch.ones(8, 4)}, storage_writer=models.writer(tmp_path / "0"))
    stream.add(3.0)
    cnr.load_table(tmp_path / "0", "weight", out=table.weight)
    assert table.weight.unique().tolist() == [1.0]
    assert stream.seen == [3.0, 1.0]


def test_rows_are_swapped_in_between_the_lookups_of_all_streams(
    tmp_path: Path, table: nn.EmbeddingBag, stream: Stream
) -> None:
    """A lookup on a device goes on after its forward has returned."""
    dcp.save({"model": {"weight": torch.ones(8, 4)}}, storage_writer=models.writer(tmp_path / "0"))
    subscriber = cnr.RowSubscriber(table, tmp_path)
    stream.add(3.0)
    assert subscriber.update() is not None
    subscriber.close()
    assert table.weight.unique().tolist() == [1.0]
    assert stream.seen == [3.0, 1.0]


@pytest.mark.parametrize("fails", [False, True])
def test_marks_are_changed_after_those_of_all_streams(
    tmp_path: Path, table: nn.EmbeddingBag, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """By a cut, and by the outcome of a save; and before marks that training makes afterwards, in any stream."""
    tracker = cnr.RowTracker(table)
    planner = cnr.CNRSavePlanner(tracker)
    marked, calls = tracker.shards[0].rows.marked, list[str]()

    def wait(items: Iterable[Tensor]) -> None:
        calls.extend("wait" for item in items if item is marked)

    monkeypatch.setattr(cut, "wait_for_devices", wait)
    for name in ("freeze", "commit", "rollback"):
        original = getattr(tracker, name)

        def told(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> None:
            calls.append(name)
            original(*args, **kwargs)

        monkeypatch.setattr(tracker, name, told)
    writer = models.writer(tmp_path / "0")
    if fails:
        monkeypatch.setattr(writer, "finish", faults.raising("finish"))
    with pytest.raises(CheckpointException) if fails else nullcontext():
        dcp.save(table.state_dict(), storage_writer=writer, planner=planner)
    planner.resolve_last_save()
    outcome = "rollback" if fails else "commit"
    assert "-".join(calls).endswith(f"wait-freeze-wait-wait-{outcome}-wait")
    tracker.close()


@pytest.mark.gpu
@pytest.mark.parametrize("is_async", [False, True])
def test_saves_outside_the_stream_that_trains(tmp_path: Path, is_async: bool) -> None:
    """On a GPU whose stream is behind, a save in the default stream holds what was written last."""
    model = nn.EmbeddingBag(1000, 8, device="cuda")
    tracker, training = cnr.RowTracker(model), torch.cuda.Stream()
    options: Any = {"storage_writer": models.writer(tmp_path / "0"), "planner": cnr.CNRSavePlanner(tracker)}
    with torch.cuda.stream(training), torch.no_grad():
        torch.cuda._sleep(1_000_000_000)
        model.weight.fill_(3.0)
    if is_async:
        future: Any = dcp.async_save(model.state_dict(), **options)
        future.result()
    else:
        dcp.save(model.state_dict(), **options)
    assert cnr.load_table(tmp_path / "0", "weight").unique().tolist() == [3.0]
    tracker.close()
