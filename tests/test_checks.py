"""Refusals where no whole layer call stands before: batched experts, torch operators, sizes of zero."""

from __future__ import annotations

import pytest
import torch
from calls import call, pack, require
from strategies import make_case

from moe_cpu import PackedExperts, errors, fused_experts
from moe_cpu.experts import create
from moe_cpu.modular_kernel import _moe_problem_size

CASE = make_case(M=12, K=64, I=48, E=4, topk=2, bias=True)
BATCH = CASE.x.view(4, 3, 64)
COUNTS = torch.tensor([3, 0, 2, 1], dtype=torch.int32)
BACKENDS = ("native", "onednn", "reference")


def batched(backend, packed=False, **changes):
    require(backend)
    a = {"x": BATCH, "w1": CASE.w1, "w2": CASE.w2, "activation": "silu", "counts": COUNTS} | changes
    weights = (pack(CASE), None) if packed else (a["w1"], a["w2"])
    bias = {} if packed else {"w1_bias": a.get("w1_bias"), "w2_bias": a.get("w2_bias")}
    ids = torch.zeros((3, 1), dtype=torch.int32)
    return create(backend).apply(
        a["x"], *weights, ids, a["activation"], expert_num_tokens=a["counts"], **bias
    )


ANY_WEIGHTS = [
    ({"x": BATCH[..., :60]}, errors.ShapeError, r"hidden_states.*\[E, max_num_tokens, K\] = \[4, 3, 64\], got \[4, 3, 60\]"),
    ({"x": BATCH[:3]}, errors.ShapeError, r"hidden_states.*\[4, 3, 64\], got \[3, 3, 64\]"),
    ({"x": BATCH.int()}, errors.DTypeError, r"hidden_states.*int32"),
    ({"x": BATCH.double()}, errors.DTypeError, r"hidden_states.*fp64"),
    ({"x": BATCH.to("meta")}, errors.DeviceError, "meta"),
    ({"activation": "mish"}, ValueError, r"activation.*silu.*'mish'"),
    ({"counts": COUNTS[:3]}, errors.ShapeError, r"expert_num_tokens.*\[E\] = \[4\], got \[3\]"),
    ({"counts": COUNTS.float()}, errors.DTypeError, r"expert_num_tokens.*int32 or int64.*fp32"),
    ({"counts": COUNTS + 1}, errors.ArgumentError, r"expert_num_tokens\[0\].*\[0, 3\], got 4"),
    ({"counts": COUNTS - 1}, errors.ArgumentError, r"expert_num_tokens\[1\].*\[0, 3\], got -1"),
    ({"counts": COUNTS.long() + 2**32}, errors.ArgumentError, r"expert_num_tokens\[0\]"),
]  # fmt: skip
DENSE = [
    ({"activation": "relu2"}, errors.ShapeError, r"w2.*not gated"),
    ({"w1": CASE.w1.transpose(1, 2)}, errors.ShapeError, r"pass w1\.transpose\(1, 2\)"),
    ({"w2": CASE.w2[:3]}, errors.ShapeError, r"w2.*\[4, 64, 48\].*\[3, 64, 48\]"),
    ({"w1_bias": CASE.w1_bias[:, :90]}, errors.ShapeError, r"w1_bias.*\[4, 96\].*\[4, 90\]"),
    ({"w2_bias": CASE.w2_bias[:3]}, errors.ShapeError, r"w2_bias.*\[4, 64\].*\[3, 64\]"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("changes", "kind", "message"), ANY_WEIGHTS + DENSE)
def test_batched(backend, changes, kind, message):
    with pytest.raises(kind, match=message):
        batched(backend, **changes)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [*ANY_WEIGHTS, ({"activation": "relu2"}, errors.ArgumentError, "'relu2' is not gated.*'concatenated'")],
)
def test_batched_with_packed_weights(backend, changes, kind, message):
    with pytest.raises(kind, match=message):
        batched(backend, packed=True, **changes)


def test_onednn_refuses_what_it_would_get_wrong():
    require("onednn")
    with pytest.raises(errors.BackendUnavailable, match=r"onednn.*dense"):
        batched("onednn", packed=True)
    with pytest.raises(errors.BackendUnavailable, match=r"onednn.*bf16.*fp32"):
        batched("onednn", w1=CASE.w1.float(), w2=CASE.w2.float())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("K", "I"), [(0, 48), (64, 0)])
def test_sizes_of_zero(backend, K, I):
    x, w1, w2 = CASE.x[:, :K], CASE.w1[:, : 2 * I, :K], CASE.w2[:, :K, :I]
    with pytest.raises(errors.ShapeError, match="at least 1"):
        fused_experts(x, w1, w2, CASE.topk_weights, CASE.topk_ids, backend=backend)
    with pytest.raises(errors.ShapeError, match="at least 1"):
        PackedExperts.pack(w1, w2)


def test_a_small_workspace_is_named():
    w2 = torch.empty(64, dtype=torch.bfloat16)
    with pytest.raises(
        errors.ArgumentError,
        match=r"workspace2: expected at least \d+ elements of bf16, got 64.*workspace_shapes",
    ):
        create("native").apply(CASE.x, CASE.w1, CASE.w2, CASE.topk_ids, "silu", workspace2=w2)


def test_a_workspace_that_the_kernels_cannot_work_in_changes_nothing():
    experts = create("native")
    want = experts.apply(CASE.x, CASE.w1, CASE.w2, CASE.topk_ids, "silu").clone()
    block = torch.empty(1 << 22, dtype=torch.bfloat16)
    for workspace in (block[1:], block[::2]):
        got = experts.apply(
            CASE.x, CASE.w1, CASE.w2, CASE.topk_ids, "silu", workspace13=workspace, workspace2=workspace
        )
        assert torch.equal(got, want)


def test_weights_of_different_numbers_of_experts():
    with pytest.raises(errors.ShapeError, match=r"w2.*\[4, 64, 48\], got \[3, 64, 48\]"):
        _moe_problem_size(CASE.x, CASE.w1, CASE.w2[:3], CASE.topk_ids)


def test_missing_router_weights():
    with pytest.raises(errors.ArgumentError, match=r"topk_weights.*None"):
        call(CASE.with_(topk_weights=None))


# -- torch.ops.moe_cpu: anybody may call these -----------------------------------------------------------------------------

OPERATORS = torch.ops.moe_cpu
PACKED = pack(CASE)
WEIGHTS = {
    "w1": PACKED.w1, "w2": PACKED.w2, "w1_bias": PACKED.w1_bias, "w2_bias": PACKED.w2_bias, "K": 64, "I": 48,
    "gate_layout": "concatenated",
}  # fmt: skip
ROUTED = {"x": CASE.x, **WEIGHTS, "topk_ids": CASE.topk_ids, "expert_map": None, "activation": "silu"}
BAD_WEIGHTS = [
    ({"w1": PACKED.w1[:, :-1].contiguous()}, errors.ShapeError, "packed w1"),
    ({"w2": PACKED.w2[:2].contiguous()}, errors.ShapeError, "packed w2"),
    ({"w1": PACKED.w1.float()}, errors.ShapeError, "packed w1.*bf16"),
    ({"K": 640}, errors.ShapeError, "packed w1"),
    ({"I": 0}, errors.ShapeError, "I = 0"),
    ({"gate_layout": "sideways"}, errors.ArgumentError, "gate_layout.*sideways"),
    ({"w1_bias": torch.zeros(4, 9)}, errors.ShapeError, r"w1_bias.*\[4, 9\]"),
    ({"activation": "mish"}, errors.ArgumentError, "activation.*'mish'"),
    ({"activation": "relu2"}, errors.ArgumentError, "'relu2' is not gated"),
]
BAD_ROUTING = [
    ({"x": CASE.x[:, :60]}, errors.ShapeError, r"hidden_states.*\[12, 64\]"),
    ({"x": CASE.x.double()}, errors.DTypeError, "fp64"),
    ({"topk_ids": CASE.topk_ids.short()}, errors.DTypeError, "topk_ids.*int16"),
    ({"topk_ids": CASE.topk_ids[:3]}, errors.ShapeError, "topk_ids"),
    ({"topk_ids": CASE.topk_ids + 4}, errors.ExpertIdError, "topk_ids"),
    ({"expert_map": torch.zeros(4)}, errors.DTypeError, "expert_map.*fp32"),
    ({"expert_map": torch.full((4,), 2**32)}, errors.ExpertIdError, "expert_map"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), BAD_WEIGHTS + BAD_ROUTING)
def test_operators_of_routed_tokens(changes, kind, message):
    with pytest.raises(kind, match=message):
        OPERATORS.fused_experts(**(ROUTED | {"topk_weights": CASE.topk_weights} | changes))
    with pytest.raises(kind, match=message):
        OPERATORS.experts_unreduced(**(ROUTED | changes))


BAD_BATCH = [
    (
        {"expert_num_tokens" if name == "counts" else name: value for name, value in changes.items()},
        kind,
        message,
    )
    for changes, kind, message in ANY_WEIGHTS
    if kind is not errors.DeviceError  # torch itself finds no kernel for mixed devices
]


@pytest.mark.parametrize(("changes", "kind", "message"), BAD_WEIGHTS + BAD_BATCH)
def test_operator_of_batched_tokens(changes, kind, message):
    with pytest.raises(kind, match=message):
        OPERATORS.experts_batched(
            **({"x": BATCH, **WEIGHTS, "expert_num_tokens": COUNTS, "activation": "silu"} | changes)
        )


def test_operators_take_what_calls_take():
    """Maps of int64 with strides, ids of int64, weights of float64, no token at all."""
    wide = torch.arange(4).repeat_interleave(2)[::2]
    want = fused_experts(CASE.x, PACKED, None, CASE.topk_weights, CASE.topk_ids)
    arguments = ROUTED | {"topk_ids": CASE.topk_ids.long(), "expert_map": wide}
    assert torch.equal(OPERATORS.fused_experts(**arguments, topk_weights=CASE.topk_weights.double()), want)
    empty = arguments | {"x": CASE.x[:0], "topk_ids": CASE.topk_ids[:0]}
    assert OPERATORS.experts_unreduced(**empty).shape == (0, 2, 64)


@pytest.mark.parametrize(
    ("operator", "arguments", "message"),
    [
        ("pack_expert", (CASE.w1, "concatenated"), r"\[rows, columns\].*\[4, 96, 64\]"),
        ("pack_expert", (CASE.w1[0].float(), "concatenated"), "bfloat16.*float32"),
        ("pack_expert", (CASE.w1[0, :95], "concatenated"), "even number of rows"),
        ("pack_expert", (CASE.w1[0], "sideways"), "sideways"),
        ("unpack_expert", (PACKED.w1[0], 960, 64, "concatenated"), "packed: expected"),
        ("unpack_expert", (PACKED.w1[0].float(), 96, 64, "concatenated"), "bf16.*fp32"),
        ("unpack_expert", (PACKED.w1[0], -96, -64, "concatenated"), "at least 1"),
        ("moe_align_block_size", (CASE.topk_ids.float(), 4, 4, None, False), "topk_ids.*fp32"),
        ("moe_align_block_size", (CASE.topk_ids, 0, 4, None, False), "block_size"),
        (
            "moe_align_block_size",
            (CASE.topk_ids, 4, 4, torch.zeros(3, dtype=torch.int32), False),
            "expert_map",
        ),
    ],
)
def test_operators_of_single_matrices_and_ids(operator, arguments, message):
    with pytest.raises(errors.MoEError, match=message):
        getattr(OPERATORS, operator)(*arguments)
