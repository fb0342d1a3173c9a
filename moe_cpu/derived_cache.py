"""Forms derived from weights (packed, reordered), made on first use, kept while the weights live, made again when they change.

An entry belongs to the *storages* of the weights, not to tensor objects: two views of one parameter find the same entry, and it dies with the memory it was
made from, so an address that is used again never finds the old weights. Every in-place change that autograd sees raises a tensor's version; the versions
are compared on every call. A write through ``tensor.data`` or from NumPy has no version: call `forget` after one.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class Entry(Generic[T]):
    """One derived form, the storages that it was made from and their versions then."""

    __slots__ = ("__weakref__", "storages", "value", "versions")

    def __init__(self, storages: tuple[weakref.ref[Any], ...], versions: tuple[int, ...], value: T) -> None:
        self.storages, self.versions, self.value = storages, versions, value

    def fits(self, versions: tuple[int, ...]) -> bool:
        """Whether every storage lives and no version has moved."""
        return self.versions == versions and all(ref() is not None for ref in self.storages)


class DerivedCache(Generic[T]):
    """Derived forms by the identity of their weights.

    Several threads that need the same form wait for the first of them to make it. A forked child does not inherit a lock that a thread of its parent held.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[Any, ...], Entry[T]] = {}
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)
        _caches.append(self)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def entry(self, tensors: tuple[Tensor, ...], meaning: Hashable, make: Callable[[], T]) -> Entry[T]:
        """The entry of these weights, made by `make` unless there is one that fits.

        Args:
            tensors: weights with a version (none is an inference tensor).
            meaning: what else decides the derived form.
        Raises: what `make` raises; nothing is kept then.
        """
        key = (meaning, *((t.data_ptr(), t.shape, t.stride(), t.dtype, t.is_neg()) for t in tensors))
        versions = tuple(t._version for t in tensors)
        entry = self._entries.get(key)
        if entry is not None and entry.fits(versions):
            return entry
        with self._lock:
            entry = self._entries.get(key)  # another thread may have made it while this one waited
            if entry is None or not entry.fits(versions):
                # The form made from the weights before they changed must not stay beside the new one while that is made.
                self._entries.pop(key, None)
                entry = None
                entries = self._entries

                # An entry dies with the first of its storages. This may run in the middle of anything, so it only removes, without the lock.
                def evict(_: Any) -> None:
                    entries.pop(key, None)

                storages = tuple(weakref.ref(t.untyped_storage(), evict) for t in tensors)
                entry = self._entries[key] = Entry(storages, versions, make())
            return entry

    def forget(self, *tensors: Tensor) -> None:
        """Drops what was derived from these tensors; everything when none is given."""
        storages = [t.untyped_storage() for t in tensors]
        for key, entry in list(self._entries.items()):
            if not tensors or any(ref() is storage for ref in entry.storages for storage in storages):
                self._entries.pop(key, None)

    def values(self) -> list[T]:
        """Every derived form that is held."""
        return [entry.value for entry in list(self._entries.values())]


_caches: list[DerivedCache[Any]] = []


def forget(*tensors: Tensor) -> None:
    """Drops what any backend derived from these tensors; everything when none is given."""
    for cache in _caches:
        cache.forget(*tensors)
