"""Quantization schemes: how the rows of a table become bytes, and bytes rows again."""

from torchrec_cnr.quantization.choose_bits import ByErrorBudget, ByExpectedRestores, expected_restores
from torchrec_cnr.quantization.kmeans import KMeans
from torchrec_cnr.quantization.range_search import GreedySearch, LeastSquares
from torchrec_cnr.quantization.rules import SchemeRules, scheme_from_json
from torchrec_cnr.quantization.scheme import Encoded, Quantization, Sample, Scheme, exact_row_bytes
from torchrec_cnr.quantization.uniform import AdaptiveAsymmetric, Asymmetric, Symmetric, fused_bits
from torchrec_cnr.quantization.unquantized import HalfPrecision, NoQuantization

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
    "exact_row_bytes",
    "expected_restores",
    "fused_bits",
    "scheme_from_json",
]
