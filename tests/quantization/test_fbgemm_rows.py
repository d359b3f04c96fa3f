"""Rows of TorchRec's quantized modules: codes that are taken over, and their layout."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

import torchrec_cnr as cnr
from tests.loading.quantized_models import BITS, float_model, quantized
from torchrec_cnr.quantization.fbgemm_rows import InferenceRow

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
]


_VALUES = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(
    values=hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=6), elements=_VALUES),
    bits=st.sampled_from([2, 4, 8]),
)
@settings(deadline=None)
def test_rows_of_values_are_within_half_a_step(values: npt.NDArray[np.float32], bits: int) -> None:
    """Any finite value that fp16's scale and bias reach is off by half a step of its row at most."""
    values = np.tile(values, (1, 8 // bits))
    row = InferenceRow(values.shape[1], bits, values.shape[1] * bits // 8 + 7)
    rows = row.of_values(torch.from_numpy(values))
    scale, bias = np.hsplit(_ends(rows), 2)
    got = bias + scale * _codes(rows, row)
    is_finite = np.isfinite(values).all(axis=1)
    assert np.isnan(got[~is_finite]).all()
    reached = values[is_finite].astype(np.float64).clip(-65504.0)
    least = reached.min(axis=1, keepdims=True, initial=65504.0)
    reached = np.minimum(reached, least + 65504.0 * (2**bits - 1))
    assert (np.abs(got[is_finite] - reached) <= scale[is_finite] / 2 * (1 + 1e-6)).all()
    assert not rows[:, -3:].any()


@given(data=st.data(), bits=st.sampled_from([2, 3, 4, 8]), to_bits=st.sampled_from([2, 4, 8]))
@settings(deadline=None)
def test_codes_taken_over_stand_for_the_same_values(data: st.DataObject, bits: int, to_bits: int) -> None:
    """Fused rows of any bytes, in as many bits or more, have the scale, bias and codes that they had."""
    row = InferenceRow(num_cols := 8 // to_bits * data.draw(st.integers(1, 40)), to_bits, num_cols * to_bits // 8 + 9)
    assert row.takes_over(bits) == (bits <= to_bits)
    if not row.takes_over(bits):
        return
    codes = torch.from_numpy(
        data.draw(hnp.arrays(np.uint8, (3, cnr.Asymmetric(bits).row_bytes(num_cols, torch.float32))))
    )
    rows = row.of_codes(codes, bits)
    wanted = np.unpackbits(codes.numpy(), axis=1, bitorder="little")[:, : num_cols * bits]
    np.testing.assert_array_equal(_codes(rows, row), wanted.reshape(3, num_cols, bits) @ (1 << np.arange(bits)))
    assert torch.equal(rows[:, :4], codes[:, -4:])


def _codes(rows: Tensor, row: InferenceRow) -> npt.NDArray[np.int64]:
    packed = rows.numpy()[:, 4 : 4 + row.num_cols * row.bits // 8]
    split = np.unpackbits(packed, axis=1, bitorder="little").reshape(len(rows), row.num_cols, row.bits)
    return np.asarray(split @ (1 << np.arange(row.bits)))


def _ends(rows: Tensor) -> npt.NDArray[np.float64]:
    """[n, 2]: scale and bias."""
    return rows.numpy()[:, :4].copy().view(np.float16).astype(np.float64)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint4x2, torch.quint2x4])
def test_layout_is_that_of_the_kernels(dtype: torch.dtype) -> None:
    """Fused rows that FBGEMM makes, taken over, are byte for byte what TorchRec puts into its kernels."""
    trained, bits = float_model(1), BITS[dtype]
    weight = trained.ebc.embedding_bags["t0"].weight.detach()
    fused = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(weight, bits)
    model = quantized(trained, dtype)
    table = cnr.InferenceTables(model).find(model.state_dict()["ebc.embedding_bags.t0.weight"])
    assert table is not None
    (shard,) = table.shards
    assert torch.equal(shard.row.of_codes(fused, bits), shard.rows)
