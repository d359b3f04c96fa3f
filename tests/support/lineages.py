"""Random lineages, made by hand, and a dictionary that is assumed to be perfect: what each checkpoint loads as.

A random root is a directory of checkpoints that may fork. Each holds a table with optimizer state of all shapes, a
quantized table, dense tensors, objects, and tensors that come, go and change. Each is sharded as chance has it, boxes
of any columns included. What a checkpoint must load as is worked out element by element when it is written: the last
values that were stored, as their scheme gives them back.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from tests.support import hand_made
from tests.support.hand_made import Content, Part, mask_of
from torchrec_cnr import load_table, read_checkpoint
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.lineage.checkpoint import Checkpoint, read_lineage
from torchrec_cnr.quantization import Asymmetric, HalfPrecision, KMeans, NoQuantization, Scheme
from torchrec_cnr.reading import load_table as load_table_module
from torchrec_cnr.storage.pack_reader import PackReader
from torchrec_cnr.tracking.modified_rows import RowMask

SCHEMES: tuple[Scheme, ...] = (
    NoQuantization(), HalfPrecision(), Asymmetric(8), Asymmetric(3), Asymmetric(4, entropy_coded=True), KMeans(2)
)  # fmt: skip
T, E, W, M, Q, NEW = "t.weight", "t.exp_avg", "t.cube", "t.momentum", "q.weight", "new"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SECOND_NS = 10**9


@dataclass(frozen=True)
class Save:
    """Write a checkpoint: a delta of one of those there are, or a baseline.

    Attributes:
        parent: Its number, counted from the newest; None for a baseline.
        seed: Of everything that is random.
        density: Of the rows of a delta.
        num_cuts: How often each tensor is cut into boxes.
    """

    parent: int | None
    seed: int
    density: float
    num_cuts: int


@dataclass
class Expected:
    """What a checkpoint loads as.

    Attributes:
        elements: Of each tensor; for row-wise optimizer state of each element of its table.
        contents: How it was stored.
        objects: What is no tensor.
    """

    elements: dict[str, Tensor]
    contents: Mapping[str, Content]
    objects: Mapping[str, object]

    def tensor(self, fqn: str) -> Tensor:
        """A tensor, sharded as this checkpoint is."""
        content, elements = self.contents[fqn], self.elements[fqn]
        if content.table is None:
            return elements
        found = torch.empty(content.size, dtype=elements.dtype)
        for part in content.parts:
            if part.table_box is not None:
                cells = elements[part.table_box.slices(Box.whole(tuple(elements.shape)))].double()
                found[part.box.slices(Box.whole(content.size))] = (cells.sum(1) / cells.shape[1]).to(found.dtype)
        return found


@dataclass
class RandomRoot:
    """A directory of checkpoints.

    Attributes:
        root: The directory.
        seed: Of sizes and dtypes.
        pack_bytes: Of saved packs.
        block_bytes: Of saved blobs.
    """

    root: Path
    seed: int
    pack_bytes: int = 8000
    block_bytes: int = 1500
    expected: dict[str, Expected] = field(default_factory=dict)
    created_ns: int = 10**18
    num_saves: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        rows, cols = int(rng.integers(1, 200)), int(rng.integers(1, 9))
        self.sizes = {
            T: (rows, cols),
            E: (rows, cols),
            W: (rows, cols, 2),
            Q: (int(rng.integers(1, 400)), int(rng.integers(1, 17))),
        }
        self.quantized_dtype = DTYPES[int(rng.integers(3))]

    def path(self, name: str) -> str:
        """Of a checkpoint."""
        return str(self.root / name)

    @property
    def names(self) -> list[str]:
        """Of all checkpoints, newest first."""
        return list(reversed(self.expected))

    def save(self, operation: Save) -> str:
        """Write a checkpoint; returns its name."""
        rng = np.random.default_rng(operation.seed)
        is_delta = operation.parent is not None and bool(self.expected)
        below = self.names[(operation.parent or 0) % len(self.names)] if is_delta else None
        before = self.expected[below] if below is not None else None
        contents = _Draw(rng, operation, self, before).contents()
        objects = {"epoch": self.num_saves, "notes": rng.integers(0, 99, int(rng.integers(300))).tolist()}
        name = f"step-{self.num_saves}"
        self.num_saves += 1
        self.created_ns += int(rng.integers(1, 9)) * SECOND_NS
        hand_made.write(
            self.path(name),
            contents,
            objects=objects,
            parent=read_checkpoint(self.path(below)) if below is not None else None,
            created_ns=self.created_ns,
            pack_bytes=self.pack_bytes,
            block_bytes=self.block_bytes,
        )
        self.expected[name] = Expected(_laid_over(before, contents), contents, objects)
        return name

    def check(self, names: Sequence[str] | None = None) -> None:
        """Every checkpoint loads as the dictionary has it, and nothing else is in it."""
        for name in self.names if names is None else names:
            expected = self.expected[name]
            checkpoint = read_checkpoint(self.path(name))
            assert set(checkpoint.manifest.tensors) == set(expected.contents)
            lineage = read_lineage(self.path(name))
            with mock.patch.object(
                load_table_module, "read_lineage", lambda _, lineage=lineage: lineage
            ):  # once, not often
                for fqn in expected.contents:
                    assert is_same(load_table(self.path(name), fqn), expected.tensor(fqn)), (name, fqn)
            assert objects_of(checkpoint) == expected.objects, name

    def remove_all_but(self, name: str) -> list[str]:
        """Remove whatever a checkpoint does not need; returns what is left of the checkpoints."""
        left = remove_all_but(self.path(name))
        self.expected = {name: expected for name, expected in self.expected.items() if name in left}
        return left


def remove_all_but(path: str) -> list[str]:
    """Remove whatever a checkpoint does not need from the directory that it lies in.

    Returns:
        The names of the checkpoints that are left: its lineage.
    """
    kept = read_lineage(path).checkpoints
    files = {
        os.path.normpath(Path(checkpoint.store.path, pack.directory or ".", pack.name))
        for checkpoint in kept
        for pack in checkpoint.manifest.packs
    }
    places = {checkpoint.store.path for checkpoint in kept}
    for file in Path(path).parent.glob("*/*"):
        is_manifest = file.name.startswith("manifest") and str(file.parent) in places
        if str(file) not in files and not is_manifest:
            file.unlink()
    return [Path(place).name for place in places]


def objects_of(checkpoint: Checkpoint) -> dict[str, object]:
    """What a checkpoint has that is no tensor."""
    reader = PackReader(checkpoint.store, checkpoint.manifest.packs, 1)
    found = {}
    for fqn, data in reader.read(checkpoint.manifest.objects.items()):
        path = Path(checkpoint.store.path, f".{fqn}")
        path.write_bytes(data.tobytes())
        found[fqn] = torch.load(path, weights_only=True)
        path.unlink()
    return found


def is_same(first: Tensor, second: Tensor) -> bool:
    """Whether all bits are."""
    if first.dtype is not second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first.contiguous().view(-1).view(torch.uint8), second.contiguous().view(-1).view(torch.uint8))


def _laid_over(before: Expected | None, contents: Mapping[str, Content]) -> dict[str, Tensor]:
    """Elements as they are after a save."""
    found = {}
    for fqn, content in contents.items():
        size = contents[content.table].size if content.table is not None else content.size
        dtype = content.parts[0].values.dtype
        old = None if before is None else before.elements.get(fqn)
        is_new = old is None or old.dtype is not dtype or tuple(old.shape) != size
        elements = torch.zeros(size, dtype=dtype) if old is None or is_new else old.clone()
        for part in content.parts:
            if part.values.numel() == 0:
                continue
            place = part.table_box if part.table_box is not None else part.box
            values = _decoded(part)
            if part.table_box is not None:
                values = values[:, None].expand(-1, part.table_box.num_cols)
            target = elements[place.slices(Box.whole(size))]
            if part.rows is None:
                target.copy_(values)
            else:
                target[part.rows.mask] = values[part.rows.mask]
        found[fqn] = elements
    return found


def _decoded(part: Part) -> Tensor:
    """All values of a part as its scheme gives them back."""
    if isinstance(part.scheme, NoQuantization):
        return part.values
    table = part.values.reshape(len(part.values), -1).contiguous()
    encoded = part.scheme.encode(table)
    values = part.scheme.decode(encoded.codes, table.shape[1], table.dtype)
    values[encoded.exact] = table[encoded.exact]
    return values.reshape(part.values.shape)


@dataclass
class _Draw:
    """Draws what one checkpoint holds."""

    rng: np.random.Generator
    save: Save
    random_root: RandomRoot
    before: Expected | None

    def contents(self) -> dict[str, Content]:
        found = self._family()
        found[Q] = self._table(Q, self.random_root.quantized_dtype, SCHEMES)
        for number, shape in enumerate([(), (3,), (2, 0), (2, 3, 2)]):
            values = self._values(shape, (torch.float32, torch.int64, torch.float64, torch.bool)[number])
            found[f"dense.{number}"] = hand_made.whole(values)
        if self.rng.random() < 0.7:
            found[NEW] = self._new()
        order = self.rng.permutation(list(found)) if self.rng.random() < 0.5 else list(found)
        return {str(fqn): found[str(fqn)] for fqn in order}

    def _family(self) -> dict[str, Content]:
        """A table and its optimizer state, which mostly are sharded alike and share their row numbers."""
        size = self.random_root.sizes[T]
        boxes = self._boxes(size)
        masks = [self._masks(box) for box in boxes]
        first, momentum, start = self.rng.permutation(len(boxes)), [], 0
        for number in map(int, first):
            num_rows, own = boxes[number].num_rows, masks[number]
            box, start = Box((start,), (num_rows,)), start + num_rows
            if self.rng.random() < 0.1:  # was put in its place anew since the last save
                own = [(None, 0)]
            momentum += self._parts(box, torch.float32, own, NoQuantization(), boxes[number])
        cube_boxes = [Box((*box.offsets, 0), (*box.sizes, 2)) for box in boxes]
        has_own_boxes = self.rng.random() < 0.3
        if has_own_boxes:
            cube_boxes = [Box((*box.offsets, 0), (*box.sizes, 2)) for box in self._boxes(size)]
        cube_masks = [self._masks(box) for box in cube_boxes] if has_own_boxes else masks
        return {
            T: Content(size, self._all_parts(boxes, masks), is_table=True),
            E: Content(size, self._all_parts(boxes, masks)),
            W: Content(self.random_root.sizes[W], self._all_parts(cube_boxes, cube_masks)),
            M: Content((start,), tuple(momentum), table=T),
        }

    def _table(self, fqn: str, dtype: torch.dtype, schemes: Sequence[Scheme]) -> Content:
        boxes = self._boxes(self.random_root.sizes[fqn])
        parts: list[Part] = []
        for box in boxes:
            scheme = schemes[int(self.rng.integers(len(schemes)))]
            parts += self._parts(box, dtype, self._masks(box), scheme)
        return Content(self.random_root.sizes[fqn], tuple(parts), is_table=True)

    def _new(self) -> Content:
        """A tensor that comes and goes, and comes back with another dtype or size: then it is stored whole."""
        size, dtype = (int(self.rng.integers(1, 3)) * 5, 3), DTYPES[int(self.rng.integers(2))]
        old = self.before.elements.get(NEW) if self.before is not None else None
        if old is not None and self.rng.random() < 0.7:
            size, dtype = (len(old), 3), old.dtype
        is_same_as_before = old is not None and tuple(old.shape) == size and old.dtype is dtype
        boxes = self._boxes(size)
        parts: list[Part] = []
        for box in boxes:
            parts += self._parts(box, dtype, self._masks(box) if is_same_as_before else [(None, 0)], NoQuantization())
        return Content(size, tuple(parts))

    def _all_parts(self, boxes: Sequence[Box], masks: Sequence[list[tuple[RowMask | None, int]]]) -> tuple[Part, ...]:
        return tuple(
            part
            for box, own in zip(boxes, masks, strict=True)
            for part in self._parts(box, torch.float32, own, NoQuantization())
        )

    def _parts(
        self,
        box: Box,
        dtype: torch.dtype,
        masks: Sequence[tuple[RowMask | None, int]],
        scheme: Scheme,
        table_box: Box | None = None,
    ) -> list[Part]:
        values = self._values(box.sizes, dtype)
        if not isinstance(scheme, NoQuantization) and values.numel() and self.rng.random() < 0.5:
            for row in self.rng.integers(0, len(values), 2):
                values[int(row), 0] = float(self.rng.choice([math.nan, math.inf, -math.inf]))
        return [Part(box, values, rows, scheme, table_box, heat) for rows, heat in masks]

    def _values(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        values = torch.from_numpy(self.rng.standard_normal(tuple(size)))
        return values > 0 if dtype is torch.bool else (values * 100).to(dtype)

    def _masks(self, box: Box) -> list[tuple[RowMask | None, int]]:
        """Which rows of a box are stored: all, some, or some for each heat, perhaps in several of them."""
        if self.save.parent is None or self.before is None or self.rng.random() < 0.05:
            return [(None, 0)]
        num_rows = box.num_rows
        # The first rows are hot, as in real tables.
        chance = self.save.density * np.minimum(1, 4 * np.exp(-np.arange(num_rows) / max(1, num_rows / 3)))
        mask = self.rng.random(num_rows) < chance
        if self.rng.random() < 0.5:
            return [(RowMask(torch.from_numpy(mask)), 0)]
        heat = self.rng.integers(0, 3, num_rows)
        again = self.rng.random(num_rows) < 0.3 if self.rng.random() < 0.2 else np.zeros(num_rows, dtype=np.bool_)
        return [(RowMask(torch.from_numpy(mask & ((heat == value) | again))), value) for value in range(3)]

    def _boxes(self, size: tuple[int, ...]) -> list[Box]:
        """Boxes that fill a tensor: some box is cut in two, again and again; an empty one may come out."""
        boxes = [Box.whole(size)]
        for _ in range(self.save.num_cuts):
            number, dimension = int(self.rng.integers(len(boxes))), int(self.rng.integers(len(size)))
            box = boxes.pop(number)
            lowest = 0 if dimension == 0 and self.rng.random() < 0.1 else 1
            if box.sizes[dimension] <= lowest:
                boxes.insert(number, box)
                continue
            boxes[number:number] = _cut(box, dimension, int(self.rng.integers(lowest, box.sizes[dimension])))
        return boxes


def _cut(box: Box, dimension: int, size: int) -> Iterator[Box]:
    for shift, length in ((0, size), (size, box.sizes[dimension] - size)):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dimension] += shift
        sizes[dimension] = length
        yield Box(tuple(offsets), tuple(sizes))


ROWS, COLS, PACK_BYTES, BLOCK_BYTES = 20_000, 16, 1 << 18, 1 << 16
FAMILY = ("t", "t.exp_avg", "t.momentum")


def family(masks: Sequence[RowMask] | None, seed: int, scheme: Scheme) -> dict[str, Content]:
    """A table with state of each kind that shares its row numbers, which are given by heat; None for all rows."""
    generator = torch.Generator().manual_seed(seed)
    box, own = Box((0, 0), (ROWS, COLS)), Box((0,), (ROWS,))
    stored = list(enumerate([None] if masks is None else masks))

    def parts(box: Box, scheme: Scheme, table_box: Box | None = None) -> tuple[Part, ...]:
        values = torch.randn(box.sizes, generator=generator)
        return tuple(Part(box, values, rows, scheme, table_box, heat) for heat, rows in stored)

    return {
        "t": Content((ROWS, COLS), parts(box, scheme), is_table=True),
        "t.exp_avg": Content((ROWS, COLS), parts(box, NoQuantization())),
        "t.momentum": Content((ROWS,), parts(own, NoQuantization(), box), table="t"),
    }


class HotLineage:
    """A lineage of a family of tensors, of which the same rows are modified again and again, and others now and then.

    Attributes:
        newest: Its head.
        stored: When each row was stored last, as the number of its checkpoint.
    """

    def __init__(self, root: Path, scheme: Scheme) -> None:
        self._root = root
        self._scheme = scheme
        self._rng = np.random.default_rng(0)
        self._chances = np.exp(-np.arange(ROWS) / (ROWS / 4))
        self._heat = np.zeros(ROWS, dtype=np.int64)
        self._num_saves = 1
        self.stored = np.zeros(ROWS, dtype=np.int64)
        self.newest = self._write(None)

    def save(self, num: int) -> None:
        """Add deltas."""
        for _ in range(num):
            mask = self._rng.random(ROWS) < 0.5 * self._chances
            self.stored[mask] = self._num_saves
            masks = [mask_of(np.flatnonzero(mask & (self._heat == heat)), ROWS) for heat in range(3)]
            self._heat = np.where(mask, np.minimum(self._heat + 1, 2), 0)
            self.newest = self._write(masks)
            self._num_saves += 1

    def _write(self, masks: Sequence[RowMask] | None) -> Checkpoint:
        is_first = masks is None
        return hand_made.write(
            self._root / f"step-{0 if is_first else self._num_saves}",
            family(masks, self._num_saves, self._scheme),
            parent=None if is_first else self.newest,
            created_ns=10**18 + self._num_saves * 10**12,
            pack_bytes=PACK_BYTES,
            block_bytes=BLOCK_BYTES,
        )

    @property
    def path(self) -> str:
        """Of the head."""
        return self.newest.store.url

    def load(self) -> list[Tensor]:
        """All tensors."""
        return [load_table(self.path, fqn) for fqn in FAMILY]


def own_packs(checkpoint: Checkpoint) -> set[str]:
    """Names of the packs in a checkpoint's directory."""
    return {name for name in checkpoint.store.names() if name.endswith(".safetensors")}
