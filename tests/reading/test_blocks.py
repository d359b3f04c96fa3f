"""Blocks: what of them is decoded, and what is copied to the device that it is decoded on."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchrec_cnr.format.boxes import Box
from torchrec_cnr.quantization import Asymmetric, HalfPrecision, KMeans, NoQuantization, Scheme
from torchrec_cnr.quantization.scheme import RowCodes
from torchrec_cnr.reading.blocks import Block, PlacedRows

NUM_ROWS, NUM_COLS = 30, 6
SCHEMES: list[Scheme] = [NoQuantization(), HalfPrecision(), Asymmetric(3), KMeans(2)]
PART, SOME = slice(7, 20), torch.tensor([0, 3, 7, 21, 29])


def _block(scheme: Any) -> tuple[Tensor, Block]:
    """Rows of which two cannot be represented by codes, as they come back; and a block of them."""
    table = torch.randn(NUM_ROWS, NUM_COLS, generator=torch.Generator().manual_seed(1))
    table[[3, 8]] = float("inf")
    encoded = scheme.encode(table)
    expected = scheme.decode(encoded.codes, NUM_COLS, torch.float32)
    expected[encoded.exact] = table[encoded.exact]
    placed = PlacedRows(Box.whole((NUM_ROWS, NUM_COLS)), 0, NUM_ROWS, None)
    exact_values = table[encoded.exact]
    block = Block(placed, encoded.codes, scheme, torch.float32, encoded.exact, exact_values, (NUM_COLS,), False)
    return expected, block


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("positions", [slice(0, NUM_ROWS), PART, SOME], ids=["all", "part", "some"])
@pytest.mark.parametrize("into", ["part", "some"])
def test_rows_are_decoded_where_they_belong(scheme: Scheme, positions: Tensor | slice, into: str) -> None:
    """By numbers or by slices of the block and of the target, some columns of them."""
    expected, block = _block(scheme)
    wanted = expected[positions][:, 2:5]
    numbers = torch.randperm(50, generator=torch.Generator().manual_seed(2))[: len(wanted)]
    rows = slice(4, 4 + len(wanted)) if into == "part" else numbers
    target = torch.zeros(50, 3)
    block.decode_into(positions, 2, target, rows)
    assert torch.equal(target[rows], wanted)
    assert int((target != 0).any(1).sum()) == len(wanted)


class _Copies(TorchDispatchMode):
    """Counts what is copied to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and made.device != args[0].device:
            self.shapes.append(tuple(made.shape))
        return made


class _Nothing(RowCodes):
    """A scheme that decodes nothing."""

    def decode_into(self, codes: Tensor, positions: Tensor, first_col: int, target: Tensor, rows: Tensor) -> None:
        """See that all is on one device."""
        assert {codes.device, positions.device, rows.device} == {target.device}
        assert len(positions) == len(rows)


@pytest.mark.parametrize(
    ("positions", "rows", "copied"),
    [
        (slice(0, NUM_ROWS), slice(5, 5 + NUM_ROWS), [(NUM_ROWS, 2)]),
        (PART, slice(0, 13), [(13, 2)]),
        (slice(0, 5), SOME, [(5,), (5, 2)]),
        (SOME, slice(0, 5), [(NUM_ROWS, 2), (5,)]),
    ],
    ids=["baseline", "part of a baseline", "delta", "part of a delta"],
)
def test_what_a_device_can_count_is_not_copied_to_it(
    positions: Tensor | slice, rows: Tensor | slice, copied: list[tuple[int, ...]]
) -> None:
    """Each copy of a block waits for the device: codes are copied, of these rows only, and numbers that have gaps."""
    placed = PlacedRows(Box.whole((NUM_ROWS, 4)), 0, NUM_ROWS, None)
    none = torch.empty(0, dtype=torch.int64)
    codes = torch.zeros(NUM_ROWS, 2, dtype=torch.uint8)
    scheme: Any = _Nothing()
    block = Block(placed, codes, scheme, torch.float32, none, torch.empty(0, 4), (4,), False)
    with _Copies() as copies:
        block.decode_into(positions, 0, torch.empty(50, 4, device="meta"), rows)
    assert copies.shapes == copied
