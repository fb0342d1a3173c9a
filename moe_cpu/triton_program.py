"""Launching kernels without Triton's own look at every argument.

``kernel[grid](...)`` finds the machine code that suits the dtypes, the alignment and the divisibility of its arguments. On the host that takes tens of
microseconds, longer than a layer of one token runs. Where all of that is known to be what it was, the compiled kernel is launched as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

import torch
import triton

_ALIGNMENT = 16
# Releases in which `compiled[grid]` was seen to call `compiled.run` as `_launcher` does: on a GPU, with the same results.
_KNOWN_INSIDE = (["3", "6"],)


class Program:
    """One kernel with its compile-time values, for arguments of one kind.

    Attributes:
        compiled: the machine code, from the first launch with usual arguments on; always None in Triton's interpreter.
        values: the compile-time values in the order of the kernel's parameters, which stand behind the arguments that change.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any], options: dict[str, int]) -> None:
        self.kernel, self.options = kernel, options
        self.constants = {name: constants[name] for name in kernel.arg_names if name in constants}
        self.values = tuple(self.constants.values())
        self.compiled: Any = None

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


class Step:
    """One launch of a series: a program, its grid and its numbers, and which entries of the series' table of pointers go before them."""

    def __init__(
        self, program: Program, grid: tuple[int, int, int], pointers: Sequence[int], numbers: Sequence[int]
    ) -> None:
        self.program, self.grid, self.numbers = program, grid, tuple(numbers)
        self.pick = itemgetter(*pointers)
        self._tail = (*numbers, *program.values)
        self._launch: Callable[..., None]

    def through_triton(self, keep: bool, table: Sequence[Any]) -> None:
        """Launches on the current stream, with tensors for pointers."""
        self.program.through_triton(self.grid, keep, *self.pick(table), *self.numbers)

    def prepare(self) -> bool:
        """Makes `direct` ready if there is machine code."""
        if self.program.compiled is None:
            return False
        self._launch = _launcher(self.program.compiled, self.grid)
        return True

    def direct(self, stream: int, table: Sequence[Any]) -> None:
        """Launches the machine code, with addresses for pointers."""
        self._launch(*self.pick(table), *self._tail, stream=stream)


class Series:
    """Steps that run one after the other on the current device.

    Attributes:
        ready: whether addresses will do for tensors: after a series of aligned tensors went through Triton.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)
        self.ready = False

    def through_triton(self, keep: bool, table: Sequence[Any]) -> None:
        """Launches on the current stream, with tensors for pointers. `keep`: all of them are aligned, so the machine code may be used again."""
        for step in self.steps:
            step.through_triton(keep, table)
        if keep:
            self.ready = all([step.prepare() for step in self.steps])

    def direct(self, stream: int, table: Sequence[Any]) -> None:
        """Launches on a stream, with addresses for pointers."""
        for step in self.steps:
            step.direct(stream, table)


def _launcher(compiled: Any, grid: tuple[int, int, int]) -> Callable[..., None]:
    """Triton's launcher of machine code; where its inside is known, without what it does for profilers, unless one listens."""
    usual: Callable[..., None] = compiled[grid]
    if triton.__version__.split(".")[:2] not in _KNOWN_INSIDE:
        return usual
    run, handles = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
    x, y, z = grid

    def launch(*arguments: Any, stream: int) -> None:
        runtime = triton.knobs.runtime
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            usual(*arguments, stream=stream)
        else:
            run(x, y, z, stream, *handles, *arguments)

    return launch


def addresses_of(tensors: Iterable[torch.Tensor | None]) -> tuple[list[Any], bool]:
    """Addresses, None where there is no tensor, and whether machine code for the usual alignment may have them."""
    addresses: list[int | None] = []
    together = 0
    for tensor in tensors:
        if tensor is None:
            addresses.append(None)
        else:
            address = tensor.data_ptr()
            together |= address
            addresses.append(address)
    return addresses, together % _ALIGNMENT == 0


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
