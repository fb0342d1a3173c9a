"""The oracle against torch's own float64 functions and worked numbers: a second opinion on what everything else is measured by."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F
from strategies import make_case

GRID = torch.linspace(-30, 30, 601, dtype=torch.float64)


@pytest.mark.parametrize(
    ("mine", "torchs"),
    [
        (oracle.silu, F.silu),
        (oracle.sigmoid, torch.sigmoid),
        (oracle.gelu, F.gelu),
        (oracle.gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
        (oracle.swish_1702, lambda x: x * torch.sigmoid(1.702 * x)),
    ],
)
def test_scalar_functions(mine, torchs):
    np.testing.assert_allclose(mine(GRID.numpy()), torchs(GRID).numpy(), rtol=1e-13, atol=1e-14)


def test_gate_and_up_positions():
    g = np.array([[1.0, 2.0, 3.0, 4.0]])
    assert [half.tolist() for half in oracle.gate_up(g, "silu")] == [[[1, 2]], [[3, 4]]]
    assert [half.tolist() for half in oracle.gate_up(g, "swigluoai")] == [[[1, 3]], [[2, 4]]]


def test_swigluoai_clamps_one_side_of_the_gate_and_both_of_up():
    g = np.array([[9.0, -9.0, -9.0, 9.0]])  # gate, up, gate, up
    want = [
        7 / (1 + np.exp(-1.702 * 7)) * (-7 + 1),
        -9 / (1 + np.exp(1.702 * 9)) * (7 + 1),
    ]
    np.testing.assert_allclose(oracle.activate(g, "swigluoai"), [want], rtol=1e-13)


def test_a_layer_worked_by_hand():
    x = torch.tensor([[2.0]])
    w1, w2 = torch.tensor([[[1.0], [3.0]], [[-1.0], [1.0]]]), torch.tensor([[[5.0]], [[7.0]]])
    ids, weights = torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.25]])
    silu = oracle.silu(np.array([2.0, -2.0]))
    want = 0.5 * 5 * silu[0] * 6 + 0.25 * 7 * silu[1] * 2
    np.testing.assert_allclose(oracle.moe(x, w1, w2, weights, ids), [[want]], rtol=1e-14)
    biased = oracle.moe(x, w1, w2, weights, ids, w2_bias=torch.tensor([[10.0], [100.0]]))
    np.testing.assert_allclose(biased, [[want + 0.5 * 10 + 0.25 * 100]], rtol=1e-14)


def test_remote_and_absent_experts_contribute_nothing():
    case = make_case(E=4, local=2, routing="some_skipped", M=9)
    pairs = oracle.moe_pairs(**case.pair_arguments())
    absent = oracle.local_ids(case.topk_ids, case.expert_map) < 0
    assert absent.any()
    assert (~absent).any()
    assert (pairs[absent] == 0).all()
    assert (pairs[~absent] != 0).any(axis=-1).all()


def test_the_contracts_worked_alignment():
    ids = [[2, 3, 4], [1, 2, 4], [1, 3, 4], [1, 2, 3]]
    positions, experts, used = oracle.align(ids, 4, 5)
    assert positions.tolist()[:16] == [3, 6, 9, 12, 0, 4, 10, 12, 1, 7, 11, 12, 2, 5, 8, 12]
    assert positions.tolist()[16:] == [12] * 11
    assert experts.tolist() == [1, 2, 3, 4, 0, 0, 0]
    assert used == 16


def test_largest_takes_the_lowest_index_among_equals():
    assert oracle.largest(np.array([[1.0, 3.0, 3.0, 2.0, 3.0]]), 4).tolist() == [[1, 2, 4, 3]]
