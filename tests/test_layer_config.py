"""Configurations of a MoELayer that are refused, with the reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moe_cpu import MoELayer, MoELayerConfig
from moe_cpu.errors import ArgumentError


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"router": "soft"}, "router: expected one of softmax, grouped, sigmoid_top1, got 'soft'"),
        ({"activation": "mish"}, "activation: expected one of"),
        ({"hidden_size": -1}, "hidden_size: expected a whole number of at least 1, got -1"),
        ({"num_experts": "6"}, "num_experts: expected a whole number of at least 1, got '6'"),
        (
            {"shared_intermediate_size": -3},
            "shared_intermediate_size: expected a whole number of at least 0, got -3",
        ),
        ({"shared_intermediate_size": 2.5}, "shared_intermediate_size: .*got 2.5"),
        ({"topk_group": 0}, "topk_group: expected a whole number of at least 1, got 0"),
        ({"hidden_size": True}, "hidden_size: expected a whole number of at least 1, got True"),
        (
            {"router": "grouped", "num_expert_group": 4},
            "num_expert_group: expected a divisor of E = 6, got 4",
        ),
        (
            {"router": "grouped", "scoring_func": "tanh"},
            "scoring_func: expected one of softmax, sigmoid, got 'tanh'",
        ),
        (
            {"router": "grouped", "routed_scaling_factor": "2"},
            "routed_scaling_factor: expected a number, got '2'",
        ),
        ({"topk": 9}, r"topk: expected 1 <= topk <= E = 6, got 9"),
        ({"router": "sigmoid_top1"}, "topk: expected 1"),
    ],
)
def test_impossible_configurations_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        MoELayerConfig(**{"hidden_size": 48, "intermediate_size": 40, "num_experts": 6, "topk": 2} | changes)


@pytest.mark.parametrize("name", ["experts", "config", "a.b", "", "forward", "training", "pack", "class", 3])
@pytest.mark.parametrize("field", ["router_name", "shared_name", "shared_gate_name"])
def test_names_that_are_taken_are_refused(field: str, name: Any) -> None:
    options = {"shared_intermediate_size": 40, "shared_gate": True, field: name}
    words = f"{field}: expected a Python name that no attribute of the layer has, got {name!r}"
    with pytest.raises(ArgumentError, match=words):
        MoELayer(MoELayerConfig(48, 40, 6, 2, **options))
    if field != "router_name":
        MoELayer(MoELayerConfig(48, 40, 6, 2, **{field: name}))  # nobody's name


def test_names_that_are_the_same_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"shared_name: .*got 'gate'"):
        MoELayer(MoELayerConfig(48, 40, 6, 2, shared_intermediate_size=40, shared_name="gate"))
    MoELayer(MoELayerConfig(48, 40, 6, 2, router_name="shared_experts"))


def test_narrow_numbers_are_widened() -> None:
    config = MoELayerConfig(np.uint8(200), np.uint8(200), np.int16(3), 2)  # type: ignore[arg-type]
    assert MoELayer(config).experts.gate_up_proj.shape == (3, 400, 200)


def test_what_is_no_configuration_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"config: expected MoELayerConfig\(hidden_size, .*\), got int"):
        MoELayer(8)  # type: ignore[arg-type]
