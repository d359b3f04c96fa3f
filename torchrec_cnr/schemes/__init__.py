"""Quantization schemes: how the rows of a table become bytes, and bytes rows again."""

from torchrec_cnr.schemes.base import Encoded, Quantization, Sample, Scheme, exact_row_bytes
from torchrec_cnr.schemes.choices import ByErrorBudget, ByExpectedRestores, expected_restores
from torchrec_cnr.schemes.clusters import KMeans
from torchrec_cnr.schemes.direct import HalfPrecision, NoQuantization
from torchrec_cnr.schemes.rules import SchemeRules, scheme_from_json
from torchrec_cnr.schemes.searches import GreedySearch, LeastSquares
from torchrec_cnr.schemes.uniform import AdaptiveAsymmetric, Asymmetric, Symmetric, fused_bits

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
