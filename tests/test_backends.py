"""Which backend runs, why another does not, and oneDNN's own numbers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import bounds
import pytest
import torch
from calls import call, modular, pack, require
from hypothesis import given
from strategies import cases, make_case

from moe_cpu import CPUExperts
from moe_cpu import isa as selection
from moe_cpu.errors import ArgumentError, BackendUnavailable, IsaUnavailable
from moe_cpu.experts import NAMES, ExpertsConfig, create, list_backends, select

CONFIG = ExpertsConfig(
    device="cpu", x_dtype=torch.bfloat16, weight_dtype=torch.bfloat16, packed=False, activation="silu", has_bias=False,
    gate_layout="concatenated", E=4, K=64, I=32,
)  # fmt: skip
# oneDNN hands both products over in bf16.
ONEDNN = {"first": "bfloat16", "pair": "bfloat16"}
STATUS = {status.name: status for status in list_backends()}


def test_every_refusal_has_a_sentence():
    assert tuple(STATUS) == NAMES
    assert NAMES[0] == "native"
    assert NAMES[-1] == "reference"
    for status in STATUS.values():
        assert status.available == (status.reason == ""), status
        assert status.available or len(status.reason) > 10, status
    assert STATUS["reference"].available
    assert STATUS["native"].available


@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        ({}, "native"),
        ({"packed": True}, "native"),
        ({"weight_dtype": torch.float32}, "reference"),
        ({"weight_dtype": torch.float16}, "reference"),
        ({"weight_dtype": torch.float64, "x_dtype": torch.float64}, "reference"),
        ({"activation": "relu2", "gate_layout": "none"}, "native"),
    ],
)
def test_automatic_choice(change, chosen):
    assert select(dataclasses.replace(CONFIG, **change)) == chosen


def test_a_choice_that_fails_lists_every_candidate():
    config = dataclasses.replace(CONFIG, weight_dtype=torch.int8)
    with pytest.raises(BackendUnavailable) as failure:
        select(config)
    for name in NAMES:
        assert f"{name}: " in str(failure.value)
    supported, reason = CPUExperts().supports(config)
    assert not supported
    assert "native: " in reason
    assert "reference: " in reason


def test_a_forced_backend_never_falls_back():
    case = make_case(w_dtype=torch.float32, x_dtype=torch.float32)
    with pytest.raises(BackendUnavailable, match=r"native.*bf16.*fp32"):
        call(case, backend="native")
    with pytest.raises(BackendUnavailable, match=r"onednn.*bf16.*fp32"):
        call(case, backend="onednn")
    with pytest.raises(BackendUnavailable, match=r"onednn.*dense"):
        call(make_case(), packed=pack(make_case()), backend="onednn")
    for name, status in STATUS.items():
        if not status.available:
            with pytest.raises(BackendUnavailable, match=name):
                call(make_case(), backend=name)


def test_an_unknown_backend_lists_the_known():
    with pytest.raises(ArgumentError, match=r"backend.*native.*reference.*'fast'"):
        call(make_case(), backend="fast")


def test_the_environment_replaces_auto_only(monkeypatch):
    monkeypatch.setenv("MOE_CPU_BACKEND", "fast")
    with pytest.raises(ArgumentError, match=r"MOE_CPU_BACKEND.*'fast'"):
        call(make_case())
    make_case().check(call(make_case(), backend="reference"))
    monkeypatch.setenv("MOE_CPU_BACKEND", "native")
    with pytest.raises(BackendUnavailable, match="native"):
        call(make_case(w_dtype=torch.float32))


def test_native_on_a_named_isa(isa):
    case = make_case(M=9, seed=91)
    assert torch.equal(modular(case, CPUExperts(isa=isa)), call(case, packed=pack(case), isa=isa))
    assert torch.equal(modular(case, create("native", isa)), call(case, packed=pack(case), isa=isa))


def test_only_native_takes_an_isa():
    with pytest.raises(ArgumentError, match=r"isa.*reference.*avx2"):
        CPUExperts(backend="reference", isa="avx2")
    with pytest.raises(IsaUnavailable, match=r"sse9"):
        CPUExperts(isa="sse9")


def test_isa_selection(monkeypatch):
    monkeypatch.delenv("MOE_CPU_ISA", raising=False)
    selection.forget()
    able = selection.available()
    assert set(able) <= set(selection.names())
    assert selection.active() in able
    for name in selection.names():
        reason = selection.why_not(name)
        assert (reason is None) == (name in able)
        if reason is not None:
            assert len(reason) > 5
            with pytest.raises(IsaUnavailable, match=name), selection.use(name):
                pass
    with pytest.raises(IsaUnavailable, match="sse9"):
        selection.why_not("sse9")
    before = selection.active()
    assert before == next(name for name in able if name != "amx_emulated")
    intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    names = selection.names()
    assert (names.index("avx512") < names.index("avx512_bf16")) == intel
    with selection.use(able[-1]) as used:
        assert used == selection.active() == able[-1]
    assert selection.active() == before
    with pytest.raises(RuntimeError, match="inside"), selection.use(able[-1]):
        raise RuntimeError("inside")
    assert selection.active() == before
    monkeypatch.setenv("MOE_CPU_ISA", "sse9")
    selection.forget()
    with pytest.raises(IsaUnavailable, match=r"MOE_CPU_ISA.*sse9"):
        selection.active()
    monkeypatch.setenv("MOE_CPU_ISA", able[-1])
    selection.forget()
    assert selection.active() == able[-1]
    monkeypatch.undo()
    selection.forget()


@given(case=cases())
def test_onednn_on_any_small_call(case):
    require("onednn")
    case.check(call(case, backend="onednn"), ONEDNN)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swigluoai", "relu2"])
def test_onednn_on_random_data(activation):
    require("onednn")
    case = make_case(M=33, K=256, I=96, activation=activation, bias=True, seed=92)
    got = call(case, backend="onednn")
    case.check(got, ONEDNN)
    typical = case.bound(bounds.Typical, **ONEDNN)
    bounds.assert_within(got, case.want(), bounds.DEVIATIONS * typical, form="sqrt(k)")


def test_onednn_notices_changed_weights():
    require("onednn")
    case = make_case(M=5, seed=93)
    call(case, backend="onednn")
    case.w1.mul_(-1)
    case.w2[1].zero_()
    case.check(call(case, backend="onednn"), ONEDNN)


def test_all_backends_agree_on_a_skipped_pair():
    case = make_case(M=12, E=5, local=3, topk=2, routing="some_skipped", seed=94)
    for name, status in STATUS.items():
        if status.available and name in ("native", "onednn", "reference"):
            case.check(call(case, backend=name), ONEDNN if name == "onednn" else None)
