"""The bounds themselves: a right answer passes, and every plausible mistake is caught."""

from __future__ import annotations

import bounds
import numpy as np
import oracle
import pytest
import torch
from bounds import UNIT, Typical, Worst
from strategies import Case, make_case
from torch import Tensor

BF16 = torch.bfloat16
# Large enough for faults to be seen as in a model, small enough for float64.
SHAPE = {"M": 12, "K": 256, "I": 160, "E": 4, "topk": 2}


def simulate(case: Case, fault: str = "") -> Tensor:
    """The layer in float32 with the contract's two roundings, or with one mistake."""
    total = torch.zeros(case.M, case.K)
    for m in range(case.M):
        for slot, e in enumerate(case.topk_ids[m].tolist()):
            if fault == "slot dropped" and slot == 1:
                continue
            total[m] += case.topk_weights[m, slot].float() * expert(
                case, e, case.x[m].to(BF16).float(), fault
            )
    return total.to(case.x.dtype)


def expert(case: Case, e: int, x: Tensor, fault: str) -> Tensor:
    w1, w2 = case.w1[e].float(), case.w2[e].float()
    used = slice(0, case.K - 32) if fault == "k-block dropped" else slice(0, case.K)
    if fault == "accumulated in bf16":
        g = torch.zeros(w1.shape[0], dtype=BF16)
        for k in range(case.K):
            g = (g.float() + x[k] * w1[:, k]).to(BF16)
        g = g.float()
    else:
        g = x[used] @ w1[:, used].T
    if case.w1_bias is not None and fault != "w1_bias missing":
        g = g + case.w1_bias[e]
    if fault == "gate and up swapped":
        gate, up = g.chunk(2)
        g = torch.cat((up, gate))
    if fault == "gate rounded":
        g = g.to(BF16).float()
    h = torch.from_numpy(oracle.activate(g.double().numpy(), case.activation)).float().to(BF16).float()
    if fault == "last neuron dropped":
        h[-1] = 0
    y = h @ w2.T
    if case.w2_bias is not None and fault != "w2_bias missing":
        y = y + case.w2_bias[e]
    return y.to(BF16).float() if fault == "pair rounded" else y


@pytest.mark.parametrize("activation", oracle.ACTIVATIONS)
@pytest.mark.parametrize("x_dtype", [BF16, torch.float32, torch.float16])
def test_a_right_answer_is_inside(activation, x_dtype):
    case = make_case(**SHAPE, activation=activation, bias=True, x_dtype=x_dtype, seed=3)
    got = simulate(case)
    case.check(got)
    error = np.abs(oracle.f64(got) - case.want())
    assert (error <= bounds.DEVIATIONS * case.bound(Typical)).all()


@pytest.mark.parametrize(
    "fault",
    [
        "k-block dropped",
        "w1_bias missing",
        "w2_bias missing",
        "gate and up swapped",
        "slot dropped",
        "last neuron dropped",
        "accumulated in bf16",
    ],
)
def test_a_fault_is_caught_by_the_worst_case(fault):
    case = make_case(**SHAPE, bias=True, seed=4)
    case.check(simulate(case))
    with pytest.raises(AssertionError, match="outside the bound"):
        case.check(simulate(case, fault))


@pytest.mark.parametrize("fault", ["pair rounded", "gate rounded", "accumulated in bf16"])
def test_one_rounding_too_many_is_caught_by_the_relative_error(fault):
    case = make_case(**SHAPE, seed=5)
    assert bounds.relative_rms(simulate(case), case.want()) <= bounds.RELATIVE_RMS
    assert bounds.relative_rms(simulate(case, fault), case.want()) > bounds.RELATIVE_RMS


def test_most_of_the_bound_is_used():
    """The worst case is an upper bound, but not a far one: its largest used share, and the typical error's."""
    case = make_case(**SHAPE, seed=6)
    error = np.abs(oracle.f64(simulate(case)) - case.want())
    assert (error / case.bound(Worst)).max() > 0.1
    typical = np.sqrt(np.mean(error**2) / np.mean(case.bound(Typical) ** 2))
    assert 0.4 < typical < 1.0


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_unit_roundoffs_are_exact(dtype):
    u = UNIT[bounds.name_of(dtype)]
    values = torch.linspace(1, 2, 100001, dtype=torch.float64)
    error = ((values.to(dtype).double() - values).abs() / values).max().item()
    assert 0.9 * u < error <= u
    assert torch.finfo(dtype).eps == 2 * u


def test_slopes_bound_the_activations():
    t = np.linspace(-12, 12, 200001)
    for name, slope in bounds.SLOPE.items():
        steepest = np.abs(np.diff(oracle.GATES[name](t)) / np.diff(t)).max()
        assert 0.95 * slope < steepest <= slope, name


@pytest.mark.parametrize("activation", oracle.ACTIVATIONS)
def test_float32_activations_stay_inside_their_evaluation_error(activation):
    t = np.linspace(-15, 15, 60001).astype(np.float32).astype(np.float64)
    g = np.stack((t, np.full_like(t, 3.0)), axis=-1)  # gate and up, whatever the order
    g32 = torch.from_numpy(g).float()
    gate, up = (h[..., 0] for h in (g32[..., :1], g32[..., 1:]))
    torchs = {
        "silu": lambda: torch.nn.functional.silu(gate) * up,
        "gelu": lambda: torch.nn.functional.gelu(gate) * up,
        "gelu_tanh": lambda: torch.nn.functional.gelu(gate, approximate="tanh") * up,
        "swigluoai": lambda: (c := gate.clamp(max=7)) * torch.sigmoid(1.702 * c) * (up.clamp(-7, 7) + 1),
        "relu2": lambda: torch.relu(g32).square(),
    }
    got = oracle.f64(torchs[activation]())
    want = oracle.activate(g, activation).reshape(got.shape)
    error = bounds.activation_error(Worst, g, np.zeros_like(g), activation, UNIT["float32"]).reshape(
        got.shape
    )
    bounds.assert_within(got, want, error + bounds.TINY, activation=activation)


def test_a_failure_says_everything():
    got, want = np.zeros((2, 3)), np.zeros((2, 3))
    got[1, 2] = 5.0
    with pytest.raises(AssertionError) as failure:
        bounds.assert_within(got, want, np.full((2, 3), 0.5), seed=17, isa="avx2")
    for part in ("1 of 6", "[1, 2]", "got 5.0", "want 0.0", "bound 0.5", "seed=17", "isa=avx2"):
        assert part in str(failure.value), part


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_never_within(value):
    with pytest.raises(AssertionError):
        bounds.assert_within(np.array([value]), np.array([1.0]), np.array([1e30]))


def test_a_pair_without_expert_has_no_error():
    case = make_case(E=4, local=2, routing="any", M=9)
    _, error = bounds.pair_errors(**case.pair_arguments(), numerics=case.numerics())
    absent = oracle.local_ids(case.topk_ids, case.expert_map) < 0
    assert absent.any()
    assert (error[absent] == 0).all()
    assert (error[~absent] > 0).all()
