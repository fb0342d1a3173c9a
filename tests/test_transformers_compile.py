"""Experts modules and whole models under torch.compile."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers_models import LAYOUTS, build, experts_of, kernels, one_call, one_thread, prompt, quiet  # noqa: E402, F401

import moe_cpu.integrations.transformers as integration  # noqa: E402

pytestmark = [quiet, pytest.mark.usefixtures("one_thread")]


@kernels
@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_compiled_experts_equal_eager_ones_and_notice_changes(name: str) -> None:
    module = experts_of(build(name))[0]
    x, ids, weights = one_call(module)
    ids[0, 0] = module.num_experts
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, ids, weights), module(x, ids, weights))
    module.down_proj.mul_(2)
    assert torch.equal(compiled(x, ids, weights), module(x, ids, weights))


@kernels
@pytest.mark.parametrize("release", [False, True])
@torch.no_grad()
def test_whole_model_compiles_without_a_break(release: bool) -> None:
    model, ids = build("Qwen3-MoE"), prompt()
    want = model(ids).logits
    integration.pack(model, progress=False, release=release)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids).logits, want, rtol=2.0**-6, atol=2.0**-6)


@torch.no_grad()
def test_reference_path_compiles() -> None:
    module = experts_of(build("OpenAI privacy filter"))[0]
    x, ids, weights = one_call(module)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, ids, weights), module(x, ids, weights), rtol=2.0**-6, atol=2.0**-6)
