"""Dense weights packed on first use, and packed again when they change; `moe_cpu.derived_cache` says how a change is noticed."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch import Tensor

from moe_cpu.derived_cache import DerivedCache, Entry, forget
from moe_cpu.packing import PackedExperts, layout_of

__all__ = ["find", "forget", "held_bytes", "packed_for"]

_cache: DerivedCache[PackedExperts] = DerivedCache()
# The same entries by the addresses of w1 and w2, for `find`: those last found, with the tensors they were found for. Nothing here keeps anything alive, and
# a place is emptied as soon as one of the three has died.
_last: dict[
    tuple[int, int, str], tuple[weakref.ref[Entry[PackedExperts]], weakref.ref[Any], weakref.ref[Any], Any]
] = {}


def packed_for(
    w1: Tensor,
    w2: Tensor,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    activation: str = "silu",
) -> PackedExperts:
    """The packed form of dense bf16 weights: from the cache if they are unchanged since they were packed, else packed now.

    Args:
        w1, w2, w1_bias, w2_bias, activation: as in `PackedExperts.pack`.

    Raises:
        what `PackedExperts.pack` raises.

    Memory: the packed copy lives as long as the dense weights. Tensors made under ``torch.inference_mode`` have no version; they are packed on every
    call, with one warning. Writes through ``tensor.data`` or NumPy have none either: call `forget` after one.
    """
    tensors = tuple(t for t in (w1, w2, w1_bias, w2_bias) if t is not None)
    layout = layout_of(activation)

    def pack() -> PackedExperts:
        return PackedExperts.pack(w1, w2, w1_bias, w2_bias, gate_layout=layout)

    if any(t.is_inference() for t in tensors):
        warnings.warn(
            "weights made under torch.inference_mode have no version counter, so a change could not be noticed: they are packed on every call; "
            "pass PackedExperts.pack(w1, w2) instead",
            stacklevel=2,
        )
        return pack()
    entry = _cache.entry(tensors, (layout, w1_bias is None, w2_bias is None), pack)
    if w1_bias is None and w2_bias is None:
        _remember(entry, w1, w2, activation)
    return entry.value


def find(w1: Tensor, w2: Tensor, activation: str) -> PackedExperts | None:
    """The packed form of weights without biases if these very tensor objects were packed before and have not changed since; else None.

    The quick half of `packed_for`: about a microsecond.
    """
    found = _last.get((w1.data_ptr(), w2.data_ptr(), activation))
    if found is None:
        return None
    entry, first, second, form = found
    known = entry()
    if (
        known is not None
        and first() is w1
        and second() is w2
        and known.versions == (w1._version, w2._version)
        and form == (w1.shape, w1.stride(), w2.shape, w2.stride())
    ):
        return known.value
    return None


def _remember(entry: Entry[PackedExperts], w1: Tensor, w2: Tensor, activation: str) -> None:
    key = (w1.data_ptr(), w2.data_ptr(), activation)

    def evict(_: Any) -> None:
        _last.pop(key, None)

    _last[key] = (
        weakref.ref(entry, evict),
        weakref.ref(w1, evict),
        weakref.ref(w2, evict),
        (w1.shape, w1.stride(), w2.shape, w2.stride()),
    )


def held_bytes() -> int:
    """Bytes of packed weights the cache holds."""
    return sum(packed.nbytes for packed in _cache.values())
