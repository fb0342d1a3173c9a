"""Launching a kernel without Triton's own look at every argument.

``kernel[grid](...)`` finds the machine code that suits the dtypes, the alignment and the divisibility of its arguments. On the host that takes tens of
microseconds, longer than a layer of one token runs. Where all of that is known to be what it was, the compiled kernel is launched as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton

_ALIGNMENT = 16


class Program:
    """One kernel with its compile-time values, for arguments of one kind.

    Attributes:
        compiled: the machine code, from the first launch on; always None in Triton's interpreter.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any], options: dict[str, int]) -> None:
        self.kernel, self.options = kernel, options
        # In the order of the kernel's parameters, behind the arguments that change.
        self.constants = {name: constants[name] for name in kernel.arg_names if name in constants}
        self.compiled: Any = None
        self._values = tuple(self.constants.values())

    def direct(self, grid: tuple[int, int, int], stream: int, *arguments: Any) -> None:
        """Launches machine code; an address stands for a tensor."""
        self.compiled[grid](*arguments, *self._values, stream=stream)

    def through_triton(self, grid: tuple[int, int, int], keep: bool, *arguments: Any) -> None:
        """Launches on the current stream as Triton does, compiling where needed; keeps the machine code when the arguments are the usual, aligned ones."""
        compiled = self.kernel[grid](*arguments, **self.constants, **self.options)
        if keep and hasattr(compiled, "__getitem__"):
            self.compiled = compiled


@functools.cache
def program(
    kernel: Any, device: int, kinds: tuple[Any, ...], constants: tuple[tuple[str, Any], ...], warps: int = 4, stages: int = 3
) -> Program:  # fmt: skip
    """The program for these constants on a device.

    Args:
        kinds: everything else that Triton would look at: dtypes of pointers (None where there is none) and values of integers, but those it is told not to
            specialise on, which must fit into 32 bits.
    """
    return Program(kernel, dict(constants), {"num_warps": warps, "num_stages": stages})


class Launcher:
    """Launches programs one after the other, either way.

    Args:
        device: index of the GPU, -1 in the interpreter.
        programs: those that will be launched.
        tensors: the tensors, or None, that they take, but for those inside blocks that are aligned anyway.
    """

    def __init__(
        self, device: int, programs: Sequence[Program], tensors: Sequence[torch.Tensor | None]
    ) -> None:
        self.addresses = [None if t is None else t.data_ptr() for t in tensors]
        together = 0
        for address in self.addresses:
            together |= address or 0
        self.aligned = together % _ALIGNMENT == 0
        self.direct = self.aligned and device >= 0
        for one in programs:
            if one.compiled is None:
                self.direct = False
        self.pointers: Sequence[Any] = self.addresses if self.direct else tensors
        self.stream = current_stream(device)

    def __call__(self, program: Program, grid: tuple[int, int, int], *arguments: Any) -> None:
        if self.direct:
            program.direct(grid, self.stream, *arguments)
        else:
            program.through_triton(grid, self.aligned, *arguments)


def current_stream(device: int) -> int:
    """Handle of the stream that torch is on."""
    return triton.runtime.driver.active.get_current_stream(device) if device >= 0 else 0


class Address:
    """What a descriptor of the copy engine needs of a tensor, without keeping its memory."""

    def __init__(self, value: int, dtype: torch.dtype) -> None:
        self.value, self.dtype = value, dtype

    def data_ptr(self) -> int:
        return self.value


@functools.lru_cache(maxsize=4096)
def descriptor_of(address: int, dtype: torch.dtype, shape: tuple[int, int], tile: tuple[int, int]) -> Any:
    """`descriptor` by address, for launches past Triton; made once for each weight."""
    return descriptor(Address(address, dtype), shape, tile)


def descriptor(base: Any, shape: tuple[int, int], tile: tuple[int, int]) -> Any:
    """What the copy engine needs to load tiles of contiguous memory seen as one matrix of that shape."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(base, list(shape), [shape[1], 1], list(tile))
