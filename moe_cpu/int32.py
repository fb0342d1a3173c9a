"""64-bit numbers for kernels that read 32 bits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from moe_cpu.errors import ArgumentError


def as_int32(name: str, numbers: Tensor) -> Tensor:
    """`numbers` `[n]` as contiguous int32. What is beyond it is refused on the CPU; on a GPU, which is not waited for, it becomes the nearest int32.

    Raises: ArgumentError with the place and the number.
    """
    numbers = numbers.resolve_neg()
    if numbers.dtype != torch.int32:
        near = numbers.clamp(-(2**31), 2**31 - 1)
        if numbers.is_cpu and not isinstance(numbers, FakeTensor) and not torch.equal(near, numbers):
            index = int((near != numbers).nonzero()[0])
            raise ArgumentError(
                f"{name}[{index}]: expected a number that int32 holds, got {int(numbers[index])}; no expert has that number, nor so many rows"
            )
        numbers = near.to(torch.int32)
    return numbers.contiguous()
