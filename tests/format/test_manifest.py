"""The manifest: what is written is read back, and whatever else is read is refused with a typed error."""

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import zstandard
from hypothesis import strategies as st

from tests.golden import mixed, reader
from torchrec_cnr.errors import DamagedError, VersionError
from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.blob_bytes import exact_row_bytes
from torchrec_cnr.format.boxes import Box, fills
from torchrec_cnr.format.manifest import (
    DTYPES,
    CheckpointRef,
    History,
    LogRange,
    Manifest,
    Pack,
    Place,
    Shard,
    TensorEntry,
)
from torchrec_cnr.format.manifest_json import compressed_body
from torchrec_cnr.format.row_sets import Blob, RowBlock, RowSet
from torchrec_cnr.quantization import Asymmetric, KMeans, NoQuantization, Scheme

Json = Any
EXACT = NoQuantization()
SCHEMES: list[Scheme] = [
    EXACT,
    Asymmetric(2),
    Asymmetric(4),
    Asymmetric(8),
    Asymmetric(4, entropy_coded=True),
    *mixed.SCHEMES,
]
GOLDEN = Path(__file__).parents[1] / "golden" / "v1"
TRANSFORMED = GOLDEN.parent / "v1_transformed"
START_BYTES = 512  # of a manifest file, in which its time of commit lies


class Filler:
    """Lays blobs out in packs, one behind the other."""

    def __init__(self, save_id: str, pack_bytes: int, directories: tuple[str | None, ...] = (None,)) -> None:
        self.save_id = save_id
        self.pack_bytes = pack_bytes
        self.directories = directories  # of the packs, in turn
        self.ends: list[int] = []
        self.hole_bytes = 0  # behind each pack's last blob

    def blob(self, num_bytes: int, hole_bytes: int = 0) -> Blob:
        if not self.ends or self.ends[-1] > self.pack_bytes:
            self.ends.append(64)
        self.ends[-1] += hole_bytes + num_bytes
        return Blob(len(self.ends) - 1, self.ends[-1] - num_bytes, num_bytes, 0xC0FFEE)

    def packs(self) -> tuple[Pack, ...]:
        names = (f"{self.save_id}-0-{number}.safetensors" for number in range(len(self.ends)))
        return tuple(
            Pack(name, end + self.hole_bytes, 64, 7, self.directories[number % len(self.directories)])
            for number, (name, end) in enumerate(zip(names, self.ends, strict=True))
        )


def delta(scheme: Scheme = EXACT, is_split: bool = False) -> Manifest:
    """A small delta with something of everything, and a table of two shards, the second under this scheme.

    Args:
        scheme: Of the second shard.
        is_split: Whether the blob of its state is split.
    """
    filler = Filler("5a7e", 10_000)
    exact, place, width = EXACT, Box((0, 0), (8, 2)), scheme.row_bytes(1, torch.float32)
    coded = RowSet((RowBlock("bitmap", 1, 4, 2, filler.blob(11)), RowBlock("gaps", 7, 1, 1, filler.blob(9))))
    table = (
        Shard(place, coded, (filler.blob(2 * 6), filler.blob(6 + 12)), Asymmetric(4)),
        Shard(Box((0, 2), (8, 1)), RowSet.all(8, 5), (filler.blob(5 * width), filler.blob(3 * width)), scheme),
    )
    state = (
        Shard(Box((0,), (8,)), coded, (filler.blob(8), filler.blob(4)), exact, place),
        Shard(Box((8,), (8,)), RowSet.all(8, 8), (filler.blob(20 if is_split else 32),), exact, Box((0, 2), (8, 1))),
    )
    step = (Shard(Box((), ()), RowSet.all(1, 1), (filler.blob(8),), exact),)
    return Manifest(
        created_ns=2,
        checkpoint_id="step-2",
        save_id="5a7e",
        parent=CheckpointRef("../step-1", "ab" * 32),
        policy="Consecutive",
        history=History(1000, (500, 300)),
        num_restores=3,
        world_size=2,
        writer="tests",
        tensors={
            "step": TensorEntry("int64", (), step),
            "table": TensorEntry("float32", (8, 3), table, is_table=True),
            "table.state": TensorEntry("float32", (16,), state, table="table"),
        },
        objects={"reader": filler.blob(77)},
        paths={"step": ("step",), "reader": ("list", 3)},
        packs=filler.packs(),
    )


def replacement(is_split: bool = False) -> Manifest:
    """The delta folded into a baseline: shards overlap, packs of three directories have holes, a blob is shared.

    Args:
        is_split: Whether the blob of a table's shard is split.
    """
    filler = Filler("5a7e", 150, (None, "../step-1", "../../old/step-0"))
    filler.hole_bytes = 5
    whole, left, right = Box((0, 0), (8, 3)), Box((0, 0), (8, 2)), Box((0, 2), (8, 1))
    ends = RowSet((RowBlock("all", 0, 3, 3, None), RowBlock("all", 6, 2, 2, None)))
    first, second = RowBlock("bitmap", 1, 4, 2, filler.blob(11)), RowBlock("gaps", 7, 1, 1, filler.blob(9, 3))
    table = (
        Shard(whole, ends, (filler.blob(36), filler.blob(24, 100)), EXACT),
        Shard(left, RowSet((first, second)), (filler.blob(2 * 6), filler.blob(6 + 12)), Asymmetric(4)),
        Shard(right, RowSet.all(8, 8), (filler.blob(20 if is_split else 32),), EXACT),
    )
    state = (
        Shard(Box((0,), (8,)), ends, (filler.blob(12), filler.blob(8)), EXACT, whole),
        Shard(Box((0,), (8,)), RowSet((second,)), (filler.blob(4, 40),), EXACT, left),
        Shard(Box((8,), (8,)), RowSet.all(8, 8), (filler.blob(32),), EXACT, right),
        Shard(Box((16,), (0,)), RowSet(()), (), EXACT),
    )
    places = (Place(Box((0,), (8,)), left), Place(Box((8,), (8,)), right), Place(Box((16,), (0,))))
    step = (Shard(Box((), ()), RowSet.all(1, 1), (filler.blob(8),), EXACT),)
    tensors = {
        "step": TensorEntry("int64", (), step),
        "table": TensorEntry("float32", (8, 3), table, is_table=True, folded=(Place(left), Place(right))),
        "table.state": TensorEntry("float32", (16,), state, table="table", folded=places),
    }
    objects = {"reader": filler.blob(77)}
    return replace(
        delta(), parent=None, replaces="cd" * 32, tensors=tensors, objects=objects, packs=filler.packs(), save_id="f01d"
    )


def logged(manifest: Manifest) -> Manifest:
    """The same with its first pack in a log, and what else lies in its own directory, too, in other partitions."""
    own = [pack for pack in manifest.packs if pack.directory is None]
    ranges = {pack.name: LogRange("rows.of-1", n, 2**40, 2**40 + 9, 50) for n, pack in enumerate(own)}
    packs = tuple(replace(p, log=ranges[p.name]) if p.directory is None else p for p in manifest.packs)
    return replace(manifest, packs=packs)


def body_of(manifest: Manifest) -> Json:
    """A manifest as parsed JSON."""
    return json.loads(manifest_json.dumps(manifest)[0])["manifest"]


def _golden_body(pattern: str) -> Json:
    (path,) = TRANSFORMED.glob(pattern)
    return json.loads(path.read_text())["manifest"]


BODIES: dict[str, Callable[[], Json]] = {
    "delta": lambda: body_of(delta(is_split=True)),
    "replacement": lambda: body_of(replacement()),
    "logged": lambda: body_of(logged(delta())),
    "logged replacement": lambda: body_of(logged(replacement(is_split=True))),
    "transformed": lambda: _golden_body("step-2/manifest.json"),
    "transformed replacement": lambda: _golden_body("step-4/manifest-*.json"),
}


def file_of(body: Json) -> bytes:
    """The file with this body, given as a value or as bytes, and its right digest."""
    data = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    return b'{"sha256":"%s","manifest":%s}\n' % (hashlib.sha256(data).hexdigest().encode(), data)


def loads(body: Json) -> Manifest:
    """Load the file with this body, in a process that has not seen it before."""
    manifest_json.forget()
    return manifest_json.loads(file_of(body), "here")[0]


# What is written is read back


@st.composite
def _manifests(draw: st.DrawFn) -> Manifest:
    """Valid manifests of any shape."""
    replaces = draw(st.none() | _digests)
    directories: list[str | None] = [None]
    if replaces is not None:
        directories += draw(st.lists(_relative_paths, max_size=2))
    filler = Filler("save", draw(st.sampled_from([100, 10_000])), tuple(directories))
    filler.hole_bytes = 0 if replaces is None else draw(st.integers(0, 9))
    fqns = draw(st.lists(st.text(max_size=5), max_size=3, unique=True))
    tensors = {fqn: draw(_entries(filler, replaces is not None)) for fqn in fqns}
    names = st.text(max_size=5).filter(lambda name: name not in tensors)
    objects = {fqn: filler.blob(draw(st.integers(1, 50))) for fqn in draw(st.lists(names, max_size=2, unique=True))}
    may_be_baseline = all(entry.is_whole or entry.folded is not None for entry in tensors.values())
    keys = st.one_of(st.text(max_size=5), st.integers(0, 2**20))
    paths = st.tuples(st.text(max_size=5), st.lists(keys, max_size=2)).map(lambda path: (path[0], *path[1]))
    integers = st.integers(0, 2**62)
    return Manifest(
        created_ns=draw(integers),
        checkpoint_id=draw(st.text()),
        save_id=draw(st.from_regex(r"[A-Za-z0-9._-]{1,200}", fullmatch=True)),
        parent=None
        if may_be_baseline and draw(st.booleans())
        else CheckpointRef(draw(_relative_paths), draw(_digests)),
        policy=draw(st.text()),
        history=History(draw(integers), tuple(draw(st.lists(integers, max_size=3)))),
        num_restores=draw(integers),
        world_size=draw(st.integers(1, 2**62)),
        writer=draw(st.text()),
        packs=filler.packs(),
        tensors=tensors,
        objects=objects,
        paths=draw(st.dictionaries(st.text(max_size=5), paths, max_size=3)),
        replaces=replaces,
    )


_digests = st.text("0123456789abcdef", min_size=64, max_size=64)
_names = st.text(max_size=6).filter(lambda name: name not in ("", ".", "..") and not re.search(r"[/\\\x00-\x1f]", name))
_relative_paths = st.tuples(st.integers(1, 3), st.lists(_names, min_size=1, max_size=3)).map(
    lambda parts: "../" * parts[0] + "/".join(parts[1])
)


@st.composite
def _entries(draw: st.DrawFn, filler: Filler, may_fold: bool) -> TensorEntry:
    """A tensor of one or two shards; if it is folded, any number of them lie anywhere."""
    size: tuple[int, ...] = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
    dtype = draw(st.sampled_from(list(DTYPES)))
    schemes = [scheme for scheme in SCHEMES if scheme.supports(DTYPES[dtype])]
    boxes = draw(_boxes_that_fill(size))
    folded = tuple(Place(box) for box in boxes) if may_fold and draw(st.booleans()) else None
    if folded is not None:
        boxes = draw(st.lists(_boxes_within(size), max_size=4))
    shards = []
    for box in boxes:
        scheme = draw(st.sampled_from(schemes))
        rows = draw(_row_sets(filler, box))
        blobs = []
        for block in rows.blocks if box.num_cols else ():
            exact = draw(st.integers(0, block.num_rows)) if scheme != NoQuantization() else 0
            num_bytes = block.num_rows * scheme.row_bytes(box.num_cols, DTYPES[dtype])
            least = num_bytes - block.num_rows * scheme.tail_bytes(box.num_cols, DTYPES[dtype])
            most = num_bytes - -(-(num_bytes - least) // 128)
            sizes = range(max(least + 10, -(-num_bytes // 64)), most + 1) if most < num_bytes else range(0)  # if split
            if sizes and draw(st.booleans()):
                blobs.append(filler.blob(draw(st.sampled_from(sizes))))
                continue
            blobs.append(filler.blob(num_bytes + exact * exact_row_bytes(box.num_cols, DTYPES[dtype].itemsize)))
        shards.append(Shard(box, rows, tuple(blobs), scheme))
    is_table = draw(st.booleans()) and len(size) == 2
    return TensorEntry(dtype, size, tuple(shards), is_table=is_table, folded=folded)


@st.composite
def _boxes_that_fill(draw: st.DrawFn, size: tuple[int, ...]) -> list[Box]:
    if not size:
        return [Box.whole(size)]
    cut, rest = draw(st.integers(0, size[0])), (0,) * (len(size) - 1)
    return [Box((0, *rest), (cut, *size[1:])), Box((cut, *rest), (size[0] - cut, *size[1:]))]


@st.composite
def _boxes_within(draw: st.DrawFn, size: tuple[int, ...]) -> Box:
    """With all indices of all dimensions but the first two."""
    starts = [draw(st.integers(0, whole)) for whole in size[:2]]
    lengths = [draw(st.integers(0, whole - start)) for start, whole in zip(starts, size, strict=False)]
    return Box((*starts, *(0 for _ in size[2:])), (*lengths, *size[2:]))


@st.composite
def _row_sets(draw: st.DrawFn, filler: Filler, box: Box) -> RowSet:
    """All rows of a box, or some."""
    num_rows, block_rows = box.num_rows, draw(st.integers(1, 5))
    if not box.sizes or draw(st.booleans()):
        return RowSet.all(num_rows if box.num_cols else 0, block_rows)
    members = sorted(draw(st.sets(st.integers(0, num_rows - 1)))) if num_rows else []
    blocks: list[RowBlock] = []
    while members:
        count = draw(st.integers(1, len(members)))
        rows, members = members[:count], members[count:]
        span = rows[-1] - rows[0] + 1
        if span == len(rows) and draw(st.booleans()):
            blocks.append(RowBlock("all", rows[0], span, span, None))
        else:
            blocks.append(RowBlock("gaps", rows[0], span, len(rows), filler.blob(9)))
    return RowSet(tuple(blocks))


@hypothesis.given(_manifests())
def test_any_manifest_comes_back(manifest: Manifest) -> None:
    """A manifest that was written is read as the same value, and the reader of the page accepts it."""
    data, digest = manifest_json.dumps(manifest)
    assert manifest_json.loads(data, "here") == (manifest, digest)
    assert reader.Manifest(data).digest == digest


def test_small_delta_comes_back() -> None:
    """The delta that the tests below damage is a good one."""
    data, digest = manifest_json.dumps(delta())
    assert manifest_json.loads(data, "here") == (delta(), digest)
    assert reader.Manifest(data).digest == digest
    assert delta().kind == "delta"
    assert delta().num_rows == round(3 * 2 / 3 + 8 * 1 / 3)
    assert delta().num_exact_rows == delta(KMeans(4)).num_exact_rows == 1


def test_small_replacement_comes_back() -> None:
    """So is the replacement, with all of its row sets and directories."""
    data, digest = manifest_json.dumps(replacement())
    assert manifest_json.loads(data, "here") == (replacement(), digest)
    assert reader.Manifest(data).digest == digest
    assert replacement().kind == "baseline"
    assert replacement().blob_bytes < sum(pack.num_bytes - pack.header_bytes for pack in replacement().packs)
    assert {pack.directory for pack in replacement().packs} == {None, "../step-1", "../../old/step-0"}


@pytest.mark.parametrize(
    "path",
    sorted(GOLDEN.glob("*/*/manifest*.json")),
    ids=lambda path: f"{path.parents[1].name}-{path.parent.name}-{path.stem[:14]}",
)
def test_golden_manifests_are_written_as_they_were_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading and writing a golden manifest, or a replacement, gives the same bytes."""
    data = path.read_bytes()
    manifest, digest = manifest_json.loads(data, path.name)
    if "zstd" in json.loads(data)["manifest"]:
        monkeypatch.setattr(manifest_json, "PLAIN_BYTES", 0)
    assert manifest_json.dumps(manifest) == (data, digest)


def test_digest_is_that_of_the_body() -> None:
    """The digest by which a child names its parent is the SHA-256 of the bytes between frame and frame."""
    data, digest = manifest_json.dumps(delta())
    body = data.removeprefix(b'{"sha256":"' + digest.encode() + b'","manifest":').removesuffix(b"}\n")
    assert len(body) == len(data) - 11 - 64 - 13 - 2
    assert hashlib.sha256(body).hexdigest() == digest


@hypothesis.given(_manifests())
def test_time_of_commit_stands_at_the_start(manifest: Manifest) -> None:
    """The first 512 bytes tell a manifest's time of commit, whatever follows."""
    assert manifest_json.created_ns(manifest_json.dumps(manifest)[0][:START_BYTES]) == manifest.created_ns


@pytest.mark.parametrize("start", [b"", b"{}", b'{"sha256":"', b"\0" * 512, b'"created_ns":x'])
def test_other_files_have_no_time_of_commit(start: bytes) -> None:
    """What is no manifest has no time of commit."""
    assert manifest_json.created_ns(start) is None


# Single fields

VALUES: list[Json] = [None, True, False, 0, 1, 2, -1, 1.0, 4.0, 2.5, 2**62, 2**62 + 1, 2**64, 10**30, "", "x", ".."]
VALUES += ["../x", "none", "float32", "\ud800", "\0", [], {}, [0], [[]], [[], []], [[0], [0]], [[0], [1]], {"a": 1}]
VALUES += [[[0, 0], [0, 0]], [[9], [0]], "all", ["all", 0, 8, 8, None], "ef" * 32, [[[[0, 0], [8, 3]], None]]]
DELETE, REPEAT = object(), object()


def nodes(value: Json, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path to each value within a value."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from nodes(inner, (*path, key))


def changed(body: Json, path: tuple[Any, ...], to: Json) -> Json:
    """A body with one value changed, left out, or, in a list, repeated."""
    copied = json.loads(json.dumps(body))
    inner = copied
    *way, last = path
    for key in way:
        inner = inner[key]
    if to is DELETE:
        del inner[last]
    elif to is not REPEAT:
        inner[last] = to
    elif isinstance(inner, list):
        inner.insert(last, inner[last])
    return copied


def _outcome(load: Callable[[bytes], object], data: bytes) -> str:
    """How loading ends; anything but a good manifest or the refusal of one is raised."""
    try:
        load(data)
    except (VersionError, reader.NewerVersion):
        return "newer"
    except (DamagedError, reader.Refused):
        return "damaged"
    return "good"


def _of_reader(data: bytes) -> str:
    return _outcome(reader.Manifest, data)


def _of_library(data: bytes) -> str:
    manifest_json.forget()
    return _outcome(lambda data: manifest_json.loads(data, "here"), data)


LONGEST = {(body, "tensors") for body in ("replacement", "logged", "logged replacement", "transformed replacement")}
every_key = pytest.mark.parametrize(
    ("what", "key"),
    [
        pytest.param(what, key, marks=[pytest.mark.slow] if (what, key) in LONGEST else [])
        for what, body in BODIES.items()
        for key in body()
    ],
)


@pytest.mark.long
@every_key
def test_any_single_change_is_refused_where_the_page_refuses_it(what: str, key: str) -> None:
    """Each value is replaced, left out and repeated; the library refuses just what the page tells it to."""
    body = BODIES[what]()
    num_damaged, different = 0, []
    for path in nodes(body[key], (key,)):
        for to in [*VALUES, DELETE, REPEAT]:
            data = file_of(changed(body, path, to))
            expected, actual = _of_reader(data), _of_library(data)
            num_damaged += expected == "damaged"
            if expected != actual:
                different.append((path, to, expected, actual))
    assert different == []
    assert num_damaged > 10


@every_key
def test_missing_and_unknown_keys_are_refused(what: str, key: str) -> None:
    """A manifest has exactly the keys that the page lists."""
    body = BODIES[what]()
    with pytest.raises((DamagedError, VersionError)):
        loads({name: value for name, value in body.items() if name != key})
    with pytest.raises(DamagedError):
        loads({**body, f"{key}_": body[key]})
    if key not in ("format", "version"):
        with pytest.raises(DamagedError):
            loads({**{name: value for name, value in body.items() if name != key}, key: body[key]} | {"x": 0})


def _set(*path_and_value: Json) -> Callable[[Json], Json]:
    *path, value = path_and_value
    return lambda body: changed(body, tuple(path), value)


TABLE, STATE = ("tensors", "table"), ("tensors", "table.state")
SHARD = (*TABLE, "shards", 0)
WHOLE = [[[[0, 0], [8, 3]], None]]  # the place of the whole table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(_set("format", "other"), "not a manifest of torchrec_cnr", id="another format"),
        pytest.param(_set("version", True), "version", id="version is a boolean"),
        pytest.param(_set("version", 1.0), "version", id="version is a float"),
        pytest.param(_set("version", "1"), "version", id="version is a string"),
        pytest.param(_set("version", 0), "version", id="version 0"),
        pytest.param(_set("save_id", "a/b"), "save_id", id="save id with a slash"),
        pytest.param(_set("save_id", "x" * 201), "save_id", id="save id too long"),
        pytest.param(_set("restores", DELETE), "keys", id="no restores"),
        pytest.param(_set("replaces", DELETE), "keys", id="without a word on replacement"),
        pytest.param(_set("restores", -1), "restores", id="fewer than no restores"),
        pytest.param(_set("restores", True), "restores", id="restores are a boolean"),
        pytest.param(_set("restores", 1.0), "restores", id="restores are a float"),
        pytest.param(_set("restores", None), "restores", id="restores are unknown"),
        pytest.param(_set("restores", 2**62 + 1), "restores", id="restores beyond bounds"),
        pytest.param(_set("world_size", 0), "world_size", id="no rank"),
        pytest.param(_set("packs", 0, 1, "../x.safetensors"), "packs", id="pack elsewhere"),
        pytest.param(_set("packs", 0, 1, "manifest.json"), "packs", id="pack that is the manifest"),
        pytest.param(_set("packs", 0, 1, ".."), "packs", id="pack that is a directory"),
        pytest.param(_set("packs", 0, 0, "../step-1"), "replaces no manifest", id="pack of another directory"),
        pytest.param(_set("packs", 0, REPEAT), "two packs", id="pack twice"),
        pytest.param(_set("packs", 0, 2, 400), "integer|end|hole", id="longer pack"),
        pytest.param(_set("packs", 0, 3, 7), "packs", id="header too short"),
        pytest.param(_set("packs", 0, 3, 63), "hole", id="hole behind the header"),
        pytest.param(_set("packs", 0, 3, 65), "integer", id="blob in the header"),
        pytest.param(_set("packs", 0, 4, 2**32), "packs", id="crc of 33 bits"),
        pytest.param(_set("packs", 0, 5, -1), "packs", id="time before all time"),
        pytest.param(_set("packs", 0, 6, 4), "packs", id="heat beyond the hottest"),
        pytest.param(_set("replaces", "AB" * 32), "replaces", id="replaces a digest in capitals"),
        pytest.param(_set("replaces", "../step-1"), "replaces", id="replaces a path"),
        pytest.param(_set("objects", "reader", 0, 1), "reader", id="pack that is not there"),
        pytest.param(_set("objects", "reader", 2, 78), "reader", id="blob beyond the pack"),
        pytest.param(_set("objects", "reader", 2, 76), "end at byte", id="hole at the end"),
        pytest.param(_set("objects", {}), "end at byte", id="blob that nobody has"),
        pytest.param(_set(*STATE, "shards", 0, 3, 0, 1, 75), "hole or an overlap", id="overlap"),
        pytest.param(_set("row_sets", 1, 0, 3, 5), "5 rows in a span of 4", id="more members than a span holds"),
        pytest.param(_set("row_sets", 1, 0, 3, 0), "integer", id="no member"),
        pytest.param(_set("row_sets", 1, 0, 3, 1), "bytes", id="fewer members than blobs hold"),
        pytest.param(_set("row_sets", 1, 0, 0, "runs"), "coding", id="unknown coding"),
        pytest.param(_set("row_sets", 1, 0, 0, "all"), "'all' with a blob", id="consecutive rows with a code"),
        pytest.param(_set("row_sets", 1, 0, 4, None), "'bitmap' without a blob", id="coding without a code"),
        pytest.param(_set("row_sets", 2, 0, 0, "gaps"), "'gaps' without a blob", id="consecutive rows that are coded"),
        pytest.param(_set("row_sets", 2, 0, 3, 4), "4 rows in a span of 5", id="consecutive rows with a gap"),
        pytest.param(_set("row_sets", 2, 0, 2, 4), "5 rows in a span of 4", id="more consecutive rows than a span"),
        pytest.param(_set("row_sets", 2, 0, 3, 2**62), "span", id="absurd number of rows"),
        pytest.param(_set("row_sets", 1, 0, 2, 1), "2 rows in a span of 1", id="span too short"),
        pytest.param(_set("row_sets", 1, 0, 2, 7), "out of order", id="blocks that overlap"),
        pytest.param(_set("row_sets", 1, 1, 2, 2), "beyond the 8 rows", id="rows beyond the box"),
        pytest.param(_set("row_sets", 0, 0, 1, 1), "beyond the 1 rows", id="rows beyond a scalar"),
        pytest.param(_set("row_sets", 0, REPEAT), "table", id="row set twice"),
        pytest.param(
            lambda body: {**body, "row_sets": [*body["row_sets"], []]}, "its row sets", id="row set that no shard has"
        ),
        pytest.param(_set(*SHARD, 2, 4), "table", id="row set that is not there"),
        pytest.param(_set(*SHARD, 2, None), "table", id="no row set"),
        pytest.param(_set(*SHARD, 2, 2), "row sets|bytes", id="row set of others"),
        pytest.param(_set(*SHARD, 2, 3), "2 blobs for 1 blocks", id="too many blobs"),
        pytest.param(_set(*SHARD, 3, 0, DELETE), "1 blobs for 2 blocks", id="too few blobs"),
        pytest.param(_set(*SHARD, 3, 0, 2, 13), "hole|bytes", id="blob of another size"),
        pytest.param(_set(*SHARD, 0, 1, 0, 7), "do not fill", id="box with a hole"),
        pytest.param(_set(*SHARD, 0, 1, 1, 3), "do not fill|bytes", id="boxes that overlap"),
        pytest.param(_set(*SHARD, 0, 0, [0]), "offsets", id="box of two dimensions"),
        pytest.param(_set(*TABLE, "size", [8, 4]), "do not fill", id="larger tensor"),
        pytest.param(_set(*TABLE, "folded", DELETE), "keys", id="without a word on folding"),
        pytest.param(_set(*TABLE, "scheme", {"name": "none"}), "keys", id="tensor with a scheme"),
        pytest.param(_set(*TABLE, "dtype", "float8"), "dtype", id="unknown dtype"),
        pytest.param(_set(*TABLE, "dtype", "float64"), "cannot be quantized", id="dtype that is not quantized"),
        pytest.param(_set(*TABLE, "dtype", "float16"), "bytes", id="narrower dtype"),
        pytest.param(_set(*SHARD, 4, {"name": "none"}), "bytes", id="not quantized"),
        pytest.param(_set(*SHARD, 4, "bits", 5), "scheme", id="5 bits"),
        pytest.param(_set(*SHARD, 4, "bits", 4.0), "scheme", id="bits as a float"),
        pytest.param(_set(*SHARD, 4, "zero", 1), "scheme", id="unknown parameter"),
        pytest.param(_set(*SHARD, 4, "name", "later"), "scheme", id="unknown scheme"),
        pytest.param(_set(*SHARD, 4, "asymmetric"), "object", id="scheme that is a string"),
        pytest.param(_set(*SHARD, 4, None), "object", id="scheme that is null"),
        pytest.param(_set(*SHARD, "a shard"), "list of 5", id="shard that is a string"),
        pytest.param(_set(*SHARD, None), "list of 5", id="shard that is null"),
        pytest.param(_set(*STATE, "shards", 1, 3, 0, 2, 0), "integer", id="blob of nothing"),
        pytest.param(_set("row_sets", 0, [1, 1, []]), "list", id="row set with a number"),
        pytest.param(_set(*SHARD, 4, DELETE), "list of 5", id="shard without a scheme"),
        pytest.param(_set(*SHARD, 4, REPEAT), "list of 5", id="shard with two schemes"),
        pytest.param(_set(*STATE, "shards", 1, 4, {"name": "kmeans", "bits": 8}), "bytes", id="another scheme"),
        pytest.param(_set(*SHARD, 4, {"bits": 4, "name": "asymmetric"}), "scheme", id="parameter before the name"),
        pytest.param(_set("parent", {"sha256": "ab" * 32, "path": "../a"}), "parent", id="digest before the path"),
        pytest.param(_set("parent", "more", 1), "parent", id="a parent's key more"),
        pytest.param(_set(*TABLE, "is_table", False), "table", id="state of no table"),
        pytest.param(_set(*TABLE, "table", "table"), "table", id="table of a table"),
        pytest.param(_set(*TABLE, "shards", 1, 1, [[0, 0], [8, 1]]), "table", id="table box without a table"),
        pytest.param(_set(*STATE, "table", "missing"), "missing", id="missing table"),
        pytest.param(_set(*STATE, "table", "table.state"), "table", id="table that is a vector"),
        pytest.param(_set(*STATE, "table", None), "table", id="table boxes of nothing"),
        pytest.param(_set(*STATE, "shards", 0, 1, None), "table", id="no table box"),
        pytest.param(_set(*STATE, "shards", 0, 1, [[0, 1], [8, 2]]), "table", id="table boxes that overlap"),
        pytest.param(_set(*STATE, "shards", 0, 1, [[0, 0], [7, 2]]), "table", id="table box of other rows"),
        pytest.param(
            lambda body: {**body, "objects": {"table": body["objects"]["reader"]}},
            "name",
            id="object named as a tensor",
        ),
        pytest.param(_set("parent", None), "baseline", id="baseline without all rows"),
        pytest.param(_set("parent", "sha256", "AB" * 32), "sha256", id="digest in capitals"),
        pytest.param(_set(*TABLE, "size", [8] * 65), "65 dimensions", id="more dimensions than torch has"),
        pytest.param(_set(*SHARD, 0, [[0] * 65, [8] * 65]), "65 dimensions", id="box of more dimensions"),
        pytest.param(_set("objects", {"x" * 8193: [0, 64, 1, 0]}), "8193 characters", id="name without end"),
        pytest.param(_set("row_sets", 1, 0, 2, 129), "bitmap of 129 bits for 2", id="bitmap of hardly any rows"),
        pytest.param(
            _set("row_sets", 1, 0, ["gaps", 1, 2**25, 2**24 + 1, [0, 64, 11, 7]]),
            "expected 16777216 at most",
            id="code of more rows than fit",
        ),
        pytest.param(_set("paths", "step", []), "path", id="empty path"),
        pytest.param(_set("paths", "step", [0]), "path", id="path that begins with an index"),
        pytest.param(_set("paths", "step", ["a", 2**20 + 1]), "path", id="index of a list beyond memory"),
    ],
)
def test_each_contradiction_is_refused(change: Callable[[Json], Json], message: str) -> None:
    """A manifest that contradicts itself is refused, and the error says where."""
    with pytest.raises(DamagedError, match=f"here: .*({message})"):
        loads(change(body_of(delta())))


LOG = ("packs", 0, 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(_set("packs", 0, 0, "../step-1"), "both in a Kafka topic and in the directory", id="two places"),
        pytest.param(_set("packs", 0, 7, DELETE), "list of 8", id="pack that does not say where"),
        pytest.param(_set("packs", 0, REPEAT), "two packs", id="pack twice"),
        pytest.param(_set(*LOG, 0, "a/b"), "packs", id="topic with a slash"),
        pytest.param(_set(*LOG, 0, ".."), "packs", id="topic that Kafka refuses"),
        pytest.param(_set(*LOG, 0, ""), "packs", id="no topic"),
        pytest.param(_set(*LOG, 0, "x" * 250), "packs", id="topic too long"),
        pytest.param(_set(*LOG, 0, "rows\n"), "packs", id="topic with a line break"),
        pytest.param(_set(*LOG, 1, -1), "packs", id="partition below 0"),
        pytest.param(_set(*LOG, 1, 2**31), "packs", id="partition beyond Kafka's"),
        pytest.param(_set(*LOG, 2, -1), "packs", id="offset below 0"),
        pytest.param(_set(*LOG, 3, 2**40 - 1), "too few", id="ends before it begins"),
        pytest.param(_set(*LOG, 3, 2**40), "too few", id="fewer records than parts"),
        pytest.param(_set(*LOG, 3, 2**63), "packs", id="offset beyond bounds"),
        pytest.param(_set(*LOG, 4, 0), "packs", id="parts of nothing"),
        pytest.param(_set(*LOG, 4, 1), "too few", id="parts of a byte"),
        pytest.param(_set(*LOG, 4, 2**30 + 1), "packs", id="parts beyond bounds"),
        pytest.param(_set(*LOG, 4, REPEAT), "list of 6", id="a number more"),
        pytest.param(_set(*LOG, 5, ""), "packs", id="key of nothing"),
        pytest.param(_set(*LOG, 5, "a\nb"), "packs", id="key with a line break"),
        pytest.param(_set(*LOG, 5, 7), "packs", id="key that is a number"),
        pytest.param(_set(*LOG, []), "list of 6", id="no range"),
        pytest.param(_set(*LOG, "rows"), "list of 6", id="range that is a string"),
    ],
)
def test_each_contradiction_of_a_pack_in_a_log_is_refused(change: Callable[[Json], Json], message: str) -> None:
    """Where a pack lies in a log is told whole, and within Kafka's bounds; library and page agree."""
    body = change(body_of(logged(delta())))
    with pytest.raises(DamagedError, match=f"here: .*({message})"):
        loads(body)
    assert _of_reader(file_of(body)) == "damaged"


@hypothesis.given(st.data())
def test_any_manifest_with_packs_in_a_log_comes_back(data: st.DataObject) -> None:
    """Of each pack, the manifest says where it lies; packed or not."""
    manifest = data.draw(_manifests())
    own = [pack.name for pack in manifest.packs if pack.directory is None]
    hypothesis.assume(own)
    chosen = set(data.draw(st.lists(st.sampled_from(own), min_size=1)))
    offsets, sizes = st.integers(0, 2**61), st.integers(1, 2**30)
    topics, partitions = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,248}", fullmatch=True), st.integers(0, 2**31 - 1)
    packs = []
    for pack in manifest.packs:
        if pack.name in chosen and pack.directory is None:
            first, part_bytes = data.draw(offsets), data.draw(sizes)
            last = first + -(-pack.num_bytes // part_bytes) - 1 + data.draw(st.integers(0, 99))
            key = data.draw(st.none() | st.just(f"{pack.name}/rows"))
            log = LogRange(data.draw(topics), data.draw(partitions), first, last, part_bytes, key)
            packs.append(replace(pack, log=log))
        else:
            packs.append(pack)
    manifest = replace(manifest, packs=tuple(packs))
    body = body_of(manifest)
    assert loads(body) == manifest
    packed = compressed_body(json.dumps(body, separators=(",", ":")).encode(), manifest.created_ns)
    assert packed is None or loads(packed) == manifest
    assert _of_reader(file_of(body)) == "good"


CUBE = TensorEntry("int8", (0, 2, 3), (), folded=(Place(Box.whole((0, 2, 3))),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(_set("replaces", None), "hole", id="holes in a commit"),
        pytest.param(_set("packs", 1, 0, "step-1"), "packs", id="directory below"),
        pytest.param(_set("packs", 1, 0, "/step-1"), "packs", id="absolute directory"),
        pytest.param(_set("packs", 1, 0, ".."), "packs", id="directory above"),
        pytest.param(_set("packs", 1, 0, "../x/../y"), "packs", id="winding directory"),
        pytest.param(_set("packs", 1, 0, "s3://bucket/x"), "packs", id="directory elsewhere"),
        pytest.param(_set("packs", 1, 0, 7), "packs", id="directory that is a number"),
        pytest.param(
            lambda body: {**body, "packs": [*body["packs"], ["../x", "y.safetensors", 99, 64, 7, None, 0, None]]},
            "it holds no blob",
            id="pack that nobody needs",
        ),
        pytest.param(
            lambda body: {**body, "packs": [body["packs"][0], body["packs"][0], *body["packs"][2:]]},
            "two packs",
            id="one file in two packs",
        ),
        pytest.param(_set(*TABLE, "folded", None), "do not fill", id="overlapping shards that are not folded"),
        pytest.param(_set(*TABLE, "folded", []), "do not fill", id="folded into nothing"),
        pytest.param(_set(*TABLE, "folded", 0, DELETE), "do not fill", id="folded with a hole"),
        pytest.param(_set(*TABLE, "folded", 0, REPEAT), "do not fill", id="folded twice"),
        pytest.param(_set(*TABLE, "folded", 0, 0, 1, 1, 3), "do not fill", id="folded with an overlap"),
        pytest.param(_set(*TABLE, "folded", 0, 0, [[0], [8]]), "do not fill", id="folded in other dimensions"),
        pytest.param(_set(*TABLE, "folded", 0, 1, [[0, 0], [8, 2]]), "table", id="place in a table of no state"),
        pytest.param(_set(*TABLE, "folded", 0, [[0, 0], [8, 2]]), "list of 2|list", id="box that is no place"),
        pytest.param(_set(*TABLE, "folded", True), "list", id="folded without places"),
        pytest.param(_set(*SHARD, 0, 0, 1, 1), "outside", id="shard beyond the last column"),
        pytest.param(_set(*SHARD, 0, 0, 0, 1), "outside", id="shard beyond the last row"),
        pytest.param(_set(*SHARD, 0, [[0], [8]]), "dimensions", id="shard of other dimensions"),
        pytest.param(_set(*SHARD, 0, 1, 0, 7), "beyond the 7 rows", id="rows beyond a shard"),
        pytest.param(_set(*STATE, "shards", 0, 0, [[0, 0], [8, 1]]), "dimensions", id="state that is a matrix"),
        pytest.param(
            _set(*STATE, "shards", 0, 1, [[0, 0], [7, 3]]), "its table", id="state of fewer rows of the table"
        ),
        pytest.param(_set(*STATE, "shards", 0, 1, [[1, 0], [8, 3]]), "its table", id="state beyond the table"),
        pytest.param(_set(*STATE, "shards", 0, 1, [[0], [8]]), "its table", id="table box of one dimension"),
        pytest.param(_set(*STATE, "shards", 0, 1, None), "its table", id="rows of no table"),
        pytest.param(
            _set(*STATE, "folded", 0, 1, [[0, 0], [8, 3]]), "its table", id="places that overlap in the table"
        ),
        pytest.param(_set(*STATE, "folded", 0, 1, None), "its table", id="place without its rows of the table"),
        pytest.param(
            _set(*STATE, "folded", 2, 1, [[0, 0], [8, 2]]), "its table", id="place with more rows of the table"
        ),
        pytest.param(_set(*STATE, "table", "step"), "not a table", id="folded state of no table"),
        pytest.param(_set("row_sets", 2, 1, 1, 8), "beyond the 8 rows", id="shared code beyond a shard"),
        pytest.param(_set(*SHARD, 3, 0, 1, 64), "overlap", id="values that are row numbers, too"),
    ],
)
def test_each_contradiction_of_a_replacement_is_refused(change: Callable[[Json], Json], message: str) -> None:
    """A replacement may have more than a manifest that commits, but what it has must fit together, too."""
    with pytest.raises(DamagedError, match=f"here: .*({message})"):
        loads(change(body_of(replacement())))


@pytest.mark.parametrize("box", [Box((0, 0, 0), (0, 2, 2)), Box((0, 0, 1), (0, 2, 2)), Box((0, 1, 0), (0, 1, 3))])
def test_shards_of_folded_tensors_are_divided_in_two_dimensions(box: Box) -> None:
    """What of a folded tensor is stored is counted in rows and columns: in a third dimension none may be missing."""
    shard = Shard(box, RowSet(()), (), EXACT)
    manifest = replace(replacement(), tensors={**replacement().tensors, "cube": replace(CUBE, shards=(shard,))})
    is_good = box.sizes[2] == 3
    data = manifest_json.dumps(manifest)[0]
    assert (_of_library(data), _of_reader(data)) == ("good" if is_good else "damaged",) * 2


def test_rows_of_a_box_without_columns_lie_in_it() -> None:
    """Nothing is stored of such rows, but they are rows of the box all the same."""
    for num_rows, is_good in [(8, True), (9, False)]:
        shard = Shard(Box((0, 0), (8, 0)), RowSet.all(num_rows, 9), (), EXACT)
        data = manifest_json.dumps(
            replace(delta(), tensors={**delta().tensors, "x": TensorEntry("int8", (8, 0), (shard,))})
        )
        assert (_of_library(data[0]), _of_reader(data[0])) == ("good" if is_good else "damaged",) * 2


@pytest.mark.long
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_any_single_change_of_a_scheme_is_refused_where_the_page_refuses_it(scheme: Scheme) -> None:
    """Library and page agree on the parameters of each scheme and search, on their types and bounds."""
    body, at = body_of(delta(scheme)), (*TABLE, "shards", 1, 4)
    assert (_of_library(file_of(body)), _of_reader(file_of(body))) == ("good", "good")
    bounds = [3, 63, 64, 65, 1000, 1001, 10_000, 10_001, "float16", "0.5", "0.49999", "1e-05", "0.00001", "1.0", "1"]
    others: list[Json] = [value for to in SCHEMES for value in (to.to_json(), to.to_json().get("search"))]
    different = []
    for path in [at, *((*at, *way) for way in nodes(scheme.to_json()))]:
        for to in [
            *VALUES,
            *bounds,
            *others,
            "-0.0",
            "nan",
            "inf",
            "0.5e0",
            "1_0.0",
            " 0.1",
            "\u0660.0",
            DELETE,
            REPEAT,
        ]:
            data = file_of(changed(body, path, to))
            if _of_library(data) != _of_reader(data):
                different.append((path, to, _of_library(data)))
    assert different == []


GREEDY = {"name": "greedy", "num_bins": 25, "ratio": "1.0"}
LEAST = {"name": "least_squares", "cuts": ["0.0"], "rounds": 1, "kept": 1, "polish": 0}


@pytest.mark.long
@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param({"name": "symmetric", "bits": 5}, id="5 bits"),
        pytest.param({"name": "kmeans", "bits": True}, id="bits are a boolean"),
        pytest.param({"name": "kmeans", "bits": 2.0}, id="bits are a float"),
        pytest.param({"name": "kmeans", "bits": 10**4000}, id="very many bits"),
        pytest.param({"name": "kmeans"}, id="no bits"),
        pytest.param({"name": "kmeans", "bits": 2, "entropy_coded": True}, id="codebooks that are entropy-coded"),
        pytest.param({"name": "symmetric", "bits": 2, "entropy_coded": False}, id="codes that say they are plain"),
        pytest.param({"bits": 2, "name": "kmeans"}, id="parameter before the name"),
        pytest.param({"name": "half", "dtype": "float32"}, id="half that is whole"),
        pytest.param({"name": "half", "dtype": ""}, id="half without a dtype"),
        pytest.param({"name": "half", "dtype": ["float16"]}, id="list of dtypes"),
        pytest.param({"name": "asymmetric", "bits": 2, "search": GREEDY}, id="search that nobody does"),
        *(
            pytest.param({"name": "adaptive_asymmetric", "bits": 2, "search": search}, id=name)
            for name, search in {
                "no search": None,
                "search without a name": {},
                "search that is a list": [GREEDY],
                "unknown search": {**GREEDY, "name": "random"},
                "parameter more": {**GREEDY, "seed": 1},
                "bins are a boolean": {**GREEDY, "num_bins": True},
                "no bin": {**GREEDY, "num_bins": 0},
                "too many bins": {**GREEDY, "num_bins": 10_001},
                "ratio is a float": {**GREEDY, "ratio": 1.0},
                "ratio is an integer": {**GREEDY, "ratio": 1},
                "ratio is none": {**GREEDY, "ratio": "0.0"},
                "ratio is too large": {**GREEDY, "ratio": "1.0000000000000002"},
                "ratio is no number": {**GREEDY, "ratio": "nan"},
                "ratio of too many digits": {**GREEDY, "ratio": "0.10000000000000001"},
                "a million cuts": {**LEAST, "cuts": ["0.0"] * 10**6},
                "65 cuts": {**LEAST, "cuts": ["0.0"] * 65},
                "no cut": {**LEAST, "cuts": []},
                "cuts are a string": {**LEAST, "cuts": "0.0"},
                "half is cut": {**LEAST, "cuts": ["0.5"]},
                "cut below": {**LEAST, "cuts": ["-0.1"]},
                "cut is a float": {**LEAST, "cuts": [0.0]},
                "cut in another way": {**LEAST, "cuts": ["0.00001"]},
                "no round": {**LEAST, "rounds": 0},
                "too many rounds": {**LEAST, "rounds": 1001},
                "65 kept": {**LEAST, "kept": 65},
                "rounds are a boolean": {**LEAST, "rounds": True},
                "polish is a float": {**LEAST, "polish": 0.0},
                "polish below": {**LEAST, "polish": -1},
            }.items()
        ),
    ],
)
def test_other_schemes_are_refused(scheme: Json) -> None:
    """A scheme, and the search in it, is one that the page lists, written in its one way."""
    body = _set(*TABLE, "shards", 1, 4, scheme)(body_of(delta()))
    assert _of_reader(file_of(body)) == "damaged"
    with pytest.raises(DamagedError, match="here: "):
        loads(body)


@pytest.mark.parametrize("version", [2, 3, 2**62])
def test_newer_versions_are_named(version: int) -> None:
    """A newer version is no damage, whatever else is in it: the way out is an upgrade."""
    body = body_of(delta())
    for newer in ({**body, "version": version}, {**body, "version": version, "packs": "elsewhere", "new": {}}):
        with pytest.raises(VersionError, match=f"version {version}.*upgrade"):
            loads(newer)


def test_versions_below_the_first_do_not_exist() -> None:
    """Such a number is damage, and no newer version."""
    for version in (0, -1):
        body = {**body_of(delta()), "version": version}
        assert (_of_library(file_of(body)), _of_reader(file_of(body))) == ("damaged", "damaged")


@pytest.mark.parametrize("num_bytes", [1, 9, 10, 20, 31, 33])
def test_a_blob_tells_by_itself_whether_it_is_split(num_bytes: int) -> None:
    """One that is shorter than its rows is split; beside it, in the same manifest, others are not."""
    filler, whole = Filler("a", 1000), Box.whole((8, 1))
    shards = tuple(Shard(whole, RowSet.all(8, 8), (filler.blob(size),), EXACT) for size in (32, num_bytes))
    tensors = {fqn: TensorEntry("float32", (8, 1), (shard,)) for fqn, shard in zip("ab", shards, strict=True)}
    manifest = Manifest(1, "a", "a", None, "Full", History(0), 0, 1, "", filler.packs(), tensors)
    data = manifest_json.dumps(manifest)[0]
    expected = "good" if 10 <= num_bytes < 32 else "damaged"
    assert (_of_library(data), _of_reader(data)) == (expected, expected)


def test_unused_row_sets_and_packs_are_refused() -> None:
    """Whatever a manifest lists is used: it would be kept for nobody, and nobody would check it."""
    body, blob = body_of(delta()), [1, 64, 3, 0]
    row_sets = [*body["row_sets"], [["gaps", 0, 1, 1, blob]], []]
    pack, empty = [None, "x.safetensors", 67, 64, 7, None, 0, None], [None, "y.safetensors", 8, 8, 0, None, 0, None]
    for more in ({"row_sets": row_sets, "packs": [*body["packs"], pack]}, {"packs": [*body["packs"], empty]}):
        data = file_of({**body, **more})
        assert (_of_library(data), _of_reader(data)) == ("damaged", "damaged")


def test_shards_without_rows_must_lie_in_the_tensor() -> None:
    """An empty box of other dimensions or outside of its tensor is refused; one within is as good as none."""
    manifest = delta()
    table = manifest.tensors["table"]
    for box, is_good in [(Box((8, 0), (0, 3)), True), (Box((8,), (0,)), False), (Box((9, 0), (0, 3)), False)]:
        more = replace(table, shards=(*table.shards, Shard(box, RowSet(()), (), EXACT)))
        data = manifest_json.dumps(replace(manifest, tensors={**manifest.tensors, "table": more}))[0]
        assert (_of_library(data), _of_reader(data)) == ("good" if is_good else "damaged",) * 2


def test_rows_of_a_table_box_need_a_shard_with_as_many() -> None:
    """State without rows of its own cannot stand for rows of the table: they would stay as they were, unnoticed."""
    filler, whole = Filler("a", 1000), Box.whole((4, 2))
    table = TensorEntry("int8", (4, 2), (Shard(whole, RowSet.all(4, 4), (filler.blob(8),), EXACT),), is_table=True)
    state = TensorEntry("int8", (0,), (Shard(Box.whole((0,)), RowSet(()), (), EXACT, whole),), table="t")
    manifest = Manifest(1, "a", "a", None, "Full", History(0), 0, 1, "", filler.packs(), {"s": state, "t": table})
    with pytest.raises(DamagedError, match="'s'"):
        manifest_json.loads(manifest_json.dumps(manifest)[0], "here")


@pytest.mark.parametrize(("num_rows", "is_good"), [(0, True), (4, False)])
def test_state_belongs_to_columns_of_its_table(num_rows: int, is_good: bool) -> None:
    """Rows of state without a column of the table have no value; a load would return whatever was in memory."""
    filler, whole = Filler("a", 1000), Box.whole((4, 2))
    table = TensorEntry("int8", (4, 2), (Shard(whole, RowSet.all(4, 4), (filler.blob(8),), EXACT),), is_table=True)
    shards = [Shard(Box((0,), (4,)), RowSet.all(4, 4), (filler.blob(4),), EXACT, whole)]
    blobs = (filler.blob(4),) if num_rows else ()
    shards.append(Shard(Box((4,), (num_rows,)), RowSet.all(num_rows, 4), blobs, EXACT, Box((0, 2), (num_rows, 0))))
    state = TensorEntry("int8", (4 + num_rows,), tuple(shards), table="t")
    manifest = Manifest(1, "a", "a", None, "Full", History(0), 0, 1, "", filler.packs(), {"t": table, "s": state})
    data = manifest_json.dumps(manifest)[0]
    assert (_of_library(data), _of_reader(data)) == ("good" if is_good else "damaged",) * 2


# The parent's path


HOSTILE_PARENTS = ["", ".", "..", "../", "../..", "x", "./x", "x/../y", "/", "/x", "//x", "../x/", "..//x", "../x//y"]
HOSTILE_PARENTS += ["../x/../y", "../x/..", "../x/.", "../x/./y", ".././x", "../.", "../../", "file:///x", "s3://b/x"]
HOSTILE_PARENTS += ["..\\x", "../x\\..\\y", "../x\0", "../x\n", "../\x1f", "../x/\r/y", "\n../x", " ../x", "../x\ud800"]

PLAIN_PARENTS = ["../x", "../../a/b", "../.hidden", "../...", "../a b", "../s3:", "../é", "../x..", "../~", "../%2e%2e"]


@pytest.mark.parametrize("path", HOSTILE_PARENTS)
def test_hostile_parents_are_refused(path: str) -> None:
    """A parent's path is relative, goes up first and then down by names: nothing else is followed."""
    with pytest.raises(DamagedError, match="parent"):
        loads(_set("parent", "path", path)(body_of(delta())))
    assert _of_reader(file_of(_set("parent", "path", path)(body_of(delta())))) == "damaged"


@pytest.mark.parametrize("path", PLAIN_PARENTS)
def test_plain_parents_are_accepted(path: str) -> None:
    """Names of any other kind are followed as they stand."""
    parent = loads(_set("parent", "path", path)(body_of(delta()))).parent
    assert parent is not None
    assert parent.path == path


# The frame, and JSON itself

BODY = json.dumps(body_of(delta()), separators=(",", ":")).encode()
FILE = file_of(BODY)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(FILE[:-1], id="no line feed"),
        pytest.param(FILE[: len(FILE) // 2], id="half"),
        pytest.param(FILE + b"\n", id="a line more"),
        pytest.param(b" " + FILE, id="a blank before"),
        pytest.param(FILE + FILE, id="twice"),
        pytest.param(BODY, id="no frame"),
        pytest.param(FILE.replace(b'"sha256":"', b'"sha256": "'), id="a blank within"),
        pytest.param(FILE[:11] + FILE[11:75].upper() + FILE[75:], id="digest in capitals"),
        pytest.param(FILE[:11] + b"0" * 64 + FILE[75:], id="another digest"),
        pytest.param(FILE.replace(b'"writer":"tests"', b'"writer":"Tests"'), id="another body"),
    ],
)
def test_other_frames_are_refused(data: bytes) -> None:
    """The file is one frame around one body with its digest, and nothing else."""
    assert (_of_library(data), _of_reader(data)) == ("damaged", "damaged")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b"null", id="null"),
        pytest.param(b"{}", id="empty"),
        pytest.param(BODY[:-1], id="truncated"),
        pytest.param(BODY + b"}", id="a brace more"),
        pytest.param(BODY.replace(b'"created_ns":2', b'"created_ns":NaN'), id="NaN"),
        pytest.param(BODY.replace(b'"created_ns":2', b'"created_ns":-Infinity'), id="infinity"),
        pytest.param(BODY.replace(b'"created_ns":2', b'"created_ns":2e0'), id="an exponent"),
        pytest.param(BODY.replace(b'"created_ns":2', b'"created_ns":' + b"9" * 5000), id="5000 digits"),
        pytest.param(BODY.replace(b'"created_ns":2', b'"created_ns": 2'), id="white space"),
        pytest.param(BODY + b" ", id="white space behind"),
        pytest.param(BODY.replace(b'"tests"', b'"\\u0074ests"'), id="an escape that is not needed"),
        pytest.param(BODY.replace(b'"tests"', b'"\\/"'), id="an escaped slash"),
        pytest.param(BODY.replace(b'"tests"', b'"\\u00E9"'), id="an escape in capitals"),
        pytest.param(BODY.replace(b'"tests"', b'"\x7f"'), id="a control character"),
        pytest.param(BODY.replace(b'"created_ns":2', b'"created_ns":-0'), id="minus zero"),
        pytest.param(BODY.replace(b'"world_size":2', b'"world_size":2,"world_size":2'), id="a key twice"),
        pytest.param(BODY.replace(b'"version":1', b'"version":9,"version":1'), id="two versions"),
        pytest.param(BODY.replace(b'"step":{', b'"step":{"dtype":"bool",'), id="a key of a tensor twice"),
        pytest.param(BODY.replace(b'"tests"', '"tésts"'.encode()), id="not ASCII"),
        pytest.param(BODY.replace(b'"tests"', b'"\xff"'), id="not UTF-8"),
        pytest.param(b"\xef\xbb\xbf" + BODY, id="a byte order mark"),
        pytest.param(BODY.decode().encode("utf-16"), id="UTF-16"),
        pytest.param(json.dumps(body_of(delta()), indent=1).encode(), id="indented"),
        pytest.param(json.dumps(dict(reversed(body_of(delta()).items()))).encode(), id="keys in another order"),
    ],
)
def test_other_json_is_refused(body: bytes) -> None:
    """A body is written in one way only, so that all readers agree on what it says."""
    assert (_of_library(file_of(body)), _of_reader(file_of(body))) == ("damaged", "damaged")


@pytest.mark.parametrize("where", ["packs", "tensors", "paths"])
def test_deep_nesting_is_refused(where: str) -> None:
    """However deep the JSON, it is refused with a typed error, not with one about recursion."""
    body = json.dumps({**body_of(delta()), where: "@"}, separators=(",", ":"))
    for depth in [10, 500, *range(800, 1001), 2000, 100_000]:
        for nested in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
            file = file_of(body.replace('"@"', nested).encode())
            assert (_of_library(file), _of_reader(file)) == ("damaged", "damaged"), depth


# Anything at all

_json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(VALUES),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.long
@hypothesis.settings(max_examples=400)
@pytest.mark.parametrize("what", BODIES)
@hypothesis.given(data=st.data())
def test_mutated_manifests_are_good_or_refused(what: str, data: st.DataObject) -> None:
    """Several random changes at once give a good manifest, which comes back when it is written, or a typed error."""
    body = BODIES[what]()
    paths = list(nodes(body))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(paths))
        to = data.draw(st.one_of(_json_values, st.sampled_from([DELETE, REPEAT])))
        try:
            body = changed(body, path, to)
        except (KeyError, IndexError, TypeError, AttributeError):  # an earlier change removed it
            continue
    file = file_of(body)
    expected, actual = _of_reader(file), _of_library(file)
    assert actual == expected
    if actual == "good":
        assert loads(body_of(loads(body))) == loads(body)
        assert file_of(body_of(loads(body))) == file


@hypothesis.given(st.binary(max_size=600))
def test_foreign_files_are_refused(data: bytes) -> None:
    """Bytes that are no manifest are refused, alone and in a frame with their digest."""
    for file in (data, file_of(data)):
        assert _of_library(file) == "damaged"


# Packed manifests


def packed_body(body: bytes, **changes: Json) -> Json:
    """A packed body, with some of it changed."""
    packed = compressed_body(body, 7)
    assert packed is not None
    return packed | {"created_ns": json.loads(body)["created_ns"]} | changes


@pytest.mark.parametrize("size", [-1, 0, 1])
def test_only_large_manifests_are_packed(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of more than the limit is packed, and reads as the same manifest; its digest is that of what is stored."""
    plain = json.dumps(body_of(delta()), separators=(",", ":")).encode()
    monkeypatch.setattr(manifest_json, "PLAIN_BYTES", len(plain) - size)
    data, digest = manifest_json.dumps(delta())
    assert json.loads(data)["manifest"].keys() >= ({"zstd"} if size > 0 else {"packs"})
    assert manifest_json.loads(data, "here") == (delta(), digest)
    assert manifest_json.dumps_valid(delta(), "here")[0] == data
    assert manifest_json.created_ns(data[:START_BYTES]) == delta().created_ns
    assert reader.Manifest(data).created_ns == delta().created_ns


def test_packed_manifests_are_checked_as_others_are() -> None:
    """Library and page refuse a packed body that is anything but one whole body, and what it breaks."""
    plain = json.dumps(body_of(delta()), separators=(",", ":")).encode()
    good = packed_body(plain)
    frame = base64.b64decode(good["zstd"])
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(plain)
    bodies: dict[str, Json] = {
        "another time": good | {"created_ns": 8},
        "a key more": good | {"more": 1},
        "a key less": {key: value for key, value in good.items() if key != "created_ns"},
        "no text": good | {"zstd": 1},
        "no base64": good | {"zstd": good["zstd"][:-3] + "?=="},
        "not canonical": good | {"zstd": good["zstd"] + "="},
        "nothing": good | {"zstd": ""},
        "cut": good | {"zstd": base64.b64encode(frame[:-9]).decode()},
        "more behind": good | {"zstd": base64.b64encode(frame + b"x").decode()},
        "two frames": good | {"zstd": base64.b64encode(frame + frame).decode()},
        "no size": good | {"zstd": base64.b64encode(unsized).decode()},
        "packed twice": packed_body(json.dumps(good, separators=(",", ":")).encode()),
        "white space": packed_body(json.dumps(body_of(delta())).encode()),
        "version 0": packed_body(plain.replace(b'"version":1', b'"version":0')),
        "a bad manifest": packed_body(plain.replace(b'"restores":', b'"restored":')),
    }
    assert (_of_library(file_of(good)), _of_reader(file_of(good))) == ("good", "good")
    found = {what: (_of_library(file_of(body)), _of_reader(file_of(body))) for what, body in bodies.items()}
    assert found == dict.fromkeys(bodies, ("damaged", "damaged"))


def test_packed_manifest_is_not_unpacked_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file cannot fill memory: what it says it would be unpacked to is looked at first."""
    body = packed_body(json.dumps(body_of(delta()), separators=(",", ":")).encode())
    loads(body)
    monkeypatch.setattr(manifest_json, "MAX_BYTES", 100)
    with pytest.raises(DamagedError, match="expected at most 32 times as many"):
        loads(body)


def test_a_body_that_shrinks_too_much_is_stored_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader would take it for a bomb, so it is not packed, and loads."""
    manifest = replace(delta(), policy="x" * 100_000)
    monkeypatch.setattr(manifest_json, "PLAIN_BYTES", 100)
    data, digest = manifest_json.dumps_valid(manifest, "here")
    assert "packs" in json.loads(data)["manifest"]
    manifest_json.forget()
    assert manifest_json.loads(data, "here") == (manifest, digest)
    monkeypatch.setattr(manifest_json, "MAX_PACKED_RATIO", 1_000)
    assert "zstd" in json.loads(manifest_json.dumps(manifest)[0])["manifest"]


def test_what_would_not_load_is_not_given_out() -> None:
    """A manifest that contradicts itself is refused before it is written."""
    with pytest.raises(DamagedError, match=r"here: .*its blobs end at"):
        manifest_json.dumps_valid(replace(delta(), objects={}), "here")


@hypothesis.given(st.lists(st.integers(0, 4), max_size=5), st.integers(0, 12), st.integers(0, 2))
def test_boxes_one_behind_the_other_fill_a_tensor(lengths: list[int], num_rows: int, first: int) -> None:
    """Row-wise sharding is told from any other by looking at each box once, with the same answer."""
    offsets = list(itertools.accumulate(lengths, initial=first))[:-1]
    boxes = [Box((offset, 0), (length, 3)) for offset, length in zip(offsets, lengths, strict=True)]
    are_within = all(offset + length <= num_rows for offset, length in zip(offsets, lengths, strict=True))
    expected = are_within and sum(lengths) == num_rows
    assert fills((num_rows, 3), boxes) == fills((num_rows, 3), boxes[::-1]) == expected
