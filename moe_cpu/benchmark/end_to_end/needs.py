"""What a model and a measurement of it take, worked out before any memory is taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_cpu import ops, pack_ops
from moe_cpu.benchmark.end_to_end.settings import Settings
from moe_cpu.benchmark.memory import gib
from moe_cpu.errors import OutOfMemory
from moe_cpu.integrations.transformers.detect import computation_of, is_experts_module, names_of
from moe_cpu.integrations.transformers.forward import NAME
from moe_cpu.packing import layout_of

_BF16 = 2
# Interpreter, torch and transformers, and what the rest of the system needs meanwhile.
_RESERVE = 3 << 29


@dataclass(frozen=True)
class Sizes:
    """A model in numbers.

    Attributes:
        name: of its class.
        attention: the implementation that transformers chose.
        layers, vocabulary: decoder layers, tokens known.
        experts_layers, E, topk: layers with experts; experts in each, and how many work on a token.
        parameters, weights_bytes: of the whole model, in bf16 (norms may be kept wider).
        experts_bytes: of the experts' dense weights.
        packed_bytes, largest_packed_bytes: of the packed weights of all layers that the kernels take, and of the largest of them.
        cache_bytes: keys and values of one token, at most.
        call_bytes: what one token of a prefill needs beside weights and cache, without attention.
        score_bytes: the same for one pair of tokens in attention; 0 where the scores are never written down.
    """

    name: str
    attention: str
    layers: int
    vocabulary: int
    experts_layers: int
    E: int
    topk: int
    parameters: int
    weights_bytes: int
    experts_bytes: int
    packed_bytes: int
    largest_packed_bytes: int
    cache_bytes: int
    call_bytes: int
    score_bytes: int


@dataclass(frozen=True)
class Needs:
    """Bytes at the peak of a measurement, and what could be had when it was planned."""

    weights: int
    packed: int
    call: int
    reserve: int
    available: int

    @property
    def total(self) -> int:
        return self.weights + self.packed + self.call + self.reserve


def sizes_of(model: Any) -> Sizes:
    """`Sizes` of a model, which may be a skeleton."""
    text = model.config.get_text_config()
    experts = [m for m in model.modules() if is_experts_module(m)]
    packed = [_packed_bytes(m) for m in experts]
    names = names_of(experts[0])
    N, K = _dense_shape(experts[0], names.w1)
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    topk = int(getattr(text, "num_experts_per_tok", 1))
    # Each pair of a token and an expert has rows of K and N several times over; other layers hold a few rows of each token.
    call = topk * (2 * N + 4 * K) + 16 * text.hidden_size + 4 * heads * head_dim
    attention = text._attn_implementation
    return Sizes(
        name=type(model).__name__,
        attention=attention,
        layers=text.num_hidden_layers,
        vocabulary=text.vocab_size,
        experts_layers=len(experts),
        E=getattr(experts[0], names.w2).shape[0],
        topk=topk,
        parameters=sum(p.numel() for p in model.parameters()),
        weights_bytes=sum(p.nbytes for p in model.parameters()),
        experts_bytes=sum(p.nbytes for m in experts for p in m.parameters(recurse=False)),
        packed_bytes=sum(packed),
        largest_packed_bytes=max(packed),
        cache_bytes=text.num_hidden_layers * 2 * kv_heads * head_dim * _BF16,
        call_bytes=call * _BF16,
        # Scores, with the mask, with softmax in float32, and that rounded again.
        score_bytes=0 if attention != "eager" else heads * (3 * _BF16 + 2 * 4),
    )


def _packed_bytes(module: Any) -> int:
    computes = computation_of(module)
    if computes.activation is None or not ops.available():
        return 0
    names = names_of(module)
    w1, w2 = _dense_shape(module, names.w1), _dense_shape(module, names.w2)
    first = pack_ops.packed_elements(*w1, layout_of(computes.activation))
    E = getattr(module, names.w2).shape[0]
    return int(E * (first + pack_ops.packed_elements(*w2, "none")) * _BF16)


def _dense_shape(module: Any, name: str) -> tuple[int, int]:
    """Rows and columns of one expert's matrix in nn.Linear order."""
    _, rows, cols = getattr(module, name).shape
    return (cols, rows) if module.is_transposed else (rows, cols)


def plan(sizes: Sizes, settings: Settings, available: int) -> Needs:
    """Memory of the measurement: dense and packed weights beside each other, because implementations take turns.

    Raises:
        OutOfMemory: it does not fit; the message has the numbers.
    """
    batch, prompt = max(settings.batches), settings.prompt_tokens
    tokens = batch * (prompt + settings.new_tokens)
    call = (
        tokens * (sizes.cache_bytes + sizes.call_bytes)
        + batch * prompt * prompt * sizes.score_bytes
        + batch * sizes.vocabulary * 8
    )
    # It copies the matrices of an expert for every token that goes there.
    if "batched_mm" in settings.implementations:
        call += tokens * sizes.topk * sizes.experts_bytes // (sizes.experts_layers * sizes.E)
    packed = sizes.packed_bytes if NAME in settings.implementations else 0
    needs = Needs(sizes.weights_bytes, packed, call, _RESERVE, available)
    if needs.total > available:
        raise OutOfMemory(
            f"{sizes.name}: {gib(needs.total)} are needed (dense weights {gib(needs.weights)}, packed weights {gib(needs.packed)}, "
            f"{batch} sequences of {prompt} tokens {gib(needs.call)}, {gib(needs.reserve)} for everything else), {gib(available)} are available; "
            "take fewer layers, a smaller batch, a shorter prompt, or a single implementation"
        )
    return needs
