"""One layer's experts and router from a Hugging Face checkpoint in safetensors files, read without loading the rest of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_cpu.benchmark.inputs import DenseLayer, Inputs, random_tokens
from moe_cpu.errors import ArgumentError, DTypeError, dtype_error
from moe_cpu.models import ModelShape
from moe_cpu.routers import grouped_topk, softmax_topk

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Only routers that score by sigmoid have it.
_CORRECTION = "gate.e_score_correction_bias"


class _Names(NamedTuple):
    """How a family of models names one layer's tensors."""

    prefix: str
    gate: str
    up: str
    down: str


_FAMILIES = (
    _Names("model.layers.{layer}.block_sparse_moe", "w1", "w3", "w2"),  # Mixtral
    _Names(
        "model.layers.{layer}.mlp", "gate_proj", "up_proj", "down_proj"
    ),  # Qwen3-MoE, OLMoE, DeepSeek-V3, GLM-4.5 and their kin
)


class Checkpoint:
    """A layer of a checkpoint: its shape at once, its weights on `make_layer`.

    Args:
        folder: holds config.json and model.safetensors, or several files with model.safetensors.index.json.
        layer: number of the layer, from 0.

    Raises:
        ArgumentError: the folder is no such checkpoint or the layer has no routed experts.
    """

    def __init__(self, folder: str | Path, layer: int) -> None:
        self.folder, self.layer = Path(folder), layer
        try:
            self._config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise ArgumentError(f"checkpoint: {self.folder} has no readable config.json: {error}") from error
        self._files = self._find_files()
        self._names = self._find_family()
        self._router = self._tensor("gate.weight").float()
        self.shape = self._read_shape()

    def _find_files(self) -> dict[str, Path]:
        index = self.folder / _INDEX
        if index.exists():
            return {
                name: self.folder / file for name, file in json.loads(index.read_text())["weight_map"].items()
            }
        single = self.folder / _SINGLE
        if not single.exists():
            raise ArgumentError(f"checkpoint: expected {_SINGLE} or {_INDEX} in {self.folder}, found neither")
        with _open(single) as file:
            return dict.fromkeys(file.keys(), single)

    def _find_family(self) -> _Names:
        for names in _FAMILIES:
            found = names._replace(prefix=names.prefix.format(layer=self.layer))
            if (
                f"{found.prefix}.gate.weight" in self._files
                and f"{found.prefix}.experts.0.{found.gate}.weight" in self._files
            ):
                return found
        known = " or ".join(
            f"{n.prefix.format(layer=self.layer)}.experts.0.{n.gate}.weight" for n in _FAMILIES
        )
        raise ArgumentError(
            f"checkpoint: layer {self.layer} of {self.folder} has no routed experts: expected a tensor {known} and a gate.weight"
        )

    def _key(self, name: str) -> str:
        return f"{self._names.prefix}.{name}"

    def _tensor(self, name: str) -> Tensor:
        key = self._key(name)
        if key not in self._files:
            raise ArgumentError(f"checkpoint: {self.folder} has no tensor {key}")
        with _open(self._files[key]) as file:
            return file.get_tensor(key)

    def _read_shape(self) -> ModelShape:
        E, K = self._router.shape
        key = self._key(f"experts.0.{self._names.gate}.weight")
        with _open(self._files[key]) as file:
            rows, columns = file.get_slice(key).get_shape()
        activation = self._config.get("hidden_act", "silu")
        if activation != "silu":
            raise ArgumentError(f"checkpoint: expected hidden_act silu, got {activation!r}")
        if columns != K:
            raise ArgumentError(f"checkpoint: {key} has {columns} columns, but the router takes K = {K}")
        topk = int(self._config.get("num_experts_per_tok", 0))
        if not 1 <= topk <= E:
            raise ArgumentError(
                f"checkpoint: expected num_experts_per_tok in 1 .. E = {E} in config.json, got {topk}"
            )
        if self._key(_CORRECTION) in self._files:
            router = "grouped_sigmoid"
        elif self._names.gate == "w1" or self._config.get("norm_topk_prob", False):
            router = "softmax_renormalized"
        else:
            router = "softmax"
        return ModelShape(
            f"{self.folder.name}-layer{self.layer}", E, topk, K, rows, router=router, source=self.folder.name
        )

    def make_layer(self, shape: ModelShape, seed: int) -> DenseLayer:
        """The experts as w1 `[E, 2*I, K]` (gate rows, then up rows) and w2 `[E, K, I]`, bf16.

        Raises:
            DTypeError: the checkpoint is not bf16. Memory: one expert beside the result.
        """
        w1 = torch.empty((shape.E, shape.N, shape.K), dtype=torch.bfloat16)
        w2 = torch.empty((shape.E, shape.K, shape.I), dtype=torch.bfloat16)
        for e in range(shape.E):
            w1[e, : shape.I] = self._expert(e, self._names.gate)
            w1[e, shape.I :] = self._expert(e, self._names.up)
            w2[e] = self._expert(e, self._names.down)
        return DenseLayer(w1, w2, None, None)

    def _expert(self, e: int, matrix: str) -> Tensor:
        name = f"experts.{e}.{matrix}.weight"
        tensor = self._tensor(name)
        if tensor.dtype != torch.bfloat16:
            raise _wrong_dtype(self._key(name), tensor.dtype)
        return tensor

    def make_inputs(self, shape: ModelShape, M: int, routing: str, rng: torch.Generator, seed: int) -> Inputs:
        """Random hidden states of unit variance, as a norm layer leaves them, and what this layer's router makes of them."""
        x = random_tokens(M, shape.K, rng)
        logits = x.float() @ self._router.T
        if shape.router == "grouped_sigmoid":
            routed = grouped_topk(
                logits,
                shape.topk,
                int(self._config.get("n_group", 1)),
                int(self._config.get("topk_group", 1)),
                renormalize=bool(self._config.get("norm_topk_prob", True)),
                scoring_func="sigmoid",
                e_score_correction_bias=self._tensor(_CORRECTION).float(),
                routed_scaling_factor=float(self._config.get("routed_scaling_factor", 1.0)),
            )
        else:
            routed = softmax_topk(logits, shape.topk, renormalize=shape.router == "softmax_renormalized")
        return Inputs(x, *routed)


def _wrong_dtype(name: str, got: torch.dtype) -> DTypeError:
    return dtype_error(name, "bf16", got, "convert the checkpoint to bf16 first")


def _open(path: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ArgumentError(
            "checkpoint: reading one needs safetensors; install moe-cpu[checkpoint]"
        ) from error
    return safe_open(str(path), framework="pt", device="cpu")
