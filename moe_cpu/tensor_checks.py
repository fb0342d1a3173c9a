"""Checks of tensors that their shapes and dtypes do not show: whose memory, where, and whether a trace is being made of them."""

from __future__ import annotations

import math
from typing import Any

import torch

from moe_cpu.errors import ArgumentError, DeviceError


def refuse_tracing() -> None:
    """Raises ArgumentError under `torch.jit.trace`, which keeps as constants what was read from the ids and what native calls returned."""
    if torch.jit.is_tracing():
        raise ArgumentError(
            "torch.jit.trace: expected torch.compile or torch.export, which record this call; a trace would keep the result of its example"
        )


def check_one_device(first: torch.Tensor, *others: Any) -> None:
    """Raises DeviceError when a tensor among the arguments of an operator is elsewhere: a shape rule would not look, and no body would run."""
    for other in others:
        if isinstance(other, torch.Tensor) and other.device != first.device:
            raise DeviceError(
                f"torch.ops.moe_cpu: expected all tensors on {first.device}, where the first is, got {list(other.shape)} on {other.device}"
            )


def check_own_memory(name: str, matrix: torch.Tensor) -> None:
    """Raises ArgumentError when two elements of `matrix` `[rows, columns]`, which is about to be written, share their memory."""
    if matrix.layout != torch.strided:
        raise ArgumentError(
            f"inplace: expected {name} of layout torch.strided, got {matrix.layout}; pass {name}.to_dense()"
        )
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    apart = right > 0 and down > 0 and ((columns - 1) * right < down or (rows - 1) * down < right)
    if apart or matrix.numel() <= 1:
        return  # rows, or columns, lie apart: as nearly always, and all that a graph of symbolic sizes can find out
    # Equal addresses mean i * down == j * right; the least such i and j that are not both zero:
    step = math.gcd(down, right)
    i, j = (right // step, down // step) if step else (0, 0)
    if i < rows and j < columns:
        raise ArgumentError(
            f"inplace: expected {name} with memory of its own for every element, got strides {list(matrix.stride())} "
            f"for shape {list(matrix.shape)}; pass a clone"
        )
