"""Launches past Triton, in its interpreter: which calls of a layer may take that way."""

from __future__ import annotations

import ctypes
import os
import warnings
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from strategies import Case, make_case
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_cpu.errors import ArgumentError
from moe_cpu.experts.triton import TritonExperts
from moe_cpu.experts.triton_launch import plan_for

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from moe_cpu import align_triton, triton_program
from moe_cpu.experts import triton_layer

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs TRITON_INTERPRET=1, which runs kernels on the CPU",
)


class Machine:
    """Stands for machine code in the interpreter: takes addresses of what the first launch took as tensors."""

    def __init__(self, program, arguments):
        self.program = program
        self.dtypes = [getattr(a, "dtype", None) for a in arguments]
        self.launches = 0

    def __getitem__(self, grid):
        def launch(*arguments, stream):
            count = len(self.dtypes)
            given, values = arguments[:count], arguments[count:]
            assert values == self.program.values
            assert not any(isinstance(a, torch.Tensor) for a in given)
            self.launches += 1
            at = [self.tensor(a, dtype) for a, dtype in zip(given, self.dtypes, strict=True)]
            self.program.kernel[grid](*at, **self.program.constants, **self.program.options)

        return launch

    @staticmethod
    def tensor(argument, dtype):
        if hasattr(argument, "block_shape"):
            base = Machine.tensor(argument.base.value, argument.base.dtype)
            return replace(argument, base=base)
        if dtype is None or argument is None:
            return argument
        return torch.frombuffer((ctypes.c_char * 8).from_address(argument), dtype=dtype)


@pytest.fixture
def machine(monkeypatch):
    """Programs that keep machine code in the interpreter too, on a "GPU" with the number that tensors on the CPU give."""
    made = []
    through_triton = triton_program.Program.through_triton

    def keeps(self, grid, keep, *arguments):
        through_triton(self, grid, keep, *arguments)
        if keep:
            self.compiled = Machine(self, arguments)
            made.append(self.compiled)

    monkeypatch.setattr(triton_program.Program, "through_triton", keeps)
    monkeypatch.setattr(triton_program, "_KNOWN_INSIDE", ())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    caches = (triton_program.program, align_triton._series_for)
    for clear in (triton_layer._forms.clear, *(cache.cache_clear for cache in caches)):
        clear()
    yield made
    for clear in (triton_layer._forms.clear, *(cache.cache_clear for cache in caches)):
        clear()


def arguments(case: Case) -> tuple:
    """Those of `TritonExperts.known`."""
    c = case
    return c.x, c.w1, c.w2, c.topk_weights, c.topk_ids, c.activation, -1, c.expert_map, c.w1_bias, c.w2_bias


def checked(experts: TritonExperts, case: Case) -> torch.Tensor:
    x, w1, w2, weights, ids, activation, num, expert_map, w1_bias, w2_bias = arguments(case)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    experts.apply_weighted(
        out, x, w1, w2, weights, ids, activation, num, expert_map, w1_bias=w1_bias, w2_bias=w2_bias
    )
    return out


def copying_plan():
    """One whose weights come through the copy engine."""
    plan = plan_for(50, 1)
    return replace(plan, m=16, first=replace(plan.first, n=32, k=32), second=replace(plan.second, n=32, k=32))


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same at an address that the copy engine cannot take."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].view(tensor.shape).copy_(tensor)


@interpreted
@pytest.mark.parametrize("order", [("w1", "w2"), ("w2", "w1")], ids=str)
def test_each_weight_may_be_aligned_or_not(order):
    case = make_case(M=9, K=64, I=32, E=5, topk=2, seed=6)
    experts = TritonExperts(plan=copying_plan())
    for name in order:
        case.check(checked(experts, case.with_(**{name: shifted(getattr(case, name))})))


@interpreted
@pytest.mark.parametrize(
    "options",
    [
        {"M": 1},
        {"M": 3, "bias": True, "activation": "swigluoai"},
        {"M": 9, "routing": "some_skipped", "local": 3},
        {"M": 9, "activation": "relu2", "plan": True},
    ],
    ids=str,
)
def test_known_calls_give_the_same_bits(options, machine):
    """With other tokens, routing and weights than those of the call before, and none of them through Triton."""
    options = dict(options)
    plan = copying_plan() if options.pop("plan", False) else None
    options = {"K": 64, "I": 32, "E": 5, "topk": 2, **options}
    first, second = (make_case(**options, seed=seed) for seed in (1, 2))
    experts = TritonExperts(plan=plan)
    assert experts.known(*arguments(first)) is None
    want = checked(experts, first)
    assert torch.equal(experts.known(*arguments(first)), want)
    got = experts.known(*arguments(second))
    second.check(got)
    assert torch.equal(got, checked(TritonExperts(plan=plan), second))
    launches = [one.launches for one in machine if one.launches]
    assert launches == [3] * len(launches)
    assert len(launches) == len(next(iter(triton_layer._forms.values())).series.steps)


@interpreted
def test_only_calls_of_a_known_form_skip_the_checks(machine):
    case = make_case(M=9, K=64, I=32, E=4, topk=2, seed=3)
    experts = TritonExperts()
    checked(experts, case)
    good = arguments(case)
    assert experts.known(*good) is not None
    assert experts.known(*good[:6], 4, *good[7:]) is not None
    x, w1, w2, weights, ids = good[:5]
    room = torch.empty(x.numel() + 1, dtype=x.dtype)
    shifted = room[1:].view(x.shape) if room[1:].data_ptr() % 16 else room[:-1].view(x.shape)
    turned = torch.empty(x.shape[::-1], dtype=x.dtype).T
    others = {
        0: (x[:8], x.float(), turned, shifted, torch._neg_view(x), x.to_sparse(), x.tolist(), None),
        1: (w1[:3], w1.half(), w1.transpose(1, 2), None),
        2: (w2[:3], w2.half(), w2.transpose(1, 2), None),
        3: (weights[:8], weights.half(), weights.T, 1.0),
        4: (ids[:8], ids.to(torch.int16), ids.float(), torch._neg_view(ids), [[0]]),
        5: ("gelu", "mish", None, ["silu"]),
        6: (5, 0, None),
        7: (torch.arange(4, dtype=torch.int32), torch.arange(5)),
        8: (torch.zeros(case.w1.shape[:2]),),
        9: (torch.zeros(case.w2.shape[:2]),),
    }
    for place, wrong in others.items():
        for value in wrong:
            assert experts.known(*good[:place], value, *good[place + 1 :]) is None, (place, value)
    assert TritonExperts(check_ids=True).known(*good) is None
    assert TritonExperts(plan=plan_for(1, 1)).known(*good) is None
    assert TritonExperts().known(*good) is not None, "what is launched does not belong to an instance"


@interpreted
def test_known_ids_are_aligned_by_machine_code(machine):
    """Both ways of grouping ids, the second time with addresses."""
    for M, E in ((20, 6), (700, 6)):
        for seed in (1, 2):
            ids = make_case(M=M, K=16, I=16, E=E, topk=6, seed=seed).topk_ids
            got = align_triton.align(ids, 4, E, None, ids.numel() + E * 3)
            _, positions = ids.reshape(-1).sort(stable=True)
            real = got[0][got[0] < ids.numel()]
            assert torch.equal(real, positions.int())
    assert [one.launches for one in machine] == [1, 1, 1]


@interpreted
def test_pending_negations_are_carried_out():
    """As of the imaginary part of conjugated numbers: memory holds the opposite of what the tensor says."""
    case = make_case(M=9, K=64, I=32, E=4, topk=2, seed=4)
    opposite = case.with_(
        **{
            name: torch._neg_view(-getattr(case, name))
            for name in ("x", "w1", "w2", "topk_weights", "topk_ids")
        }
    )
    assert torch.equal(checked(TritonExperts(), opposite), checked(TritonExperts(), case))


@interpreted
def test_tensors_without_memory_are_refused(machine):
    """Before a kernel writes to address zero; also where the same call with memory is known."""
    case = make_case(M=9, K=64, I=32, E=4, topk=2, seed=5)
    experts = TritonExperts()
    checked(experts, case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about the address of a fake tensor
        with FakeTensorMode() as mode:
            fake = case.with_(x=mode.from_tensor(case.x))
            assert experts.known(*arguments(fake)) is None
            with pytest.raises(ArgumentError, match="tensors with memory"):
                checked(experts, fake)
