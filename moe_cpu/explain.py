"""Words the refusal of a layer call: finds which of its arguments is wrong, and raises the error that says so."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from moe_cpu.checks import FLOAT_DTYPES, ID_DTYPES, activation_width, check_weight_on_input, is_packed
from moe_cpu.errors import ArgumentError, DeviceError, device_error, dtype_error, dtype_name, shape_error


def explain_call(
    x: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    activation: Any,
    on_input: bool,
    global_num_experts: int,
    expert_map: Any,
    w1_bias: Any,
    w2_bias: Any,
) -> NoReturn:
    """Finds what `check_call` refused and raises the error that words it."""
    width = activation_width(activation)
    packed = is_packed(w1, w2)
    tensors = {"hidden_states": x, "topk_ids": topk_ids}
    if not packed:
        tensors |= {"w1": w1, "w2": w2}
    optional = {
        "topk_weights": topk_weights,
        "expert_map": expert_map,
        "w1_bias": w1_bias,
        "w2_bias": w2_bias,
    }
    tensors |= {name: value for name, value in optional.items() if value is not None}
    if w2 is not None and is_packed(w1, None):
        raise ArgumentError(
            f"w2: expected None beside a PackedExperts, which holds both weights, got {type(w2).__name__}; pass (x, experts, None, topk_weights, topk_ids)"
        )
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            wanted = "a tensor, or PackedExperts with w2=None" if name in ("w1", "w2") else "a tensor"
            raise ArgumentError(f"{name}: expected {wanted}, got {type(value).__name__}")
    if packed and not x.is_cpu:
        raise DeviceError(
            f"hidden_states: expected device cpu, where PackedExperts always are, got {x.device}; pass hidden_states, topk_weights and topk_ids "
            f"on the cpu, or dense weights on {x.device} (PackedExperts.unpack() gives them on the cpu)"
        )
    for name, value in tensors.items():
        if value.device != x.device:
            raise device_error(name, x.device, value.device)
    if x.dim() != 2:
        raise shape_error(
            "hidden_states", "[M, K]", (), x.shape, hint="flatten batch and sequence: x.view(-1, x.size(-1))"
        )
    if packed:
        _explain_packed(w1, width, activation, w1_bias, w2_bias)
        E, N, K, dtype = w1.E, w1.N, w1.K, w1.dtype
    else:
        E, N, K, dtype = *_explain_weights(x, w1, w2, width, activation), w1.dtype
    if x.shape[1] != K:
        raise shape_error(
            "hidden_states", "[M, K]", (x.shape[0], K), x.shape, hint="K is w2.size(1), the hidden size"
        )
    _explain_dtypes(x, dtype, {"topk_weights": topk_weights, "w1_bias": w1_bias, "w2_bias": w2_bias})
    _explain_routing(x, topk_weights, topk_ids, on_input)
    _explain_map(E, global_num_experts, expert_map)
    for name, bias, symbols, sizes in (
        ("w1_bias", w1_bias, "[E, N]", (E, N)),
        ("w2_bias", w2_bias, "[E, K]", (E, K)),
    ):
        if bias is not None and tuple(bias.shape) != sizes:
            raise shape_error(name, symbols, sizes, bias.shape)
    raise ArgumentError("the arguments of this call contradict each other; check shapes, dtypes and devices")


def _explain_weights(x: Any, w1: Any, w2: Any, width: int, activation: str) -> tuple[int, int, int]:
    rows = "[E, N, K]" if width == 2 else "[E, I, K]"
    for name, weight, symbols in (("w1", w1, rows), ("w2", w2, "[E, K, I]")):
        if weight.dim() != 3:
            raise shape_error(
                name, symbols, (), weight.shape, dtype=weight.dtype, hint="stack the experts in dimension 0"
            )
    E, K = w1.shape[0], x.shape[1]
    if w1.shape[1] == K and swapped(w1, w2, width):
        raise shape_error("w1", rows, tuple(w2.shape), w1.shape, dtype=w1.dtype, hint="swap w1 and w2")
    turned_w1, turned_w2 = tuple(w1.transpose(1, 2).shape), tuple(w2.transpose(1, 2).shape)
    if w1.shape[2] != K and turned_w1[2] == K:
        raise shape_error("w1", rows, turned_w1, w1.shape, dtype=w1.dtype, hint="pass w1.transpose(1, 2)")
    if w2.shape[1] != K and turned_w2[1] == K:
        raise shape_error(
            "w2", "[E, K, I]", turned_w2, w2.shape, dtype=w2.dtype, hint="pass w2.transpose(1, 2)"
        )
    if w1.shape[2] != w2.shape[1]:
        expected = (E, w1.shape[1], w2.shape[1])
        raise shape_error(
            "w1", rows, expected, w1.shape, dtype=w1.dtype, hint="K is w2.size(1), the hidden size"
        )
    wanted = (E, w1.shape[2], w1.shape[1] // width)
    if tuple(w2.shape) != wanted or w1.shape[1] % width:
        hint = f"{activation} is {'gated: N = 2*I rows of w1' if width == 2 else 'not gated: w1 has I rows'}"
        raise shape_error("w2", "[E, K, I]", wanted, w2.shape, dtype=w2.dtype, hint=hint)
    if K == 0 or w2.shape[2] == 0:
        raise shape_error("w2", "[E, K, I] with K and I of at least 1", (), w2.shape, dtype=w2.dtype)
    for name, weight in (("w1", w1), ("w2", w2)):
        if weight.dtype not in FLOAT_DTYPES:
            raise dtype_error(name, "bf16, fp16, fp32 or fp64", weight.dtype)
    if w1.dtype != w2.dtype:
        raise dtype_error("w2", f"{dtype_name(w1.dtype)}, like w1", w2.dtype)
    return E, w1.shape[1], w1.shape[2]


def swapped(w1: torch.Tensor, w2: torch.Tensor, width: int) -> bool:
    """Whether w1 looks like w2 and w2 like w1, of one expert or all. Without a gate that cannot be told from weights that are transposed both."""
    return width == 2 and w1.shape[-2] == w2.shape[-1] and w2.shape[-2] == 2 * w1.shape[-1]


def _explain_packed(w1: Any, width: int, activation: str, w1_bias: Any, w2_bias: Any) -> None:
    if (width == 1) != (w1.gate_layout == "none"):
        raise ArgumentError(
            f"activation: {activation!r} is {'gated' if width == 2 else 'not gated'}, but w1 was packed with "
            f"gate_layout={w1.gate_layout!r}; pack again with activation={activation!r}"
        )
    if w1_bias is not None or w2_bias is not None:
        raise ArgumentError(
            "w1_bias, w2_bias: packed weights carry their biases; pass them to PackedExperts.pack instead"
        )


def _explain_dtypes(x: Any, dtype: torch.dtype, others: dict[str, Any]) -> None:
    if x.dtype not in FLOAT_DTYPES:
        raise dtype_error("hidden_states", "bf16, fp16, fp32 or fp64", x.dtype)
    if x.dtype == torch.float64 and dtype != torch.float64:
        raise dtype_error(
            "hidden_states",
            f"bf16, fp16 or fp32 with {dtype_name(dtype)} weights",
            x.dtype,
            "convert it or the weights",
        )
    for name, tensor in others.items():
        if tensor is not None and tensor.dtype not in FLOAT_DTYPES:
            raise dtype_error(name, "fp32, bf16 or fp16", tensor.dtype)


def _explain_routing(x: Any, topk_weights: Any, topk_ids: Any, on_input: bool) -> None:
    M = x.shape[0]
    if topk_ids.dim() != 2 or topk_ids.shape[0] != M:
        raise shape_error("topk_ids", "[M, topk]", (M, "topk"), topk_ids.shape)
    if topk_ids.dtype not in ID_DTYPES:
        raise dtype_error("topk_ids", "int32 or int64", topk_ids.dtype, "pass topk_ids.to(torch.int32)")
    if topk_weights is not None and topk_weights.shape != topk_ids.shape:
        raise shape_error("topk_weights", "[M, topk]", tuple(topk_ids.shape), topk_weights.shape)
    check_weight_on_input(on_input, topk_ids.shape[1])


def _explain_map(E: int, global_num_experts: int, expert_map: Any) -> None:
    if expert_map is None:
        if global_num_experts not in (-1, E):
            raise ArgumentError(
                f"global_num_experts: expected E = {E} without an expert_map, got {global_num_experts}; pass expert_map "
                "[global_num_experts] int32 to say which experts are here"
            )
        return
    expected = global_num_experts if global_num_experts != -1 else "global_num_experts"
    if expert_map.dim() != 1 or (global_num_experts != -1 and expert_map.shape[0] != global_num_experts):
        raise shape_error("expert_map", "[global_num_experts]", (expected,), expert_map.shape)
    if expert_map.dtype not in ID_DTYPES:
        raise dtype_error("expert_map", "int32 or int64", expert_map.dtype, "pass expert_map.to(torch.int32)")
