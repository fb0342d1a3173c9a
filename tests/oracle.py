"""What a layer, a router and the block alignment must compute: float64 numpy, written from the formulas.

Imports nothing of the package. Tensors of any dtype come in, float64 (or int64) arrays go out; nothing here rounds below float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

ALPHA, LIMIT = 1.702, 7.0  # swigluoai: slope of its sigmoid, bound of its clamps

_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def f64(tensor: Any) -> np.ndarray:
    """A tensor's or array's values in float64, exactly."""
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().double().numpy()
    return np.array(tensor, dtype=np.float64)


def ints(tensor: Any) -> np.ndarray:
    """A tensor's or array's values in int64."""
    return np.array(tensor.detach().numpy() if hasattr(tensor, "detach") else tensor, dtype=np.int64)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x / (1.0 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * _erfc(-x / math.sqrt(2.0)) if x.size else x


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def swish_1702(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(1.702 x)."""
    return silu(ALPHA * x) / ALPHA


GATES = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "swigluoai": swish_1702}
ACTIVATIONS = (*GATES, "relu2")


def gate_up(g: np.ndarray, activation: str) -> tuple[np.ndarray, np.ndarray]:
    """The two halves of a gated `[..., 2 * I]`: alternating columns for swigluoai, else first and second half."""
    if activation == "swigluoai":
        return g[..., 0::2], g[..., 1::2]
    half = g.shape[-1] // 2
    return g[..., :half], g[..., half:]


def activate(g: np.ndarray, activation: str) -> np.ndarray:
    """`[..., N] -> [..., I]`."""
    if activation == "relu2":
        return np.maximum(g, 0.0) ** 2
    gate, up = gate_up(g, activation)
    if activation == "swigluoai":
        return swish_1702(np.minimum(gate, LIMIT)) * (np.clip(up, -LIMIT, LIMIT) + 1.0)
    return GATES[activation](gate) * up


def local_ids(topk_ids: Any, expert_map: Any = None) -> np.ndarray:
    """Local expert of every pair, -1 = none."""
    ids = ints(topk_ids)
    if expert_map is None:
        return ids
    return np.where(ids < 0, -1, ints(expert_map)[np.maximum(ids, 0)])


def moe_pairs(
    x: Any,
    w1: Any,
    w2: Any,
    topk_ids: Any,
    activation: str = "silu",
    w1_bias: Any = None,
    w2_bias: Any = None,
    expert_map: Any = None,
) -> np.ndarray:
    """`[M, topk, K]`: every pair's expert applied to its token, unweighted, zero where there is no expert."""
    x, ids = f64(x), local_ids(topk_ids, expert_map)
    out = np.zeros((*ids.shape, w2.shape[1]))
    for e in np.unique(ids[ids >= 0]):
        token, slot = np.nonzero(ids == e)
        g = x[token] @ f64(w1[e]).T
        if w1_bias is not None:
            g = g + f64(w1_bias[e])
        y = activate(g, activation) @ f64(w2[e]).T
        if w2_bias is not None:
            y = y + f64(w2_bias[e])
        out[token, slot] = y
    return out


def moe(
    x: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    activation: str = "silu",
    w1_bias: Any = None,
    w2_bias: Any = None,
    expert_map: Any = None,
    weight_on_input: bool = False,
) -> np.ndarray:
    """`[M, K]`: the layer."""
    x, weights = f64(x), f64(topk_weights)
    if weight_on_input:
        x, weights = x * weights, np.ones_like(weights)
    pairs = moe_pairs(x, w1, w2, topk_ids, activation, w1_bias, w2_bias, expert_map)
    used = np.where(local_ids(topk_ids, expert_map) >= 0, weights, 0.0)  # an unused weight may be NaN
    return np.einsum("mt,mtk->mk", used, pairs)


def align(
    topk_ids: Any, block_size: int, num_experts: int, expert_map: Any = None, pad_sorted_ids: bool = False
) -> tuple[np.ndarray, np.ndarray, int]:
    """Sorted flat positions, experts of the blocks and the used length of `moe_align_block_size`, one expert after the other."""
    flat = ints(topk_ids).reshape(-1)
    length = flat.size + num_experts * (block_size - 1)
    if pad_sorted_ids:
        length = -(-length // block_size) * block_size
    positions = np.full(length, flat.size, dtype=np.int64)
    experts = np.zeros(-(-length // block_size), dtype=np.int64)
    of_expert: list[list[int]] = [[] for _ in range(num_experts)]
    for position, e in enumerate(flat.tolist()):
        if e >= 0:
            of_expert[e].append(position)
    used = 0
    for e, mine in enumerate(of_expert):
        blocks = -(-len(mine) // block_size)
        positions[used : used + len(mine)] = mine
        experts[used // block_size : used // block_size + blocks] = e
        used += blocks * block_size
    if expert_map is not None and num_experts > 0:
        experts = ints(expert_map)[experts]
    return positions, experts, used


def largest(scores: np.ndarray, count: int) -> np.ndarray:
    """Columns of the largest entries, best first, lowest column first among equals."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :count]


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def softmax_topk(logits: Any, topk: int, renormalize: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Weights and ids of the topk most probable experts."""
    logits = f64(logits)
    ids = largest(logits, topk)
    weights = np.take_along_axis(softmax(logits), ids, axis=-1)
    return weights / weights.sum(axis=-1, keepdims=True) if renormalize else weights, ids


def grouped_topk(
    logits: Any,
    topk: int,
    groups: int,
    topk_group: int,
    renormalize: bool = True,
    scoring: str = "softmax",
    bias: Any = None,
    scale: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """DeepSeek's choice: the best groups first, then the best experts in them; the bias chooses and never weighs."""
    logits = f64(logits)
    scores = softmax(logits) if scoring == "softmax" else sigmoid(logits)
    choice = scores if bias is None else scores + f64(bias)
    M, E = choice.shape
    of_group = np.sort(choice.reshape(M, groups, E // groups), axis=-1)
    rank = of_group[..., -1] if bias is None else of_group[..., -2:].sum(axis=-1)
    allowed = np.zeros((M, groups), dtype=bool)
    np.put_along_axis(allowed, largest(rank, topk_group), True, axis=-1)
    choice = np.where(np.repeat(allowed, E // groups, axis=-1), choice, -np.inf)
    ids = largest(choice, topk)
    weights = np.take_along_axis(scores, ids, axis=-1)
    if renormalize:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights * scale, ids


def sigmoid_top1(logits: Any) -> tuple[np.ndarray, np.ndarray]:
    """Llama 4: the largest logit's expert, with that logit's sigmoid."""
    logits = f64(logits)
    ids = largest(logits, 1)
    return sigmoid(np.take_along_axis(logits, ids, axis=-1)), ids
