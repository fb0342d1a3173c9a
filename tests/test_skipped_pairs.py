"""A pair without an expert here adds exactly zero, also when its weight is not finite."""

from __future__ import annotations

import pytest
import torch
from calls import call, modular, require
from strategies import make_case
from test_modular_kernel import NoReduce, PlainPrepare

from moe_cpu import BatchedPrepareAndFinalize, CPUExperts
from moe_cpu.experts import create

BACKENDS = ("native", "onednn", "reference")


def poisoned(value, routing="some_skipped"):
    """A case in which every remote or missing pair has that weight, and the same case with a weight of one half instead."""
    case = make_case(M=14, E=6, local=3, topk=3, routing=routing, seed=141)
    remote = (case.topk_ids < 0) | (case.expert_map[case.topk_ids.clamp(min=0).long()] < 0)
    assert 0 < int(remote.sum()) < remote.numel()
    return tuple(case.with_(topk_weights=case.topk_weights.masked_fill(remote, w)) for w in (value, 0.5))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("map_dtype", [torch.int32, torch.int64])
def test_in_one_call(backend, value, map_dtype):
    require(backend)
    bad, good = (c.with_(expert_map=c.expert_map.to(map_dtype)) for c in poisoned(value))
    got = call(bad, backend=backend)
    assert torch.isfinite(got).all()
    assert torch.equal(got, call(good, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stage", [NoReduce, PlainPrepare, lambda: BatchedPrepareAndFinalize(42, 3)])
def test_in_stages_that_do_not_reduce(backend, stage):
    require(backend)
    # A stage of another maker may know nothing of -1.
    bad, good = poisoned(float("nan"), "any" if stage is PlainPrepare else "some_skipped")
    got = modular(bad, create(backend), stage())
    assert torch.isfinite(got).all()
    assert torch.equal(got, modular(good, create(backend), stage()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stage", [None, NoReduce()])
def test_in_the_stage_that_chooses(backend, stage):
    require(backend)
    bad, good = poisoned(float("nan"))
    got = modular(bad, CPUExperts(backend=backend), stage)
    assert torch.isfinite(got).all()
    assert torch.equal(got, modular(good, CPUExperts(backend=backend), stage))
