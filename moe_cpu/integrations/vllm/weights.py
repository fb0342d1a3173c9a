"""The weights of a vLLM layer: packed after loading, dense again while they are loaded anew.

vLLM loads into the dense parameters that the method created, and then has them processed once. Later it may load again, on two ways: into new dense
parameters, whose processed form is copied into the ones in use (`reload_weights`), or straight into those in use (`model.load_weights`), whose loaders then
get packed bytes where they expect rows. So the parameters stay the same objects all the time, and a loader that finds packed ones unpacks them first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from moe_cpu.packing import PackedExperts

_BIASES = ("w13_bias", "w2_bias")


def is_packed(layer: Any) -> bool:
    """Whether the layer's matrices are packed: then each expert is a row of elements."""
    return layer.w13_weight.dim() == 2


def pack(layer: Any, gate_layout: str) -> None:
    """Packs the weights of `layer` where they are, unless they are packed.

    `w13_weight` `[E, N, K]` and `w2_weight` `[E, K, I]` become `[E, elements]`, biases float32, which the kernels read.

    Raises: what `PackedExperts.pack` raises; the layer is unchanged then.
    Memory: while it packs, the dense and the packed weights of this layer.
    """
    if is_packed(layer):
        return
    w13, w2 = layer.w13_weight, layer.w2_weight
    packed = PackedExperts.pack(w13.data, w2.data, gate_layout=gate_layout)
    w13.data, w2.data = packed.w1, packed.w2
    for name in _BIASES:
        bias = getattr(layer, name, None)
        if bias is not None:
            bias.data = bias.data.float()


def unpack(layer: Any, gate_layout: str) -> None:
    """The inverse of `pack`, bit for bit; biases stay float32."""
    if not is_packed(layer):
        return
    w13, w2 = layer.w13_weight, layer.w2_weight
    packed = PackedExperts.from_tensors(
        w13.data, w2.data, None, None, layer.hidden_size, layer.intermediate_size_per_partition, gate_layout
    )
    w13.data, w2.data = packed.unpack()


def unpacking_loader(loader: Callable[..., Any], gate_layout: str) -> Callable[..., Any]:
    """`loader`, a method of the layer that fills one of its parameters, which finds them dense from now on.

    A method as well, because vLLM takes the layer out of the methods it remembers, and puts it in again.
    """
    load = loader.__func__  # type: ignore[attr-defined]

    @functools.wraps(load)
    def unpack_and_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        unpack(self, gate_layout)
        return load(self, *args, **kwargs)

    return MethodType(unpack_and_load, loader.__self__)  # type: ignore[attr-defined]
