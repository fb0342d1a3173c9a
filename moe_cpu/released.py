"""Dense weights of a module given up for their packed form, and brought back whenever somebody needs them.

A released parameter is an empty tensor `[0, ...]` of the old dtype, so the module keeps its names and forgets its bytes. `state_dict` unpacks on the fly,
`load_state_dict` takes dense weights and packs them again, `.to(dtype)` or `.to(device)` bring the dense weights back at the next call. bf16 weights are
packed without rounding, so what comes back is bit for bit what was released.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_cpu.errors import DeviceError
from moe_cpu.packing import PackedExperts


class Names(NamedTuple):
    """Attribute names of the parameters of a module, and whether its matrices are stored as `[E, in, out]`."""

    w1: str
    w2: str
    w1_bias: str | None = None
    w2_bias: str | None = None
    transposed: bool = False


class _Released:
    """What a module with released weights holds instead of them."""

    def __init__(self, packed: PackedExperts, names: Names, grads: tuple[bool, bool]) -> None:
        self.packed, self.names, self.grads = packed, names, grads
        self.biases: tuple[Any, ...] | None = None  # as `_seen` saw those of which `packed` has the values

    def __reduce__(self) -> Any:
        return _Released, (self.packed, self.names, self.grads)


def dense(module: nn.Module, names: Names) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """w1 `[E, N, K]`, w2 `[E, K, I]` (views, when they are stored transposed) and the biases of a module."""
    w1, w2 = getattr(module, names.w1), getattr(module, names.w2)
    if names.transposed:
        w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
    return w1, w2, _bias(module, names.w1_bias), _bias(module, names.w2_bias)


def release(module: nn.Module, names: Names, gate_layout: str, ticks: Any = None) -> PackedExperts:
    """Packs the weights of `module` and gives the dense ones up.

    Args:
        gate_layout: row order of w1, as in `PackedExperts.pack`.
        ticks: a progress bar, advanced by one for each expert.
    Returns: the packed weights, which the module holds from now on.
    Raises: what `PackedExperts.pack` raises; the module is unchanged then.
    Memory: while it packs, the dense and the packed weights of this module.
    """
    w1, w2, b1, b2 = dense(module, names)
    packed = PackedExperts.pack(_Ticking(w1, ticks), w2, b1, b2, gate_layout=gate_layout)
    grads = (getattr(module, names.w1).requires_grad, getattr(module, names.w2).requires_grad)
    # The views would keep the storage alive.
    del w1, w2
    for name in (names.w1, names.w2):
        old = getattr(module, name)
        setattr(module, name, nn.Parameter(old.detach().new_empty((0, *old.shape[1:])), requires_grad=False))
    first_time = not hasattr(module, "_moe_cpu_released")
    state = _Released(packed, names, grads)
    state.biases = _seen(b1, b2)
    module._moe_cpu_released = state  # type: ignore[assignment]
    if first_time:  # hooks stay for good and do nothing while the weights are dense
        module.register_state_dict_post_hook(_fill_state_dict)
        module.register_load_state_dict_pre_hook(_before_load)
        module.register_load_state_dict_post_hook(_after_load)
    return packed


def packed_of(module: nn.Module) -> PackedExperts | None:
    """The packed weights that `module` holds instead of dense ones; None while it has dense ones.

    A module that was moved to another dtype or device gets its dense weights back, there, and one that got new biases keeps them.
    """
    state = _state(module)
    if state is None:
        return None
    w1 = getattr(module, state.names.w1)
    if w1.dtype != torch.bfloat16 or w1.device.type != "cpu":
        if torch.compiler.is_compiling():
            raise DeviceError(
                f"released weights were moved to {w1.dtype} on {w1.device}; run the module once, or unpack it, before compiling"
            )
        warnings.warn(
            f"{type(module).__name__}: moved to {w1.dtype} on {w1.device}, so its released weights are dense again",
            stacklevel=3,
        )
        restore(module)
        return None
    if state.names.w1_bias is not None:
        b1, b2 = _bias(module, state.names.w1_bias), _bias(module, state.names.w2_bias)
        if torch.compiler.is_compiling():
            p = state.packed  # a graph reads the module's own biases, in any dtype, at every call
            return PackedExperts(p.w1, p.w2, b1, b2, p.K, p.I, p.gate_layout)
        if not _unchanged(state.biases, b1, b2):
            state.packed = PackedExperts.from_state_dict(
                state.packed.state_dict() | {"w1_bias": b1, "w2_bias": b2}
            )
            state.biases = _seen(b1, b2)
    return state.packed


def is_released(module: nn.Module) -> bool:
    """Whether the module's dense weights were given up."""
    return _state(module) is not None


def restore(module: nn.Module) -> bool:
    """Brings the dense weights of `module` back, in its dtype and on its device. Returns whether they were released."""
    state = _state(module)
    if state is None:
        return False
    for name, tensor, grad in zip(
        (state.names.w1, state.names.w2), _unpacked(module, state), state.grads, strict=True
    ):
        setattr(module, name, nn.Parameter(tensor, requires_grad=grad))
    module._moe_cpu_released = None  # type: ignore[assignment]
    return True


def _state(module: nn.Module) -> _Released | None:
    return getattr(module, "_moe_cpu_released", None)


def _unpacked(module: nn.Module, state: _Released) -> list[Tensor]:
    """The dense weights as the module stored them."""
    like = getattr(module, state.names.w1)
    matrices = state.packed.unpack()
    if state.names.transposed:
        matrices = matrices[0].transpose(1, 2).contiguous(), matrices[1].transpose(1, 2).contiguous()
    return [tensor.to(dtype=like.dtype, device=like.device) for tensor in matrices]


def _bias(module: nn.Module, name: str | None) -> Tensor | None:
    return None if name is None else getattr(module, name)


def _seen(*biases: Tensor | None) -> tuple[Any, ...]:
    """What tells whether biases have changed. It keeps their storages, so that no other ones come to lie at their addresses."""
    return tuple(None if b is None else (b, b.untyped_storage(), _form(b)) for b in biases)


def _unchanged(seen: tuple[Any, ...] | None, *biases: Tensor | None) -> bool:
    """Whether these are the biases that were seen; never of inference tensors, which do not count their changes."""
    if seen is None:
        return False
    for before, b in zip(seen, biases, strict=True):
        if b is None or before is None:
            if b is not before:
                return False
        elif b is not before[0] or b.is_inference() or _form(b) != before[2]:
            return False
    return True


def _form(b: Tensor) -> tuple[Any, ...]:
    return b.data_ptr(), None if b.is_inference() else b._version, b.stride(), b.is_neg()


def _fill_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    state = _state(module)
    if state is not None:
        for name, tensor in zip((state.names.w1, state.names.w2), _unpacked(module, state), strict=True):
            state_dict[prefix + name] = tensor


def _before_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    state = _state(module)
    if state is None or not any(
        prefix + name in state_dict for name in state.names[:4] if isinstance(name, str)
    ):
        return
    restore(module)
    module._moe_cpu_reload = state  # type: ignore[assignment]


def _after_load(module: nn.Module, _: Any) -> None:
    state = module.__dict__.pop("_moe_cpu_reload", None)
    if state is None:
        return
    w1 = getattr(module, state.names.w1)
    if w1.dtype == torch.bfloat16 and w1.device.type == "cpu":
        release(module, state.names, state.packed.gate_layout)


class _Ticking:
    """The matrices of a weight, one progress step for each."""

    def __init__(self, weight: Tensor, ticks: Any) -> None:
        self.weight, self.ticks = weight, ticks

    def __len__(self) -> int:
        return len(self.weight)

    def __iter__(self) -> Iterator[Tensor]:
        for matrix in self.weight:
            yield matrix
            if self.ticks is not None:
                self.ticks.update(1)
