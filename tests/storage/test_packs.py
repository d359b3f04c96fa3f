"""Packs: what is written into them is found again, by any reader of safetensors too, and damage is noticed."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from safetensors import safe_open

from tests.support.faults import flip
from torchrec_cnr.errors import DamagedError, StoreError
from torchrec_cnr.format.blob_bytes import Bytes
from torchrec_cnr.format.manifest import DTYPES, Pack
from torchrec_cnr.format.row_sets import Blob
from torchrec_cnr.storage import pack_reader
from torchrec_cnr.storage.pack_reader import PackReader, plan_spans, read_spans
from torchrec_cnr.storage.pack_writer import PackWriter
from torchrec_cnr.storage.store import Store

places = st.floats(0, 1, exclude_max=True)
numbers = count()


@dataclass(frozen=True)
class Written:
    """Packs that were written, and what is in them."""

    store: Store
    contents: list[bytes]
    packs: tuple[Pack, ...]
    blobs: tuple[Blob, ...]

    def read(self, wanted: Sequence[int] | None = None, thread_count: int = 2) -> dict[str, bytes]:
        """Blobs by number."""
        blobs = [(str(n), self.blobs[n]) for n in (range(len(self.blobs)) if wanted is None else wanted)]
        return {key: data.tobytes() for key, data in PackReader(self.store, self.packs, thread_count).read(blobs)}

    def path(self, pack: int) -> Path:
        """A pack's file."""
        return Path(self.store.child(self.packs[pack].name))


def _array(data: bytes) -> Bytes:
    return np.frombuffer(data, dtype=np.uint8)


def _write(store: Store, sizes: Sequence[int], pack_bytes: int = 1000, thread_count: int = 2) -> Written:
    contents = [np.random.default_rng(index).bytes(size) for index, size in enumerate(sizes)]
    writer = PackWriter(store, "save-0", thread_count, pack_bytes)
    for index, content in enumerate(contents):
        assert writer.add(f"blob {index}", "uint8", (len(content),), _array(content)) == index
    written = Written(store, contents, *writer.finish())
    writer.close()
    return written


def _new_store(factory: pytest.TempPathFactory, protocol: str) -> Store:
    name = f"packs-{next(numbers)}"
    store = Store.open(f"memory://{name}" if protocol == "memory" else factory.getbasetemp() / name, sync_files=False)
    store.make()
    return store


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Three packs: of four blobs, of one that is larger than a pack should be, and of two."""
    return _write(Store.open(tmp_path, sync_files=False), [300, 100, 300, 300, 2000, 500, 7])


# Writing and reading


@pytest.mark.parametrize("protocol", ["local", "memory"])
@hypothesis.given(
    st.lists(st.integers(1, 700), max_size=30), st.integers(1, 1500), st.integers(1, 3), st.integers(1, 3)
)
def test_blobs_come_back(
    protocol: str,
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    pack_bytes: int,
    num_writers: int,
    num_readers: int,
) -> None:
    """Whatever the sizes, blobs are read as they were written, and packs are filled up to their limit without holes."""
    written = _write(_new_store(tmp_path_factory, protocol), sizes, pack_bytes, num_writers)
    assert written.read(thread_count=num_readers) == {str(n): data for n, data in enumerate(written.contents)}
    assert written.store.names() == sorted(f"save-0-{number}.safetensors" for number in range(len(written.packs)))
    for index, pack in enumerate(written.packs):
        inside = sorted((b.offset, b.num_bytes) for b in written.blobs if b.pack == index)
        assert [pack.header_bytes, *(offset + size for offset, size in inside)] == [
            *(o for o, _ in inside),
            pack.num_bytes,
        ]
        assert len(inside) == 1 or pack.num_bytes - pack.header_bytes <= pack_bytes
        assert pack.name == f"save-0-{index}.safetensors"


def test_packs_are_full_before_the_next_begins(written: Written) -> None:
    """Blobs go into a pack until the next would not fit; one that never fits gets a pack of its own."""
    assert [blob.pack for blob in written.blobs] == [0, 0, 0, 0, 1, 2, 2]


def test_only_wanted_blobs_and_their_packs_headers_are_read(written: Written) -> None:
    """Blobs that nobody asked for may be damaged without harm, and so may packs that have nothing else."""
    written.path(1).unlink()
    flip(written.path(0), written.blobs[1].offset)
    assert written.read([0, 2, 6]) == {str(n): written.contents[n] for n in (0, 2, 6)}
    with pytest.raises(DamagedError):
        written.read([0, 1, 2])


def test_headers_are_checked_once_of_packs_that_are_read_from(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage to a header is noticed with the first blob wanted of its pack, and a header is not read again."""
    reads: list[tuple[str, int]] = []
    read_array = Store.read_array

    def note(store: Store, name: str, start: int, stop: int, on_piece: Callable[[Bytes], None]) -> Bytes:
        reads.append((name, start))
        return read_array(store, name, start, stop, on_piece)

    monkeypatch.setattr(Store, "read_array", note)
    reader = PackReader(written.store, written.packs, 1)
    for number in (3, 2, 6):
        assert [key for key, _ in reader.read([("it", written.blobs[number])])] == ["it"]
    assert [name for name, start in reads if start == 0] == [written.packs[0].name, written.packs[2].name]
    flip(written.path(1), 9)
    assert [key for key, _ in reader.read([("it", written.blobs[0])])] == ["it"]
    with pytest.raises(DamagedError, match=r"header of save-0-1\.safetensors: corrupt: crc32c"):
        list(reader.read([("it", written.blobs[4])]))


def test_headers_may_be_left_out_of_small_reads(written: Written) -> None:
    """They are checked as soon as most of a pack has been read, be it blob by blob."""
    flip(written.path(0), 9)
    reader = PackReader(written.store, written.packs, 1, checks_headers=False)
    assert [key for key, _ in reader.read([("it", written.blobs[0])])] == ["it"]
    assert [key for key, _ in reader.read([("it", written.blobs[1])])] == ["it"]
    with pytest.raises(DamagedError, match=r"header of save-0-0\.safetensors: corrupt: crc32c"):
        list(reader.read([("it", written.blobs[2])]))


def test_headers_of_packs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """Packs of several directories may have one name: the header of each is checked."""
    stores = [Store.open(tmp_path / name, sync_files=False) for name in ("here", "there")]
    for store in stores:
        store.make()
    here, there = (_write(store, [10 * number]) for number, store in enumerate(stores, 1))
    packs = (here.packs[0], replace(there.packs[0], directory="../there"))
    assert packs[0].name == packs[1].name
    blobs = [("here", here.blobs[0]), ("there", replace(there.blobs[0], pack=1))]
    assert {key: data.tobytes() for key, data in PackReader(here.store, packs, 2).read(blobs)} == {
        "here": here.contents[0],
        "there": there.contents[0],
    }
    for name, written in [("here", here), ("there", there)]:
        good = written.path(0).read_bytes()
        written.path(0).write_bytes(good[:9] + bytes([good[9] ^ 1]) + good[10:])
        with pytest.raises(DamagedError, match=rf"{name}/save-0-0\.safetensors: header"):
            list(PackReader(here.store, packs, 2).read(blobs))
        written.path(0).write_bytes(good)


@hypothesis.given(st.lists(st.lists(st.integers(0, 6), max_size=4), max_size=4), st.integers(1, 3))
def test_turns_come_one_after_the_other(
    tmp_path_factory: pytest.TempPathFactory, turns: list[list[int]], thread_count: int
) -> None:
    """What is read in a later turn comes after all of the turns before, whatever pack it is in."""
    written = _write(_new_store(tmp_path_factory, "memory"), [300, 100, 300, 300, 2000, 500, 7])
    wanted = [[(f"{turn}-{n}", written.blobs[n]) for n in set(numbers)] for turn, numbers in enumerate(turns)]
    found = [key for key, _ in PackReader(written.store, written.packs, thread_count).read(*wanted)]
    assert found == [f"{turn}-{n}" for turn, numbers in enumerate(turns) for n in sorted(set(numbers))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors_opens_packs(tmp_path: Path, dtype: str) -> None:
    """The safetensors library reads each dtype, with the shape and the values that were stored."""
    writer = PackWriter(Store.open(tmp_path, sync_files=False), "s", 1)
    tensors = {
        f"{dtype}{list(size)}": torch.arange(24).reshape(-1)[: int(np.prod(size))] for size in [(2, 3), (24,), ()]
    }
    for name, tensor in tensors.items():
        size = tuple(int(n) for n in name.removeprefix(dtype)[1:-1].split(",") if n)
        tensors[name] = (tensor % 2 if dtype == "bool" else tensor).to(DTYPES[dtype]).reshape(size)
        data = tensors[name].reshape(-1).view(torch.uint8).numpy()
        writer.add(name, dtype, size, data)
    writer.add("codes", "uint8", (5,), _array(b"\1\2\3\4\5"))
    (pack,), _ = writer.finish()
    writer.close()
    with safe_open(tmp_path / pack.name, framework="pt") as file:
        assert sorted(file.keys()) == sorted([*tensors, "codes"])
        assert file.get_tensor("codes").tolist() == [1, 2, 3, 4, 5]
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert found.equal(tensor)


@pytest.mark.parametrize("names", [["a", "a"], ["__metadata__", "b"], ['"\\\n', "\0é\U0001f600"], ["", " "]])
def test_safetensors_opens_packs_whatever_the_names(tmp_path: Path, names: list[str]) -> None:
    """Names are for people: odd, reserved or equal ones make no file that other readers refuse."""
    writer = PackWriter(Store.open(tmp_path, sync_files=False), "s", 1)
    for number, name in enumerate(names):
        writer.add(name, "uint8", (3,), _array(bytes([number] * 3)))
    (pack,), _ = writer.finish()
    writer.close()
    with safe_open(tmp_path / pack.name, framework="np") as file:
        assert sorted(file.get_tensor(name).tolist() for name in file.keys()) == [[0] * 3, [1] * 3]  # noqa: SIM118


def test_blobs_are_aligned_to_their_elements(tmp_path: Path) -> None:
    """Wider elements come first, so that each blob can be mapped as an array of its dtype."""
    writer = PackWriter(Store.open(tmp_path, sync_files=False), "s", 1)
    dtypes = ["uint8", "float64", "bool", "bfloat16", "int64", "float32", "int16", "uint8", "float16"]
    for number, dtype in enumerate(dtypes):
        writer.add(str(number), dtype, (3,), torch.zeros(3, dtype=DTYPES[dtype]).view(torch.uint8).numpy())
    (pack,), blobs = writer.finish()
    writer.close()
    assert pack.header_bytes % 8 == 0
    assert [blob.offset % DTYPES[dtype].itemsize for blob, dtype in zip(blobs, dtypes, strict=True)] == [0] * len(
        dtypes
    )


@pytest.mark.parametrize("thread_count", [1, 3])
def test_failed_writes_are_reported(tmp_path: Path, thread_count: int) -> None:
    """A pack that cannot be written fails the save with a typed error, and no thread is left."""
    writer = PackWriter(Store.open(tmp_path / "not made", sync_files=False), "s", thread_count, 100)

    def write() -> None:
        for number in range(10):
            writer.add(str(number), "uint8", (60,), _array(bytes(60)))
        writer.finish()

    with pytest.raises(StoreError, match=r"cannot write .*s-0\.safetensors"):
        write()
    writer.close()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("cnr-write")] == []


def test_no_more_packs_are_held_than_are_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded: adding waits while ``thread_count`` packs are on their way."""
    waiting, most, gate = set(), [0], threading.Semaphore(0)

    def put(_: Store, name: str, parts: object) -> None:
        waiting.add(name)
        most[0] = max(most[0], len(waiting))
        gate.acquire(timeout=10)
        waiting.remove(name)

    monkeypatch.setattr(Store, "put", put)
    writer = PackWriter(Store.open(tmp_path, sync_files=False), "s", 2, 100)
    added: list[int] = []

    def add_all() -> None:
        for number in range(8):
            added.append(writer.add(str(number), "uint8", (100,), _array(bytes(100))))  # noqa: PERF401 - seen from outside
        writer.finish()

    thread = threading.Thread(target=add_all)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert len(added) <= 3  # two are being written, a third is full, and the fourth waits
    for _ in range(8):
        gate.release()
    thread.join(10)
    writer.close()
    assert (len(added), most[0]) == (8, 2)


# Spans


@st.composite
def _wanted(draw: st.DrawFn) -> list[tuple[str, Blob]]:
    """Blobs of several packs, some far apart, in any order."""
    limits = [pack_reader._FREE_GAP_BYTES, pack_reader._SPAN_GAP_BYTES]
    steps = st.sampled_from([0, 1, 1000, *limits, *(limit + 1 for limit in limits), 10**5, 10**9])
    sizes = st.sampled_from(
        [1, 50, 10**5, 10**6, pack_reader._SPAN_BYTES - 1, pack_reader._SPAN_BYTES, pack_reader._SPAN_BYTES + 1]
    )
    blobs = []
    for pack in range(draw(st.integers(0, 3))):
        end = 100
        for step, size in draw(st.lists(st.tuples(steps, sizes), max_size=12)):
            blobs.append(Blob(pack, end + step, size, 0))
            end += step + size
    return [(str(number), blob) for number, blob in enumerate(draw(st.permutations(blobs)))]


@hypothesis.given(_wanted())
def test_spans_hold_every_blob_once(wanted: list[tuple[str, Blob]]) -> None:
    """Each blob wanted lies in exactly one span of its pack, whole."""
    spans = plan_spans(wanted)
    assert sorted(item[0] for span in spans for item in span.blobs) == sorted(key for key, _ in wanted)
    for span in spans:
        assert {blob.pack for _, blob in span.blobs} == {span.pack}
        assert span.start == min(blob.offset for _, blob in span.blobs)
        assert span.stop == max(blob.offset + blob.num_bytes for _, blob in span.blobs)


@hypothesis.given(_wanted())
def test_spans_are_few_and_bounded(wanted: list[tuple[str, Blob]]) -> None:
    """A span is no longer than its limit unless one blob is, and no blob could be in the span before."""
    spans = plan_spans(wanted)
    for span in spans:
        assert len(span.blobs) == 1 or span.stop - span.start <= pack_reader._SPAN_BYTES
        assert all(0 <= gap <= pack_reader._SPAN_GAP_BYTES for gap in _gaps(span))
    for span, following in pairwise(spans):
        assert (span.pack, span.start) < (following.pack, following.start)
        if span.pack == following.pack:
            blob = following.blobs[0][1]
            gap = following.start - span.stop
            num_wanted = blob.num_bytes + sum(blob.num_bytes for _, blob in span.blobs)
            is_far = gap > pack_reader._SPAN_GAP_BYTES or (
                gap > pack_reader._FREE_GAP_BYTES and gap + sum(_gaps(span)) > num_wanted // pack_reader._GAP_DIVISOR
            )
            assert is_far or blob.offset + blob.num_bytes - span.start > pack_reader._SPAN_BYTES


@hypothesis.given(_wanted())
def test_what_is_read_in_vain_is_bounded(wanted: list[tuple[str, Blob]]) -> None:
    """Gaps add an eighth of the bytes wanted at most, but for those that are next to nothing."""
    for span in plan_spans(wanted):
        num_wanted = sum(blob.num_bytes for _, blob in span.blobs)
        num_free = sum(gap for gap in _gaps(span) if gap <= pack_reader._FREE_GAP_BYTES)
        assert span.stop - span.start <= num_wanted + num_wanted // 8 + num_free


def _gaps(span: pack_reader.Span) -> list[int]:
    return [b.offset - a.offset - a.num_bytes for (_, a), (_, b) in pairwise(span.blobs)]


# Damage


@pytest.mark.long
@hypothesis.given(place=places, bit=st.integers(0, 7), pack=st.integers(0, 2))
def test_any_flipped_bit_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, place: float, bit: int, pack: int
) -> None:
    """A bit flipped in a header or a blob is noticed, and the error names the pack."""
    written = _write(_new_store(tmp_path_factory, "local"), [300, 100, 300, 300, 2000, 500, 7])
    flip(written.path(pack), int(place * written.path(pack).stat().st_size), bit)
    with pytest.raises(DamagedError, match=rf"save-0-{pack}\.safetensors.*crc32c is 0x\w+, the manifest says"):
        written.read()


@hypothesis.given(place=places, pack=st.integers(0, 2))
def test_any_truncation_is_noticed(tmp_path_factory: pytest.TempPathFactory, place: float, pack: int) -> None:
    """A pack cut short anywhere is noticed."""
    written = _write(_new_store(tmp_path_factory, "local"), [300, 100, 300, 300, 2000, 500, 7])
    data = written.path(pack).read_bytes()
    written.path(pack).write_bytes(data[: int(place * len(data))])
    with pytest.raises(DamagedError, match=rf"save-0-{pack}\.safetensors.*truncated"):
        written.read()


@pytest.mark.parametrize("protocol", ["local", "memory"])
def test_missing_pack_is_damage(protocol: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A pack that is gone makes the checkpoint a damaged one, in any file system."""
    written = _write(_new_store(tmp_path_factory, protocol), [300, 2000])
    written.store.fs.rm(written.store.child(written.packs[1].name))
    assert written.read([0]) == {"0": written.contents[0]}
    with pytest.raises(DamagedError, match=r"save-0-1\.safetensors: the data file is missing"):
        written.read([0, 1])


def test_unreadable_pack_is_no_damage(written: Written) -> None:
    """Where the store fails, the error says so, and blames no checkpoint."""
    written.path(1).unlink()
    written.path(1).mkdir()
    with pytest.raises(StoreError, match=r"cannot read .*save-0-1\.safetensors"):
        written.read()


def _threads_that_read(others: set[threading.Thread]) -> list[str]:
    return [thread.name for thread in set(threading.enumerate()) - others if thread.name.startswith("cnr-read")]


def test_abandoned_reads_end(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that stops in the middle leaves no thread behind."""
    monkeypatch.setattr(pack_reader, "_QUICK_BYTES", 0)
    others = set(threading.enumerate())
    spans = [span for blob in written.blobs for span in plan_spans([("key", blob)])]
    reads = read_spans(written.store, written.packs, spans, thread_count=2)
    next(reads)
    assert _threads_that_read(others) != []
    del reads
    assert _threads_that_read(others) == []


def test_small_reads_of_local_files_use_no_threads(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one span of any size. Several large ones do; what is read is the same."""
    others = set(threading.enumerate())
    spans = [span for blob in written.blobs for span in plan_spans([("key", blob)])]
    assert len(spans) > 1
    found = []
    for quick_bytes, some_spans, has_threads in ((1 << 20, spans, False), (0, spans[:1], False), (0, spans, True)):
        monkeypatch.setattr(pack_reader, "_QUICK_BYTES", quick_bytes)
        reads = read_spans(written.store, written.packs, some_spans, thread_count=2)
        first = next(reads)
        assert (_threads_that_read(others) != []) == has_threads
        found.append([data.tobytes() for _, data in (first, *reads)])
    assert found[0] == found[2]
    assert found[1] == found[2][:1]
