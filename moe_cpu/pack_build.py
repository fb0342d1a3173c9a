"""How `PackedExperts.pack` builds its buffers: one expert at a time, every matrix checked as it passes."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor

from moe_cpu import native_library as native
from moe_cpu import pack_ops
from moe_cpu.errors import ArgumentError, DeviceError, DTypeError, ShapeError, out_of_memory_error


class Matrices:
    """The per-expert matrices of one weight, checked as they pass."""

    def __init__(self, name: str, weights: Tensor | Iterable[Tensor], dtype: torch.dtype | None) -> None:
        self.name, self.weights, self.dtype = name, weights, dtype
        if isinstance(weights, Tensor) and weights.dim() != 3:
            symbols = "[E, N, K]" if name == "w1" else "[E, K, I]"
            raise ShapeError(f"{name}: expected {symbols}, got {list(weights.shape)}")
        if isinstance(weights, str) or not isinstance(weights, Iterable):
            raise ArgumentError(
                f"{name}: expected a tensor or an iterable of one matrix per expert, got {type(weights).__name__}"
            )
        self.count: int | None = len(weights) if isinstance(weights, Sized) else None

    def __iter__(self) -> Iterator[Tensor]:
        for matrix in self.weights:
            if not isinstance(matrix, Tensor):
                raise ArgumentError(
                    f"{self.name}: expected a [rows, columns] tensor per expert, got {type(matrix).__name__}"
                )
            if matrix.dim() != 2:
                raise ShapeError(
                    f"{self.name}: expected one [rows, columns] matrix per expert, got {list(matrix.shape)}"
                )
            if 0 in matrix.shape:
                raise ShapeError(
                    f"{self.name}: expected at least 1 row and column for every expert (K and I), got {list(matrix.shape)}"
                )
            if matrix.device.type != "cpu":
                raise DeviceError(
                    f"{self.name}: expected a CPU tensor, got {matrix.device}; move it with .cpu()"
                )
            if matrix.dtype != torch.bfloat16:
                if self.dtype is None or not matrix.dtype.is_floating_point:
                    raise DTypeError(
                        f"{self.name}: expected torch.bfloat16, got {matrix.dtype}; pass dtype=torch.bfloat16 to round the weights, "
                        f"or use the reference backend, which keeps their precision"
                    )
                matrix = matrix.detach().to(self.dtype)
            yield matrix.detach().resolve_neg()


class Stack:
    """Packed experts, one after the other, in one `[E, elements]` buffer.

    Memory: an unknown number of experts grows in pages of its own, which move without being copied. Blocks of the allocator would be held twice while
    they are joined, for it keeps what it is given back.
    """

    def __init__(self, source: Matrices, gate_layout: str) -> None:
        self.name, self.gate_layout, self.count = source.name, gate_layout, source.count
        self.dense_shape = (0, 0)
        self.buffer: Tensor | None = None
        self.pages: mmap.mmap | None = None
        self.used = 0

    def add(self, dense: Tensor) -> None:
        rows, cols = dense.shape
        if self.used == 0:
            self.dense_shape = (rows, cols)
            self.size = pack_ops.packed_elements(rows, cols, self.gate_layout)
        elif (rows, cols) != self.dense_shape:
            raise ShapeError(
                f"{self.name}[{self.used}]: expected {list(self.dense_shape)} as the experts before it, got [{rows}, {cols}]"
            )
        pack_ops.pack_expert(dense, self.gate_layout, self._place())
        self.used += 1

    def finish(self) -> Tensor:
        if self.used == 0:
            raise ShapeError(f"{self.name}: expected at least one expert, got none")
        if self.buffer is not None:
            return self.buffer
        # Keeps the pages, which nobody can resize any more, alive.
        everything = torch.frombuffer(self.pages, dtype=torch.bfloat16, count=self.used * self.size)
        return everything.view(self.used, self.size)

    def _place(self) -> Tensor:
        """Where the next expert goes. Raises OutOfMemory with the bytes."""
        size = (self.count or self.used + 1) * self.size * 2
        try:
            if self.count is not None:
                if self.buffer is None:
                    self.buffer = torch.empty((self.count, self.size), dtype=torch.bfloat16)
                return self.buffer[self.used]
            if self.pages is None:
                self.pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            else:
                self.pages.resize(size)
        except (RuntimeError, OSError) as error:
            raise out_of_memory_error(
                f"packed {self.name}", size, "use a machine with more memory"
            ) from error
        return torch.frombuffer(
            self.pages, dtype=torch.bfloat16, count=self.size, offset=self.used * self.size * 2
        )


def check_even(w1: Tensor, gate_layout: str) -> None:
    """Raises ShapeError when gate and up cannot share the rows of one expert's `w1`."""
    if gate_layout != "none" and w1.shape[0] % 2:
        raise ShapeError(f"w1: expected an even number of rows N = 2*I (gate and up), got {w1.shape[0]}")


def pairs(first: Matrices, second: Matrices) -> Iterator[tuple[Tensor, Tensor]]:
    """zip that names the shorter side."""
    one, two, done = iter(first), iter(second), object()
    count = 0
    while True:
        a, b = next(one, done), next(two, done)
        if a is done and b is done:
            return
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            raise ShapeError(
                f"w1 and w2: expected the same number of experts E, but {'w1' if a is done else 'w2'} ends after {count}"
            )
        count += 1
        yield a, b


def check_panels(w1: Tensor, w2: Tensor, K: int, I: int, gate_layout: str) -> tuple[int, int]:
    """Raises unless `w1` and `w2` are packed matrices of these sizes; returns E and N."""
    if gate_layout not in native.GATE_LAYOUT_CODES:
        raise ArgumentError(
            f"gate_layout: expected one of {', '.join(native.GATE_LAYOUT_CODES)}, got {gate_layout!r}"
        )
    if K < 1 or I < 1:
        raise ShapeError(f"packed weights: expected K and I of at least 1, got K = {K}, I = {I}")
    N = I if gate_layout == "none" else 2 * I
    for name, tensor, rows, columns, layout in (("w1", w1, N, K, gate_layout), ("w2", w2, K, I, "none")):
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"packed {name}: expected a tensor, got {type(tensor).__name__}")
        if tensor.device.type != "cpu":
            raise DeviceError(
                f"packed {name}: expected a CPU tensor, got {tensor.device}; move it with .cpu()"
            )
        elements = pack_ops.packed_elements(rows, columns, layout)
        if (
            tensor.dtype != torch.bfloat16
            or tensor.dim() != 2
            or not tensor.is_contiguous()
            or tensor.is_neg()
        ):
            raise ShapeError(
                f"packed {name}: expected [E, elements] = [E, {elements}] contiguous bf16, got {list(tensor.shape)} {tensor.dtype}"
            )
        if tuple(tensor.shape) != (w1.shape[0], elements):
            raise ShapeError(
                f"packed {name}: expected [E, elements] = [{w1.shape[0]}, {elements}] contiguous bf16, got {list(tensor.shape)}"
            )
    return w1.shape[0], N


def float_bias(
    name: str, bias: Tensor | None, symbols: tuple[str, str], shape: tuple[int, int], *, copy: bool
) -> Tensor | None:
    """The bias in float32, contiguous, on the CPU. `copy`: even where it is so already, so that a later change of it does not reach the packed weights."""
    if bias is None:
        return None
    if tuple(bias.shape) != shape:
        raise ShapeError(f"{name}: expected [{', '.join(symbols)}] = {list(shape)}, got {list(bias.shape)}")
    if bias.device.type != "cpu":
        raise DeviceError(f"{name}: expected a CPU tensor, got {bias.device}; move it with .cpu()")
    if not bias.dtype.is_floating_point:
        raise DTypeError(f"{name}: expected fp32, bf16 or fp16, got {bias.dtype}")
    bias = bias.detach().resolve_neg().to(torch.float32, memory_format=torch.contiguous_format, copy=copy)
    return bias.contiguous()


def progress_bar(total: int | None, show: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="packing experts", unit="expert", disable=not show)
