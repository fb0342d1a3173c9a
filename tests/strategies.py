"""Layer calls as data: seeded cases, ways to make tensors awkward, and hypothesis strategies over both. Imports nothing of the package."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import bounds
import numpy as np
import oracle
import torch
from hypothesis import strategies as st
from torch import Tensor

# Hidden and intermediate sizes around the places where tiles, panels and pairs end.
SIZES = (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 97)
TOKENS = (0, 1, 2, 3, 7, 15, 16, 17, 33)
ROUTINGS = ("distinct", "any", "one_expert", "some_skipped", "all_skipped", "first_only")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Case:
    """One layer call: everything a backend gets, and the seed that made it."""

    x: Tensor
    w1: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    activation: str = "silu"
    w1_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    expert_map: Tensor | None = None
    weight_on_input: bool = False
    seed: int = 0

    @property
    def M(self) -> int:
        return self.x.shape[0]

    @property
    def K(self) -> int:
        return self.x.shape[1]

    @property
    def E(self) -> int:
        return self.w1.shape[0]

    def with_(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def arguments(self) -> dict[str, Any]:
        """Of `oracle.moe` and `bounds.layer_errors`."""
        return {name: value for name, value in vars(self).items() if name != "seed"}

    def pair_arguments(self) -> dict[str, Any]:
        """Of `oracle.moe_pairs` and `bounds.pair_errors`."""
        drop = ("seed", "topk_weights", "weight_on_input")
        return {name: value for name, value in vars(self).items() if name not in drop}

    def numerics(self, **changes: Any) -> bounds.Numerics:
        return bounds.Numerics.of(self.x.dtype, self.w1.dtype, **changes)

    def want(self) -> np.ndarray:
        return oracle.moe(**self.arguments())

    def bound(self, kind: Any = bounds.Worst, **numerics: Any) -> np.ndarray:
        return bounds.layer_errors(**self.arguments(), numerics=self.numerics(**numerics), kind=kind)

    def check(self, got: Tensor, numerics: dict[str, Any] | None = None, **context: Any) -> None:
        """`got` must be the layer's output, in dtype, shape and value."""
        assert got.dtype == self.x.dtype, f"{got.dtype} instead of {self.x.dtype}"
        bounds.assert_within(got, self.want(), self.bound(**(numerics or {})), case=self, **context)

    def __repr__(self) -> str:
        topk = self.topk_ids.shape[1]
        extras = [n for n in ("w1_bias", "w2_bias", "expert_map") if getattr(self, n) is not None]
        extras += ["weight_on_input"] if self.weight_on_input else []
        x = f"{bounds.name_of(self.x.dtype)}{'' if self.x.is_contiguous() else ' strided'}"
        sizes = f"M={self.M} K={self.K} I={self.w2.shape[2]} E={self.E} topk={topk}"
        return f"Case({sizes} {self.activation} x={x} {'+'.join(extras)} seed={self.seed})"


def route(
    M: int,
    E: int,
    topk: int,
    rng: torch.Generator,
    routing: str = "distinct",
    dtype: torch.dtype = torch.int32,
) -> Tensor:
    """Expert ids `[M, topk]`. "any" may repeat an id within a row, "first_only" leaves every other expert without tokens."""
    if routing == "distinct":
        ids = torch.rand((M, E), generator=rng).argsort(dim=1)[:, :topk]
    elif routing == "one_expert":
        ids = torch.full((M, topk), int(torch.randint(E, (1,), generator=rng)))
    elif routing == "all_skipped":
        ids = torch.full((M, topk), -1)
    elif routing == "first_only":
        ids = torch.full((M, topk), -1)
        ids[:, :1] = 0
    else:
        ids = torch.randint(E, (M, topk), generator=rng)
        if routing == "some_skipped":
            ids[torch.rand((M, topk), generator=rng) < 0.4] = -1
    return ids.to(dtype)


def make_case(
    M: int = 5,
    K: int = 64,
    I: int = 48,
    E: int = 4,
    topk: int = 2,
    activation: str = "silu",
    *,
    bias: bool = False,
    routing: str = "distinct",
    x_dtype: torch.dtype = torch.bfloat16,
    w_dtype: torch.dtype = torch.bfloat16,
    ids_dtype: torch.dtype = torch.int32,
    weights_dtype: torch.dtype = torch.float32,
    local: int | None = None,
    weight_on_input: bool = False,
    seed: int = 0,
) -> Case:
    """Normal data scaled so that activations stay of order one. `local` of the E experts are here, the others on another rank."""
    rng = generator(seed)
    here = E if local is None else local
    N = I if activation == "relu2" else 2 * I

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=rng).mul_(scale)

    w1, w2 = normal(here, N, K, scale=2 * K**-0.5).to(w_dtype), normal(here, K, I, scale=I**-0.5).to(w_dtype)
    w1_bias, w2_bias = (normal(here, N), normal(here, K)) if bias else (None, None)
    weights = torch.rand((M, topk), generator=rng).add_(0.1)
    expert_map = None
    if local is not None:
        expert_map = torch.full((E,), -1, dtype=torch.int32)
        expert_map[torch.randperm(E, generator=rng)[:here]] = torch.arange(here, dtype=torch.int32)
    ids = route(M, E, topk, rng, routing, ids_dtype)
    x = normal(M, K).to(x_dtype)
    return Case(
        x,
        w1,
        w2,
        weights.to(weights_dtype),
        ids,
        activation,
        w1_bias,
        w2_bias,
        expert_map,
        weight_on_input,
        seed,
    )


def strided(tensor: Tensor, how: str = "columns") -> Tensor:
    """The same values behind other strides; what lies between them is poison (NaN, or an id far out of range)."""
    poison: float | int = float("nan") if tensor.is_floating_point() else 10**6
    if how == "transposed":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    shape = list(tensor.shape)
    if how == "rows":
        shape[-2] = 2 * shape[-2] + 1
        view = torch.full(shape, poison, dtype=tensor.dtype)[..., 1::2, :]
    elif how == "padded":
        shape[-1] += 3
        view = torch.full(shape, poison, dtype=tensor.dtype)[..., 1 : 1 + tensor.shape[-1]]
    else:
        shape[-1] = 2 * shape[-1] + 1
        view = torch.full(shape, poison, dtype=tensor.dtype)[..., 1::2]
    view.copy_(tensor)
    return view


STRIDES = ("columns", "rows", "padded", "transposed")
seeds = st.integers(0, 2**31 - 1)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    tokens: tuple[int, ...] = TOKENS,
    activations: tuple[str, ...] = oracle.ACTIVATIONS,
    x_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32, torch.float16),
    w_dtype: torch.dtype = torch.bfloat16,
    awkward: bool = True,
) -> Case:
    """Small layer calls of every kind; `awkward` ones may have any strides, skipped ids and remote experts."""
    E = draw(st.integers(1, 6))
    topk = draw(st.integers(1, E))
    routing = draw(st.sampled_from(ROUTINGS if awkward else ("distinct", "any")))
    case = make_case(
        draw(st.sampled_from(tokens)),
        draw(st.sampled_from(SIZES)),
        draw(st.sampled_from(SIZES)),
        E,
        topk,
        draw(st.sampled_from(activations)),
        bias=draw(st.booleans()),
        routing=routing,
        x_dtype=draw(st.sampled_from(x_dtypes)),
        w_dtype=w_dtype,
        ids_dtype=draw(st.sampled_from((torch.int32, torch.int64))),
        weights_dtype=draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16))),
        local=draw(st.sampled_from((None, E, max(1, E - 1)))) if awkward else None,
        weight_on_input=topk == 1 and draw(st.booleans()),
        seed=draw(seeds),
    )
    if not awkward:
        return case
    changes = {}
    for name in ("x", "topk_ids", "topk_weights", "w1", "w2"):
        how = draw(st.sampled_from((None, None, *STRIDES)))
        if how is not None:
            changes[name] = strided(getattr(case, name), how)
    return case.with_(**changes)
