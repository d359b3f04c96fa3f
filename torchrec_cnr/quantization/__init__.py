"""Quantization schemes, which turn the rows of a table into bytes and back. Schemes are frozen values.

- ``scheme``: the interface of all schemes; ``NoQuantization`` and ``HalfPrecision``, which store each value by itself.
- ``uniform``: ``Symmetric``, ``Asymmetric`` and ``AdaptiveAsymmetric``, which store evenly spaced codes, and the
  searches for the range that the codes of a row cover (``GreedySearch``, ``LeastSquares``).
- ``kmeans``: ``KMeans``, which stores a codebook with each row.
- ``transform_coded``: ``TransformCoded``, a rule, and ``Transformed``, its scheme: rows in a basis of their table.
- ``row_transform``: ``RowTransform``, the basis, the step and the tables of an entropy code.
- ``learned_transform``: learns one from a sample of rows.
- ``symbol_tables``: the tables of frequencies of the entropy code, which are part of the format.
- ``packed_rows``: the bytes of a blob of entropy-coded rows.
- ``choose_bits``: ``ByExpectedRestores`` and ``ByErrorBudget``, which choose a scheme for each shard.
- ``rules``: chooses the scheme of each tensor, and parses schemes from manifests. Knows every scheme.
- ``fbgemm_rows``: converts codes to the row layout of FBGEMM's inference kernels.

Terms of this package:

- *codes*: the small integers that represent the values of a row; for ``HalfPrecision``, its values in 16 bits.
- *scale*, *bias*: the two numbers of a row that turn its codes into values: ``code × scale + bias``.
- *range*: the interval from the value of code 0 to the value of the largest code, for one row.
- *codebook*: the values that the codes of a row represent in k-means.
- *tail*: the bytes of a row after its codes, if they are few enough to be worth compressing.
- *exact row*: a row that codes cannot represent (NaN, infinity, out of range), stored in full after the codes.
- *numbers*: the components of a row as multiples of a step, which are whole.
- *digit*: the part of a number that the entropy coder codes by its frequency; the low bits of large numbers follow raw.
- *escape*: a digit that says that a number follows as 16 raw bits.
- *dead zone*: how far a component is moved towards zero before it is rounded, in steps.
- *class*: how large the numbers of a row are, from 0 to 15. Each class has its own tables.
- *strip*: the rows that are entropy-coded together.
- *sample*: some of the rows to be stored; a rule measures them to choose a scheme.
"""

from torchrec_cnr.quantization.choose_bits import ByErrorBudget, ByExpectedRestores, expected_restores
from torchrec_cnr.quantization.kmeans import KMeans
from torchrec_cnr.quantization.rules import SchemeRules, scheme_from_json
from torchrec_cnr.quantization.scheme import Encoded, HalfPrecision, NoQuantization, Quantization, Sample, Scheme
from torchrec_cnr.quantization.transform_coded import TransformCoded, Transformed
from torchrec_cnr.quantization.uniform import (
    AdaptiveAsymmetric,
    Asymmetric,
    GreedySearch,
    LeastSquares,
    Symmetric,
    fused_bits,
    warm_up,
)

__all__ = [
    "AdaptiveAsymmetric",
    "Asymmetric",
    "ByErrorBudget",
    "ByExpectedRestores",
    "Encoded",
    "GreedySearch",
    "HalfPrecision",
    "KMeans",
    "LeastSquares",
    "NoQuantization",
    "Quantization",
    "Sample",
    "Scheme",
    "SchemeRules",
    "Symmetric",
    "TransformCoded",
    "Transformed",
    "expected_restores",
    "fused_bits",
    "scheme_from_json",
    "warm_up",
]
