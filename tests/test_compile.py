"""Graphs: torch.compile without a break, and torch's own checks of every operator."""

from __future__ import annotations

import pytest
import torch
from calls import call, pack, run_kernel
from strategies import make_case
from torch._dynamo.testing import CompileCounterWithBackend

from moe_cpu import (
    BatchedPrepareAndFinalize,
    MoEPrepareAndFinalizeNoEP,
    fused_experts,
    moe_align_block_size,
    stored_op,  # noqa: F401  defines the operator that modules use
)
from moe_cpu import FusedMoEModularKernel as Kernel
from moe_cpu.errors import ArgumentError, DeviceError
from moe_cpu.experts import create

OPERATORS = torch.ops.moe_cpu


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_every_operator_passes_torchs_checks():
    case = make_case(M=5, K=40, I=24, E=4, topk=2, local=3, bias=True, seed=111)
    packed = pack(case)
    weights = (packed.w1, packed.w2, packed.w1_bias, packed.w2_bias, packed.K, packed.I, packed.gate_layout)
    batch = case.x.new_zeros((3, 5, 40))
    samples = {
        "fused_experts": (case.x, *weights, case.topk_weights, case.topk_ids, case.expert_map, "silu"),
        "experts_unreduced": (case.x, *weights, case.topk_ids, case.expert_map, "silu"),
        "experts_batched": (batch, *weights, torch.tensor([2, 0, 5], dtype=torch.int32), "silu"),
        "moe_align_block_size": (case.topk_ids, 4, 4, case.expert_map, True),
        "pack_expert": (case.w1[0], "concatenated"),
        "unpack_expert": (packed.w2[0], 40, 24, "none"),
        "experts_layer": (
            case.x, case.w1, case.w2, case.topk_weights, case.topk_ids, "silu", False, -1, case.expert_map, None, None,
            "auto", [], "",
        ),
    }  # fmt: skip
    samples["stored_experts"] = (
        case.x, case.w1, case.w2, case.topk_weights, case.topk_ids.clamp(max=2), None, None, "silu", False, False, "auto",
    )  # fmt: skip
    known = {n.partition("::")[2] for n in torch._C._dispatch_get_all_op_names() if n.startswith("moe_cpu::")}
    assert known == set(samples), "every operator has a sample here"
    for name, arguments in samples.items():
        torch.library.opcheck(getattr(OPERATORS, name).default, arguments)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", ["plain", "on input", "inplace", "map"])
def test_the_layer_is_one_graph(packed, mode):
    case = make_case(
        M=6, E=5, topk=1 if mode == "on input" else 2, bias=True, weight_on_input=mode == "on input",
        local=3 if mode == "map" else None, seed=112,
    )  # fmt: skip
    weights = pack(case) if packed else None
    want = call(case, packed=weights)
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def layer(x, topk_weights, topk_ids):
        return call(
            case.with_(x=x + 0, topk_weights=topk_weights, topk_ids=topk_ids),
            packed=weights,
            inplace=mode == "inplace",
        )

    assert torch.equal(layer(case.x, case.topk_weights, case.topk_ids), want)
    assert counter.frame_count == 1


def test_inplace_in_a_graph_writes_the_callers_tensor():
    case = make_case(M=6, seed=113)
    packed, x = pack(case), case.x.clone()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x):
        return fused_experts(x, packed, None, case.topk_weights, case.topk_ids, inplace=True)

    layer(x)
    assert torch.equal(x, call(case, packed=packed))


@pytest.mark.parametrize("dynamic", [False, True])
def test_inplace_in_a_graph_into_shared_memory_is_refused(dynamic):
    case = make_case(M=6, K=32, seed=121)
    torch._dynamo.reset()
    layer = torch.compile(lambda x: call(case.with_(x=x), inplace=True), backend="aot_eager", dynamic=dynamic)
    want = call(case)
    assert torch.equal(layer(case.x.clone()), want)
    with pytest.raises(ArgumentError, match=r"inplace.*clone"):
        layer(torch.zeros(300, dtype=case.x.dtype).as_strided((6, 32), (16, 1)))


@pytest.mark.parametrize("name", ["w1", "topk_ids"])
def test_a_tensor_without_memory_in_a_graph_is_refused(name):
    """The rule for shapes is what runs then, and it alone would make a result of nothing."""
    case = make_case(M=6, K=32, seed=122)
    layer = torch.compile(call, backend="aot_eager")
    with pytest.raises(Exception, match=r"all tensors on .*, where the first is, got .* on meta"):
        layer(case.with_(**{name: getattr(case, name).to("meta")}))
    with pytest.raises(DeviceError, match="meta"):
        torch.ops.moe_cpu.moe_align_block_size(
            case.topk_ids, 4, 8, torch.zeros(8, dtype=torch.int32, device="meta"), False
        )


def test_another_number_of_tokens_needs_no_new_graph():
    case = make_case(M=40, seed=114)
    packed = pack(case)
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def layer(x, weights, ids):
        return fused_experts(x * 1, packed, None, weights, ids) + 1

    for M in (3, 17, 40):
        part = case.with_(x=case.x[:M], topk_weights=case.topk_weights[:M], topk_ids=case.topk_ids[:M])
        assert torch.equal(layer(part.x, part.topk_weights, part.topk_ids), call(part, packed=packed) + 1)
    assert counter.frame_count == 1


def test_inductor():
    case = make_case(M=6, seed=115)
    packed = pack(case)

    @torch.compile(fullgraph=True)
    def layer(x):
        return fused_experts(x, packed, None, case.topk_weights, case.topk_ids)

    assert torch.equal(layer(case.x), call(case, packed=packed))


def test_align_in_a_graph():
    ids = make_case(M=30, E=6, topk=2, seed=116).topk_ids

    @torch.compile(fullgraph=True, backend="aot_eager")
    def align(ids):
        return moe_align_block_size(ids, 8, 6)

    for mine, theirs in zip(align(ids), moe_align_block_size(ids, 8, 6), strict=True):
        assert torch.equal(mine, theirs)


def test_align_in_a_graph_with_a_map_of_64_bits():
    ids = torch.randint(0, 6, (9, 2), dtype=torch.int32, generator=torch.Generator().manual_seed(4))
    expert_map = torch.tensor([1, -1, 0, 2, -1, 3])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def align(ids, expert_map):
        return moe_align_block_size(ids, 8, 6, expert_map)

    for mine, theirs in zip(align(ids, expert_map), moe_align_block_size(ids, 8, 6, expert_map), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("stage", [MoEPrepareAndFinalizeNoEP, lambda: BatchedPrepareAndFinalize(12, 4)])
def test_a_modular_kernel_under_compile(stage):
    """It may break the graph; it may not give other numbers."""
    case = make_case(M=6, seed=117)
    kernel = Kernel(stage(), create("native"))
    want = run_kernel(kernel, case)
    compiled = torch.compile(kernel, backend="aot_eager")
    assert torch.equal(run_kernel(compiled, case), want)


def test_a_bad_call_inside_a_graph_is_still_refused():
    case = make_case(M=6, seed=118)
    ids = case.topk_ids.clone()
    ids[2, 0] = 77

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x, ids):
        return fused_experts(x, case.w1, case.w2, case.topk_weights, ids)

    with pytest.raises(IndexError, match=r"topk_ids\[2, 0\].*77"):
        layer(case.x, ids)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_graph_notices_changed_weights(transposed):
    """Weights that the graph was traced with, and views of them made inside it, change in place between two calls."""
    case = make_case(M=6, seed=119)
    w1, w2 = (w.transpose(1, 2).contiguous() if transposed else w.clone() for w in (case.w1, case.w2))

    def turned(w: torch.Tensor) -> torch.Tensor:
        return w.transpose(1, 2) if transposed else w

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x, w1, w2):
        return call(case.with_(x=x, w1=turned(w1), w2=turned(w2)))

    for change in (lambda: None, lambda: w1.mul_(-2), lambda: w2[1].zero_(), lambda: w1.add_(0.25)):
        change()
        case.with_(w1=turned(w1), w2=turned(w2)).check(layer(case.x, w1, w2))
