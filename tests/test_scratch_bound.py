"""What a call of the native kernels works in stays within what they promise, on every published shape, whatever the number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest
import torch
from calls import native, native_pairs, pack
from measuring import SHAPE, make_quick, suite
from strategies import make_case

from moe_cpu import PackedExperts, native_library, ops
from moe_cpu.benchmark import Report, inputs, memory, run, table
from moe_cpu.models import MODELS, ModelShape
from moe_cpu.packing import layout_of

TOKENS = sorted({2**p for p in range(18)} | {3, 33, 1000, 5000, 50_000})


def needed(shape: ModelShape, M: int, mode: int, isa: str) -> int:
    code = native_library.GATE_LAYOUT_CODES[layout_of(shape.activation)]
    sizes = SimpleNamespace(E=shape.E, K=shape.K, I=shape.I, gate_layout_code=code)
    return ops.layer_scratch_bytes(M, shape.topk, sizes, torch.bfloat16, mode, isa)


def broken(isa: str, set_threads: Callable[[int], None], threads: Iterable[int]) -> list[str]:
    """A sentence for each size that exceeds the promise."""
    out = []
    for number in threads:
        set_threads(number)
        for shape in MODELS.values():
            for M in TOKENS:
                bound = memory.scratch_bound(shape, M)
                for mode in (native_library.REDUCED, native_library.UNREDUCED):
                    size = needed(shape, M, mode, isa)
                    assert size > 0
                    if size > bound:
                        out.append(f"{shape.name}, M = {M}, {number} threads: {size} bytes, promised {bound}")
    return out


@pytest.mark.parametrize("threads", [range(1, 9), (10, 12, 16, 24, 32, 48, 64)], ids=["1-8", "10-64"])
def test_scratch_memory_stays_within_the_promise(isa, set_threads, threads):
    over = broken(isa, set_threads, threads)
    assert not over, over


def test_what_is_cut_finer_to_fit_has_the_same_bits(isa, set_threads):
    """One thread more needs more memory, unless the call's rows or columns are cut finer for it."""
    case = make_case(M=128, K=4096, I=32, E=4, topk=4, bias=True, seed=38)
    packed = pack(case)
    sizes = {}
    for number in range(1, 161):
        set_threads(number)
        sizes[number] = ops.layer_scratch_bytes(128, 4, packed, torch.bfloat16, native_library.REDUCED, isa)
    finer = [number for number in range(2, 161) if sizes[number] < sizes[number - 1]]
    assert finer, "this case was to need more than may be had"
    set_threads(1)
    want, want_pairs = native(case, isa, packed), native_pairs(case, isa, packed)
    for number in finer:
        set_threads(number)
        assert torch.equal(native(case, isa, packed), want), number
        assert torch.equal(native_pairs(case, isa, packed), want_pairs), number


def test_blocks_of_k_of_both_products_have_the_same_bits(isa, set_threads):
    """So many threads leave no room for whole rows in float32, neither of x nor of h."""
    if isa not in ("avx512", "avx2"):
        pytest.skip("its rows are bf16, which are always held whole")
    case = make_case(M=200, K=4100, I=1540, E=2, topk=2, seed=39)
    packed = pack(case)
    set_threads(1)
    want = native(case, isa, packed)
    for number in (80, 160):
        set_threads(number)
        assert torch.equal(native(case, isa, packed), want), number


def test_layers_too_narrow_to_fit_are_not_cut_up_in_vain(isa, set_threads):
    """What they keep of each row exceeds the promise, so every thread gets as many rows at a time as it would without one."""
    shape, hands = ModelShape("narrow", 64, 8, 64, 64), []
    for M in (64, 100_000):
        sizes = []
        for number in (1, 8):
            set_threads(number)
            sizes.append(needed(shape, M, native_library.REDUCED, isa))
        hands.append(sizes[1] - sizes[0])
    assert needed(shape, 100_000, native_library.REDUCED, isa) > memory.scratch_bound(shape, 100_000)
    assert hands[1] >= hands[0] > 0


def test_the_promise_in_numbers():
    assert memory.scratch_bound(MODELS["qwen3-30b-a3b"], 64) == 2**26 + 64 * 8 * (2048 + 768) * 2


def test_results_say_what_a_call_works_in(monkeypatch, native, set_threads, tmp_path):
    make_quick(monkeypatch)
    set_threads(1)
    report = run(suite(tokens=(1, 5)))
    packed = PackedExperts.pack(*inputs.random_layer(SHAPE, 0))
    for row in report.rows:
        if row.case.contender == "native":
            mode = native_library.REDUCED
            assert row.scratch == ops.layer_scratch_bytes(row.case.M, 2, packed, torch.bfloat16, mode) > 0
        else:
            assert row.scratch is None
    shown = "\n".join(table.lines(report))
    assert "scratch MiB" in shown
    assert f"{report.rows[0].scratch / 2**20:.1f} of 64.0" in shown
    assert "(over)" not in shown
    report.save(tmp_path / "r.json")
    assert Report.load(tmp_path / "r.json") == report
    report.rows[0].scratch = 65 << 20
    assert "65.0 of 64.0 (over)" in "\n".join(table.lines(report))
    without = run(suite(contenders=("reference",)))
    assert "scratch" not in "\n".join(table.lines(without))
