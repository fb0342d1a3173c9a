"""What goes wrong, and how it is worded.

Every error is a `MoEError` and also the built-in class a caller would expect (`ValueError`, `TypeError`, ...), so
`except ValueError` keeps working. A message names the argument, says what was expected in symbols and in numbers, what
came, and the likely fix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class MoEError(Exception):
    """Base class of every error this package raises on purpose."""


class ShapeError(MoEError, ValueError):
    """A tensor has the wrong number of dimensions or the wrong sizes."""


class DTypeError(MoEError, TypeError):
    """A tensor has an element type that this call cannot take."""


class DeviceError(MoEError, ValueError):
    """Tensors of one call live on different devices, or on one that the backend cannot use."""


class ArgumentError(MoEError, ValueError):
    """An argument is not a tensor problem: an unknown name, an impossible combination."""


class ExpertIdError(MoEError, IndexError, ValueError):
    """An expert id lies outside `[0, global_num_experts)` and is not -1."""


class BackendUnavailable(MoEError, RuntimeError):
    """No backend, or not the one asked for, can run this configuration here."""


class IsaUnavailable(BackendUnavailable):
    """The instruction set asked for cannot run on this machine."""


class NativeLibraryMissing(BackendUnavailable):
    """The compiled library is absent or cannot be loaded."""


class OutOfMemory(MoEError, MemoryError):
    """Scratch or packed weights do not fit into memory."""


class NoBackward(MoEError, RuntimeError):
    """A gradient is wanted from a backend that computes none."""


_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def dtype_name(dtype: Any) -> str:
    """Short spelling of a torch dtype: `bf16`, `fp32`, `int64`."""
    name = str(dtype).rpartition(".")[2]
    return _SHORT.get(name, name)


def _sizes(shape: Sequence[Any]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


def _with_hint(text: str, hint: str) -> str:
    return f"{text}; {hint}" if hint else text


def shape_error(
    name: str, symbols: str, expected: Sequence[Any], got: Sequence[Any], *, dtype: Any = None, hint: str = ""
) -> ShapeError:
    """`w1: expected [E, N, K] = [8, 28672, 4096] bf16, got [8, 4096, 28672]; pass w1.transpose(1, 2)`."""
    kind = "" if dtype is None else " " + dtype_name(dtype)
    wanted = f"{symbols} = {_sizes(expected)}" if expected else symbols
    return ShapeError(_with_hint(f"{name}: expected {wanted}{kind}, got {_sizes(got)}", hint))


def dtype_error(name: str, expected: str, got: Any, hint: str = "") -> DTypeError:
    """`topk_ids: expected int32 or int64, got fp32; pass topk_ids.to(torch.int32)`."""
    return DTypeError(_with_hint(f"{name}: expected {expected}, got {dtype_name(got)}", hint))


def device_error(name: str, expected: Any, got: Any, other: str = "hidden_states") -> DeviceError:
    """`w1: expected device cpu (where hidden_states is), got cuda:0; move one of them with .to(...)`."""
    return DeviceError(
        f"{name}: expected device {expected} (where {other} is), got {got}; move one of them with .to(...)"
    )


def expert_id_error(row: int, slot: int, value: int, num_experts: int) -> ExpertIdError:
    """`topk_ids[3, 1]: expected an expert id in [0, 8) or -1, got 9`."""
    return ExpertIdError(
        f"topk_ids[{row}, {slot}]: expected an expert id in [0, global_num_experts) = [0, {num_experts}), or -1 for "
        f"no expert, got {value}; with experts on several ranks pass expert_map [global_num_experts]"
    )


def expert_map_error(index: int, value: int, E: int) -> ExpertIdError:
    """`expert_map[5]: expected a local expert id in [0, 3) or -1, got 7`."""
    return ExpertIdError(
        f"expert_map[{index}]: expected a local expert id in [0, E) = [0, {E}), or -1 for an expert on another rank, got {value}"
    )


def token_count_error(expert: int, value: int, max_num_tokens: int) -> ArgumentError:
    """`expert_num_tokens[2]: expected a count in [0, 16], got 17`."""
    return ArgumentError(
        f"expert_num_tokens[{expert}]: expected a count in [0, max_num_tokens] = [0, {max_num_tokens}], got {value}"
    )


def out_of_memory_error(
    what: str, size: int, hint: str = "split the tokens into several calls"
) -> OutOfMemory:
    """`scratch memory: 68719476736 bytes could not be had; split the tokens into several calls`."""
    return OutOfMemory(f"{what}: {size} bytes could not be had; {hint}")


def no_memory_error(what: str) -> ArgumentError:
    """For a tensor that has a shape but no memory behind it."""
    return ArgumentError(
        f"{what}: expected tensors with memory, got one without (fake or meta); under torch.compile call the functions of moe_cpu"
    )


def no_backward_error(backend: str, names: Sequence[str]) -> NoBackward:
    """Says which inputs want a gradient and the two ways out."""
    return NoBackward(
        f"backend {backend!r} computes no gradient, but {', '.join(names)} require one; call it under torch.no_grad() "
        "(or torch.inference_mode()), or pass backend='reference', which has a backward"
    )


def unknown_name_error(kind: str, got: object, known: Sequence[str]) -> ArgumentError:
    """`activation: expected one of gelu, silu, got 'mish'`."""
    return ArgumentError(f"{kind}: expected one of {', '.join(known)}, got {got!r}")
