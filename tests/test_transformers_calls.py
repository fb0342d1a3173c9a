"""What an experts module may be called with: ids, weights and strides of every kind, changed weights, sentinels; and the registration."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from transformers_models import LAYOUTS, build, experts_of, kernels, one_call, one_thread, prompt, quiet  # noqa: E402, F401

import moe_cpu.integrations.transformers as integration  # noqa: E402
from moe_cpu import isa as selection  # noqa: E402
from moe_cpu.errors import ExpertIdError  # noqa: E402

pytestmark = [quiet, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_expert_parallel_sentinel_is_skipped_and_other_ids_are_refused(name: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        module = experts_of(build(name, dtype))[0]
        x, ids, weights = one_call(module)
        E = module.num_experts
        with_sentinel = ids.clone()
        with_sentinel[:, 1] = E
        want = module(x, ids[:, :1].contiguous(), weights[:, :1].contiguous())
        got = module(x, with_sentinel, weights)
        torch.testing.assert_close(got, want, rtol=2.0**-7, atol=1e-6)
        assert torch.equal(module(x, torch.full_like(ids, E), weights), torch.zeros_like(x))
        with pytest.raises(ExpertIdError):
            module(x, torch.full_like(ids, E + 1), weights)


@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_ids_weights_and_strides_of_every_kind_give_the_same_result(name: str) -> None:
    module = experts_of(build(name))[0]
    x, ids, weights = one_call(module)
    weights = weights.bfloat16().float()
    want = module(x, ids, weights)
    assert torch.equal(module(x, ids.int(), weights), want)
    assert torch.equal(module(x, ids, weights.bfloat16()), want)
    assert torch.equal(module(x.repeat(1, 2)[:, : x.shape[1]], ids.t().contiguous().t(), weights), want)
    assert torch.equal(module(hidden_states=x, **keywords(module, ids, weights)), want)
    empty = module(x[:0], ids[:0], weights[:0])
    assert empty.shape == (0, x.shape[1])


def keywords(module: Any, ids: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The names of our function, which is what a caller by keyword reaches whatever the class calls them."""
    return {"top_k_index": ids, "top_k_weights": weights}


@kernels
@torch.no_grad()
def test_changed_weights_are_noticed() -> None:
    for name in LAYOUTS:
        module = experts_of(build(name))[0]
        x, ids, weights = one_call(module)
        before = module(x, ids, weights)
        module.down_proj.mul_(2)
        after = module(x, ids, weights)
        assert not torch.equal(before, after)
        fresh = copy.deepcopy(module)(x, ids, weights)
        assert torch.equal(after, fresh)


def test_registration_is_by_name_and_nothing_else_is_warned_about() -> None:
    assert integration.NAME in transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS
    model = build("Mixtral")
    assert model.get_experts_implementation()[""] == integration.NAME
    if selection.available():
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("error")
            model(prompt())
