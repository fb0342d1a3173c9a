"""Our own backends as contenders, and finding a contender by its name."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from moe_cpu import experts, fused_experts, isa, native_library, ops
from moe_cpu.benchmark.baselines import BASELINES
from moe_cpu.benchmark.contender import Contender
from moe_cpu.benchmark.inputs import DenseLayer, Inputs
from moe_cpu.errors import ArgumentError
from moe_cpu.models import ModelShape
from moe_cpu.packing import PackedExperts


class Backend(Contender):
    """`moe_cpu.fused_experts` with a forced backend, called as a user calls it; for "native" on weights packed beforehand.

    Args:
        backend: a name of `moe_cpu.experts.list_backends`.
        isa_name: an instruction set to force, only for "native".
    """

    ours = True

    def __init__(self, backend: str, isa_name: str | None = None) -> None:
        if isa_name is not None and backend != "native":
            raise ArgumentError(f"contender: only native takes an instruction set, got {backend}:{isa_name}")
        self.name = backend if isa_name is None else f"{backend}:{isa_name}"
        self.backend, self.isa = backend, isa_name
        self._packs = backend == "native"
        self.keeps_dense = not self._packs
        # The other backends may keep a layout of their own beside the dense weights.
        self.copies = 0 if backend == "reference" else 1

    def why_not(self, shape: ModelShape) -> str | None:
        if self.isa is not None and (reason := isa.why_not(self.isa)) is not None:
            return reason
        for status in experts.list_backends():
            if status.name == self.backend:
                return None if status.available else status.reason
        return f"no backend of that name; there are {', '.join(s.name for s in experts.list_backends())}"

    def active(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.isa is None else isa.use(self.isa)

    def prepare(self, layer: DenseLayer, shape: ModelShape) -> Any:
        if self._packs:
            return PackedExperts.pack(*layer, activation=shape.activation)
        # A backend that keeps a layout of its own makes it on first use, which is not to be timed.
        token = Inputs(
            torch.zeros(1, shape.K, dtype=layer[0].dtype, device=layer[0].device),
            torch.ones(1, 1, device=layer[0].device),
            torch.zeros(1, 1, dtype=torch.int32, device=layer[0].device),
        )
        self.run(layer, token, shape)
        return layer

    def run(self, prepared: Any, inputs: Inputs, shape: ModelShape) -> Tensor:
        x, weights, ids = inputs
        if self._packs:
            return fused_experts(
                x, prepared, None, weights, ids, activation=shape.activation, backend="native"
            )
        w1, w2, w1_bias, w2_bias = prepared
        return fused_experts(
            x,
            w1,
            w2,
            weights,
            ids,
            activation=shape.activation,
            w1_bias=w1_bias,
            w2_bias=w2_bias,
            backend=self.backend,
        )

    def scratch_bytes(self, prepared: Any, inputs: Inputs, shape: ModelShape) -> int | None:
        if not self._packs:
            return None
        x = inputs.x
        return ops.layer_scratch_bytes(len(x), shape.topk, prepared, x.dtype, native_library.REDUCED)


def find(name: str) -> Contender:
    """The contender of that name: a backend, ``native:<isa>``, or a baseline.

    Raises:
        ArgumentError: there is none; the message lists the names.
    """
    if name in BASELINES:
        return BASELINES[name]()
    backend, _, isa_name = name.partition(":")
    known = [status.name for status in experts.list_backends()]
    if backend not in known:
        raise ArgumentError(
            f"contender: expected a backend ({', '.join(known)}; native:<isa> forces an instruction set) "
            f"or a baseline ({', '.join(BASELINES)}), got {name!r}"
        )
    if ":" in name and isa_name not in isa.names():
        raise ArgumentError(
            f"contender {name}: expected an instruction set among {', '.join(isa.names())}, got {isa_name!r}"
        )
    return Backend(backend, isa_name or None)
