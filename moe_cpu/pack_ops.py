"""One expert's matrix to panels and back, by the native library. Functions here trust their callers (`moe_cpu.pack_build`)."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_cpu import native_library as native
from moe_cpu.errors import no_memory_error


def packed_elements(rows: int, cols: int, gate_layout: str) -> int:
    """bf16 elements of one packed `[rows, cols]` matrix, padding included."""
    return int(native.library().moe_packed_elements(rows, cols, native.GATE_LAYOUT_CODES[gate_layout]))


def pack_expert(dense: Tensor, gate_layout: str, out: Tensor) -> None:
    """Lays one expert's `[rows, cols]` matrix (bf16 or float32, any strides) out in panels, in `out` (`packed_elements` bf16, contiguous)."""
    rows, cols = dense.shape
    if not (dense.data_ptr() and out.data_ptr()):
        raise no_memory_error("pack")
    info = native.Info()
    status = native.library().moe_pack_expert(
        dense.data_ptr(), native.DTYPE_CODES[dense.dtype], rows, cols, dense.stride(0), dense.stride(1),
        native.GATE_LAYOUT_CODES[gate_layout], out.data_ptr(), torch.get_num_threads(), info,
    )  # fmt: skip
    if status != native.OK:
        raise native.failure(status, info, "pack")


def unpack_expert(packed: Tensor, rows: int, cols: int, gate_layout: str) -> Tensor:
    """The dense `[rows, cols]` bf16 matrix that `pack_expert` was given."""
    dense = torch.empty((rows, cols), dtype=torch.bfloat16)
    info = native.Info()
    status = native.library().moe_unpack_expert(
        packed.data_ptr(), rows, cols, native.GATE_LAYOUT_CODES[gate_layout], dense.data_ptr(), torch.get_num_threads(), info
    )  # fmt: skip
    if status != native.OK:
        raise native.failure(status, info, "unpack")
    return dense
