"""Steady state: a call allocates its result and nothing else, scratch memory is reused, packing holds little beside its result."""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from calls import call, native, pack, run_kernel
from strategies import make_case

from moe_cpu import (
    BatchedPrepareAndFinalize,
    CPUExperts,
    FusedMoEModularKernel,
    MoEPrepareAndFinalizeNoEP,
    native_library,
    ops,
)
from moe_cpu.experts import create

CASE = make_case(M=64, K=256, I=128, E=4, topk=2, seed=131)


def allocations(work) -> list[int]:
    """Sizes of the tensors' memory that torch's CPU allocator hands out during `work`."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    events = profile.profiler.kineto_results.events()
    return [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0]


def test_the_instrument_sees_an_allocation():
    assert allocations(lambda: torch.empty(12345, dtype=torch.uint8)) == [12345]


def test_a_call_allocates_its_result_only(isa):
    packed = pack(CASE)
    native(CASE, isa, packed)
    assert allocations(lambda: native(CASE, isa, packed)) == [CASE.x.nbytes]


def test_inplace_and_dense_weights_allocate_no_more():
    case = CASE.with_(x=CASE.x.clone())
    call(case)
    assert allocations(lambda: call(case)) == [case.x.nbytes]
    assert allocations(lambda: call(case, inplace=True)) == []


def test_a_modular_kernel_allocates_its_result_only():
    kernel = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), create("native"))
    run_kernel(kernel, CASE)
    assert allocations(lambda: run_kernel(kernel, CASE)) == [CASE.x.nbytes]


class NoReduce(MoEPrepareAndFinalizeNoEP):
    def accepts_reduced(self):
        return False


@pytest.mark.parametrize("stage", [NoReduce, lambda: BatchedPrepareAndFinalize(64, 4)])
def test_the_chosen_backend_works_in_the_kernels_memory(stage):
    """Under "auto" the first call finds out who runs; from then on the experts allocate nothing that grows with pairs."""
    kernel = FusedMoEModularKernel(stage(), CPUExperts())
    run_kernel(kernel, CASE)
    seen = []
    inner = kernel.fused_experts.apply

    def watched(*args, **kwargs):
        seen.append(allocations(lambda: seen.append(inner(*args, **kwargs))))
        return seen.pop(0)

    kernel.fused_experts.apply = watched
    before = ops.scratch_bytes_held()
    run_kernel(kernel, CASE)
    assert sum(seen[0]) < 1024
    assert ops.scratch_bytes_held() == before


def test_pages_are_not_taken_from_the_system_again(isa):
    case = make_case(M=512, K=512, I=256, E=8, topk=4, seed=132)
    packed, out = pack(case), torch.empty_like(case.x)

    def once() -> None:
        ops.fused_experts(
            case.x, packed, case.topk_weights, case.topk_ids, activation="silu", out=out, isa=isa
        )

    once()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        once()
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    held = ops.scratch_bytes_held() // resource.getpagesize()
    assert held > 500
    assert taken < held / 10, (
        "five calls would take five times the scratch memory's pages if they allocated it"
    )


def test_scratch_memory_stays_where_it_is():
    packed = pack(CASE)
    native(CASE, None, packed)
    held, address = ops.scratch_bytes_held(), ops._mine.scratch.data_ptr()
    small = make_case(M=1, seed=133)
    for _ in range(3):
        native(small, None)
        native(CASE, None, packed)
    assert (ops.scratch_bytes_held(), ops._mine.scratch.data_ptr()) == (held, address)


def test_a_kernels_workspaces_stay_where_they_are():
    kernel = FusedMoEModularKernel(NoReduce(), create("native"))
    run_kernel(kernel, CASE)
    addresses = {k: v.data_ptr() for k, v in kernel._scratch._blocks.items()}
    small = CASE.with_(x=CASE.x[:3], topk_ids=CASE.topk_ids[:3], topk_weights=CASE.topk_weights[:3])
    for case in (small, CASE):
        run_kernel(kernel, case)
    assert {k: v.data_ptr() for k, v in kernel._scratch._blocks.items()} == addresses


@pytest.mark.parametrize("mode", [native_library.REDUCED, native_library.UNREDUCED, native_library.BATCHED])
def test_scratch_memory_grows_no_faster_than_the_tokens(isa, mode):
    shape = SimpleNamespace(
        K=2048, I=768, E=128, gate_layout_code=native_library.GATE_LAYOUT_CODES["concatenated"]
    )

    def needed(tokens: int) -> int:
        return ops.layer_scratch_bytes(tokens, 8, shape, torch.bfloat16, mode, isa)

    sizes = [needed(2**p) for p in range(13)]
    for small, large in itertools.pairwise(sizes):
        assert 0 < small <= large <= 2 * small


PEAK = """
import sys, torch
sys.path.insert(0, {tests!r})
from moe_cpu import PackedExperts
E, N, K, I = 24, 2048, 1024, 1024
torch.set_num_threads(1)

def matrices(rows, cols):
    for e in range(E):
        yield torch.full((rows, cols), float(e), dtype=torch.bfloat16)

def most_resident():
    # Of this program alone: ru_maxrss would start at what the parent held before exec.
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

class Counted:
    def __init__(self, *size): self.size = size
    def __len__(self): return E
    def __iter__(self): return matrices(*self.size)

first = PackedExperts.pack(torch.ones(1, N, K, dtype=torch.bfloat16), torch.ones(1, K, I, dtype=torch.bfloat16))
before = most_resident()
packed = PackedExperts.pack({w1}, {w2})
peak = most_resident() - before
print(peak / first.nbytes, packed.nbytes / first.nbytes)
"""


@pytest.mark.parametrize(
    ("w1", "w2"), [("Counted(N, K)", "Counted(K, I)"), ("matrices(N, K)", "matrices(K, I)")]
)
def test_packing_holds_the_packed_weights_and_little_more(w1, w2):
    """In experts: E packed ones, and a few dense ones on their way (the allocator keeps some), whether or not their number is known in advance."""
    code = PEAK.format(tests=str(Path(__file__).parent), w1=w1, w2=w2)
    path = os.pathsep.join(filter(None, sys.path))
    out = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    peak, packed = map(float, out.stdout.split())
    assert packed == 24
    assert packed - 1 < peak < packed + 6
