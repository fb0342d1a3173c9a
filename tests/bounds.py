"""How far a right answer may be from the oracle, derived element by element from where an implementation rounds.

Each operation of precision u returns its exact result times (1 + d), |d| <= u. A sum of n products in any order then errs by at most
gamma(n) * sum |a_i b_i|, gamma(n) = n u / (1 - n u) (Higham, Accuracy and Stability of Numerical Algorithms, 3.1); products of two bf16 are exact in
float32 and only their sum rounds. Errors travel on through the activation by its slope, through the second product and the weighted sum by absolute values.

Two readings of the same chain: `Worst` adds absolute errors and holds always. `Typical` adds variances (a rounding error is at most uniform, u / sqrt 3;
a sum of n random terms errs by about u sqrt(n) instead of u n) and holds for random data: an alarm for what stays inside the worst case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
from oracle import f64

# Unit roundoffs: half the spacing above 1, so 2^-p for p significand bits (bf16 has 8).
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
# Below the normal numbers the error is absolute: bf16 and float32 may flush what is below 2^-126 to zero (TDPBF16PS and VDPBF16PS always do, on the way
# in and out); fp16 keeps subnormals, whose spacing is 2^-24.
TINY = 2.0**-126
ABSOLUTE = {"bfloat16": TINY, "float16": 2.0**-25, "float32": TINY, "float64": 2.0**-1022}

# Additions beside the k products of a sum: even and odd chains joined, the joined pair added, the bias; one for a bias that is rounded.
EXTRA_TERMS = 4
# An activation evaluated in precision u errs by at most this many u * |gate|. Worst is gelu by erfc, |x| (Phi(-|x|) (4 x^2 + 32) + 2) u < 19 u |x|:
# the exponent x^2 / 2 carries 4 roundings, the fit of erfc and its exp about 32 u; x^2 Phi(-x) <= 0.17. Swish and the tanh form need 7.
# Two more for the products with up (+ 1).
ACTIVATION_ULPS = 22
# Largest slope of x sigmoid(a x) (any a: it is silu(a x) / a), of gelu and of its tanh form, rounded up.
SLOPE = {"silu": 1.1, "swigluoai": 1.1, "gelu": 1.13, "gelu_tanh": 1.13}
# bf16 data, bf16 out: |got - want| / |want| in the 2-norm. Two roundings to bf16 (activation, output) leave 0.0023; a third would make it 0.0028.
RELATIVE_RMS = 0.0024
# Standard deviations that an element of a random case may be off: 7 leaves 3e-12 per element.
DEVIATIONS = 7.0


def name_of(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]


@dataclass(frozen=True)
class Numerics:
    """Where an implementation rounds, as dtype names. x: input of the first product; first: its result; h: activation; pair: each expert's result."""

    out: str = "bfloat16"
    x: str = "bfloat16"
    h: str = "bfloat16"
    accumulate: str = "float32"
    first: str | None = None
    pair: str | None = None

    @staticmethod
    def of(x_dtype: Any, weight_dtype: Any, **changes: Any) -> Numerics:
        """The contract's: accumulate in float32 (float64 for float64), h in the weights' dtype, x too when they are bf16."""
        weights, x = name_of(weight_dtype), name_of(x_dtype)
        accumulate = "float64" if weights == "float64" else "float32"
        return Numerics(
            **{
                "out": x,
                "x": "bfloat16" if weights == "bfloat16" else x,
                "h": weights,
                "accumulate": accumulate,
            }
            | changes
        )


class Worst:
    """Errors as absolute bounds that add up."""

    @staticmethod
    def unit(dtype: str) -> float:
        return UNIT[dtype]

    @staticmethod
    def join(*errors: Any) -> Any:
        return sum(errors)

    @staticmethod
    def through(errors: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        """Errors of a vector after its product with `matrix [columns, k]`."""
        return errors @ np.abs(matrix).T

    @staticmethod
    def summed(a: np.ndarray, matrix: np.ndarray, dtype: str) -> np.ndarray:
        """Rounding of the products' sum itself."""
        n = a.shape[-1] + EXTRA_TERMS
        return n * UNIT[dtype] / (1 - n * UNIT[dtype]) * (np.abs(a) @ np.abs(matrix).T)


class Typical:
    """Errors as standard deviations whose squares add up."""

    @staticmethod
    def unit(dtype: str) -> float:
        return UNIT[dtype] / math.sqrt(3)

    @staticmethod
    def join(*errors: Any) -> Any:
        return np.sqrt(sum(np.square(e) for e in errors))

    @staticmethod
    def through(errors: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        return np.sqrt(errors**2 @ (matrix**2).T)

    @staticmethod
    def summed(a: np.ndarray, matrix: np.ndarray, dtype: str) -> np.ndarray:
        n = a.shape[-1] + EXTRA_TERMS
        return Typical.unit(dtype) * np.sqrt(n * (a**2 @ (matrix**2).T))


def flushed(a: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Absolute error of sums whose subnormal operands, products and partial sums may all be taken for zero."""
    small_a, small_m = (
        np.where(np.abs(a) < TINY, np.abs(a), 0),
        np.where(np.abs(matrix) < TINY, np.abs(matrix), 0),
    )
    return small_a @ np.abs(matrix).T + np.abs(a) @ small_m.T + (2 * a.shape[-1] + EXTRA_TERMS) * TINY


def rounding(kind: Any, value: np.ndarray, error: np.ndarray, dtype: str | None) -> np.ndarray:
    """`error` of `value` after one more rounding to `dtype`."""
    if dtype is None:
        return error
    return kind.join(error, kind.unit(dtype) * (np.abs(value) + error)) + ABSOLUTE[dtype]


def activation_error(kind: Any, g: np.ndarray, error: np.ndarray, activation: str, unit: float) -> np.ndarray:
    """Error of the activation of `g`, which itself is off by `error`, before it is rounded."""
    if activation == "relu2":
        positive = np.maximum(g, 0)
        return kind.join(2 * positive * error, error**2, unit * (positive + error) ** 2)
    (gate, up), (gate_error, up_error) = oracle.gate_up(g, activation), oracle.gate_up(error, activation)
    if activation == "swigluoai":
        gate, up = np.minimum(gate, oracle.LIMIT), np.clip(up, -oracle.LIMIT, oracle.LIMIT) + 1
    slope, big_up = SLOPE[activation], np.abs(up) + up_error
    if activation == "swigluoai":
        big_up = big_up + 1  # up + 1 rounds relative to its terms
    evaluation = ACTIVATION_ULPS * unit * (np.abs(gate) + gate_error) * big_up
    return kind.join(
        slope * gate_error * big_up, np.abs(oracle.GATES[activation](gate)) * up_error, evaluation
    )


def expert_errors(
    kind: Any,
    x: np.ndarray,
    x_error: np.ndarray,
    w1: np.ndarray,
    w2: np.ndarray,
    b1: np.ndarray,
    b2: np.ndarray,
    activation: str,
    numerics: Numerics,
) -> tuple[np.ndarray, np.ndarray]:
    """One expert's results `[rows, K]` in float64 and how far they may be off."""
    acc = numerics.accumulate
    g = x @ w1.T + b1
    g_error = kind.join(
        kind.through(x_error, w1), kind.summed(x, w1, acc), EXTRA_TERMS * kind.unit(acc) * np.abs(b1)
    ) + flushed(x, w1)
    g_error = rounding(kind, g, g_error, numerics.first)
    h = oracle.activate(g, activation)
    h_error = activation_error(kind, g, g_error, activation, UNIT[acc]) + TINY
    h_error = rounding(kind, h, h_error, numerics.h)
    y = h @ w2.T + b2
    y_error = kind.join(
        kind.through(h_error, w2),
        kind.summed(np.abs(h) + h_error, w2, acc),
        EXTRA_TERMS * kind.unit(acc) * np.abs(b2),
    )
    return y, rounding(kind, y, y_error + flushed(h, w2), numerics.pair)


def pair_errors(
    x: Any,
    w1: Any,
    w2: Any,
    topk_ids: Any,
    activation: str = "silu",
    w1_bias: Any = None,
    w2_bias: Any = None,
    expert_map: Any = None,
    *,
    numerics: Numerics,
    kind: Any = Worst,
    x_error: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`oracle.moe_pairs` and its errors, both `[M, topk, K]`. A pair without an expert is exactly zero."""
    x_dtype, x, ids = name_of(getattr(x, "dtype", "float64")), f64(x), oracle.local_ids(topk_ids, expert_map)
    x_error = np.zeros_like(x) if x_error is None else x_error
    if x_dtype != numerics.x:
        x_error = rounding(kind, x, x_error, numerics.x)
    values, errors = np.zeros((*ids.shape, w2.shape[1])), np.zeros((*ids.shape, w2.shape[1]))
    for e in np.unique(ids[ids >= 0]):
        token, slot = np.nonzero(ids == e)
        b1 = np.zeros(w1.shape[1]) if w1_bias is None else f64(w1_bias[e])
        b2 = np.zeros(w2.shape[1]) if w2_bias is None else f64(w2_bias[e])
        values[token, slot], errors[token, slot] = expert_errors(
            kind, x[token], x_error[token], f64(w1[e]), f64(w2[e]), b1, b2, activation, numerics
        )
    return values, errors


def layer_errors(
    x: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    activation: str = "silu",
    w1_bias: Any = None,
    w2_bias: Any = None,
    expert_map: Any = None,
    weight_on_input: bool = False,
    *,
    numerics: Numerics,
    kind: Any = Worst,
) -> np.ndarray:
    """How far each element of the layer's output `[M, K]` may be from `oracle.moe`."""
    weights, x_error = f64(topk_weights), None
    weights = np.where(oracle.local_ids(topk_ids, expert_map) >= 0, weights, 0.0)
    if weight_on_input:
        # The product is taken in the accumulator's precision and rounded to x's dtype.
        product, dtype = f64(x) * f64(topk_weights), name_of(x.dtype)
        x_error = rounding(kind, product, kind.unit(numerics.accumulate) * np.abs(product), dtype)
        if dtype != numerics.x:
            x_error = rounding(kind, product, x_error, numerics.x)
        x, weights = product, np.ones_like(weights)
        numerics = Numerics(**{**vars(numerics), "x": "float64"})
    values, errors = pair_errors(
        x,
        w1,
        w2,
        topk_ids,
        activation,
        w1_bias,
        w2_bias,
        expert_map,
        numerics=numerics,
        kind=kind,
        x_error=x_error,
    )
    total, error = np.einsum("mt,mtk->mk", weights, values), np.zeros((values.shape[0], values.shape[2]))
    # Slot by slot: weight times pair, then one product and one sum of precision `accumulate`; one more for a weight that is rounded.
    steps = kind.unit(numerics.accumulate) * (weights.shape[1] + 2)
    for slot in range(weights.shape[1]):
        w = np.abs(weights[:, slot, None])
        error = kind.join(error, w * errors[:, slot], steps * w * (np.abs(values[:, slot]) + errors[:, slot]))
    return rounding(kind, total, error + (weights.shape[1] + 1) * TINY, numerics.out)


def assert_within(got: Any, want: np.ndarray, bound: np.ndarray, **context: Any) -> None:
    """Every |got - want| <= bound; otherwise the worst element, with everything needed to see it again."""
    got = f64(got)
    assert got.shape == want.shape, f"shape {got.shape} instead of {want.shape}; {context}"
    error = np.abs(got - want)
    bad = ~(error <= bound)  # NaN is bad
    if not bad.any():
        return
    ratio = np.where(bad, np.nan_to_num(error / np.maximum(bound, 1e-300), nan=np.inf), -1.0)
    index = tuple(int(i) for i in np.unravel_index(np.argmax(ratio), ratio.shape))
    raise AssertionError(
        f"{int(bad.sum())} of {bad.size} elements are outside the bound; worst at {list(index)}: got {float(got[index])!r}, want {float(want[index])!r}, "
        f"error {error[index]:.4g}, bound {bound[index]:.4g}; "
        + ", ".join(f"{k}={v}" for k, v in context.items())
    )


def relative_rms(got: Any, want: np.ndarray) -> float:
    """|got - want| / |want| in the 2-norm."""
    return float(np.linalg.norm(f64(got) - want) / np.linalg.norm(want))
