"""The reference backend against float64: every dtype it keeps, every kind of call, and its gradients."""

from __future__ import annotations

import bounds
import numpy as np
import oracle
import pytest
import torch
from calls import call
from hypothesis import given
from strategies import cases, make_case

from moe_cpu import FusedMoEModularKernel, MoEPrepareAndFinalizeNoEP
from moe_cpu.activations import activate
from moe_cpu.experts import create

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@given(case=cases())
def test_any_small_call(case):
    case.check(call(case, backend="reference"))


@given(case=cases(w_dtype=torch.float32))
def test_float32_weights_keep_their_precision(case):
    case.check(call(case, backend="reference"))


@pytest.mark.parametrize("activation", oracle.ACTIVATIONS)
@pytest.mark.parametrize("w_dtype", [*FLOATS, torch.float64])
def test_random_data(activation, w_dtype):
    x_dtype = torch.float64 if w_dtype == torch.float64 else torch.bfloat16
    case = make_case(
        M=9, K=96, I=64, activation=activation, bias=True, x_dtype=x_dtype, w_dtype=w_dtype, seed=1
    )
    got = call(case, backend="reference")
    case.check(got)
    bounds.assert_within(got, case.want(), bounds.DEVIATIONS * case.bound(bounds.Typical), form="sqrt(k)")


def test_float32_really_is_more_precise_than_bf16():
    case = make_case(M=16, K=96, I=64, x_dtype=torch.float32, w_dtype=torch.float32, seed=2)
    assert bounds.relative_rms(call(case, backend="reference"), case.want()) < 1e-6


def test_auto_keeps_float32_weights_in_float32():
    case = make_case(M=16, K=96, I=64, x_dtype=torch.float32, w_dtype=torch.float32, seed=2)
    assert bounds.relative_rms(call(case), case.want()) < 1e-6


@pytest.mark.parametrize("activation", oracle.ACTIVATIONS)
def test_activation_in_float64(activation, rng):
    h = torch.randn((50, 24), generator=rng, dtype=torch.float64) * 5
    np.testing.assert_allclose(
        activate(h, activation).numpy(), oracle.activate(h.numpy(), activation), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("activation", oracle.ACTIVATIONS)
@pytest.mark.parametrize("on_input", [False, True])
def test_gradients_are_those_of_finite_differences(activation, on_input):
    case = make_case(
        M=3, K=4, I=3, E=3, topk=1 if on_input else 2, activation=activation, bias=True, x_dtype=torch.float64,
        w_dtype=torch.float64, weights_dtype=torch.float64, weight_on_input=on_input, seed=3,
    )  # fmt: skip
    names = ("x", "w1", "w2", "topk_weights", "w1_bias", "w2_bias")
    inputs = [getattr(case, name).double().requires_grad_() for name in names]

    def layer(*tensors):
        return call(case.with_(**dict(zip(names, tensors, strict=True))), backend="reference")

    assert torch.autograd.gradcheck(layer, inputs)


def test_gradients_survive_the_next_call_of_the_same_kernel():
    """The first call's results must not live in scratch memory that the second one overwrites."""
    case = make_case(M=6, x_dtype=torch.float64, w_dtype=torch.float64, seed=4)
    kernel = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), create("reference"))

    def gradient(between: bool) -> torch.Tensor:
        weights = case.topk_weights.double().requires_grad_()
        out = kernel(case.x, case.w1, case.w2, weights, case.topk_ids)
        if between:
            kernel(case.x * 100, case.w1, case.w2, case.topk_weights, case.topk_ids)
        out.sum().backward()
        return weights.grad

    assert torch.equal(gradient(True), gradient(False))


def test_experts_without_tokens_get_zero_gradients():
    case = make_case(M=4, E=4, topk=1, routing="one_expert", w_dtype=torch.float32, x_dtype=torch.float32)
    w1, w2 = case.w1.clone().requires_grad_(), case.w2.clone().requires_grad_()
    call(case.with_(w1=w1, w2=w2), backend="reference").sum().backward()
    used = int(case.topk_ids[0, 0])
    for e in range(4):
        assert bool(w1.grad[e].any()) == bool(w2.grad[e].any()) == (e == used)
