"""Launching kernels without Triton's own look at every argument.

``kernel[grid](...)`` finds the machine code that suits the dtypes, the alignment and the divisibility of its arguments. On the host that takes tens of
microseconds, longer than a layer of one token runs. Where all of that is known to be what it was, the compiled kernel is launched as it is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton

_ALIGNMENT = 16
# Releases whose launcher was seen to do what `_Inside` does: on a GPU, with the same results.
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


class Engine(NamedTuple):
    """How the copy engine of a GPU reads one of a step's tensors, whose memory is contiguous.

    Attributes:
        position: of the tensor among the step's pointers. The kernel's next parameter is the descriptor; the step's table has None there.
        seen: rows and columns of the matrix it is taken for.
        tile: those that one load brings.
    """

    position: int
    dtype: torch.dtype
    seen: tuple[int, int]
    tile: tuple[int, int]

    def descriptor(self, base: Any) -> Any:
        """What Triton takes for a descriptor, of a tensor or an `Address`."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(base, list(self.seen), [self.seen[1], 1], list(self.tile))

    def beside(self, pointers: Sequence[Any], *described: Any) -> tuple[Any, ...]:
        """The pointers with that in the descriptor's place."""
        at = self.position + 1
        return (*pointers[:at], *described, *pointers[at + 1 :])


class Step:
    """One launch of a series: a program, its grid and its numbers, and which entries of the series' table of pointers go before them."""

    def __init__(
        self, program: Program, grid: tuple[int, int, int], pointers: Sequence[int], numbers: Sequence[int],
        engine: Engine | None = None,
    ) -> None:  # fmt: skip
        self.program, self.grid, self.numbers, self.engine = program, grid, tuple(numbers), engine
        self.pick = itemgetter(*pointers)
        self._tail = (*numbers, *program.values)
        self._launch: Callable[..., None]

    def through_triton(self, keep: bool, table: Sequence[Any]) -> None:
        """Launches on the current stream, with tensors for pointers."""
        pointers, engine = self.pick(table), self.engine
        if engine is not None:
            pointers = engine.beside(pointers, engine.descriptor(pointers[engine.position]))
        self.program.through_triton(self.grid, keep, *pointers, *self.numbers)

    def prepare(self) -> bool:
        """Makes `direct` ready if there is machine code."""
        if self.program.compiled is None:
            return False
        self._launch = _launcher(self.program.compiled, self.grid, self.engine)
        return True

    def direct(self, stream: int, table: Sequence[Any]) -> None:
        """Launches the machine code, with addresses for pointers."""
        self._launch(stream, *self.pick(table), *self._tail)


class Series:
    """Steps that run one after the other on the current device."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)
        self._prepared = self._unheard = False

    @property
    def ready(self) -> bool:
        """Whether addresses will do for tensors: after a series of aligned tensors went through Triton, unless a profiler wants to hear of launches."""
        return self._prepared and not (self._unheard and _watched())

    def through_triton(self, keep: bool, table: Sequence[Any]) -> None:
        """Launches on the current stream, with tensors for pointers. `keep`: all of them are aligned, so the machine code may be used again."""
        for step in self.steps:
            step.through_triton(keep, table)
        if keep:
            self._prepared = all([step.prepare() for step in self.steps])
            self._unheard = _knows_inside()

    def direct(self, stream: int, table: Sequence[Any]) -> None:
        """Launches on a stream, with addresses for pointers, when ready."""
        for step in self.steps:
            step.direct(stream, table)


class _Inside:
    """What is inside of Triton's launcher of machine code: the C function, and what stands between the stream and the kernel's arguments.

    Raises: AttributeError, KeyError, ValueError: the inside is another.
    """

    def __init__(self, compiled: Any) -> None:
        run = compiled.run
        if run.global_scratch_size or run.profile_scratch_size:
            raise ValueError("needs memory that Triton allocates")
        self.launch, self._meta = run.launch, None
        if inspect.isfunction(run.launch):  # encodes descriptors on every launch
            within = inspect.getclosurevars(run.launch).nonlocals
            self.launch, (self._meta,) = within["launcher"], within["tensordesc_meta"]
        flags, memory, hooks = (run.launch_cooperative_grid, run.launch_pdl), (None, None), (None, None, None)
        self.between = (compiled.function, *flags, *memory, compiled.packed_metadata, *hooks)

    def encoded(self, descriptor: Any) -> tuple[Any, ...]:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        return tuple(make_tensordesc_arg(descriptor, self._meta))


def _launcher(compiled: Any, grid: tuple[int, int, int], engine: Engine | None) -> Callable[..., None]:
    """Launches machine code: (stream, *arguments). Where the inside of Triton's launcher is known, only that."""
    usual: Callable[..., None] = compiled[grid]
    inside = _inside(compiled) if _knows_inside() else None
    if inside is None:
        if engine is None:
            return lambda stream, *arguments: usual(*arguments, stream=stream)
        return lambda stream, *arguments: usual(
            *engine.beside(arguments, *_described(None, engine, arguments[engine.position])), stream=stream
        )
    (x, y, z), launch, between = grid, inside.launch, inside.between
    if engine is None:
        return lambda stream, *arguments: launch(x, y, z, stream, *between, *arguments)
    return lambda stream, *arguments: launch(
        x, y, z, stream, *between, *engine.beside(arguments, *_described(inside, engine, arguments[engine.position]))
    )  # fmt: skip


@functools.cache
def _inside(compiled: Any) -> _Inside | None:
    try:
        return _Inside(compiled)
    except (AttributeError, KeyError, ValueError):
        return None


@functools.lru_cache(maxsize=4096)
def _described(inside: _Inside | None, engine: Engine, address: int) -> tuple[Any, ...]:
    """What a launch takes in the place of a descriptor of that memory; made once for each weight and kernel."""
    descriptor = engine.descriptor(Address(address, engine.dtype))
    return (descriptor,) if inside is None else inside.encoded(descriptor)


def _knows_inside() -> bool:
    return triton.__version__.split(".")[:2] in _KNOWN_INSIDE


def _watched() -> bool:
    """Whether a profiler listens, who would not hear of launches from inside."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


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
    """What a descriptor needs of a tensor, without keeping its memory."""

    def __init__(self, value: int, dtype: torch.dtype) -> None:
        self.value, self.dtype = value, dtype

    def data_ptr(self) -> int:
        return self.value
