"""Imports: a stock checkpoint becomes a baseline with the same values, and nothing in it runs or is believed unseen."""

import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

import torchrec_cnr as cnr
from tests.support import models, without_us
from tests.support.faults import small_files
from tests.support.models import Whole, state, torchrec_job, train, whole
from tests.support.ranks import RankPools
from torchrec_cnr.format.manifest import DTYPES
from torchrec_cnr.maintenance.dcp_import.import_checkpoint import import_checkpoint
from torchrec_cnr.maintenance.export import contents
from torchrec_cnr.maintenance.export.export import export

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def _loaded(path: Path | str, like: dict[str, Any]) -> Whole:
    """What a strict load of everything gives, by FQN."""
    target = torch.utils._pytree.tree_map(lambda v: torch.zeros_like(v) if isinstance(v, Tensor) else "?", like)
    dcp.load(target, storage_reader=cnr.CNRStorageReader(path), planner=cnr.CNRLoadPlanner())
    return flatten_state_dict(target)[0]


def _save(path: Path, saved: dict[str, Any], **options: Any) -> None:
    dcp.save(saved, storage_writer=FileSystemWriter(path, sync_files=False, **options))


def _tensor(dtype: torch.dtype, size: tuple[int, ...], seed: int, is_view: bool) -> Tensor:
    """A random one; a view has rows that do not follow one another in memory."""
    values = torch.randint(-99, 99, size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return values.t().contiguous().t() if is_view and values.dim() == 2 else values


sizes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
tensors = st.builds(_tensor, st.sampled_from(list(DTYPES.values())), sizes, st.integers(0, 99), st.booleans())
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.tuples(inner, inner),
    max_leaves=3,
)
names = st.text("abcé_ 1", min_size=1, max_size=3)
states = st.dictionaries(
    names,
    # Without empty dictionaries: DCP does not load a list that has one.
    st.recursive(
        tensors | plain, lambda inner: st.dictionaries(names, inner, min_size=1) | st.lists(inner, max_size=3)
    ),
    max_size=4,
)


@pytest.mark.long
@settings(max_examples=30)
@given(states, st.integers(1, 400))
def test_any_state_comes_back_both_ways(
    tmp_path_factory: pytest.TempPathFactory, saved: dict[str, Any], held_bytes: int
) -> None:
    """Stock checkpoint, import, export, import: all load as the nested state that was saved, bit for bit."""
    folder = tmp_path_factory.mktemp("both-ways")
    expected, paths = flatten_state_dict(saved)
    _save(folder / "stock", saved)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(contents, "HELD_BYTES", held_bytes)
        import_checkpoint(folder / "stock", folder / "0")
        export(folder / "0", folder / "exported", to="dcp")
        import_checkpoint(folder / "exported", folder / "1")
        export(folder / "1", folder / "exported.pt", to="torch")
    for path in (folder / "0", folder / "1"):
        assert without_us.differing(_loaded(path, saved), expected) == []
    assert without_us.differing(without_us.load_dcp(folder / "exported", saved), expected) == []
    assert without_us.differing(without_us.load_torch(folder / "exported.pt", saved), expected) == []
    assert FileSystemReader(folder / "exported").read_metadata().planner_data == paths
    assert flatten_state_dict(torch.load(folder / "exported.pt", weights_only=True))[1] == paths


def _save_stock(rank: int, path: str, sharding: str) -> Whole:
    """A stock checkpoint of a sharded model; what it holds."""
    job = torchrec_job(1, sharding)
    train(job, 1)
    saved = {**state(job, place=7), "betas": (0.9, 0.99)}
    dcp.save(saved, storage_writer=FileSystemWriter(path, thread_count=2, sync_files=False))
    return whole(saved)


def _load_imported(rank: int, path: str, sharding: str, policy: cnr.Policy | None) -> Whole:
    """What an import loads as, on ranks; the tracker goes on with deltas of it, which are loaded in turn.

    With a policy, they are saved in the background: what the import does not know of is staged whole.
    """
    job = torchrec_job(2, sharding)
    tracker = cnr.RowTracker(job.model)
    loaded = {**state(job, place=0), "betas": None}
    dcp.load(loaded, storage_reader=cnr.CNRStorageReader(path), planner=cnr.CNRLoadPlanner(tracker))
    found = whole(loaded)
    writer, planner = models.writer(f"{path}-delta"), cnr.CNRSavePlanner(tracker, policy=policy or cnr.Consecutive())
    for number in range(2):
        train(job, 2 + number)
        end, delta = whole(state(job)), f"{path}-delta-{number}"
        if policy is None:
            dcp.save(state(job), checkpoint_id=delta, storage_writer=writer, planner=planner)
        else:
            models.save_behind(state(job), delta, writer, planner).result(timeout=100)
        assert cnr.read_checkpoint(delta).kind == "delta"
        again = state(torchrec_job(3, sharding))
        dcp.load(again, storage_reader=cnr.CNRStorageReader(delta), planner=cnr.CNRLoadPlanner())
        assert models.differing(whole(again), end) == []
    tracker.close()
    return found


@pytest.mark.parametrize(
    ("sharding", "policy"),
    [("mixed", None), ("column", None), ("mixed", cnr.Consecutive()), ("column", cnr.OneShot())],
)
def test_stock_checkpoints_of_ranks_are_imported(
    sharding: str, policy: cnr.Policy | None, tmp_path: Path, rank_pool: RankPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sharded tables, row-wise optimizer state, dense parts and objects, in chunks of a few rows."""
    expected = rank_pool(2).run(_save_stock, str(tmp_path / "stock"), sharding)[0]
    monkeypatch.setattr(contents, "HELD_BYTES", 150)
    imported = import_checkpoint(tmp_path / "stock", tmp_path / "0", thread_count=2)
    assert imported.kind == "baseline"
    assert {fqn for fqn, entry in imported.manifest.tensors.items() if entry.is_table} == {
        fqn for fqn in expected if fqn.startswith("model.e") and fqn.endswith(".weight")
    }
    loaded = rank_pool(2).run(_load_imported, str(tmp_path / "0"), sharding, policy)[0]
    assert models.differing(loaded, expected) == []


def test_tables_are_quantized_as_in_any_save(tmp_path: Path) -> None:
    """By TorchRec's names or by patterns; an import in one chunk has the bytes that a save of the same values has."""
    torch.manual_seed(1)
    saved = {"ebc.embedding_bags.t.weight": torch.rand(300, 16), "mine": torch.rand(300, 16), "bias": torch.rand(9)}
    _save(tmp_path / "stock", saved)
    for number, quantization in enumerate((cnr.AdaptiveAsymmetric(4), {"mine": cnr.KMeans(2)})):
        path = tmp_path / str(number)
        found = import_checkpoint(tmp_path / "stock", path, quantization=quantization)
        dcp.save(saved, storage_writer=models.writer(f"{path}-saved", quantization=quantization))
        assert cnr.read_checkpoint(f"{path}-saved").num_bytes - found.num_bytes in range(-9, 10)  # of ids of saves
        assert without_us.differing(_loaded(path, saved), _loaded(f"{path}-saved", saved)) == []
        exact = [fqn for fqn in saved if torch.equal(cnr.load_table(path, fqn), saved[fqn])]
        assert exact == (["mine", "bias"] if number == 0 else ["ebc.embedding_bags.t.weight", "bias"])


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ("t.weight", "'tables' must be a list"),
        ([1], "'tables' must be a list"),
        ([], "would be fewer tables"),
        (["x*", "y"], "no tensor is named x. or y; pass"),
        (["t.weight", "y"], "no tensor is named y; pass"),
    ],
)
def test_tables_that_are_not_there_are_refused(tables: Any, words: str, tmp_path: Path) -> None:
    """Before anything is written; a vector is no table, whatever its name."""
    _save(tmp_path / "stock", {"t.weight": torch.ones(4, 2), "x": torch.ones(4)})
    with pytest.raises(cnr.ConfigurationError, match=words):
        import_checkpoint(tmp_path / "stock", tmp_path / "0", tables=tables)
    assert not (tmp_path / "0").exists()


def test_rows_that_lie_apart_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposed tensors and those with channels last stay one shard; views and others are divided."""
    base = torch.rand(40, 6)
    saved = {
        "transposed": base.t(),
        "channels": torch.rand(5, 3, 4, 4).to(memory_format=torch.channels_last),
        "rows": base[10:30],
        "columns": base[:, 2:5],
        "expanded": torch.rand(1, 3).expand(7, 3),
        "scalar": base[3, 3],
    }
    assert not saved["transposed"].is_contiguous()
    _save(tmp_path / "stock", saved)
    monkeypatch.setattr(contents, "HELD_BYTES", 100)
    found = import_checkpoint(tmp_path / "stock", tmp_path / "0")
    assert without_us.differing(_loaded(tmp_path / "0", saved), saved) == []
    num_shards = {fqn: len(entry.shards) for fqn, entry in found.manifest.tensors.items()}
    assert num_shards["transposed"] == num_shards["channels"] == num_shards["scalar"] == 1
    assert num_shards["rows"] == 5


def test_views_of_larger_memory_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP saves no more memory than a tensor has; where another writer did, its rows are found all the same."""
    base = torch.rand(40, 6)
    saved = {"rows": base[10:30], "columns": base[:, 2:5], "row": base[7]}
    _save(tmp_path / "stock", saved)
    file = tmp_path / "stock" / "__0_0.distcp"
    for fqn, value in saved.items():
        start = file.stat().st_size
        with file.open("ab") as stream:
            torch.save(value, stream)
        place = {"offset": start, "length": file.stat().st_size - start}
        _change(tmp_path / "stock", lambda metadata, fqn=fqn, place=place: _info(metadata, fqn, **place))
    monkeypatch.setattr(contents, "HELD_BYTES", 100)
    import_checkpoint(tmp_path / "stock", tmp_path / "0")
    assert without_us.differing(_loaded(tmp_path / "0", saved), saved) == []


def test_other_file_systems_are_read(tmp_path: Path) -> None:
    """A checkpoint that DCP wrote to memory is imported to memory."""
    saved = {"a": {"t": torch.rand(30, 4)}, "o": [1, "x"]}
    dcp.save(saved, storage_writer=FsspecWriter(f"memory://{tmp_path}/stock", sync_files=False))
    import_checkpoint(f"memory://{tmp_path}/stock", f"memory://{tmp_path}/0")
    assert without_us.differing(_loaded(f"memory://{tmp_path}/0", saved), flatten_state_dict(saved)[0]) == []


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It grows to the number of bytes of all tensors."""
    monkeypatch.setattr(contents, "HELD_BYTES", 64)
    _save(tmp_path / "stock", {"a": torch.rand(40, 4), "b": torch.ones(3), "o": 1})
    told: list[tuple[int, int]] = []
    import_checkpoint(tmp_path / "stock", tmp_path / "0", progress=lambda done, total: told.append((done, total)))
    assert len(told) > 10
    assert told == sorted(told)
    assert {total for _, total in told} == {40 * 4 * 4 + 12}
    assert told[-1][0] == 40 * 4 * 4 + 12


def test_a_checkpoint_that_is_there_stays(tmp_path: Path) -> None:
    """Nothing is imported over it."""
    _save(tmp_path / "stock", {"t": torch.ones(2)})
    import_checkpoint(tmp_path / "stock", tmp_path / "0")
    before = {file: file.read_bytes() for file in (tmp_path / "0").iterdir()}
    with pytest.raises(cnr.CheckpointExistsError):
        import_checkpoint(tmp_path / "stock", tmp_path / "0")
    assert {file: file.read_bytes() for file in (tmp_path / "0").iterdir()} == before


def test_a_full_disk_commits_nothing(tmp_path: Path) -> None:
    """The error is typed, and the next import goes to the same place."""
    saved = {"t": torch.rand(1000, 16)}
    _save(tmp_path / "stock", saved)
    with small_files(20_000), pytest.raises(cnr.StoreError):
        import_checkpoint(tmp_path / "stock", tmp_path / "0")
    assert cnr.latest(tmp_path) is None
    import_checkpoint(tmp_path / "stock", tmp_path / "0")
    assert without_us.differing(_loaded(tmp_path / "0", saved), saved) == []


class _Runs:
    """What runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class _Foreign:
    """A class of somebody's own."""


def _change(path: Path, change: Callable[[Metadata], Any]) -> None:
    """Rewrite the metadata, or put something in its place."""
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps(change(metadata) or metadata))


@pytest.mark.parametrize("place", ["state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"])
def test_metadata_runs_no_code(place: str, tmp_path: Path) -> None:
    """Whatever a pickle wants to call, and wherever: nothing but DCP's classes is given to it."""
    _save(tmp_path / "stock", {"t": torch.ones(2)})
    ran = tmp_path / "ran"
    values = {
        "posix.mkdir": _Runs(ran),
        "tests.maintenance.test_import_checkpoint._Foreign": _Foreign(),
        "torch.serialization.load": torch.load,
    }
    for name, value in values.items():
        _change(tmp_path / "stock", lambda metadata, value=value: setattr(metadata, place, {"t": value}))
        with pytest.raises(cnr.DamagedError, match=f"names {name}, which"):
            import_checkpoint(tmp_path / "stock", tmp_path / "0")
        assert not ran.exists()
        (tmp_path / "stock" / ".metadata").unlink()
        _save(tmp_path / "stock", {"t": torch.ones(2)})
    pickle.loads(pickle.dumps(_Runs(ran)))
    assert ran.exists()


def test_objects_run_no_code(tmp_path: Path) -> None:
    """One that would is refused, and nothing is committed."""
    _save(tmp_path / "stock", {"t": torch.ones(2), "o": _Runs(tmp_path / "ran")})
    with pytest.raises(cnr.ConfigurationError, match=r"'o' .*add_safe_globals"):
        import_checkpoint(tmp_path / "stock", tmp_path / "0")
    assert not (tmp_path / "ran").exists()
    assert cnr.latest(tmp_path) is None


def test_what_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    """Dtypes that the format does not have, and files written through DCP's extensions."""
    _save(tmp_path / "complex", {"c": torch.ones(2, dtype=torch.complex64)})
    _save(tmp_path / "extended", {"t": torch.ones(2)})
    _change(tmp_path / "extended", lambda metadata: _info(metadata, "t", transform_descriptors=["stream.zstd/1"]))
    for name, words in (("complex", "'c' of torch.complex64"), ("extended", "'t' .*extensions .stream.zstd")):
        with pytest.raises(cnr.ConfigurationError, match=words):
            import_checkpoint(tmp_path / name, tmp_path / "0")
    assert not (tmp_path / "0").exists()


def _info(metadata: Metadata, fqn: str, **values: Any) -> None:
    for index, info in metadata.storage_data.items():
        if index.fqn == fqn:
            vars(info).update(values)


def _entry(metadata: Metadata, **values: Any) -> None:
    vars(metadata.state_dict_metadata["t"]).update(values)


def _chunk(offsets: list[int], sizes: list[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


LIES: dict[str, tuple[Callable[[Metadata], Any], str]] = {
    "a hole": (lambda m: _entry(m, chunks=[_chunk([0, 0], [4, 4])]), "'t' do not fill its size .5, 4."),
    "an overlap": (lambda m: _entry(m, chunks=[_chunk([0, 0], [5, 4]), _chunk([4, 0], [1, 4])]), "do not fill"),
    "outside": (lambda m: _entry(m, chunks=[_chunk([1, 0], [5, 4])]), "do not fill"),
    "negative": (lambda m: _entry(m, chunks=[_chunk([-1, 0], [6, 4])]), "do not fill"),
    "no chunks": (lambda m: _entry(m, chunks=None), "invalid metadata"),
    "another shape": (
        lambda m: _entry(m, size=torch.Size([4, 5]), chunks=[_chunk([0, 0], [4, 5])]),
        r"expected \[4, 5\] of torch.float32, got \[5, 4\] of torch.float32",
    ),
    "another dtype": (
        lambda m: vars(m.state_dict_metadata["t"].properties).update(dtype=torch.int32),
        r"expected .* of torch.int32, got .* of torch.float32",
    ),
    "neither": (lambda m: m.state_dict_metadata.update(t=None), "neither a tensor nor an object"),
    "names": (lambda m: m.state_dict_metadata.update({3: m.state_dict_metadata["t"]}), "names that are not strings"),
    "nowhere": (lambda m: m.storage_data.clear(), "invalid metadata"),
    "anything": (lambda m: m.storage_data.update({MetadataIndex("t", [0, 0]): 3}), "the place of 't' is missing"),
    "above": (lambda m: _info(m, "t", relative_path="../secret"), "must be in a file of the same directory"),
    "absolute": (lambda m: _info(m, "t", relative_path="/etc/passwd"), "must be in a file of the same directory"),
    "missing": (lambda m: _info(m, "t", relative_path="__1_0.distcp"), "__1_0.distcp"),
    "before": (lambda m: _info(m, "t", offset=-1), "the place of 't' is missing"),
    "elsewhere": (lambda m: _info(m, "t", offset=3), "not a tensor from torch.save"),
    "another's": (lambda m: _info(m, "t", **vars(m.storage_data[MetadataIndex("o")])), "not a dense tensor"),
    "short": (lambda m: _info(m, "t", length=700), "not a tensor from torch.save"),
    "an object elsewhere": (lambda m: _info(m, "o", offset=3), "object 'o': not an object from torch.save"),
    "no path": (lambda m: m.planner_data.update(t=()), "no path"),
    "a path of numbers": (lambda m: m.planner_data.update(t=(1,)), "no path"),
    "a path of fractions": (lambda m: m.planner_data.update(t=("t", 1.5)), "no path"),
    "paths": (lambda m: setattr(m, "planner_data", 5), "invalid metadata"),
    "a dictionary": (lambda m: {"t": 1}, "expected DCP's Metadata, got dict"),
}


@pytest.mark.parametrize("lie", LIES)
def test_metadata_is_not_believed(lie: str, tmp_path: Path) -> None:
    """What contradicts itself or the files is refused, with what is wrong, before anything is committed."""
    change, words = LIES[lie]
    _save(tmp_path / "stock", {"t": torch.rand(5, 4), "o": 1})
    import_checkpoint(tmp_path / "stock", tmp_path / "truth" / "0")
    _change(tmp_path / "stock", change)
    with pytest.raises(cnr.DamagedError, match=words):
        import_checkpoint(tmp_path / "stock", tmp_path / "0")
    assert cnr.latest(tmp_path) is None


class _Odd:
    """What is pickled as a tensor [4, 2] whose storage has a number of bytes that is no multiple of its elements'."""

    def __reduce__(self) -> tuple[Any, ...]:
        storage = torch.UntypedStorage(35).fill_(0)
        return torch._utils._rebuild_tensor_v3, (storage, 0, (4, 2), (1, 4), False, OrderedDict(), torch.float32)


@pytest.mark.parametrize(
    ("hostile", "words"),
    [(torch.ones(1, 1).expand(4, 2), r"overlapping values \(4 bytes for 8 values\)"), (_Odd(), None)],
)
def test_storages_that_torch_does_not_write(tmp_path: Path, hostile: object, words: str | None) -> None:
    """Values that overlap would take any amount of memory, and are refused; bytes behind the values are not read."""
    _save(tmp_path / "stock", {"t": torch.ones(4, 2)})
    file = tmp_path / "stock" / "__0_0.distcp"
    torch.save(hostile, file)
    _change(tmp_path / "stock", lambda metadata: _info(metadata, "t", offset=0, length=file.stat().st_size))
    if words is None:
        import_checkpoint(tmp_path / "stock", tmp_path / "0")
        assert torch.equal(cnr.load_table(tmp_path / "0", "t"), torch.zeros(4, 2))
    else:
        with pytest.raises(cnr.DamagedError, match=words):
            import_checkpoint(tmp_path / "stock", tmp_path / "0")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """Missing, cut off, garbage, and a bool that is none: each is a typed error that names the file."""
    _save(tmp_path / "stock", {"t": torch.rand(50, 4), "flags": torch.ones(200).bool(), "o": 1})
    metadata, data = tmp_path / "stock" / ".metadata", tmp_path / "stock" / "__0_0.distcp"
    whole_data, whole_metadata = data.read_bytes(), metadata.read_bytes()
    no_bools = whole_data.replace(b"\1" * 200, b"\1" * 199 + b"\7")
    assert no_bools != whole_data
    for bad in (whole_data[: len(whole_data) // 2], b"", b"x" * len(whole_data), no_bools):
        data.write_bytes(bad)
        with pytest.raises(cnr.DamagedError, match=r"__0_0.distcp"):
            import_checkpoint(tmp_path / "stock", tmp_path / "0")
    data.unlink()
    with pytest.raises(cnr.DamagedError, match=r"missing.*__0_0.distcp"):
        import_checkpoint(tmp_path / "stock", tmp_path / "0")
    data.write_bytes(whole_data)
    for bad in (whole_metadata[:-20], b"", b"x" * 100, whole_data):
        metadata.write_bytes(bad)
        with pytest.raises(cnr.DamagedError, match=r".metadata"):
            import_checkpoint(tmp_path / "stock", tmp_path / "0")
    metadata.unlink()
    for source in (tmp_path / "stock", tmp_path / "nowhere", data):
        with pytest.raises(cnr.CheckpointNotFoundError, match=r".metadata"):
            import_checkpoint(source, tmp_path / "0")
    assert cnr.latest(tmp_path) is None


def _archive(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _compressed(archive: bytes) -> bytes:
    """Its central directory says that a file which is no pickle is compressed."""
    at = archive.rindex(b"archive/byteorder") - 36
    return archive[:at] + b"\x08" + archive[at + 1 :]


AMBIGUOUS: dict[str, Callable[[bytes], bytes]] = {
    "a bare pickle before it": lambda archive: pickle.dumps(bytearray(3), protocol=2) + archive,
    "another archive before it": lambda archive: _archive(torch.full((5, 4), 7.0)) + archive,
    "compressed": _compressed,
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_an_archive_that_torch_may_read_otherwise_is_refused(name: str, tmp_path: Path) -> None:
    """The pickle that is looked through must be the one that torch loads; nothing is unpickled before."""
    _save(tmp_path / "stock", {"t": torch.rand(5, 4)})
    changed = AMBIGUOUS[name](_archive(torch.rand(5, 4)))
    (tmp_path / "stock" / "__0_0.distcp").write_bytes(changed)
    _change(tmp_path / "stock", lambda metadata: _info(metadata, "t", offset=0, length=len(changed)))
    with pytest.raises(cnr.DamagedError, match=r"not a tensor from torch.save \(_Costly\)"):
        import_checkpoint(tmp_path / "stock", tmp_path / "0")


@pytest.mark.parametrize(("tables", "expected"), [(None, [40, 1]), (["*t.weight"], [1, 1])])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_run_goes_on_from_an_import(
    is_async: bool, tables: list[str] | None, expected: list[int], tmp_path: Path
) -> None:
    """A tracker's deltas on top of it load; of tables whose names were not told, the first one has all rows."""
    model = nn.ModuleDict({"t": nn.EmbeddingBag(40, 4)})
    _save(tmp_path / "stock", model.state_dict())
    import_checkpoint(tmp_path / "stock", tmp_path / "0", tables=tables)
    tracker = cnr.RowTracker(model)
    dcp.load(
        model.state_dict(), storage_reader=cnr.CNRStorageReader(tmp_path / "0"), planner=cnr.CNRLoadPlanner(tracker)
    )
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    for number in (1, 2):
        with torch.no_grad():
            model["t"].weight[number] += 1
        tracker.mark("t", torch.tensor([number]))
        writer = models.writer(tmp_path / str(number))
        if is_async:
            models.save_behind(model.state_dict(), str(tmp_path / str(number)), writer, planner).result(timeout=100)
        else:
            dcp.save(model.state_dict(), storage_writer=writer, planner=planner)
    tracker.close()
    assert [cnr.read_checkpoint(tmp_path / str(number)).num_rows for number in (1, 2)] == expected
    assert without_us.differing(_loaded(tmp_path / "2", model.state_dict()), model.state_dict()) == []


def test_a_checkpoint_is_not_imported_into_its_own_directory(tmp_path: Path) -> None:
    """Two formats in one directory: neither reader could be trusted any more."""
    _save(tmp_path / "stock", {"x": torch.ones(3, 2)})
    before = sorted(path.name for path in (tmp_path / "stock").iterdir())
    for path in (tmp_path / "stock", f"{tmp_path}/./stock/"):
        with pytest.raises(cnr.CheckpointExistsError, match="contains a checkpoint in DCP's own format"):
            cnr.import_checkpoint(tmp_path / "stock", path)
    assert sorted(path.name for path in (tmp_path / "stock").iterdir()) == before


def test_a_checkpoint_is_not_imported_where_it_would_hide_others(tmp_path: Path) -> None:
    """Into a root, which would then be taken for a checkpoint; or into a checkpoint, where nobody looks for it."""
    _save(tmp_path / "stock", {"x": torch.ones(3, 2)})
    import_checkpoint(tmp_path / "stock", tmp_path / "run" / "step-1")
    for path, words in ((tmp_path / "run", "is a root"), (tmp_path / "run" / "step-1" / "x", "cannot contain another")):
        with pytest.raises(cnr.ConfigurationError, match=words):
            import_checkpoint(tmp_path / "stock", path)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-1"]
    assert cnr.latest(tmp_path / "run") == str(tmp_path / "run" / "step-1")
    import_checkpoint(tmp_path / "stock", tmp_path / "run" / "step-2")
