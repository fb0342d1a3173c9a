"""The modular kernel with its own stages and with foreign ones."""

from __future__ import annotations

import copy
import itertools

import bounds
import oracle
import pytest
import torch
from bounds import assert_within
from calls import modular, pack, poisoned_empty, run_kernel
from hypothesis import given
from strategies import cases, make_case

from moe_cpu import (
    BatchedPrepareAndFinalize,
    CPUExperts,
    FusedMoEModularKernel,
    FusedMoEPermuteExpertsUnpermute,
    FusedMoEPrepareAndFinalize,
    MoEPrepareAndFinalizeNoEP,
    _moe_problem_size,
    ops,
)
from moe_cpu.errors import ArgumentError
from moe_cpu.experts import create

BACKENDS = ("native", "reference")


class PlainPrepare(FusedMoEPrepareAndFinalize):
    """A stage of another maker: plain tuples, the published methods, no capability."""

    ids_dtype: torch.dtype | None = None

    def prepare(self, a1, a1_scale, a2_scale, topk_weights, topk_ids, num_experts, expert_map, on_input):
        self.seen = (topk_ids.dtype, num_experts, expert_map, on_input)
        return a1 * topk_weights.to(a1.dtype) if on_input else a1, None, None, None, None

    def finalize(self, output, fused_expert_output, topk_weights, topk_ids, on_input):
        weights = torch.ones_like(topk_weights) if on_input else topk_weights
        output.copy_((fused_expert_output.float() * weights.float().unsqueeze(-1)).sum(dim=1))

    def topk_indices_dtype(self):
        return self.ids_dtype

    def max_num_tokens_per_rank(self):
        return None


class PlainExperts(FusedMoEPermuteExpertsUnpermute):
    """Experts of another maker: the sixteen published arguments by position, results in workspace13, h in workspace2."""

    def workspace_shapes(self, a, aq, M, N, K, topk, num_experts):
        self.sizes = (M, N, K, topk, num_experts)
        return M * topk * max(N, K), M * topk * (N // 2), torch.float32

    def apply(
        self, hidden_states, w1, w2, topk_ids, activation, global_num_experts, expert_map, w1_scale, w2_scale,
        w1_zp, w2_zp, a1q_scale, a2_scale, workspace13, workspace2, expert_num_tokens,
    ):  # fmt: skip
        M, K = hidden_states.shape
        topk, N = topk_ids.shape[1], w1.shape[1]
        g = workspace13[: M * topk * N].view(M, topk, N)
        h = workspace2[: M * topk * (N // 2)].view(M, topk, N // 2)
        for m, s in itertools.product(range(M), range(topk)):
            g[m, s] = w1[topk_ids[m, s]].float() @ hidden_states[m].float()
        self.activation(activation, h, g)
        out = workspace13[: M * topk * K].view(M, topk, K)
        for m, s in itertools.product(range(M), range(topk)):
            out[m, s] = w2[topk_ids[m, s]].float() @ h[m, s].to(w2.dtype).float()
        return out


class NoReduce(MoEPrepareAndFinalizeNoEP):
    """The local stage without its capability: pairs come unreduced."""

    def accepts_reduced(self):
        return False


def pair_rounding(backend, case):
    return {"pair": bounds.name_of(case.x.dtype)} if backend == "native" else {}


@pytest.mark.parametrize("experts", [PlainExperts, *BACKENDS])
@pytest.mark.parametrize("prepare", [PlainPrepare, NoReduce, MoEPrepareAndFinalizeNoEP])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_any_stages_plug_into_each_other(experts, prepare, activation):
    case = make_case(M=7, K=40, I=24, activation=activation, seed=61)
    stage = create(experts) if isinstance(experts, str) else experts()
    reduces = experts == "native" and prepare is MoEPrepareAndFinalizeNoEP
    case.check(modular(case, stage, prepare()), {} if reduces else pair_rounding(experts, case))


@given(case=cases())
@pytest.mark.parametrize("backend", BACKENDS)
def test_weighting_in_the_experts_or_in_finalize(backend, case):
    """The capability saves memory traffic, it does not change the answer."""
    case.check(modular(case, create(backend)))
    case.check(modular(case, create(backend), NoReduce()), pair_rounding(backend, case))


@given(case=cases())
@pytest.mark.parametrize("backend", BACKENDS)
def test_batched(backend, case):
    rows = case.M * case.topk_ids.shape[1]  # all on one expert fits
    stage = BatchedPrepareAndFinalize(rows, case.E)
    with poisoned_empty():
        got = modular(case, create(backend), stage)
    case.check(got, pair_rounding(backend, case))


def test_what_the_stages_are_told():
    case = make_case(M=6, K=40, I=24, E=5, topk=1, weight_on_input=True, seed=62)
    prepare, experts = PlainPrepare(), PlainExperts()
    modular(case, experts, prepare, global_num_experts=5)
    assert prepare.seen == (torch.int32, 5, None, True)
    assert experts.sizes == (6, 48, 40, 1, 5)
    modular(case, experts, prepare)
    assert prepare.seen[1] == 5, "-1 means all of w1"


def test_ids_are_converted_to_what_prepare_needs():
    case = make_case(M=6, seed=63)
    prepare = PlainPrepare()
    prepare.ids_dtype = torch.int64
    case.check(modular(case, create("reference"), prepare))
    assert prepare.seen[0] == torch.int64


@pytest.mark.parametrize("backend", BACKENDS)
def test_dispatched_ids_and_weights_replace_the_callers(backend):
    case, other = make_case(M=6, E=4, seed=64), make_case(M=6, E=4, seed=65)

    class Dispatch(MoEPrepareAndFinalizeNoEP):
        def prepare(self, a1, *_):
            return a1, None, None, other.topk_ids, other.topk_weights

    expected = case.with_(topk_ids=other.topk_ids, topk_weights=other.topk_weights)
    expected.check(modular(case, create(backend), Dispatch()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_dispatch_skips_the_experts_and_still_finalizes(backend):
    case = make_case(M=5, seed=66)
    called = []

    class Elsewhere(MoEPrepareAndFinalizeNoEP):
        def prepare(self, a1, *_):
            return a1.new_empty((0, a1.shape[1])), None, None, case.topk_ids[:0], case.topk_weights[:0]

        def finalize(self, output, fused_expert_output, topk_weights, topk_ids, on_input):
            called.append(tuple(fused_expert_output.shape))
            output.fill_(3)

    experts = create(backend)
    experts.apply = experts.apply_weighted = None  # calling either would fail
    got = modular(case, experts, Elsewhere())
    assert len(called) == 1
    assert 0 in called[0]
    assert bool((got == 3).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("prepare", [MoEPrepareAndFinalizeNoEP, NoReduce])
@pytest.mark.parametrize("shape", [{"M": 0}, {"M": 3, "routing": "all_skipped"}])
def test_no_token_gives_zeros(backend, prepare, shape):
    case = make_case(**shape, seed=67)
    with poisoned_empty():
        got = modular(case, create(backend), prepare())
    assert got.shape == case.x.shape
    assert not got.any()


@given(case=cases())
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("prepare", [MoEPrepareAndFinalizeNoEP, NoReduce])
def test_poisoned_memory_changes_nothing(backend, prepare, case):
    """Scratch, workspaces and outputs full of NaN: whatever is read was written in this call."""
    kernel = FusedMoEModularKernel(prepare(), create(backend))
    clean = run_kernel(kernel, case)
    for block in (*kernel._scratch._blocks.values(), ops._mine.scratch):
        block.fill_(0xFF)
    with poisoned_empty():
        assert torch.equal(run_kernel(kernel, case), clean)


@given(case=cases())
@pytest.mark.parametrize("backend", BACKENDS)
def test_inplace_writes_the_input_and_nothing_else(backend, case):
    want = modular(case, create(backend))
    case = case.with_(x=case.x.clone())
    got = modular(case, create(backend), inplace=True)
    assert got is case.x
    assert torch.equal(got, want)


def test_inplace_into_strided_memory():
    case = make_case(M=5, K=40, seed=68)
    memory = torch.zeros((5, 80), dtype=torch.bfloat16)
    memory[:, ::2] = case.x
    view = memory[:, ::2]
    got = modular(case.with_(x=view), create("native"), inplace=True)
    assert got is view
    case.check(memory[:, ::2])
    assert not memory[:, 1::2].any()


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_inplace_into_shared_memory_is_refused(backend):
    case = make_case(M=4, seed=127)
    with pytest.raises(ArgumentError, match=r"inplace.*clone"):
        modular(case.with_(x=case.x[:1].expand(4, -1)), create(backend), inplace=True)


def test_a_kernel_is_reused_with_other_sizes():
    kernel = FusedMoEModularKernel(NoReduce(), create("native"))
    for M, K, I in [(3, 40, 24), (30, 64, 32), (1, 17, 16), (30, 64, 32), (0, 40, 24)]:
        case = make_case(M=M, K=K, I=I, seed=M)
        case.check(run_kernel(kernel, case), {"pair": "bfloat16"})


def test_packed_weights_and_a_copy_of_the_kernel():
    case = make_case(M=6, bias=True, seed=69)
    packed = pack(case)
    kernel = FusedMoEModularKernel(NoReduce(), CPUExperts(backend="native"))
    first = run_kernel(kernel, case, packed)
    case.check(first, {"pair": "bfloat16"})
    assert torch.equal(run_kernel(copy.deepcopy(kernel), case, packed), first)


@pytest.mark.parametrize("name", oracle.ACTIVATIONS)
def test_activation_method(name, rng):
    width = 1 if name == "relu2" else 2
    g = torch.randn((4, 3, 10 * width), generator=rng)
    out = torch.empty((4, 3, 10), dtype=torch.bfloat16)
    PlainExperts().activation(name, out, g)
    want = oracle.activate(oracle.f64(g), name)
    error = bounds.activation_error(bounds.Worst, oracle.f64(g), 0 * oracle.f64(g), name, 2.0**-24)
    assert_within(out, want, bounds.rounding(bounds.Worst, want, error, "bfloat16"))


def test_an_unknown_activation_is_a_value_error_naming_it():
    with pytest.raises(ValueError, match="mish"):
        PlainExperts().activation("mish", torch.empty(1, 2), torch.empty(1, 4))
    case = make_case()
    for backend in BACKENDS:
        with pytest.raises(ValueError, match="mish"):
            modular(case.with_(activation="mish"), create(backend))


def test_problem_size():
    w1, w2 = torch.empty(3, 10, 8), torch.empty(3, 8, 5)
    ids = torch.zeros((4, 2), dtype=torch.int32)
    assert _moe_problem_size(torch.empty(4, 8), w1, w2, ids) == (3, 4, 10, 8, 2)
    assert _moe_problem_size(torch.empty(3, 6, 8), w1, w2, ids) == (3, 6, 10, 8, 2)
    halved = torch.empty(3, 10, 4)  # int4: two values in a byte; K is what w2 says
    assert _moe_problem_size(torch.empty(4, 8), halved, w2, ids).K == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a1": torch.empty(5, 8)}, r"topk_ids.*\[M, topk\].*5.*\[4, 2\]"),
        ({"a1": torch.empty(2, 6, 8)}, r"a1.*\[E, max_num_tokens, K\].*\[2, 6, 8\]"),
        ({"a1": torch.empty(8)}, r"a1.*\[8\]"),
        ({"w1": torch.empty(10, 8)}, r"w1.*\[E, N, K\].*\[10, 8\]"),
        ({"w2": torch.empty(8, 5)}, r"w2.*\[E, K, I\].*\[8, 5\]"),
        ({"topk_ids": torch.zeros(4)}, r"topk_ids.*\[M, topk\].*\[4\]"),
    ],
)
def test_problem_size_refusals(changes, message):
    sizes = {
        "a1": torch.empty(4, 8),
        "w1": torch.empty(3, 10, 8),
        "w2": torch.empty(3, 8, 5),
        "topk_ids": torch.zeros(4, 2),
    }
    with pytest.raises(ValueError, match=message):
        _moe_problem_size(**(sizes | changes))


def test_the_stages_are_abstract():
    for stage in (FusedMoEPrepareAndFinalize, FusedMoEPermuteExpertsUnpermute):
        with pytest.raises(TypeError, match="abstract"):
            stage()
