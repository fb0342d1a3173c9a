"""Fast Mixture-of-Experts layers for x86-64 CPUs, behind the modular kernel interface.

Importing this package imports torch and numpy only, patches nothing and prints nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moe_cpu import torch_ops as torch_ops  # defines torch.ops.moe_cpu
from moe_cpu.align import moe_align_block_size
from moe_cpu.errors import BackendUnavailable
from moe_cpu.experts import CPUExperts
from moe_cpu.functional import fused_experts
from moe_cpu.layer import MoELayer
from moe_cpu.layer_config import MoELayerConfig
from moe_cpu.modular_kernel import (
    FusedMoEModularKernel,
    FusedMoEPermuteExpertsUnpermute,
    FusedMoEPrepareAndFinalize,
    PrepareResult,
    _moe_problem_size,
)
from moe_cpu.packing import PackedExperts
from moe_cpu.prepare_finalize import BatchedPrepareAndFinalize, MoEPrepareAndFinalizeNoEP

if TYPE_CHECKING:
    TritonExperts: type[FusedMoEPermuteExpertsUnpermute]

__all__ = [
    "BatchedPrepareAndFinalize",
    "CPUExperts",
    "FusedMoEModularKernel",
    "FusedMoEPermuteExpertsUnpermute",
    "FusedMoEPrepareAndFinalize",
    "MoELayer",
    "MoELayerConfig",
    "MoEPrepareAndFinalizeNoEP",
    "PackedExperts",
    "PrepareResult",
    "_moe_problem_size",
    "fused_experts",
    "moe_align_block_size",
]


def __getattr__(name: str) -> Any:
    # Triton is large and needs a GPU driver, so its class is imported when somebody asks for it;
    # `import *` does not ask.
    if name == "TritonExperts":
        from moe_cpu.experts.registry import backend_class

        try:
            return backend_class("triton")
        except BackendUnavailable as error:
            raise AttributeError(f"module {__name__!r} cannot give {name!r}: {error}") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
