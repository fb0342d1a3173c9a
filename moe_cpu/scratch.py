"""Scratch memory: of one layer and of one native call. A block for each calling thread, grown on demand, reused by every call."""

from __future__ import annotations

import ctypes
import threading

import torch

from moe_cpu import native_library as native
from moe_cpu.errors import out_of_memory_error

# Both workspaces are carved from one block; each starts on a cache line of its own.
_ALIGNMENT = 64


class Scratch(threading.local):
    """Memory whose content before a call is undefined. Two threads in one layer never share a block.

    Memory: the block only grows; it is released with the owner (and with its thread). A copied or unpickled owner starts
    empty.
    """

    def __init__(self) -> None:
        self._blocks: dict[torch.device, torch.Tensor] = {}
        self._key: tuple[object, ...] | None = None
        self._views: tuple[torch.Tensor, torch.Tensor] | None = None

    def __reduce__(self) -> tuple[type[Scratch], tuple[()]]:
        return Scratch, ()

    def workspaces(
        self, n13: int, n2: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two flat tensors of `n13` and `n2` elements that do not overlap. Raises OutOfMemory with the bytes."""
        key = (n13, n2, dtype, device)
        if key != self._key or self._views is None:
            # Memory made in inference mode could not be written outside of it, and the next call may be outside.
            with torch.inference_mode(False), torch.no_grad():
                start2 = -(-n13 * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
                block = self._block(start2 + n2 * dtype.itemsize, device)
                first = block[: n13 * dtype.itemsize].view(dtype)
                second = block[start2 : start2 + n2 * dtype.itemsize].view(dtype)
            self._key, self._views = key, (first, second)
        return self._views

    def reduced(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of the shape of `like`; overlaps the workspaces, which a reducing implementation has no use for."""
        return self.workspaces(like.numel(), 0, dtype, like.device)[0].view(like.shape)

    def _block(self, size: int, device: torch.device) -> torch.Tensor:
        block = self._blocks.get(device)
        if block is None or block.numel() < size:
            self._blocks.pop(device, None)  # let go of the old block before asking for a larger one
            self._views = None
            try:
                block = torch.empty(size, dtype=torch.uint8, device=device)
            except RuntimeError as error:  # on a GPU torch.OutOfMemoryError, which is one too
                raise out_of_memory_error(f"scratch memory of a layer on {device}", size) from error
            self._blocks[device] = block
        return block


class CallMemory(threading.local):
    """What the native calls of one Python thread work in and where they leave their error numbers; `busy` while one of them does."""

    def __init__(self) -> None:
        self.busy = False
        self.info = native.Info()
        self.info_address = ctypes.addressof(self.info)
        self.scratch = torch.empty(0, dtype=torch.uint8)
        self.scratch_address = 0
        self.scratch_bytes = 0

    def grow(self, size: int) -> None:
        """Makes the scratch memory `size` bytes long; its content is lost. Raises OutOfMemory with the bytes."""
        # Let go of the old one first, addresses too: the new one may not be had.
        self.scratch = torch.empty(0, dtype=torch.uint8)
        self.scratch_address, self.scratch_bytes = 0, 0
        try:
            self.scratch = torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:
            raise out_of_memory_error("scratch memory of one call", size) from error
        self.scratch_address, self.scratch_bytes = self.scratch.data_ptr(), size
