"""PackedExperts: the experts' weights laid out once for the CPU kernels.

The layout (kernels/include/moe/layout.h) is the same for every instruction set, so packed weights can be saved on one machine and used on another.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from moe_cpu import native_library as native
from moe_cpu import pack_ops
from moe_cpu.errors import ArgumentError, DTypeError, ShapeError
from moe_cpu.explain import swapped
from moe_cpu.pack_build import Matrices, Stack, check_even, check_panels, float_bias, pairs, progress_bar
from moe_cpu.tensor_checks import refuse_tracing

# Part of a saved file: raised when the layout changes.
LAYOUT_VERSION = 1
GATE_LAYOUT_OF_ACTIVATION = {
    "silu": "concatenated",
    "gelu": "concatenated",
    "gelu_tanh": "concatenated",
    "swigluoai": "interleaved",
    "relu2": "none",
}


class PackedExperts:
    """Weights of E experts as panels, accepted wherever `w1` is (then ``w2=None``).

    Make one with `pack`, `load` or `from_state_dict`. Its tensors cannot be replaced, but they may move (`share_memory_`), and a copy, a pickle or a
    worker process's argument has tensors of its own.

    Attributes:
        E, K, I, N: local experts, hidden size, intermediate size, rows of a dense w1 (2*I, or I without a gate).
        w1, w2: `[E, elements]` bf16, the packed matrices.
        w1_bias, w2_bias: `[E, N]` and `[E, K]` float32, or None.
        gate_layout: row order of the dense w1: "concatenated" (gate rows, then up rows), "interleaved" (alternating) or "none" (no gate).
        scheme: "bf16".
    """

    scheme = "bf16"

    def __init__(
        self,
        w1: Tensor,
        w2: Tensor,
        w1_bias: Tensor | None,
        w2_bias: Tensor | None,
        K: int,
        I: int,
        gate_layout: str,
    ) -> None:
        self._w1, self._w2, self._w1_bias, self._w2_bias = w1, w2, w1_bias, w2_bias
        self.E, self.K, self.I, self.gate_layout = w1.shape[0], K, I, gate_layout
        self.N = I if gate_layout == "none" else 2 * I
        self.gate_layout_code = native.GATE_LAYOUT_CODES[gate_layout]

    # Read-only: sizes and checks belong to these very tensors.
    @property
    def w1(self) -> Tensor:
        return self._w1

    @property
    def w2(self) -> Tensor:
        return self._w2

    @property
    def w1_bias(self) -> Tensor | None:
        return self._w1_bias

    @property
    def w2_bias(self) -> Tensor | None:
        return self._w2_bias

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_state_dict, (self.state_dict(),)

    # -- what a dense weight would say of itself, for code that looks ---------------------------------------------------------------------
    dtype = torch.bfloat16
    device = torch.device("cpu")
    requires_grad = False

    @property
    def has_bias(self) -> bool:
        return self.w1_bias is not None or self.w2_bias is not None

    @property
    def shape(self) -> torch.Size:
        """`[E, N, K]`, the shape of the dense w1."""
        return torch.Size((self.E, self.N, self.K))

    @property
    def nbytes(self) -> int:
        """Bytes held, padding and biases included."""
        return sum(
            t.numel() * t.element_size()
            for t in (self.w1, self.w2, self.w1_bias, self.w2_bias)
            if t is not None
        )

    def __repr__(self) -> str:
        bias = ", biases" if self.has_bias else ""
        gate = f"gate {self.gate_layout}" if self.gate_layout != "none" else "no gate"
        return f"PackedExperts(E={self.E}, K={self.K}, I={self.I}, {self.scheme}, {gate}{bias}, {self.nbytes / 2**20:.1f} MiB)"

    @classmethod
    def pack(
        cls,
        w1: Tensor | Iterable[Tensor],
        w2: Tensor | Iterable[Tensor],
        w1_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
        *,
        activation: str = "silu",
        gate_layout: str | None = None,
        dtype: torch.dtype | None = None,
        progress: bool = False,
    ) -> PackedExperts:
        """Lays dense weights out for the CPU kernels, expert by expert.

        Args:
            w1: `[E, N, K]` bf16 (nn.Linear row order; any strides), or an iterable of E matrices `[N, K]`.
            w2: `[E, K, I]` bf16, or an iterable of E matrices `[K, I]`.
            w1_bias: `[E, N]` or None; copied, kept in float32.
            w2_bias: `[E, K]` or None; copied, kept in float32.
            activation: fixes the row order of w1 when `gate_layout` is None.
            gate_layout: "concatenated", "interleaved" or "none".
            dtype: ``torch.bfloat16`` turns float32 or float16 weights into bf16 (round to nearest even); without it they are refused.
            progress: show a progress bar.

        Raises:
            ShapeError, DTypeError, DeviceError: with the expected and the given values.
            OutOfMemory: with the bytes that the packed weights take.

        Memory: an iterable is consumed one expert at a time and nothing of it is kept, so a caller who lets go of each matrix as it is taken (a
        generator over a checkpoint) never holds more than the packed weights and one dense expert.
        """
        refuse_tracing()
        if gate_layout is None:
            gate_layout = layout_of(activation)
        if gate_layout not in native.GATE_LAYOUT_CODES:
            raise ArgumentError(
                f"gate_layout: expected one of {', '.join(native.GATE_LAYOUT_CODES)}, got {gate_layout!r}"
            )
        if dtype not in (None, torch.bfloat16):
            raise DTypeError(
                f"dtype: expected torch.bfloat16 or None, got {dtype}; it names what the weights are turned into"
            )
        first = Matrices("w1", w1, dtype)
        second = Matrices("w2", w2, dtype)
        packed1, packed2 = Stack(first, gate_layout), Stack(second, "none")
        width = 1 if gate_layout == "none" else 2
        bar = progress_bar(first.count, progress)
        for e1, e2 in pairs(first, second):
            check_even(e1, gate_layout)
            if e2.shape[1] * width != e1.shape[0] or e2.shape[0] != e1.shape[1]:
                hint = "swap w1 and w2" if swapped(e1, e2, width) else "pass nn.Linear order"
                raise ShapeError(
                    f"w2: expected [K, I] = [{e1.shape[1]}, {e1.shape[0] // width}] for every expert "
                    f"(w1 has [N, K] = {list(e1.shape)}, gate {gate_layout}), got {list(e2.shape)}; {hint}"
                )
            packed1.add(e1)
            packed2.add(e2)
            bar.update(1)
        bar.close()
        w1_all, w2_all = packed1.finish(), packed2.finish()
        E, (N, K), (_, I) = w1_all.shape[0], packed1.dense_shape, packed2.dense_shape
        biases = (
            float_bias("w1_bias", w1_bias, ("E", "N"), (E, N), copy=True),
            float_bias("w2_bias", w2_bias, ("E", "K"), (E, K), copy=True),
        )
        return cls(w1_all, w2_all, *biases, K=K, I=I, gate_layout=gate_layout)

    def unpack(self) -> tuple[Tensor, Tensor]:
        """The dense `w1 [E, N, K]` and `w2 [E, K, I]` in bf16, equal to what was packed."""
        refuse_tracing()
        w1 = torch.empty((self.E, self.N, self.K), dtype=torch.bfloat16)
        w2 = torch.empty((self.E, self.K, self.I), dtype=torch.bfloat16)
        for e in range(self.E):
            w1[e] = pack_ops.unpack_expert(self.w1[e], self.N, self.K, self.gate_layout)
            w2[e] = pack_ops.unpack_expert(self.w2[e], self.K, self.I, "none")
        return w1, w2

    def state_dict(self) -> dict[str, Any]:
        """Everything `from_state_dict` needs; tensors are shared, not copied."""
        return {
            "layout_version": LAYOUT_VERSION, "scheme": self.scheme, "K": self.K, "I": self.I, "gate_layout": self.gate_layout,
            "w1": self.w1, "w2": self.w2, "w1_bias": self.w1_bias, "w2_bias": self.w2_bias,
        }  # fmt: skip

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> PackedExperts:
        """The inverse of `state_dict`; tensors are shared, not copied.

        Raises: ArgumentError for another layout version or scheme, ShapeError, DTypeError and DeviceError for tensors that do not fit.
        """
        if state.get("layout_version") != LAYOUT_VERSION or state.get("scheme") != cls.scheme:
            raise ArgumentError(
                f"packed weights: expected layout version {LAYOUT_VERSION} and scheme {cls.scheme}, "
                f"got {state.get('layout_version')} and {state.get('scheme')}; pack the dense weights again"
            )
        names = ("w1", "w2", "w1_bias", "w2_bias", "K", "I", "gate_layout")
        missing = [name for name in names if name not in state]
        if missing:
            raise ArgumentError(
                f"packed weights: {', '.join(missing)} missing; pass what state_dict returned"
            )
        return cls.from_tensors(*(state[name] for name in names))

    @classmethod
    def from_tensors(
        cls,
        w1: Tensor,
        w2: Tensor,
        w1_bias: Tensor | None,
        w2_bias: Tensor | None,
        K: int,
        I: int,
        gate_layout: str,
    ) -> PackedExperts:
        """Tensors that are packed already. Raises as `from_state_dict`: what does not fit would be read out of bounds."""
        E, N = check_panels(w1, w2, K, I, gate_layout)
        biases = (
            float_bias("w1_bias", w1_bias, ("E", "N"), (E, N), copy=False),
            float_bias("w2_bias", w2_bias, ("E", "K"), (E, K), copy=False),
        )
        return cls(w1, w2, *biases, K=K, I=I, gate_layout=gate_layout)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the packed weights to a file that `load` reads.

        Raises: OSError when the file cannot be written; what `torch.save` raises.
        """
        torch.save(self.state_dict(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], mmap: bool = False) -> PackedExperts:
        """Reads a file written by `save`; with `mmap` pages come from the file as they are used.

        Raises: OSError for a file that cannot be read, what `torch.load` raises for one that is not its own, and otherwise as `from_state_dict`.
        """
        return cls.from_state_dict(torch.load(path, map_location="cpu", weights_only=True, mmap=mmap))


def layout_of(activation: str) -> str:
    """The row order of w1 that `activation` means. Raises ArgumentError for an unknown one."""
    if activation not in GATE_LAYOUT_OF_ACTIVATION:
        raise ArgumentError(
            f"activation: expected one of {', '.join(GATE_LAYOUT_OF_ACTIVATION)}, got {activation!r}"
        )
    return GATE_LAYOUT_OF_ACTIVATION[activation]


def as_packed(weights: Any) -> PackedExperts:
    """`weights` itself, or, for an object that has the attributes of a `PackedExperts`, one that shares its tensors.

    Raises: as `PackedExperts.from_state_dict`.
    """
    if isinstance(weights, PackedExperts):
        return weights
    return PackedExperts.from_tensors(
        weights.w1, weights.w2, weights.w1_bias, weights.w2_bias, weights.K, weights.I, weights.gate_layout
    )
