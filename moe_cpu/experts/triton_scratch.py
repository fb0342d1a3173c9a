"""Scratch memory of the GPU kernels: one block for each thread and stream, carved anew by every call."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

# A vector load takes 16 bytes, and a line of L2 has 128.
_ALIGNMENT = 128


class Pieces:
    """How a call carves a block: numbers of elements and dtypes, one behind the other, none overlapping another."""

    def __init__(self, wanted: Sequence[tuple[int, torch.dtype]]) -> None:
        self.spans: list[tuple[int, int, torch.dtype]] = []
        end = 0
        for elements, dtype in wanted:
            size = elements * dtype.itemsize
            self.spans.append((end, end + size, dtype))
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.starts = [start for start, _, _ in self.spans]
        self.bytes = end


# Blocks that CUDA graphs go on using, whatever becomes of the thread that captured them.
_captured: list[torch.Tensor] = []


class DeviceScratch(threading.local):
    """Memory whose content before a call is undefined.

    Kernels of one stream run one after the other, so calls on it can share a block; calls on two streams never do. A CUDA graph goes on using the block that
    was there when it was captured: such a block is kept for good, and graphs of one stream must replay one after the other.

    Memory: a block only grows. A copied or unpickled owner starts empty.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], torch.Tensor] = {}

    def __reduce__(self) -> tuple[type[DeviceScratch], tuple[()]]:
        return DeviceScratch, ()

    def tensors(self, device: int, stream: int, pieces: Pieces) -> list[torch.Tensor]:
        """The pieces as flat tensors.

        Args:
            device: index of the GPU, the current one; -1 for the CPU.
            stream: handle of the current stream.
        """
        block = self._block(device, stream, pieces.bytes)
        with torch.inference_mode(False), torch.no_grad():
            return [block[start:end].view(dtype) for start, end, dtype in pieces.spans]

    def addresses(self, device: int, stream: int, pieces: Pieces) -> list[int]:
        """The same as addresses, which takes the host a fraction of the time."""
        base = self._block(device, stream, pieces.bytes).data_ptr()
        return [base + start for start in pieces.starts]

    def _block(self, device: int, stream: int, size: int) -> torch.Tensor:
        block = self._blocks.get((device, stream))
        if block is None or block.numel() < size:
            block = self._grow(device, stream, size)
        if device >= 0 and torch.cuda.is_current_stream_capturing() and not _is_kept(block):
            _captured.append(block)
        return block

    def _grow(self, device: int, stream: int, size: int) -> torch.Tensor:
        self._blocks.pop((device, stream), None)  # let go of the old block before asking for a larger one
        # Memory made in inference mode could not be written outside of it, and the next call may be outside.
        with torch.inference_mode(False), torch.no_grad():
            place = torch.device("cpu") if device < 0 else torch.device("cuda", device)
            block = torch.empty(size, dtype=torch.uint8, device=place)
        self._blocks[device, stream] = block
        return block


def _is_kept(block: torch.Tensor) -> bool:
    return any(block is kept for kept in _captured)
