"""Checks of one layer call: cheap when everything is right, precise when something is not.

A good call costs attribute reads and compares only (no tensor operation): the decode path is a few microseconds long.
Which of the conditions failed is worked out afterwards, in `moe_cpu.explain`.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, NamedTuple

import torch

from moe_cpu.errors import (
    ArgumentError,
    DeviceError,
    device_error,
    dtype_error,
    expert_id_error,
    shape_error,
    unknown_name_error,
)

# Rows of w1 per intermediate channel: two where a gate and an up projection share the matrix, one without a gate.
ACTIVATION_WIDTH: dict[str, int] = {"silu": 2, "gelu": 2, "gelu_tanh": 2, "swigluoai": 2, "relu2": 1}
ACTIVATIONS: tuple[str, ...] = tuple(ACTIVATION_WIDTH)

FLOAT_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
ID_DTYPES = frozenset({torch.int32, torch.int64})


class ProblemSize(NamedTuple):
    """Sizes of one call: local experts, tokens, width of w1, hidden size, experts per token."""

    E: int
    M: int
    N: int
    K: int
    topk: int


def activation_width(activation: str) -> int:
    """Rows of `w1` per intermediate channel: 2 for a gated activation, 1 for an ungated one.

    Raises: ArgumentError for an unknown name, listing the known ones.
    """
    try:
        return ACTIVATION_WIDTH[activation]
    except (KeyError, TypeError):
        raise unknown_name_error("activation", activation, ACTIVATIONS) from None


def default_gate_layout(activation: str) -> str:
    """Where `w1` keeps gate and up rows: `concatenated` `[gate; up]`, `interleaved` (even gate, odd up) or `none`."""
    if activation_width(activation) == 1:
        return "none"
    return "interleaved" if activation == "swigluoai" else "concatenated"


def is_packed(w1: Any, w2: Any) -> bool:
    """True when `w1` is a `PackedExperts` (or quacks like one), which carries `w2` inside itself."""
    return w2 is None and not isinstance(w1, torch.Tensor) and hasattr(w1, "gate_layout")


def moe_problem_size(a1: torch.Tensor, w1: Any, w2: Any, topk_ids: torch.Tensor) -> ProblemSize:
    """Sizes `(E, M, N, K, topk)` of a call, K from `w2.size(1)`: a packed weight may halve its last dimension.

    Args:
        a1: `[M, K]`, or batched `[E, max_num_tokens, K]`, where M becomes max_num_tokens.
        w1: `[E, N, K]`, or a `PackedExperts` (then `w2` is None).
        w2: `[E, K, I]`.
        topk_ids: `[M, topk]`.
    Raises: ShapeError.
    """
    if is_packed(w1, w2):
        E, N, K = w1.E, w1.N, w1.K
    else:
        if w1.dim() != 3:
            raise shape_error("w1", "[E, N, K]", (), w1.shape)
        if w2 is None or w2.dim() != 3:
            raise shape_error("w2", "[E, K, I]", (), () if w2 is None else w2.shape)
        E, N = w1.shape[0], w1.shape[1]
        K = w2.shape[1]
        if w2.shape[0] != E:
            raise shape_error("w2", "[E, K, I]", (E, K, w2.shape[2]), w2.shape, hint="E is w1.size(0)")
    if topk_ids.dim() != 2:
        raise shape_error("topk_ids", "[M, topk]", (), topk_ids.shape, hint="one row per token")
    if a1.dim() == 2:
        M = a1.shape[0]
        if topk_ids.shape[0] != M:
            raise shape_error("topk_ids", "[M, topk]", (M, topk_ids.shape[1]), topk_ids.shape)
    elif a1.dim() == 3:
        if a1.shape[0] != E:
            raise shape_error("a1", "[E, max_num_tokens, K]", (E, a1.shape[1], K), a1.shape)
        M = a1.shape[1]
    else:
        raise shape_error("a1", "[M, K] or [E, max_num_tokens, K]", (), a1.shape)
    return ProblemSize(E, M, N, K, topk_ids.shape[1])


def resolve_num_experts(global_num_experts: int, E: int, expert_map: torch.Tensor | None) -> int:
    """Number of global expert ids: the argument, or for -1 the length of `expert_map`, or E without a map."""
    if global_num_experts != -1:
        return global_num_experts
    return E if expert_map is None else expert_map.shape[0]


def check_call(
    hidden_states: torch.Tensor,
    w1: Any,
    w2: Any,
    topk_weights: torch.Tensor | None,
    topk_ids: torch.Tensor,
    activation: str,
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> ProblemSize:
    """Checks every shape, dtype and device of one layer call with 2-D `hidden_states` and returns its sizes.

    Values of ids and of the map are not read here: each backend checks them where it reads them.
    Raises: ShapeError, DTypeError, DeviceError, ArgumentError.
    """
    try:
        width = ACTIVATION_WIDTH[activation]
        M, x_columns = hidden_states.shape
        rows, topk = topk_ids.shape
        x_dtype = hidden_states.dtype
        on_cpu = hidden_states.is_cpu and topk_ids.is_cpu
        if isinstance(w1, torch.Tensor):
            E, N, K = w1.shape
            w2_experts, w2_rows, inner = w2.shape
            dtype = w1.dtype
            good = (
                w2_experts == E
                and w2_rows == K
                and width * inner == N
                and dtype == w2.dtype
                and dtype in FLOAT_DTYPES
                and inner > 0
            )
            if on_cpu:
                good = good and w1.is_cpu and w2.is_cpu
            else:
                device = hidden_states.device
                good = good and w1.device == device and w2.device == device and topk_ids.device == device
        else:
            E, N, K, dtype = w1.E, w1.N, w1.K, w1.dtype
            good = w2 is None and on_cpu and (width == 1) == (w1.gate_layout == "none")
            good = good and w1_bias is None and w2_bias is None
        good = (
            good
            and x_columns == K > 0
            and rows == M
            and topk_ids.dtype in ID_DTYPES
            and x_dtype in FLOAT_DTYPES
        )
        good = good and (x_dtype != torch.float64 or dtype == torch.float64)
        if topk_weights is not None:
            good = good and topk_weights.shape == topk_ids.shape and topk_weights.dtype in FLOAT_DTYPES
            good = good and topk_weights.is_cpu == topk_ids.is_cpu
        if apply_router_weight_on_input:
            good = good and topk == 1
        if expert_map is None:
            good = good and (global_num_experts == -1 or global_num_experts == E)
        else:
            good = good and expert_map.dim() == 1 and expert_map.dtype in ID_DTYPES
            good = good and expert_map.is_cpu == topk_ids.is_cpu
            good = good and (global_num_experts == -1 or expert_map.shape[0] == global_num_experts)
        if w1_bias is not None:
            good = good and w1_bias.shape == (E, N) and _like(w1_bias, topk_ids)
        if w2_bias is not None:
            good = good and w2_bias.shape == (E, K) and _like(w2_bias, topk_ids)
        if good:
            return ProblemSize(E, M, N, K, topk)
    except (AttributeError, KeyError, TypeError, ValueError):
        pass  # whatever was malformed, explain_call finds it and names it
    from moe_cpu.explain import explain_call  # only a refused call pays for it

    explain_call(
        hidden_states,
        w1,
        w2,
        topk_weights,
        topk_ids,
        activation,
        apply_router_weight_on_input,
        global_num_experts,
        expert_map,
        w1_bias,
        w2_bias,
    )


def check_batched_call(
    hidden_states: torch.Tensor,
    w1: Any,
    w2: Any,
    activation: str,
    expert_num_tokens: torch.Tensor | None = None,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> ProblemSize:
    """`check_call` for batched `hidden_states [E, max_num_tokens, K]`, where M is max_num_tokens and topk is one.

    Counts in `expert_num_tokens [E]` are not read here: each backend checks them where it reads them.
    Raises: ShapeError, DTypeError, DeviceError, ArgumentError.
    """
    x = hidden_states
    if x.dim() != 3:
        raise shape_error("hidden_states", "[E, max_num_tokens, K]", (), x.shape)
    # The same call with no token says what is wrong with the weights, and whether they go with the dtype and the device.
    token, ids = x.new_empty((0, x.shape[2])), x.new_empty((0, 1), dtype=torch.int32)
    E = w1.shape[0] if len(getattr(w1, "shape", ())) == 3 else x.shape[0]
    K = w2.shape[1] if isinstance(w2, torch.Tensor) and w2.dim() == 3 else getattr(w1, "K", x.shape[2])
    sound = is_packed(w1, w2) or (isinstance(w1, torch.Tensor) and w1.dim() == 3 and w1.shape[2] == K)
    if sound and (x.shape[0] != E or x.shape[2] != K):
        raise shape_error("hidden_states", "[E, max_num_tokens, K]", (E, x.shape[1], K), x.shape)
    size = check_call(token, w1, w2, None, ids, activation, w1_bias=w1_bias, w2_bias=w2_bias)
    if expert_num_tokens is not None:
        if tuple(expert_num_tokens.shape) != (E,):
            raise shape_error("expert_num_tokens", "[E]", (E,), expert_num_tokens.shape)
        if expert_num_tokens.dtype not in ID_DTYPES:
            raise dtype_error("expert_num_tokens", "int32 or int64", expert_num_tokens.dtype)
        if expert_num_tokens.device != x.device:
            raise device_error("expert_num_tokens", x.device, expert_num_tokens.device)
    return size._replace(M=x.shape[1])


def _like(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.dtype in FLOAT_DTYPES and tensor.is_cpu == other.is_cpu


def check_weight_on_input(on_input: bool, topk: int) -> None:
    """Raises ArgumentError when the router weight goes on the input of more than one expert per token."""
    if on_input and topk != 1:
        raise ArgumentError(
            f"apply_router_weight_on_input: expected topk = 1, got topk = {topk}; one input row cannot carry {topk} weights"
        )


def check_count(name: str, value: Any, least: int = 1) -> int:
    """`value` as Python's int: NumPy's may be too narrow to be multiplied. Raises ArgumentError unless it is a whole number of at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ArgumentError(f"{name}: expected a whole number of at least {least}, got {value!r}")
    return int(value)


def check_expert_ids(topk_ids: torch.Tensor, num_experts: int) -> None:
    """Raises ExpertIdError with row, slot and value when an id lies outside `[-1, num_experts)`; reads every id."""
    if topk_ids.is_meta:
        raise DeviceError(
            "topk_ids: expected ids that can be read, got device meta; fused_experts gives shapes there"
        )
    if topk_ids.numel() == 0:
        return
    low, high = torch.aminmax(topk_ids)
    if int(low) >= -1 and int(high) < num_experts:
        return
    row, slot = ((topk_ids < -1) | (topk_ids >= num_experts)).nonzero()[0].tolist()
    raise expert_id_error(row, slot, int(topk_ids[row, slot]), num_experts)


def check_no_scales(**scales: Any) -> None:
    """Raises ArgumentError when a scale or zero point is given: plain floating-point weights have none."""
    given = [name for name, value in scales.items() if value is not None]
    if given:
        raise ArgumentError(
            f"{', '.join(given)}: expected None, this build has no quantised scheme that would use them"
        )
