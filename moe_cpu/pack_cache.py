"""Dense weights packed on first use, and packed again when they change.

An entry belongs to the *storages* of the weights, not to tensor objects: two views of one parameter find the same entry, and it dies with the memory it was
made from, so an address that is used again never finds the old weights. Every in-place change that autograd sees raises a tensor's version; the versions
are compared on every call. A write through ``tensor.data`` or from NumPy has no version: call `forget` after one.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_cpu.packing import PackedExperts, layout_of


@dataclass
class _Entry:
    storages: tuple[weakref.ref[Any], ...]
    versions: tuple[int, ...]
    packed: PackedExperts


_entries: dict[tuple[Any, ...], _Entry] = {}
# The same entries by the addresses of w1 and w2, for `find`: those last found, with the tensors they were found for.
_last: dict[tuple[int, int, str], tuple[_Entry, weakref.ref[Any], weakref.ref[Any], tuple[Any, ...]]] = {}
_lock = threading.Lock()


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
    call, with one warning.
    """
    tensors = tuple(t for t in (w1, w2, w1_bias, w2_bias) if t is not None)
    layout = layout_of(activation)
    if any(t.is_inference() for t in tensors):
        warnings.warn(
            "weights made under torch.inference_mode have no version counter, so a change could not be noticed: they are packed on every call; "
            "pass PackedExperts.pack(w1, w2) instead",
            stacklevel=2,
        )
        return PackedExperts.pack(w1, w2, w1_bias, w2_bias, activation=activation)
    key = (
        layout,
        w1_bias is None,
        w2_bias is None,
        *((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors),
    )
    versions = tuple(t._version for t in tensors)
    entry = _entries.get(key)
    if entry is not None and entry.versions == versions and all(ref() is not None for ref in entry.storages):
        _remember(entry, w1, w2, w1_bias, w2_bias, activation)
        return entry.packed
    with _lock:
        # An entry dies with the first of its storages. The callback may run in the middle of anything, so it only removes, without the lock.
        def evict(_: Any) -> None:
            _entries.pop(key, None)

        storages = tuple(weakref.ref(t.untyped_storage(), evict) for t in tensors)
        packed = PackedExperts.pack(w1, w2, w1_bias, w2_bias, activation=activation)
        _entries[key] = entry = _Entry(storages, versions, packed)
        _remember(entry, w1, w2, w1_bias, w2_bias, activation)
        return packed


def find(w1: Tensor, w2: Tensor, activation: str) -> PackedExperts | None:
    """The packed form of weights without biases if these very tensor objects were packed before and have not changed since; else None.

    The quick half of `packed_for`: about a microsecond.
    """
    found = _last.get((w1.data_ptr(), w2.data_ptr(), activation))
    if found is None:
        return None
    entry, first, second, form = found
    if (
        first() is w1
        and second() is w2
        and entry.versions == (w1._version, w2._version)
        and form == _form(w1, w2)
    ):
        return entry.packed
    return None


def _form(w1: Tensor, w2: Tensor) -> tuple[Any, ...]:
    return w1.shape, w1.stride(), w2.shape, w2.stride()


def _remember(
    entry: _Entry, w1: Tensor, w2: Tensor, w1_bias: Tensor | None, w2_bias: Tensor | None, activation: str
) -> None:
    if w1_bias is None and w2_bias is None:
        key = (w1.data_ptr(), w2.data_ptr(), activation)
        first = weakref.ref(w1, lambda _: _last.pop(key, None))
        _last[key] = (entry, first, weakref.ref(w2), _form(w1, w2))


def forget(*tensors: Tensor) -> None:
    """Drops the packed copies made from these tensors (all copies when none is given)."""
    storages = [t.untyped_storage() for t in tensors]
    for key, entry in list(_entries.items()):
        if not tensors or any(ref() is storage for ref in entry.storages for storage in storages):
            _entries.pop(key, None)
    _last.clear()


def held_bytes() -> int:
    """Bytes of packed weights the cache holds."""
    return sum(entry.packed.nbytes for entry in list(_entries.values()))
