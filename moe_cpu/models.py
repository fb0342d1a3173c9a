"""Shapes of published Mixture-of-Experts layers, one line each with its source: what benchmarks and examples are run on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_cpu.errors import ArgumentError


@dataclass(frozen=True)
class ModelShape:
    """The routed experts of one layer of a model; shared experts are ordinary dense layers and not part of it.

    Attributes:
        name: what `find` looks for.
        E, topk, K, I: experts, experts per token, hidden size, intermediate size of one expert.
        activation: as `moe_cpu.fused_experts` takes it.
        has_bias: whether both projections have biases.
        router: "softmax" and "softmax_renormalized" (`routers.softmax_topk`, without and with renormalize), "grouped_sigmoid"
            (`routers.grouped_topk` with sigmoid scores) or "sigmoid_top1" (`routers.sigmoid_top1`; the weight goes on the expert's input).
        layers: layers of the model that have experts.
        source: repository on the Hugging Face hub whose config.json has these numbers.
    """

    name: str
    E: int
    topk: int
    K: int
    I: int
    activation: str = "silu"
    has_bias: bool = False
    router: str = "softmax_renormalized"
    layers: int = 1
    source: str = ""

    @property
    def gated(self) -> bool:
        """Whether w1 holds a gate and an up projection, or the up projection alone."""
        return self.activation != "relu2"

    @property
    def N(self) -> int:
        """Rows of one expert's w1: 2 * I with a gate, else I."""
        return 2 * self.I if self.gated else self.I

    @property
    def expert_elements(self) -> int:
        """Weights of one expert, biases left out: N * K + K * I."""
        return (self.N + self.I) * self.K

    def with_experts(self, E: int) -> ModelShape:
        """The same layer holding only `E` of its experts, as one rank of an expert-parallel group does."""
        if not self.topk <= E <= self.E:
            raise ArgumentError(
                f"experts: expected topk = {self.topk} .. E = {self.E} of {self.name}, got {E}"
            )
        return self if E == self.E else replace(self, name=f"{self.name}/{E}-experts", E=E)


# fmt: off
_SHAPES = (
    #          name                   E   topk  K     I
    ModelShape("qwen3-30b-a3b",      128,  8, 2048,   768, layers=48, source="Qwen/Qwen3-30B-A3B"),
    ModelShape("qwen3-235b-a22b",    128,  8, 4096,  1536, layers=94, source="Qwen/Qwen3-235B-A22B"),
    ModelShape("qwen3-next-80b-a3b", 512, 10, 2048,   512, layers=48, source="Qwen/Qwen3-Next-80B-A3B-Instruct"),
    ModelShape("deepseek-v3",        256,  8, 7168,  2048, router="grouped_sigmoid", layers=58, source="deepseek-ai/DeepSeek-V3"),
    ModelShape("kimi-k2",            384,  8, 7168,  2048, router="grouped_sigmoid", layers=60, source="moonshotai/Kimi-K2-Instruct"),
    ModelShape("mixtral-8x7b",         8,  2, 4096, 14336, layers=32, source="mistralai/Mixtral-8x7B-v0.1"),
    ModelShape("gpt-oss-20b",         32,  4, 2880,  2880, "swigluoai", True, layers=24, source="openai/gpt-oss-20b"),
    ModelShape("gpt-oss-120b",       128,  4, 2880,  2880, "swigluoai", True, layers=36, source="openai/gpt-oss-120b"),
    ModelShape("olmoe-1b-7b",         64,  8, 2048,  1024, router="softmax", layers=16, source="allenai/OLMoE-1B-7B-0924"),
    ModelShape("glm-4.5-air",        128,  8, 4096,  1408, router="grouped_sigmoid", layers=45, source="zai-org/GLM-4.5-Air"),
    ModelShape("llama-4-scout",       16,  1, 5120,  8192, router="sigmoid_top1", layers=48, source="meta-llama/Llama-4-Scout-17B-16E"),
)
# fmt: on

MODELS: dict[str, ModelShape] = {shape.name: shape for shape in _SHAPES}


def find(name: str) -> ModelShape:
    """The shape of that name; upper case, spaces and underscores do not matter.

    Raises:
        ArgumentError: there is none; the message lists the names.
    """
    shape = MODELS.get(name.strip().lower().replace("_", "-").replace(" ", "-"))
    if shape is None:
        raise ArgumentError(f"model: expected one of {', '.join(MODELS)}; got {name!r}")
    return shape
