"""The entry point: when it takes part, and what it says when it does not."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm runs all of these tests")

import vllm
from vllm.model_executor.custom_op import op_registry_oot

from moe_cpu import isa
from moe_cpu.errors import ArgumentError, IsaUnavailable
from moe_cpu.integrations import vllm as integration

REPLACED = "UnquantizedFusedMoEMethod"


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Nobody registered, nothing asked for; taken back afterwards."""
    monkeypatch.delenv("MOE_CPU_VLLM", raising=False)
    before = dict(op_registry_oot)
    op_registry_oot.pop(REPLACED, None)
    yield
    op_registry_oot.clear()
    op_registry_oot.update(before)


@pytest.fixture
def said(monkeypatch):
    """The lines that the integration logs. (vLLM's loggers do not propagate to where pytest listens.)"""
    from moe_cpu.integrations.vllm.log import logger

    lines: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(logger, level, lambda text, *args: lines.append(text % args))
    return lines


def test_vllm_finds_it():
    (found,) = entry_points(group="vllm.general_plugins", name="moe_cpu")
    assert found.load() is integration.register


def test_it_registers_once(said):
    for _ in range(3):
        integration.register()
    assert op_registry_oot[REPLACED].__name__ == "MoeCpuFusedMoEMethod"
    assert said == []


@pytest.mark.parametrize("choice", ["1", "force"])
def test_asked_for(monkeypatch, choice):
    monkeypatch.setenv("MOE_CPU_VLLM", choice)
    integration.register()
    assert REPLACED in op_registry_oot


def test_switched_off(monkeypatch, said):
    monkeypatch.setenv("MOE_CPU_VLLM", "0")
    integration.register()
    assert REPLACED not in op_registry_oot
    assert said == ["moe_cpu leaves vLLM's experts as they are: MOE_CPU_VLLM=0"]


def test_a_word_it_does_not_know(monkeypatch):
    monkeypatch.setenv("MOE_CPU_VLLM", "yes")
    with pytest.raises(ArgumentError, match="MOE_CPU_VLLM: expected one of 1, 0, force, got 'yes'"):
        integration.register()


@pytest.mark.parametrize("version", ["0.33.0", "0.3", "1.0.0", "0.320.0"])
def test_another_version(monkeypatch, said, version):
    monkeypatch.setattr(vllm, "__version__", version)
    integration.register()
    assert REPLACED not in op_registry_oot
    (line,) = said
    assert f"tested with vLLM 0.32, this is {version}; MOE_CPU_VLLM=force" in line
    monkeypatch.setenv("MOE_CPU_VLLM", "force")
    integration.register()
    assert REPLACED in op_registry_oot


@pytest.mark.parametrize("version", ["0.32", "0.32.0", "0.32.1+cpu"])
def test_the_versions_it_was_tested_with(monkeypatch, version):
    monkeypatch.setattr(vllm, "__version__", version)
    integration.register()
    assert REPLACED in op_registry_oot


def test_a_machine_without_kernels(monkeypatch, said):
    monkeypatch.delenv("MOE_CPU_ISA", raising=False)
    monkeypatch.setattr(isa, "available", lambda: ())
    integration.register()
    assert REPLACED not in op_registry_oot
    assert "no instruction set can run here" in said[0]


def test_an_instruction_set_that_was_asked_for_and_cannot_run(monkeypatch):
    monkeypatch.setenv("MOE_CPU_ISA", "mmx")
    with pytest.raises(IsaUnavailable, match="mmx"):
        integration.register()


def test_not_on_a_cpu(monkeypatch, said):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    integration.register()
    assert REPLACED not in op_registry_oot
    assert said == []


def test_somebody_else_was_first(said):
    class Theirs:
        pass

    op_registry_oot[REPLACED] = Theirs
    integration.register()
    assert op_registry_oot[REPLACED] is Theirs
    assert "Theirs has replaced UnquantizedFusedMoEMethod already" in said[0]
