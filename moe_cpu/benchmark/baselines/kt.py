"""KTransformers' AMX experts, from the extension module of the ``kt-kernel`` package."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe_cpu.benchmark.contender import Contender
from moe_cpu.benchmark.inputs import DenseLayer, Inputs
from moe_cpu.models import ModelShape

VARIABLE = "MOE_CPU_KT_LIBRARY"


class KTransformers(Contender):
    """``AMXBF16_MOE`` with a worker pool of torch's number of threads; its workers spin for 50 ms after a call."""

    name = "kt"
    copies = 2
    # Its scratch memory grows with the largest call it is configured for, and a larger call crashes.
    max_tokens = 4096
    fixed_threads = True
    settle = 0.08

    def __init__(self) -> None:
        self._module: ModuleType | None = None
        self._pool: Any = None

    def why_not(self, shape: ModelShape) -> str | None:
        path = os.environ.get(VARIABLE)
        if not path:
            return f"set {VARIABLE} to kt_kernel/_kt_kernel_ext_amx*.so of an unpacked kt-kernel wheel for this Python"
        if shape.activation != "silu" or shape.has_bias:
            return "only silu without biases is compared"
        if shape.K % 32 or shape.I % 32:
            return f"K and I must be multiples of 32, got {shape.K} and {shape.I}"
        if not torch.cpu._is_amx_tile_supported():
            return "its AMX experts end in an illegal instruction on a CPU without AMX"
        if self._module is None:
            try:
                self._module = _load(Path(path))
            except (OSError, ImportError) as error:
                return f"{VARIABLE}: {path} cannot be loaded: {error}"
        return None

    def _workers(self) -> Any:
        if self._pool is None:
            assert self._module is not None
            config = self._module.WorkerPoolConfig()
            config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = (
                1,
                [0],
                [torch.get_num_threads()],
            )
            self._pool = self._module.CPUInfer(config)
        return self._pool

    def prepare(self, layer: DenseLayer, shape: ModelShape) -> Any:
        assert self._module is not None
        pool = self._workers()
        gate, up = (half.contiguous() for half in layer.w1.chunk(2, dim=1))
        mask = torch.zeros(shape.E, dtype=torch.bool)
        identity = torch.arange(shape.E)
        config = self._module.moe.MOEConfig(shape.E, shape.topk, shape.K, shape.I, mask.data_ptr())
        config.pool, config.max_len = pool.backend_, self.max_tokens
        config.gate_proj, config.up_proj, config.down_proj = (
            gate.data_ptr(),
            up.data_ptr(),
            layer.w2.data_ptr(),
        )
        experts = self._module.moe.AMXBF16_MOE(config)
        pool.submit(experts.load_weights_task(identity.data_ptr()))
        pool.sync()
        return experts, (gate, up, layer.w2, mask)  # it holds pointers into these

    def run(self, prepared: Any, inputs: Inputs, shape: ModelShape) -> Tensor:
        experts, _ = prepared
        x, topk_weights, topk_ids = inputs
        out = torch.empty_like(x)
        count = torch.tensor([x.shape[0]], dtype=torch.int32)
        ids = topk_ids.long()
        pool = self._workers()
        arguments = (
            count.data_ptr(),
            shape.topk,
            ids.data_ptr(),
            topk_weights.data_ptr(),
            x.data_ptr(),
            out.data_ptr(),
        )
        pool.submit(experts.forward_task(*arguments, False))
        pool.sync()
        return out


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("kt_kernel_ext", path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
