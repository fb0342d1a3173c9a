"""Tensors that are not what they seem, and calls in the middle of calls."""

from __future__ import annotations

import signal
import time

import pytest
import torch
from calls import call, pack
from strategies import make_case
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_cpu import PackedExperts, fused_experts, moe_align_block_size, ops
from moe_cpu.errors import ArgumentError

CASE = make_case(M=5, K=64, I=32, E=8, topk=2, seed=5)


def test_a_pending_negation_is_carried_out():
    x = CASE.x.float()
    pending = torch._neg_view(-x)
    assert pending.is_neg()
    packed = pack(CASE)
    assert torch.equal(call(CASE.with_(x=pending), packed=packed), call(CASE.with_(x=x), packed=packed))


def test_tensors_without_memory_are_refused():
    packed = pack(CASE)
    with FakeTensorMode() as mode:
        x, ids, weights = (mode.from_tensor(t) for t in (CASE.x, CASE.topk_ids, CASE.topk_weights))
        w1, w2 = mode.from_tensor(CASE.w1), mode.from_tensor(CASE.w2)
        for use in (
            lambda: fused_experts(x, packed, None, weights, ids),
            lambda: moe_align_block_size(ids, 4, 8),
            lambda: PackedExperts.pack(w1, w2),
        ):
            with pytest.raises(ArgumentError, match="memory"):
                use()


def test_inplace_into_an_expanded_tensor_is_refused_before_anything_is_computed():
    x = CASE.x[:1].expand(5, 64)
    before = x.clone()
    with pytest.raises(ArgumentError, match=r"inplace.*clone"):
        fused_experts(x, pack(CASE), None, CASE.topk_weights, CASE.topk_ids, inplace=True)
    assert torch.equal(x, before)


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
        end = time.monotonic() + 1
        while time.monotonic() < end:
            if not torch.equal(call(large, packed=large_packed), want_large):
                wrong.append("outer")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert calls > 10
    assert not wrong
