"""The forward function that transformers calls for every experts module, on the kernels where they apply."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from transformers.integrations.moe import grouped_mm_experts_forward

from moe_cpu.errors import NoBackward
from moe_cpu.grouping import group_by_expert, local_expert_ids
from moe_cpu.integrations.transformers.detect import names_of, plan_of
from moe_cpu.released import dense, is_released, packed_of, restore
from moe_cpu.stored_op import run_stored, with_sentinel

NAME = "moe_cpu"
_GRADIENTS = "a gradient is wanted, which the kernels do not compute; call the model under torch.no_grad()"
_warned: set[tuple[type, str]] = set()


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """y[m] = sum over s of top_k_weights[m, s] * expert(top_k_index[m, s], x[m]), for an experts module `self`.

    Args:
        hidden_states: x, `[M, K]`; K is the width of the experts, which need not be the model's hidden size.
        top_k_index: `[M, topk]` int64 or int32 local ids; num_experts and -1 mean "no expert here".
        top_k_weights: `[M, topk]` float32 or the dtype of x.
    Returns: `[M, K]` in the dtype of x.
    Raises: ExpertIdError; NoBackward when a gradient is wanted and the dense weights were released.
    Numerics: bf16 weights as in `fused_experts`. Everything else, in eager calls: the module's own operations in the dtype of its weights,
    weighted and summed in float32.
    """
    reason = _GRADIENTS if _wants_gradient(self, hidden_states, top_k_weights) else None
    if reason is not None and is_released(self):
        raise NoBackward(
            f"{type(self).__name__}: its dense weights were released and the packed ones have no gradient; call the model under "
            "torch.no_grad(), or moe_cpu.integrations.transformers.unpack(model) first"
        )
    packed = packed_of(self)
    plan = plan_of(self)
    reason = reason or (plan.reason if plan.activation is None else None)
    if reason is None:
        assert plan.activation is not None
        return run_stored(
            self, names_of(self), packed, hidden_states, top_k_weights, top_k_index, plan.activation
        )
    if torch.compiler.is_compiling():
        if packed is not None:
            raise RuntimeError(
                f"{type(self).__name__}: its dense weights were released, but {reason}; unpack(model) first"
            )
        # A loop over experts cannot be traced; this function of transformers' own can.
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    _warn_once(type(self), reason)
    restore(self)
    return reference_forward(self, hidden_states, top_k_index, top_k_weights)


def reference_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The same by the module's own gate, activation and norm, one expert after the other; it has a backward."""
    names = names_of(self)
    w1, w2, b1, b2 = dense(self, names)
    E, topk = w1.shape[0], top_k_index.shape[1]
    pairs, counts = group_by_expert(local_expert_ids(top_k_index, E, with_sentinel(E)), E)
    total = torch.promote_types(hidden_states.dtype, torch.float32)
    out = hidden_states.new_zeros(hidden_states.shape, dtype=total)
    # Taking experts apart once keeps the backward linear in E: indexing would make a full-size gradient for each.
    matrices = zip(w1.unbind(0), w2.unbind(0), strict=True)
    biases = (b1.unbind(0), b2.unbind(0)) if b1 is not None and b2 is not None else None
    flat_weights = top_k_weights.reshape(-1)
    for e, ((up, down), mine) in enumerate(zip(matrices, pairs.split(counts), strict=True)):
        if not mine.numel():
            continue
        rows = mine // topk
        h = F.linear(hidden_states[rows].to(up.dtype), up, None if biases is None else biases[0][e])
        h = self._apply_gate(h) if self.has_gate else self.act_fn(h)
        y = F.linear(h, down, None if biases is None else biases[1][e])
        if getattr(self, "has_post_expert_norm", False):  # newer transformers only
            y = self.post_expert_norm(y)
        out = out.index_add(0, rows, y.to(total) * flat_weights[mine].to(total).unsqueeze(-1))
    return out.to(hidden_states.dtype)


def _wants_gradient(module: Any, *inputs: torch.Tensor) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(x.requires_grad for x in inputs) or any(p.requires_grad for p in module.parameters())


def _warn_once(cls: type, reason: str) -> None:
    if (cls, reason) not in _warned:
        _warned.add((cls, reason))
        warnings.warn(f"{cls.__name__} runs on moe_cpu's reference path: {reason}", stacklevel=3)
