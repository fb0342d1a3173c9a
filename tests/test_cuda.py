"""What only a GPU can show: graphs, no waiting for the host, streams, torch.compile, and which backend CUDA tensors get."""

from __future__ import annotations

import pytest
import torch
from calls import call
from strategies import Case, generator, make_case, route

from moe_cpu import PackedExperts, functional, fused_experts, moe_align_block_size
from moe_cpu.errors import BackendUnavailable, DeviceError, ExpertIdError, NoBackward, ShapeError
from moe_cpu.experts import list_backends
from moe_cpu.experts.cpu import SelectedExperts
from moe_cpu.experts.triton import TritonExperts

triton_program = pytest.importorskip("moe_cpu.triton_program")
triton_layer = pytest.importorskip("moe_cpu.experts.triton_layer")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def moved(case: Case, device: str = "cuda") -> Case:
    return case.with_(
        **{name: value.to(device) for name, value in vars(case).items() if isinstance(value, torch.Tensor)}
    )


@pytest.mark.parametrize("M", [1, 40])
def test_auto_is_triton(M):
    case = make_case(M=M, K=128, I=64, E=4, topk=2, seed=1)
    gpu = moved(case)
    assert SelectedExperts().backend_for(gpu.x, gpu.w1, gpu.w2, "silu").name == "triton"
    case.check(call(gpu).cpu())
    assert next(b for b in list_backends() if b.name == "triton").available


def test_cpu_and_gpu_agree():
    """Both lie within the derived bound around float64."""
    case = make_case(M=65, K=512, I=256, E=8, topk=3, bias=True, activation="swigluoai", seed=2)
    case.check(call(moved(case)).cpu(), device="cuda")
    case.check(call(case), device="cpu")


def test_float32_weights_get_the_reference():
    case = make_case(M=5, x_dtype=torch.float32, w_dtype=torch.float32, seed=3)
    gpu = moved(case)
    assert SelectedExperts().backend_for(gpu.x, gpu.w1, gpu.w2, "silu").name == "reference"
    with pytest.raises(BackendUnavailable, match="weights must be bf16 or fp16, got fp32"):
        call(gpu, backend="triton")


def test_weights_elsewhere_are_refused():
    case = make_case(M=5, seed=4)
    with pytest.raises(DeviceError, match=r"w1.*cuda.*cpu"):
        call(
            case.with_(x=case.x.cuda(), topk_ids=case.topk_ids.cuda(), topk_weights=case.topk_weights.cuda())
        )
    packed = PackedExperts.pack(case.w1, case.w2)
    with pytest.raises(DeviceError, match="cuda"):
        fused_experts(case.x.cuda(), packed, None, case.topk_weights.cuda(), case.topk_ids.cuda())


def test_no_gradient():
    gpu = moved(make_case(M=5, seed=5))
    with pytest.raises(NoBackward, match="triton"):
        call(gpu.with_(w1=gpu.w1.requires_grad_()))


@pytest.mark.parametrize("M", [1, 3, 50, 700])
def test_the_host_never_waits(M):
    gpu = moved(make_case(M=M, K=128, I=64, E=8, topk=8, routing="any", seed=6))
    call(gpu)  # compiles and grows scratch
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(gpu)
        moe_align_block_size(gpu.topk_ids, 16, 8)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("M", [1, 40, 700])
def test_graph_replays_with_other_tokens(M):
    """The routing of a replay is not that of the capture, and scratch that grew in between is still the graph's."""
    case = make_case(M=M, K=128, I=96, E=8, topk=8, routing="any", seed=7)
    gpu, experts = moved(case), TritonExperts()
    out = torch.full_like(gpu.x, float("nan"))

    def run(c: Case, into: torch.Tensor) -> None:
        experts.apply_weighted(into, c.x, c.w1, c.w2, c.topk_weights, c.topk_ids, "silu")

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run(gpu, out)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        run(gpu, out)
    with torch.cuda.stream(side):
        larger = moved(make_case(M=3 * M + 100, K=128, I=96, E=8, topk=8, routing="any", seed=8))
        run(larger, torch.empty_like(larger.x))
        trash = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
    side.synchronize()
    other = make_case(M=M, K=128, I=96, E=8, topk=8, routing="some_skipped", seed=9)
    for name in ("x", "topk_ids", "topk_weights"):
        getattr(gpu, name).copy_(getattr(other, name))
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    del trash
    case.with_(x=other.x, topk_ids=other.topk_ids, topk_weights=other.topk_weights).check(out.cpu())


def test_two_streams_do_not_share_scratch():
    first = make_case(M=300, K=256, I=128, E=8, topk=4, seed=10)
    second = make_case(M=300, K=256, I=128, E=8, topk=4, seed=11)
    gpu = [moved(first), moved(second)]
    want = [call(c) for c in gpu]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(20):
        got = []
        for stream, c in zip(streams, gpu, strict=True):
            with torch.cuda.stream(stream):
                got.append(call(c))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("M", [1, 3, 40, 700])
def test_later_launches_go_past_triton(M, monkeypatch):
    """The first call compiles, the next ones add addresses to what it found, with the same bits."""
    case = make_case(M=M, K=128, I=64, E=8, topk=8, bias=True, routing="some_skipped", seed=16)
    gpu, experts = moved(case), TritonExperts()
    first, second = torch.empty_like(gpu.x), torch.empty_like(gpu.x)

    def run(out: torch.Tensor) -> None:
        experts.apply_weighted(
            out, gpu.x, gpu.w1, gpu.w2, gpu.topk_weights, gpu.topk_ids, "silu", w1_bias=gpu.w1_bias, w2_bias=gpu.w2_bias
        )  # fmt: skip

    run(first)
    monkeypatch.setattr(triton_program.Program, "through_triton", None)
    run(second)
    assert torch.equal(first, second)
    case.check(second.cpu())


@pytest.mark.parametrize("M", [1, 3, 40, 700])
def test_later_calls_are_not_checked_again(M, monkeypatch):
    """Until something about them is another."""
    case, other = (make_case(M=M, K=128, I=64, E=8, topk=8, routing="some_skipped", seed=s) for s in (19, 20))
    gpu = moved(case)
    case.check(call(gpu).cpu())
    monkeypatch.setattr(functional, "check_call", None)
    monkeypatch.setattr(triton_program.Program, "through_triton", None)
    other.check(call(moved(other)).cpu())
    monkeypatch.undo()
    with pytest.raises(ShapeError, match="topk_ids"):
        call(gpu.with_(topk_ids=gpu.topk_ids[:0]))
    with pytest.raises(NoBackward, match="triton"):
        call(gpu.with_(w1=gpu.w1.requires_grad_()))


@pytest.mark.skipif(not triton_program._knows_inside(), reason="another release of Triton")
@pytest.mark.parametrize("K", [128, 136])
def test_a_known_release_is_launched_from_inside(K):
    """With and without the copy engine."""
    case = make_case(M=43, K=K, I=64, E=8, topk=2, seed=21)  # a form of its own
    gpu = moved(case)
    before = set(triton_layer._forms)
    case.check(call(gpu).cpu())
    steps = [
        step
        for form, layer in triton_layer._forms.items()
        if form not in before
        for step in layer.series.steps
    ]
    assert len(steps) >= 3
    assert all(triton_program._inside(step.program.compiled) is not None for step in steps)


@pytest.mark.parametrize("M", [1, 40])
def test_tensors_that_are_not_aligned(M):
    """After a call whose machine code relies on alignment."""
    case = make_case(M=M, K=128, I=64, E=4, topk=2, seed=17)
    gpu = moved(case)
    call(gpu)

    def shifted(t: torch.Tensor) -> torch.Tensor:
        room = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
        return room[1:].view(t.shape).copy_(t)

    for names in (["x"], ["w1"], ["w2"], ["topk_ids", "topk_weights"]):
        case.check(
            call(gpu.with_(**{name: shifted(getattr(gpu, name)) for name in names})).cpu(), names=names
        )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_tensors_on_another_device_than_the_current_one():
    case = make_case(M=40, K=128, I=64, E=4, topk=2, seed=18)
    other = moved(case, "cuda:1")
    for _ in range(2):
        case.check(call(other).cpu())
    got = moe_align_block_size(other.topk_ids, 16, 4)
    for mine, want in zip(got, moe_align_block_size(case.topk_ids, 16, 4), strict=True):
        assert mine.device == other.x.device
        assert torch.equal(mine.cpu(), want)


def test_same_bits_every_time():
    gpu = moved(make_case(M=500, K=256, I=128, E=8, topk=4, seed=12))
    first = call(gpu)
    assert all(torch.equal(call(gpu), first) for _ in range(10))


@pytest.mark.parametrize("M", [1, 40])
def test_compile(M):
    case = make_case(M=M, K=128, I=64, E=8, topk=2, seed=13)
    gpu = moved(case)
    compiled = torch.compile(lambda *a: fused_experts(*a) * 1, fullgraph=True, backend="aot_eager")
    case.check(compiled(gpu.x, gpu.w1, gpu.w2, gpu.topk_weights, gpu.topk_ids).cpu())


def test_compiled_align():
    ids = route(300, 16, 4, generator(14)).cuda()
    compiled = torch.compile(lambda i: moe_align_block_size(i, 16, 16), fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(ids), moe_align_block_size(ids.cpu(), 16, 16), strict=True):
        assert torch.equal(got.cpu(), want)


def test_align_checks_ids_on_request():
    ids = torch.tensor([[0, 5], [1, 2]], device="cuda")
    used = moe_align_block_size(ids, 4, 4)[2]
    assert used.item() == 12
    with pytest.raises(ExpertIdError, match=r"topk_ids\[0, 1\].*got 5"):
        moe_align_block_size(ids, 4, 4, check_ids=True)


@pytest.mark.parametrize(("M", "K", "I"), [(1, 2048, 768), (64, 2880, 2880), (900, 1024, 512)])
def test_published_sizes(M, K, I):
    """Whole tiles, no masks, every class of the launch table; against the reference on the same GPU in float32."""
    gpu = moved(make_case(M=M, K=K, I=I, E=8, topk=4, seed=15))
    want = call(gpu, backend="reference").float()
    got = call(gpu).float()
    # Two results, each rounded to bf16 at two places.
    assert float((got - want).norm() / want.norm()) < 0.004


def test_benchmark():
    """Right answers and times for every contender, graphs among them, and the notes."""
    from moe_cpu.benchmark import Suite, cuda
    from moe_cpu.benchmark.case import parse_shape

    shapes = (
        parse_shape({"E": 8, "topk": 2, "K": 128, "I": 96}),
        parse_shape({"E": 4, "topk": 2, "K": 96, "I": 64, "activation": "swigluoai", "has_bias": True}),
    )
    suite = Suite(
        shapes, (1, 33), cuda.CONTENDERS, ("uniform", "zipf", "single"), seconds=0.02, device="cuda"
    )
    report = cuda.run(suite)
    assert report.ok
    assert [(row.case.contender, row.reason) for row in report.rows if row.times is None] == []
    assert len(report.notes) == 4
    assert report.environment["gpu"]
