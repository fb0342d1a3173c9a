"""The trained model that ships in bench/tiny-qwen3-moe: it still says what it learned, and says the same under moe_cpu."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import bounds
import pytest
import torch
from measuring import make_quick
from torch import Tensor

transformers = pytest.importorskip("transformers")

FOLDER = Path(__file__).resolve().parents[1] / "bench" / "tiny-qwen3-moe"
sys.path.insert(0, str(FOLDER))  # its scripts are no package

import evaluate  # noqa: E402
from model import encode, expert_counts, nll  # noqa: E402

import moe_cpu.integrations.transformers as integration  # noqa: E402
from moe_cpu.benchmark import Report  # noqa: E402
from moe_cpu.cli import main  # noqa: E402
from moe_cpu.integrations.transformers import agreement  # noqa: E402
from moe_cpu.released import is_released  # noqa: E402

TEXT = (FOLDER / "eval.txt").read_text()
BF16, FLOAT32 = torch.bfloat16, torch.float32
LAYERS, E, TOPK, K, I = 4, 16, 4, 192, 96
EXPERT_BYTES = LAYERS * E * 3 * K * I * 2
NEW_TOKENS = 40
ROUTED_TOKENS = 700  # of each file

# float32 models run on the reference path, which says so once.
pytestmark = pytest.mark.filterwarnings("ignore:.*reference path.*:UserWarning")


def load(dtype: torch.dtype, implementation: str = integration.NAME) -> Any:
    return evaluate.load(FOLDER, dtype, implementation)[0]


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """What the training run measured."""
    return json.loads((FOLDER / "loss.json").read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def tokens(tokenizer: Any) -> Tensor:
    """The text that the model was not trained on, `[1, T]`."""
    return encode(tokenizer, TEXT)


@pytest.fixture(scope="module")
def prompt(tokenizer: Any) -> Tensor:
    return encode(tokenizer, evaluate.PROMPT)


@torch.no_grad()
def logits_of(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens).logits.float()


def logit_error(logits: Tensor) -> float:
    """What two bf16 runs may differ by in one logit, in the mean square."""
    return agreement.bf16_bound(LAYERS) * float(logits.square().mean().sqrt())


def loss_bound(logits: Tensor) -> float:
    """|loss - loss'| of two bf16 runs with the same routing.

    The gradient of one token's loss, p - onehot, is at most sqrt 2 long, so errors of deviation s in each logit move it by sqrt 2 s, and the mean over T
    tokens by sqrt(2 / T) s; the second order, half the variance of the errors under p, moves all tokens the same way, by at most s^2 / 2.
    """
    s = logit_error(logits)
    return bounds.DEVIATIONS * math.sqrt(2 / logits.shape[1]) * s + s**2 / 2


@pytest.mark.parametrize("dtype", [FLOAT32, BF16], ids=str)
@pytest.mark.parametrize("implementation", ["eager", integration.NAME])
def test_it_loads(trained: dict[str, Any], dtype: torch.dtype, implementation: str) -> None:
    model = load(dtype, implementation)
    assert model.dtype == dtype
    assert sum(p.numel() for p in model.parameters()) == trained["parameters"]
    assert (FOLDER / "model.safetensors").stat().st_size < 9e6, "it travels with every clone"
    experts = model.model.layers[2].mlp.experts
    assert experts.gate_up_proj.shape == (E, 2 * I, K)
    assert {layer.class_name for layer in integration.explain(model)} == {"Qwen3MoeExperts"}
    assert len(integration.explain(model)) == LAYERS


@pytest.mark.parametrize("implementation", ["eager", integration.NAME])
def test_the_loss_of_a_text_is_what_the_training_run_measured(
    trained: dict[str, Any], tokenizer: Any, tokens: Tensor, implementation: str
) -> None:
    loss = evaluate.text_loss(load(FLOAT32, implementation), tokenizer, TEXT)
    assert loss == pytest.approx(trained["eval_text"]["loss"], rel=1e-4)
    bits = loss / math.log(2) * tokens.shape[1] / len(TEXT.encode())
    assert bits == pytest.approx(trained["eval_text"]["bits_per_byte"], rel=1e-4)
    counts = Counter(TEXT.encode()).values()
    entropy = sum(n * math.log2(len(TEXT) / n) for n in counts) / len(TEXT)
    assert bits < 0.6 * entropy, "letters by their frequency alone would do nearly as well"


def test_float32_logits_and_greedy_tokens_equal_eager(tokens: Tensor, prompt: Tensor) -> None:
    model = load(FLOAT32)
    want = agreement.greedy_tokens(model, prompt, "eager", NEW_TOKENS)
    assert len(want.unique()) > 10, "a model that repeats itself shows little"
    assert torch.equal(agreement.greedy_tokens(model, prompt, integration.NAME, NEW_TOKENS), want)
    report = integration.pack(model, progress=False, release=True)
    assert [layer.reason for layer in report.left if "fp32" not in layer.reason] == []
    assert torch.equal(agreement.greedy_tokens(model, prompt, integration.NAME, NEW_TOKENS), want)
    # The same roundings as in bf16, of 2^-24 instead of 2^-8.
    assert agreement.logits_difference(model, tokens) < agreement.bf16_bound(LAYERS) * 2.0**-16


def test_bf16_logits_and_perplexity_stay_within_the_bound_of_the_depth(tokens: Tensor) -> None:
    model = load(BF16)
    assert agreement.logits_difference(model, tokens) <= agreement.bf16_bound(LAYERS)
    got, want = same_routing(model, tokens)
    assert abs(float(nll(got, tokens) - nll(want, tokens))) <= loss_bound(want)
    first, second = want.topk(2).values.unbind(-1)
    sure = first - second > bounds.DEVIATIONS * math.sqrt(2) * logit_error(want)
    assert sure.float().mean() > 0.1
    assert torch.equal(got.argmax(-1)[sure], want.argmax(-1)[sure])


def same_routing(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits by moe_cpu and by eager, both with eager's choice of experts."""
    calls: list[tuple[Any, ...]] = []
    model.set_experts_implementation("eager")
    with agreement.recorded(model, calls):
        want = logits_of(model, tokens)
    model.set_experts_implementation(integration.NAME)
    with agreement.replayed(model, calls):
        return logits_of(model, tokens), want


def test_the_bounds_notice_experts_off_by_one(tokens: Tensor) -> None:
    model = load(BF16)
    want = logits_of(model, tokens)
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: (args[0], (args[1] + 1) % E, args[2]))
    got = logits_of(model, tokens)
    assert (got - want).norm() / want.norm() > 2 * agreement.bf16_bound(LAYERS)
    assert nll(got, tokens) - nll(want, tokens) > 2 * loss_bound(want)


def test_a_packed_model_without_dense_weights_says_the_same(
    native: None, tokens: Tensor, prompt: Tensor
) -> None:
    model = load(BF16)
    want = agreement.greedy_tokens(model, prompt, integration.NAME, NEW_TOKENS)
    logits = logits_of(model, tokens)
    report = integration.pack(model, progress=False, release=True)
    assert (len(report.taken), report.left, report.released_bytes) == (LAYERS, [], EXPERT_BYTES)
    assert all(is_released(layer.mlp.experts) for layer in model.model.layers)
    assert torch.equal(agreement.greedy_tokens(model, prompt, integration.NAME, NEW_TOKENS), want)
    assert torch.equal(logits_of(model, tokens), logits)
    assert all(is_released(layer.mlp.experts) for layer in model.model.layers), "nothing brought them back"


def test_routing_is_learned(trained: dict[str, Any], tokenizer: Any) -> None:
    """On prose, a licence and a program: no expert is idle, some are more popular than chance explains, and a token's experts depend on the token."""
    files = (FOLDER / "eval.txt", FOLDER.parents[1] / "LICENSE", FOLDER / "train.py")
    tokens = torch.cat([encode(tokenizer, path.read_text())[:, :ROUTED_TOKENS] for path in files])
    model = load(BF16)
    calls: list[tuple[Any, ...]] = []
    with agreement.recorded(model, calls), expert_counts(model) as counts:
        logits_of(model, tokens)
    T = tokens.numel()
    assert counts.sum(1).tolist() == [T * TOPK] * LAYERS
    assert counts.min() > 0
    assert all(min(row) > 0 and sum(row) == pytest.approx(1, abs=0.01) for row in trained["expert_share"])

    # Chosen at random, an expert would get a token with probability topk / E, and the squares would add up to about E, give or take sqrt(2 E).
    p = TOPK / E
    squares = ((counts - T * p) ** 2 / (T * p * (1 - p))).sum(1)
    assert (squares > E + bounds.DEVIATIONS * math.sqrt(2 * E)).all()

    same = tokens.flatten()[:, None] == tokens.flatten()
    same.fill_diagonal_(False)
    for _, _, ids, _ in calls:
        chosen = torch.zeros(T, E).scatter_(1, ids, 1.0)
        common = chosen @ chosen.T  # how many of their experts two tokens share
        others = ~same & ~torch.eye(T, dtype=torch.bool)
        assert common[same].mean() > 1.3 * common[others].mean()
        assert len(chosen.unique(dim=0)) > E


@pytest.mark.parametrize("layer", range(LAYERS))
def test_its_layers_can_be_measured(
    layer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: None
) -> None:
    make_quick(monkeypatch)
    arguments = ["--checkpoint", FOLDER, "--layer", layer, "--tokens", "1,16", "--seconds", 0.01]
    arguments += ["--backend", "native", "--baseline", "torch_loop", "--json", tmp_path / "results.json"]
    assert main(["bench", *map(str, arguments)]) == 0
    rows = Report.load(tmp_path / "results.json").rows
    assert [row.status for row in rows] == ["ok"] * 4
    shape = rows[0].case.shape
    assert (shape.E, shape.topk, shape.K, shape.I, shape.router) == (E, TOPK, K, I, "softmax_renormalized")


def test_the_table_has_a_row_for_each_way_to_run_it(trained: dict[str, Any]) -> None:
    lines = evaluate.table(FOLDER).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:6]]
    assert [row[:2] for row in rows] == [
        [how, dtype] for dtype in ("float32", "bfloat16") for how in ("eager", integration.NAME)
    ]
    perplexities = [float(row[2]) for row in rows]
    assert perplexities[:2] == pytest.approx([trained["eval_text"]["perplexity"]] * 2, rel=5e-3)
    assert any(line.startswith(f"> {evaluate.PROMPT}") for line in lines)
