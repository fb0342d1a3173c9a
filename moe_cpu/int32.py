"""64-bit numbers for kernels that read 32 bits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from moe_cpu.errors import ExpertIdError, MoEError


def as_int32(name: str, numbers: Tensor, error: type[MoEError] = ExpertIdError) -> Tensor:
    """`numbers` `[n]` as contiguous int32. What is beyond it is refused on the CPU; on a GPU, which is not waited for, it becomes the nearest int32.

    Raises: `error` with the place and the number.
    """
    numbers = numbers.resolve_neg()
    if numbers.dtype != torch.int32:
        near = numbers.clamp(-(2**31), 2**31 - 1)
        if numbers.is_cpu and not isinstance(numbers, FakeTensor) and not torch.equal(near, numbers):
            index = int((near != numbers).nonzero()[0])
            raise error(f"{name}[{index}]: expected a number that int32 holds, got {int(numbers[index])}")
        numbers = near.to(torch.int32)
    return numbers.contiguous()
