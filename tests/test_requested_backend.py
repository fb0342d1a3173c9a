"""MOE_CPU_BACKEND with a name that is none: refused by everything that chooses or lists backends."""

from __future__ import annotations

import pytest

from moe_cpu.cli import main
from moe_cpu.errors import ArgumentError
from moe_cpu.experts import list_backends
from moe_cpu.experts.registry import ENVIRONMENT_VARIABLE, NAMES


@pytest.fixture(autouse=True)
def wrong(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "nonsense")


def test_backends_are_not_listed(monkeypatch):
    with pytest.raises(ArgumentError, match=r"MOE_CPU_BACKEND: expected one of auto, native.*got 'nonsense'"):
        list_backends()
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "reference")
    assert tuple(status.name for status in list_backends()) == NAMES


@pytest.mark.parametrize(
    "arguments", [["info"], ["info", "--json"], ["bench", "--shape", "4,2,64,48", "--tokens", "1"]]
)
def test_commands_say_so(arguments, capsys):
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("moe-cpu: MOE_CPU_BACKEND: expected one of auto, native")
    assert err.endswith("got 'nonsense'\n")
