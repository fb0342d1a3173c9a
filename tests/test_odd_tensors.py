"""Tensors that are not what they seem, and calls in the middle of calls."""

from __future__ import annotations

import itertools
import signal
import time
from contextlib import nullcontext

import pytest
import torch
from calls import call, pack
from strategies import make_case
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_cpu import (
    FusedMoEModularKernel,
    MoEPrepareAndFinalizeNoEP,
    PackedExperts,
    fused_experts,
    moe_align_block_size,
    ops,
)
from moe_cpu.errors import ArgumentError, DeviceError, ShapeError
from moe_cpu.experts import create
from moe_cpu.tensor_checks import check_own_memory

CASE = make_case(M=5, K=64, I=32, E=8, topk=2, seed=5)


def test_a_pending_negation_is_carried_out():
    x = CASE.x.float()
    pending = torch._neg_view(-x)
    assert pending.is_neg()
    packed = pack(CASE)
    assert torch.equal(call(CASE.with_(x=pending), packed=packed), call(CASE.with_(x=x), packed=packed))


@pytest.mark.parametrize("name", ["w1", "w2", "w1_bias", "w2_bias", "topk_weights"])
def test_weights_with_a_pending_negation_are_not_those_without(name):
    case = make_case(M=5, K=64, I=32, E=8, topk=2, bias=True, seed=9)
    before = call(case)
    tensor = getattr(case, name)
    assert torch.equal(
        call(case.with_(**{name: torch._neg_view(tensor)})), call(case.with_(**{name: -tensor}))
    )
    assert torch.equal(call(case), before)


def test_ids_with_a_pending_negation_are_the_negated_ones():
    ids = torch.tensor([[3, 1], [0, 3]], dtype=torch.int32)
    expert_map = torch.tensor([1, -1, 0, 2], dtype=torch.int32)
    pending, pending_map = torch._neg_view(-ids), torch._neg_view(-expert_map)
    for mine, theirs in zip(
        moe_align_block_size(pending, 2, 4, pending_map),
        moe_align_block_size(ids, 2, 4, expert_map),
        strict=True,
    ):
        assert torch.equal(mine, theirs)
    case = make_case(M=4, E=4, topk=2, local=2, seed=10)
    turned = case.with_(expert_map=torch._neg_view(-case.expert_map))
    assert torch.equal(call(turned, packed=pack(case)), call(case, packed=pack(case)))


def test_a_call_on_the_meta_device_gives_shape_and_dtype_and_checks():
    x, w1, w2, weights, ids = (
        t.to("meta") for t in (CASE.x, CASE.w1, CASE.w2, CASE.topk_weights, CASE.topk_ids)
    )
    out = fused_experts(x, w1, w2, weights, ids)
    assert (out.device.type, out.shape, out.dtype) == ("meta", CASE.x.shape, CASE.x.dtype)
    assert fused_experts(x, w1, w2, weights, ids, inplace=True) is x
    with pytest.raises(ArgumentError, match="clone"):
        fused_experts(x[:1].expand(5, 64), w1, w2, weights, ids, inplace=True)
    with pytest.raises(ShapeError, match="w2"):
        fused_experts(x, w1, w2[:, :, 1:], weights, ids)
    with pytest.raises(DeviceError, match="PackedExperts"):
        fused_experts(x, pack(CASE), None, weights, ids)
    with pytest.raises(DeviceError, match=r"topk_ids.*meta; fused_experts"):
        FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), create("reference"))(x, w1, w2, weights, ids)
    for mine, theirs in zip(
        moe_align_block_size(ids, 4, 8), moe_align_block_size(CASE.topk_ids, 4, 8), strict=True
    ):
        assert mine.is_meta
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_tensors_without_memory_are_refused():
    packed = pack(CASE)
    with FakeTensorMode() as mode:
        x, ids, weights = (mode.from_tensor(t) for t in (CASE.x, CASE.topk_ids, CASE.topk_weights))
        w1, w2 = mode.from_tensor(CASE.w1), mode.from_tensor(CASE.w2)
        wide = mode.from_tensor(torch.arange(8))
        for use in (
            lambda: fused_experts(x, packed, None, weights, ids),
            lambda: fused_experts(x, packed, None, weights, ids, expert_map=wide),
            lambda: moe_align_block_size(ids, 4, 8),
            lambda: moe_align_block_size(ids, 4, 8, wide),
            lambda: PackedExperts.pack(w1, w2),
        ):
            with pytest.raises(ArgumentError, match="memory"):
                use()


# As strides of [5, 64]: rows that are one, that overlap by half, columns that are one, all elements one, and pairs far apart that meet.
@pytest.mark.parametrize("strides", [(0, 1), (32, 1), (64, 0), (0, 0), (4, 3)])
def test_inplace_into_shared_memory_is_refused_before_anything_is_computed(strides):
    x = CASE.x.clone().as_strided((5, 64), strides)
    before = x.clone()
    with pytest.raises(ArgumentError, match=r"inplace.*clone"):
        fused_experts(x, pack(CASE), None, CASE.topk_weights, CASE.topk_ids, inplace=True)
    assert torch.equal(x, before)


def test_whether_elements_share_memory_is_what_their_addresses_say():
    for rows, columns, down, right in itertools.product(range(5), range(6), range(8), range(8)):
        places = [i * down + j * right for i in range(rows) for j in range(columns)]
        with (
            nullcontext() if len(set(places)) == len(places) else pytest.raises(ArgumentError, match="clone")
        ):
            check_own_memory("x", torch.zeros(200).as_strided((rows, columns), (down, right)))


def test_inplace_into_a_sparse_tensor_is_refused():
    with pytest.raises(ArgumentError, match=r"inplace.*strided.*sparse_coo; pass hidden_states\.to_dense"):
        fused_experts(CASE.x.to_sparse(), pack(CASE), None, CASE.topk_weights, CASE.topk_ids, inplace=True)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traces_that_would_keep_what_their_example_gave_are_refused():
    packed, reference = pack(CASE), FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), create("reference"))
    batch = torch.randn(8, 3, 64).bfloat16()
    for use, example in (
        (lambda x: fused_experts(x, packed, None, CASE.topk_weights, CASE.topk_ids), CASE.x),
        (
            lambda x: fused_experts(
                x, CASE.w1, CASE.w2, CASE.topk_weights, CASE.topk_ids, backend="reference"
            ),
            CASE.x,
        ),
        (lambda ids: reference(CASE.x, CASE.w1, CASE.w2, CASE.topk_weights, ids), CASE.topk_ids),
        (lambda ids: moe_align_block_size(ids, 4, 8), CASE.topk_ids),
        (lambda w: PackedExperts.pack(w, CASE.w2).w1, CASE.w1),
        (lambda x: x + packed.unpack()[0][0, 0, 0], CASE.x),
        (lambda x: ops.experts_batched(x, packed, torch.full((8,), 3), activation="silu"), batch),
    ):
        with pytest.raises(ArgumentError, match=r"torch\.jit\.trace"):
            torch.jit.trace(use, (example,))


@pytest.mark.parametrize("strides", [(64, 1), (65, 1), (1, 5), (128, 2)])
def test_inplace_into_memory_of_its_own(strides):
    x = torch.zeros(1000, dtype=CASE.x.dtype).as_strided((5, 64), strides).copy_(CASE.x)
    want = fused_experts(CASE.x, pack(CASE), None, CASE.topk_weights, CASE.topk_ids)
    assert torch.equal(
        fused_experts(x, pack(CASE), None, CASE.topk_weights, CASE.topk_ids, inplace=True), want
    )


def test_a_call_in_the_middle_of_another_gets_memory_of_its_own():
    """What a handler sees between the moment a call has read its scratch address and the native call: it may grow without freeing."""
    outer = ops.borrow()
    try:
        address, size = outer.scratch_address, outer.scratch_bytes
        large = make_case(M=3000, K=64, I=32, E=8, topk=2, seed=7)
        large.check(call(large, packed=pack(large)))
        moe_align_block_size(large.topk_ids, 16, 8)
        assert (outer.scratch_address, outer.scratch_bytes) == (address, size)
        assert outer.busy
    finally:
        outer.busy = False


def test_a_signal_handler_may_call_while_a_call_is_under_way():
    packed, large = pack(CASE), make_case(M=200, K=64, I=32, E=8, topk=2, seed=6)
    large_packed = pack(large)
    want, want_large = call(CASE, packed=packed), call(large, packed=large_packed)
    wrong, calls = [], 0

    def interrupt(*_: object) -> None:
        nonlocal calls
        calls += 1
        if not torch.equal(call(CASE, packed=packed), want):
            wrong.append("inner")
        signal.setitimer(signal.ITIMER_REAL, 0.0005)  # one at a time, however slow the machine

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.0005)
    try:
        start = time.monotonic()
        while (passed := time.monotonic() - start) < 1 or (calls <= 10 and passed < 60):
            if not torch.equal(call(large, packed=large_packed), want_large):
                wrong.append("outer")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert calls > 10
    assert not wrong
