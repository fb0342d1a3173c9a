"""Ways to call the package with a case, so that a test says what it tests and not how arguments are passed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from strategies import Case
from torch import Tensor

from moe_cpu import FusedMoEModularKernel, MoEPrepareAndFinalizeNoEP, PackedExperts, fused_experts, ops
from moe_cpu import isa as selection
from moe_cpu.experts import list_backends

TIMEOUT = 60


def pack(case: Case, **options: Any) -> PackedExperts:
    """The case's weights in panels; anything that is not bf16 is converted."""
    options.setdefault("activation", case.activation)
    return PackedExperts.pack(case.w1, case.w2, case.w1_bias, case.w2_bias, dtype=torch.bfloat16, **options)


def call(
    case: Case, *, packed: PackedExperts | None = None, isa: str | None = None, **options: Any
) -> Tensor:
    """`fused_experts` on dense or packed weights."""
    weights = (case.w1, case.w2, case.w1_bias, case.w2_bias) if packed is None else (packed, None, None, None)
    with nullcontext() if isa is None else selection.use(isa):
        return fused_experts(
            case.x,
            weights[0],
            weights[1],
            case.topk_weights,
            case.topk_ids,
            activation=case.activation,
            apply_router_weight_on_input=case.weight_on_input,
            expert_map=case.expert_map,
            w1_bias=weights[2],
            w2_bias=weights[3],
            **options,
        )


def native(case: Case, isa: str | None, packed: PackedExperts | None = None) -> Tensor:
    """The layer by the native library on one instruction set (None: the active one)."""
    return call(case, packed=pack(case) if packed is None else packed, isa=isa)


def native_pairs(case: Case, isa: str, packed: PackedExperts | None = None) -> Tensor:
    """`[M, topk, K]`, neither weighted nor summed."""
    packed = pack(case) if packed is None else packed
    return ops.experts_unreduced(
        case.x, packed, case.topk_ids, activation=case.activation, expert_map=case.expert_map, isa=isa
    )


def modular(
    case: Case,
    experts: Any,
    prepare_finalize: Any = None,
    packed: PackedExperts | None = None,
    **options: Any,
) -> Tensor:
    """The layer through a modular kernel made of these stages."""
    kernel = FusedMoEModularKernel(prepare_finalize or MoEPrepareAndFinalizeNoEP(), experts)
    return run_kernel(kernel, case, packed, **options)


def run_kernel(
    kernel: FusedMoEModularKernel, case: Case, packed: PackedExperts | None = None, **options: Any
) -> Tensor:
    bias = {} if packed is not None else {"w1_bias": case.w1_bias, "w2_bias": case.w2_bias}
    return kernel(
        case.x,
        case.w1 if packed is None else packed,
        case.w2 if packed is None else None,
        case.topk_weights,
        case.topk_ids,
        activation=case.activation,
        expert_map=case.expert_map,
        apply_router_weight_on_input=case.weight_on_input,
        **bias,
        **options,
    )


def require(backend: str) -> None:
    """Skips a test of a backend that cannot run here, saying why."""
    status = next(s for s in list_backends() if s.name == backend)
    if not status.available:
        pytest.skip(f"{backend}: {status.reason}")


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Every `torch.empty` of floating point or bytes is full of NaN bits: whoever reads before writing is found out."""
    originals = {name: getattr(torch, name) for name in ("empty", "empty_like")}

    def poisoned(make: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point():
                tensor.detach().fill_(float("nan"))
            elif tensor.dtype == torch.uint8:
                tensor.fill_(0xFF)
            return tensor

        return wrapper

    for name, make in originals.items():
        setattr(torch, name, poisoned(make))
    try:
        yield
    finally:
        for name, make in originals.items():
            setattr(torch, name, make)


def in_child(work: Callable[[], Any]) -> None:
    """Runs `work` in a forked child; fails when it raises, crashes or does not come back."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.WIFEXITED(status), f"the child was killed by signal {os.WTERMSIG(status)}"
            assert os.WEXITSTATUS(status) == 0, "the child raised"
            return
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail(f"the child did not come back within {TIMEOUT} s")
