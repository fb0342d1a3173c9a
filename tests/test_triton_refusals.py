"""What the Triton backend refuses before it needs Triton or a GPU."""

from __future__ import annotations

import os

import pytest
import torch
from calls import pack
from strategies import make_case

from moe_cpu import FusedMoEModularKernel, MoEPrepareAndFinalizeNoEP, fused_experts
from moe_cpu.errors import BackendUnavailable, DeviceError
from moe_cpu.experts.triton import TritonExperts


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_pack_is_refused_with_both_sides_and_the_way_out(device):
    """On whatever device the tokens are, before anything is launched or advised."""
    case = make_case(M=3, seed=18)
    packed = pack(case)
    x, ids, weights = (t.to(device) for t in (case.x, case.topk_ids, case.topk_weights))
    kernel = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), TritonExperts())
    batch = torch.empty((packed.E, 2, packed.K), dtype=torch.bfloat16, device=device)
    message = f"triton.*dense weights on cuda, got a PackedExperts.*hidden_states on {device}; pass dense w1 and w2 on cuda.*unpack.*native"
    for call in (
        lambda: TritonExperts().apply(x, packed, None, ids, "silu"),
        lambda: TritonExperts().apply(batch, packed, None, ids, "silu"),
        lambda: TritonExperts().apply_weighted(torch.empty_like(x), x, packed, None, weights, ids, "silu"),
        lambda: kernel(x, packed, None, weights, ids),
    ):
        with pytest.raises(BackendUnavailable, match=message):
            call()
    with pytest.raises(BackendUnavailable, match=r"triton.*got a PackedExperts"):
        fused_experts(case.x, packed, None, case.topk_weights, case.topk_ids, backend="triton")


@pytest.mark.parametrize("others", ["cpu", "meta"])
def test_a_pack_is_for_tokens_on_the_cpu(others):
    """A pack has no `.to(...)`: what can move are the tokens, and unpacked weights."""
    case = make_case(M=3, seed=21)
    ids, weights = case.topk_ids.to(others), case.topk_weights.to(others)
    message = r"hidden_states: expected device cpu.*got meta; pass hidden_states.*on the cpu, or dense weights on meta \(PackedExperts.unpack\(\)"
    with pytest.raises(DeviceError, match=message):
        fused_experts(case.x.to("meta"), pack(case), None, weights, ids)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter takes CPU tensors")
@pytest.mark.parametrize("batched", [False, True])
def test_tokens_on_the_cpu_are_refused(batched):
    case = make_case(M=3, seed=19)
    x = case.x.expand(case.w1.shape[0], *case.x.shape) if batched else case.x
    with pytest.raises(
        BackendUnavailable, match=r"'triton' cannot run this layer: runs on cuda tensors only, got cpu"
    ):
        TritonExperts().apply(x, case.w1, case.w2, case.topk_ids, "silu")


def test_float32_weights_are_refused():
    case = make_case(M=3, x_dtype=torch.float32, w_dtype=torch.float32, seed=20)
    with pytest.raises(BackendUnavailable, match="triton"):
        TritonExperts().apply(case.x, case.w1, case.w2, case.topk_ids, "silu")
