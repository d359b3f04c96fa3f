"""Schemes as values: what they are made of, how manifests record them, how close they come, and which is chosen."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from torchrec_cnr.errors import ConfigurationError, DamagedError
from torchrec_cnr.format.manifest import DTYPES
from torchrec_cnr.quantization import (
    AdaptiveAsymmetric,
    Asymmetric,
    ByErrorBudget,
    ByExpectedRestores,
    GreedySearch,
    HalfPrecision,
    KMeans,
    LeastSquares,
    NoQuantization,
    Quantization,
    Scheme,
    SchemeRules,
    Symmetric,
    expected_restores,
    scheme_from_json,
)

BITS = (2, 3, 4, 8)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SCHEMES: list[Scheme] = [
    NoQuantization(),
    HalfPrecision(),
    HalfPrecision(torch.bfloat16),
    *(kind(bits) for kind in (Symmetric, Asymmetric, KMeans, AdaptiveAsymmetric.best) for bits in BITS),
    AdaptiveAsymmetric(2, GreedySearch(45, 0.5)),
    AdaptiveAsymmetric(2, LeastSquares((0.0, 1e-05, 0.25), rounds=2, kept=3, polish=0)),
]


def sample_of(kind: str, num_rows: int = 512, num_cols: int = 64) -> Tensor:
    """Rows of a distribution, each of its own scale."""
    generator = torch.Generator().manual_seed(7)
    uniform = torch.rand(num_rows, num_cols, generator=generator) - 0.5
    values = {
        "gaussian": torch.randn(num_rows, num_cols, generator=generator),
        "laplace": -uniform.sign() * (1 - 2 * uniform.abs()).clamp(min=1e-7).log(),
        "uniform": uniform,
    }[kind]
    return values * torch.logspace(-3, 1, num_rows)[:, None]


def mean_error(scheme: Scheme, values: Tensor) -> float:
    """The mean l2 norm of the rows' errors, each in parts of the row's norm."""
    encoded = scheme.choose(lambda: values, 0).encode(values)
    assert len(encoded.exact) == 0
    error = (scheme.decode(encoded.codes, values.shape[1], values.dtype).double() - values.double()).norm(dim=1)
    return float((error / values.double().norm(dim=1)).mean())


# Schemes as values


@pytest.mark.parametrize("scheme", [*SCHEMES, ByExpectedRestores(3), ByErrorBudget(3, 0.2)], ids=str)
def test_schemes_are_values(scheme: Quantization) -> None:
    """A scheme equals its copy and no other, can be a key, and does not change."""
    twin = eval(repr(scheme), {**globals(), "torch": torch})
    assert twin == scheme
    assert hash(twin) == hash(scheme)
    assert [other for other in SCHEMES if other == twin] == [other for other in SCHEMES if other is scheme]
    with pytest.raises(dataclasses.FrozenInstanceError):
        scheme.bits = 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("bits", [0, 1, 5, 16, -8, 8.0, "8", True, None, [8]], ids=str)
@pytest.mark.parametrize("kind", [Symmetric, Asymmetric, AdaptiveAsymmetric, AdaptiveAsymmetric.best, KMeans])
def test_other_widths_are_refused(kind: Callable[[Any], Scheme], bits: object) -> None:
    """Only 2, 3, 4 and 8 bits are accepted, and only as integers."""
    with pytest.raises(ConfigurationError, match="'bits' must be 2, 3, 4 or 8"):
        kind(bits)


REFUSED = {
    (AdaptiveAsymmetric, "search"): ("greedy", 25, GreedySearch),
    (Symmetric, "entropy_coded"): (1, None, "True", []),
    (AdaptiveAsymmetric, "entropy_coded"): (0,),
    (HalfPrecision, "dtype"): (torch.float32, "float16", None, 16),
    (GreedySearch, "num_bins"): (0, -1, 10_001, 25.0, True, None, "25"),
    (GreedySearch, "ratio"): (0.0, -0.5, 1.01, torch.nan, "1", None, True),
    (LeastSquares, "cuts"): ((), (0.5,), (-0.1,), (0.0, torch.nan), (0.1,) * 65, [0.0], 0.1, None, ("a",), (False,)),
    (LeastSquares, "rounds"): (0, 1001, 1.0, True),
    (LeastSquares, "kept"): (0, 65, 2.0, None),
    (LeastSquares, "polish"): (-1, 1001, False),
    (ByExpectedRestores, "num_restores"): (-1, torch.nan, torch.inf, "1", True),
    (ByErrorBudget, "num_restores"): (-1, torch.nan, torch.inf, "1", True),
    (ByErrorBudget, "budget"): (-0.1, torch.nan, torch.inf, None),
}
REQUIRED = {
    Symmetric: {"bits": 4},
    AdaptiveAsymmetric: {"bits": 4},
    LeastSquares: {"cuts": (0.0,)},
    ByErrorBudget: {"num_restores": 1},
}


@pytest.mark.parametrize(("kind", "name"), REFUSED, ids=lambda part: getattr(part, "__name__", part))
def test_wrong_settings_are_refused(kind: Callable[..., object], name: str) -> None:
    """A setting that cannot be is named at once."""
    for value in REFUSED[kind, name]:
        with pytest.raises(ConfigurationError, match=f"'{name}' must be"):
            kind(**(REQUIRED.get(kind, {}) | {name: value}))


@pytest.mark.parametrize("scheme", SCHEMES[1:], ids=str)
def test_only_floats_of_up_to_32_bits_are_quantized(scheme: Scheme) -> None:
    """Integers have no range to share, and fp64 would lose what it is used for."""
    assert {dtype for dtype in DTYPES.values() if scheme.supports(dtype)} == set(FLOATS)
    assert all(NoQuantization().supports(dtype) for dtype in DTYPES.values())


# Manifests


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_schemes_come_back_from_a_manifest(scheme: Scheme) -> None:
    """What a manifest records of a scheme is read as the same scheme."""
    recorded = json.loads(json.dumps(scheme.to_json()))
    assert scheme_from_json(recorded, "here") == scheme
    assert scheme_from_json(recorded, "here").to_json() == recorded
    for key in set(recorded) - {"entropy_coded"}:
        with pytest.raises(DamagedError, match=r"here: .*not a quantization scheme"):
            scheme_from_json({other: value for other, value in recorded.items() if other != key}, "here")


GREEDY = {"name": "greedy", "num_bins": 25, "ratio": "1.0"}
LEAST = {"name": "least_squares", "cuts": ["0.0", "0.1"], "rounds": 1, "kept": 2, "polish": 2}
BAD_BITS = (0, 1, 5, 16, -8, 8.0, True, False, "8", None, [8], {}, 10**400, float("nan"))
BAD_DECIMALS = ("1e-1", "nan", "inf", "-0.1", ".5", "0.50", "00.5", " 0.5", "0.5 ", "0_0.5", "", "x", "0x1p-2")
BAD_DECIMALS += ("\u0660.\u0665", 0.25, 0, None, True, ["0.25"], {"0.25": 1}, "0." + "1" * 10**4)
HOSTILE: list[Any] = [
    *({}, {"bits": 8}, {"name": "other"}, {"name": []}, {"name": None}, {"name": ["none"]}, {"Name": "none"}),
    *({"name": "none", "bits": 8}, {"bits": 4, "name": "asymmetric"}, {"name": "asymmetric", "bits": 8, "more": 1}),
    *({"name": name, "bits": bits} for name in ("symmetric", "asymmetric", "kmeans") for bits in BAD_BITS),
    *({"name": "half", "dtype": dtype} for dtype in ("float32", "torch.float16", None, 16, [], ["float16"], {})),
    *({"dtype": "float16", "name": "half"}, {"name": "half"}, {"name": "half", "dtype": "float16", "bits": 16}),
    *({"name": "adaptive_asymmetric", "bits": bits, "search": GREEDY} for bits in BAD_BITS),
    {"name": "adaptive_asymmetric", "search": GREEDY, "bits": 4},
    {"name": "adaptive_asymmetric", "bits": 4, "search": GREEDY, "entropy_coded": True},
    {"name": "asymmetric", "entropy_coded": True, "bits": 4},
    {"name": "kmeans", "bits": 4, "entropy_coded": True},
    *({"name": "asymmetric", "bits": 4, "entropy_coded": value} for value in (False, 1, None, "true", [True], {})),
    *(
        {"name": "adaptive_asymmetric", "bits": 4, "search": search}
        for search in (
            *(None, {}, [], "greedy", 0, [GREEDY], {"search": GREEDY}, GREEDY | {"name": "other"}, GREEDY | LEAST),
            *(dict(reversed(GREEDY.items())), dict(reversed(LEAST.items())), GREEDY | {"more": 1}, LEAST | {"more": 1}),
            *(GREEDY | {"num_bins": value} for value in (0, 10_001, 25.0, True, "25", None, [25], 10**400)),
            *(GREEDY | {"ratio": value} for value in (*BAD_DECIMALS, "0.0", "1.5", "1")),
            *(LEAST | {"cuts": [value]} for value in (*BAD_DECIMALS, "0.5", "1")),
            *(LEAST | {"cuts": value} for value in ([], "0.1", None, {"0.1": 1}, ["0.1"] * 65, ["0.1"] * 10**6)),
            *(
                LEAST | {key: value}
                for key in ("rounds", "kept", "polish")
                for value in (-1, 1001, 1.0, True, "1", None)
            ),
        )
    ),
]


@pytest.mark.parametrize("value", HOSTILE, ids=map(str, range(len(HOSTILE))))
def test_other_schemes_are_damage(value: Any) -> None:
    """A scheme that this version does not know, or writes in another way, is refused, not guessed."""
    with pytest.raises(DamagedError, match=r"here: .*not a quantization scheme"):
        scheme_from_json(value, "here")


# Which tensor gets which


def test_one_scheme_is_for_tables() -> None:
    """A single scheme quantizes tables of a dtype that it knows, and nothing else."""
    for scheme in (Asymmetric(4), AdaptiveAsymmetric(4), ByErrorBudget(3), ByExpectedRestores(3)):
        rules = SchemeRules.of(scheme)
        assert rules.rule_for("t", torch.float32, is_table=True) == scheme
        assert rules.rule_for("t", torch.float64, is_table=True) == NoQuantization()
        assert rules.rule_for("dense", torch.float32, is_table=False) == NoQuantization()


def test_patterns_are_for_all_tensors() -> None:
    """The first pattern that matches an FQN gives its scheme, tables or not; what none matches is exact."""
    rules = SchemeRules.of({"*.t1.weight": NoQuantization(), "*.weight": KMeans(8), "*.momentum[12]": ByErrorBudget(1)})
    assert rules.rule_for("m.t1.weight", torch.float32, is_table=True) == NoQuantization()
    assert rules.rule_for("m.t2.weight", torch.float32, is_table=False) == KMeans(8)
    assert rules.rule_for("m.t2.weight", torch.int64, is_table=False) == NoQuantization()
    assert rules.rule_for("m.momentum1", torch.float32, is_table=False) == ByErrorBudget(1)
    assert rules.rule_for("m.momentum3", torch.float32, is_table=True) == NoQuantization()
    assert rules.rule_for("M.T2.WEIGHT", torch.float32, is_table=True) == NoQuantization()


@pytest.mark.parametrize("quantization", [8, "asymmetric", [Asymmetric(8)], {"*": 8}, {"*": Asymmetric}, Asymmetric])
def test_what_is_no_scheme_is_refused(quantization: Any) -> None:
    """A wrong argument is named before anything is saved."""
    with pytest.raises(ConfigurationError, match="'quantization' must be a scheme such as Asymmetric"):
        SchemeRules.of(quantization)


# How close they come


@pytest.mark.parametrize("kind", ["gaussian", "laplace", "uniform"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_schemes_are_as_close_as_they_cost(bits: int, kind: str) -> None:
    """K-means is closest, then the best search, the usual one and the greedy one, then no search, then symmetric."""
    values = sample_of(kind)
    best, usual = mean_error(AdaptiveAsymmetric.best(bits), values), mean_error(AdaptiveAsymmetric(bits), values)
    greedy = mean_error(AdaptiveAsymmetric(bits, GreedySearch(45 if bits == 4 else 25)), values)
    assert mean_error(KMeans(bits), values) < best <= usual <= best * 1.006
    assert usual < greedy < mean_error(Asymmetric(bits), values) < mean_error(Symmetric(bits), values)


@pytest.mark.parametrize("kind", [Symmetric, Asymmetric, AdaptiveAsymmetric, KMeans])
def test_more_bits_are_closer(kind: Callable[[int], Scheme]) -> None:
    """Each bit more makes the error smaller by more than half of it, or nearly so."""
    errors = [mean_error(kind(bits), sample_of("gaussian")) for bits in BITS]
    assert errors[0] > 1.7 * errors[1] > 1.7 * 1.7 * errors[2] > 1.7 * 1.7 * 10 * errors[3] > 0


def _searched(values: npt.NDArray[np.float64], bits: int, num_bins: int) -> npt.NDArray[np.float64]:
    """The least l2 error of each row on the greedy path from its whole range to nothing, without rounding to fp16."""
    low, high = values.min(1, keepdims=True), values.max(1, keepdims=True)
    step, top = (high - low) / num_bins, 2**bits - 1

    def error(low: npt.NDArray[np.float64], high: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        scale = np.maximum(high - low, 1e-30) / top
        decoded = low + scale * np.clip(np.round((values - low) / scale), 0, top)
        return np.asarray(np.linalg.norm(decoded - values, axis=1, keepdims=True))

    least = error(low, high)
    for _ in range(num_bins - 1):
        from_left, from_right = error(low + step, high), error(low, high - step)
        cut_left = from_left < from_right
        low, high = np.where(cut_left, low + step, low), np.where(cut_left, high, high - step)
        least = np.minimum(least, np.minimum(from_left, from_right))
    return least[:, 0]


@pytest.mark.parametrize("kind", ["gaussian", "laplace", "uniform"])
@pytest.mark.parametrize(("bits", "num_bins"), [(2, 25), (3, 25), (4, 45)])
def test_the_usual_search_is_no_worse_than_a_greedy_one(bits: int, num_bins: int, kind: str) -> None:
    """Its mean error is not above that of a greedy search worked out here in NumPy, which may use unrounded ranges."""
    values = sample_of(kind)
    norms = values.double().norm(dim=1).numpy()
    theirs = float((_searched(values.double().numpy(), bits, num_bins) / norms).mean())
    assert 0.5 * theirs < mean_error(AdaptiveAsymmetric(bits), values) <= theirs


# What is chosen


@pytest.mark.parametrize("kind", ["gaussian", "laplace", "uniform"])
@pytest.mark.parametrize("bits", BITS)
def test_a_search_is_chosen_by_the_sample_alone(bits: int, kind: str) -> None:
    """The same sample leads to the same search, a concrete one, which does not choose again and is recorded."""
    chosen = AdaptiveAsymmetric(bits).choose(lambda: sample_of(kind), 0)
    assert chosen.bits == bits
    assert chosen.search is not None
    assert chosen == AdaptiveAsymmetric(bits).choose(lambda: sample_of(kind), 99)
    assert chosen.choose(lambda: pytest.fail("a concrete scheme needs no sample"), 0) == chosen
    assert scheme_from_json(chosen.to_json(), "here") == chosen
    values = sample_of(kind, 300)
    chosen = AdaptiveAsymmetric(bits).choose(lambda: values, 0)
    assert torch.equal(AdaptiveAsymmetric(bits).encode(values).codes, chosen.encode(values).codes)


def test_the_search_depends_on_the_sample() -> None:
    """Different samples lead to different searches, and no rows at all to some search."""
    chosen = {
        AdaptiveAsymmetric(bits).choose(lambda values=values: values, 0).search
        for bits in (2, 3, 4)
        for values in (sample_of("gaussian"), sample_of("uniform"), torch.zeros(3, 4), torch.empty(0, 4))
    }
    assert None not in chosen
    assert len(chosen) > 3


def _bits(scheme: Scheme) -> int:
    """Bits of a chosen scheme, which is concrete: 32 where nothing is quantized."""
    if isinstance(scheme, NoQuantization):
        return 32
    assert isinstance(scheme, Asymmetric if scheme.to_json()["bits"] == 8 else AdaptiveAsymmetric)
    assert scheme == scheme_from_json(scheme.to_json(), "here")
    return int(scheme.to_json()["bits"])


@pytest.mark.parametrize(
    ("expected", "bits"), [(0, 2), (0.5, 2), (1, 2), (1.01, 3), (3, 3), (3.5, 4), (20, 4), (20.5, 8), (1000, 8)]
)
def test_bits_by_expected_restores(expected: float, bits: int) -> None:
    """Few restores allow few bits; once there were more than expected, 8 bits are used."""
    rule = ByExpectedRestores(expected)
    for num_restores in {0, int(expected)}:
        assert _bits(rule.choose(lambda: sample_of("gaussian"), num_restores)) == bits
    assert _bits(rule.choose(lambda: sample_of("gaussian"), int(expected) + 1)) == 8


def _relative_error(scheme: Scheme, values: Tensor) -> float:
    decoded = scheme.decode(scheme.encode(values).codes, values.shape[1], values.dtype).double()
    return float((decoded - values.double()).square().sum() / values.double().square().sum())


@pytest.mark.parametrize("kind", ["gaussian", "laplace", "uniform"])
def test_bits_by_error_budget(kind: str) -> None:
    """The fewest bits are chosen whose error, times the restores, stays within the budget; beyond 8, none."""
    values = sample_of(kind)
    schemes = [AdaptiveAsymmetric(bits).choose(lambda: values, 0) for bits in (2, 3, 4)]
    errors = [_relative_error(scheme, values) for scheme in (*schemes, Asymmetric(8))]
    assert errors == sorted(errors, reverse=True)
    met = set()
    for budget in (0.0, 1e-5, 1e-3, 0.1, 0.5):
        chosen = []
        for expected in (0, 1, 3, 20, 500):
            restores = max(expected, 1)
            wanted = next((bits for bits, error in zip(BITS, errors, strict=True) if restores * error <= budget), 32)
            chosen.append(_bits(ByErrorBudget(expected, budget).choose(lambda: values, 0)))
            assert chosen[-1] == wanted
            assert _bits(ByErrorBudget(0, budget).choose(lambda: values, restores - 1)) == wanted
        assert chosen == sorted(chosen)
        met |= set(chosen)
    assert met == {2, 3, 4, 8, 32}


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30, 3e7], ids=str)
def test_rows_stored_exactly_do_not_sway_the_choice(value: float) -> None:
    """Rows of a sample that codes cannot hold have no error, and leave the others' bits as they were."""
    values = sample_of("gaussian")
    broken = torch.cat((values[:5], values))
    broken[:5, 3] = value
    for expected in (1, 3, 20, 5000):
        rule = ByErrorBudget(expected)
        assert _bits(rule.choose(lambda: broken, 0)) == _bits(rule.choose(lambda: values, 0))
        assert rule.choose(lambda: broken[:5], 0) is not None


def test_expected_restores_are_a_product() -> None:
    """Nodes times hours times the probability that one of them fails in an hour."""
    assert expected_restores(0.001, 100, 50) == pytest.approx(5.0)
    assert expected_restores(0, 100, 50) == 0
    for number, name in enumerate(("failures_per_node_hour", "num_nodes", "job_hours")):
        for value in (-1, torch.nan, torch.inf, "1", None, True):
            arguments: list[Any] = [1, 1, 1]
            arguments[number] = value
            with pytest.raises(ConfigurationError, match=f"'{name}' must be a number"):
                expected_restores(*arguments)
