"""Tiny random models of transformers' families, for the tests of the integration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import moe_cpu.integrations.transformers as integration
from moe_cpu import isa as selection
from moe_cpu.integrations.transformers import detect
from moe_cpu.integrations.transformers.families import FAMILIES
from moe_cpu.integrations.transformers.family import VOCABULARY
from moe_cpu.released import dense

BY_NAME = {family.name: family for family in FAMILIES}
# One of each way of storing weights: plain, transposed with biases and interleaved, transposed, without a gate and narrower than the model.
LAYOUTS = ("Mixtral", "gpt-oss", "Aria (text)", "NemotronH")
kernels = pytest.mark.skipif(
    not selection.available(), reason=f"no kernel runs here: {detect.kernels_reason()}"
)
quiet = pytest.mark.filterwarnings("ignore:.*reference path.*:UserWarning")


@pytest.fixture
def one_thread(set_threads: Any) -> None:
    set_threads(1)  # for matrices of 48 columns a second thread is only something to wait for


def prompt(length: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(
        2, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed)
    )  # no padding, no start


def build(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    try:
        return BY_NAME[name].build(dtype, implementation=integration.NAME)
    except ImportError as error:
        pytest.skip(str(error))


def experts_of(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if detect.is_experts_module(m)]


def one_call(module: Any, tokens: int = 7, topk: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and weights for an experts module of the tiny models."""
    generator = torch.Generator().manual_seed(3)
    w1, _, _, _ = dense(module, detect.names_of(module))
    x = torch.randn(tokens, w1.shape[2], generator=generator).to(w1.dtype)
    ids = torch.rand(tokens, w1.shape[0], generator=generator).argsort(-1)[:, :topk]
    return x, ids, torch.rand(tokens, topk, generator=generator)
