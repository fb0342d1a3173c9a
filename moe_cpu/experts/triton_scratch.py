"""Scratch memory of the GPU kernels: one block for each thread and stream, carved anew by every call."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

# A vector load takes 16 bytes, and a line of L2 has 128.
_ALIGNMENT = 128


class DeviceScratch(threading.local):
    """Memory whose content before a call is undefined.

    Kernels of one stream run one after the other, so calls on it can share a block; calls on two streams never do. A CUDA graph goes on using the block that
    was there when it was captured: such a block is kept for good, and graphs of one stream must replay one after the other.

    Memory: a block only grows. A copied or unpickled owner starts empty.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[torch.device, int], torch.Tensor] = {}
        self._captured: list[torch.Tensor] = []

    def __reduce__(self) -> tuple[type[DeviceScratch], tuple[()]]:
        return DeviceScratch, ()

    def take(
        self, device: torch.device, wanted: Sequence[tuple[int, torch.dtype]]
    ) -> tuple[torch.Tensor, ...]:
        """Flat tensors of the numbers of elements and dtypes asked for, none overlapping another."""
        on_gpu = device.type == "cuda"
        stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
        starts, end = [], 0
        for elements, dtype in wanted:
            starts.append(end)
            end += -(-elements * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        block = self._blocks.get((device, stream))
        # Memory made in inference mode could not be written outside of it, and the next call may be outside.
        with torch.inference_mode(False), torch.no_grad():
            if block is None or block.numel() < end:
                self._blocks.pop(
                    (device, stream), None
                )  # let go of the old block before asking for a larger one
                block = torch.empty(end, dtype=torch.uint8, device=device)
                self._blocks[device, stream] = block
            if (
                on_gpu
                and torch.cuda.is_current_stream_capturing()
                and all(block is not kept for kept in self._captured)
            ):
                self._captured.append(block)
            return tuple(
                block[start : start + elements * dtype.itemsize].view(dtype)
                for start, (elements, dtype) in zip(starts, wanted, strict=True)
            )
