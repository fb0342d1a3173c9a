"""The cache of packed dense weights is never stale, holds nothing that nobody needs, and packs once."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from calls import call, in_child, pack
from strategies import make_case

from moe_cpu import PackedExperts, pack_cache

pytestmark = pytest.mark.sanitize
BF16 = torch.bfloat16


def cached(case):
    return pack_cache.packed_for(case.w1, case.w2, case.w1_bias, case.w2_bias, case.activation)


def test_the_second_call_finds_the_first_ones_copy():
    case = make_case(seed=50)
    assert cached(case) is cached(case)
    assert cached(case) is cached(case.with_(w1=case.w1.view(case.w1.shape))), (
        "another view of the same memory"
    )


@pytest.mark.parametrize("name", ["w1", "w2", "w1_bias", "w2_bias"])
def test_a_change_in_place_is_noticed(name):
    case = make_case(bias=True, seed=51)
    before = call(case, backend="native")
    getattr(case, name).mul_(-2)
    after = call(case, backend="native")
    assert not torch.equal(after, before)
    case.check(after)


def test_a_change_through_a_view_is_noticed():
    case = make_case(seed=52)
    call(case, backend="native")
    case.w1[:, 3].zero_()
    case.check(call(case, backend="native"))


def test_new_weights_at_an_old_address_are_not_the_old_ones():
    shape = make_case(seed=53)
    block1, block2 = torch.empty(shape.w1.numel(), dtype=BF16), torch.empty(shape.w2.numel(), dtype=BF16)
    for seed in (53, 54):
        case = make_case(seed=seed)
        # numpy shares the memory and has no version: what the allocator's reuse of an address looks like.
        w1 = torch.from_numpy(block1.view(torch.int16).numpy()).view(BF16).view(case.w1.shape)
        w2 = torch.from_numpy(block2.view(torch.int16).numpy()).view(BF16).view(case.w2.shape)
        w1.copy_(case.w1)
        w2.copy_(case.w2)
        case = case.with_(w1=w1, w2=w2)
        case.check(call(case, backend="native"))
        del w1, w2, case


def test_the_same_memory_under_another_meaning_is_packed_again():
    case = make_case(K=40, I=24, seed=55)
    for activation in ("silu", "gelu", "swigluoai", "silu"):
        again = case.with_(activation=activation)
        again.check(call(again, backend="native"))


def test_the_copy_dies_with_the_weights():
    pack_cache.forget()
    case = make_case(seed=56)
    cached(case)
    assert pack_cache.held_bytes() > 0
    del case
    gc.collect()
    assert pack_cache.held_bytes() == 0


def test_inference_tensors_are_never_served_stale():
    with torch.inference_mode():
        case = make_case(seed=57)
        with pytest.warns(UserWarning, match="inference_mode"):
            call(case, backend="native")
        case.w1.mul_(2)
        with pytest.warns(UserWarning, match="inference_mode"):
            case.check(call(case, backend="native"))


def test_many_threads_pack_once(monkeypatch):
    """Whoever comes while another packs the same weights waits for that copy."""
    case, real, count, start = make_case(M=4, E=6, seed=58), PackedExperts.pack, [], threading.Barrier(6)

    def slow(*args, **kwargs):
        count.append(1)
        time.sleep(0.05)
        return real(*args, **kwargs)

    monkeypatch.setattr(PackedExperts, "pack", slow)

    def work(_):
        start.wait()
        return cached(case)

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(work, range(6)))
    assert all(packed is results[0] for packed in results)
    assert len(count) == 1


def test_new_w2_beside_the_same_w1_leaves_nothing_behind():
    pack_cache.forget()
    case = make_case(seed=59)
    for seed in range(5):
        other = case.with_(w2=make_case(seed=seed).w2)
        other.check(call(other, backend="native"))
        held = pack_cache.held_bytes()
        del other
        gc.collect()
        assert pack_cache.held_bytes() == 0 < held
        assert not pack_cache._last


def test_exchanged_storage_of_the_same_tensors_leaves_nothing_behind():
    pack_cache.forget()
    case = make_case(seed=60)
    for seed in range(5):
        case.w2.data = make_case(seed=seed).w2
        case.check(call(case, backend="native"))
    gc.collect()
    assert pack_cache.held_bytes() == pack(case).nbytes
    assert len(pack_cache._last) == 1


def test_forget_is_for_writes_without_a_version():
    case = make_case(seed=61)
    call(case, backend="native")
    case.w1.data.mul_(-2)
    pack_cache.forget(case.w1)
    case.check(call(case, backend="native"))


def test_a_child_does_not_inherit_a_held_lock():
    case = make_case(seed=62)
    with pack_cache._cache._lock:
        in_child(lambda: cached(case))
