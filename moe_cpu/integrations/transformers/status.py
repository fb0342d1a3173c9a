"""The table of model families, made by running each: ``python -m moe_cpu.integrations.transformers.status``."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch

from moe_cpu.integrations.transformers import NAME, explain
from moe_cpu.integrations.transformers.agreement import bf16_bound, greedy_tokens, logits_difference
from moe_cpu.integrations.transformers.families import FAMILIES
from moe_cpu.integrations.transformers.family import VOCABULARY, Family

_NEW_TOKENS = 8
HEADER = (
    "| family | experts | path | bf16 logits: distance from eager | bound | float32 greedy tokens |",
    "|---|---|---|---|---|---|",
)


class Status(NamedTuple):
    """How one family runs.

    Attributes:
        family: its name.
        experts: classes of its experts modules.
        path: "native" with the activation, or "reference" with the reason.
        distance: |logits - eager's| / |eager's| in bf16, with eager's routing.
        bound: of that distance, for a model this deep.
        equal_tokens: whether greedy generation in float32 gives eager's tokens.
    """

    family: str
    experts: str
    path: str
    distance: float
    bound: float
    equal_tokens: bool

    @property
    def ok(self) -> bool:
        """Whether nothing differs that should not."""
        return self.distance <= self.bound and self.equal_tokens

    def markdown(self) -> str:
        """One line of the table."""
        distance = f"{self.distance:.4f}" + ("" if self.distance <= self.bound else " **outside**")
        tokens = "equal" if self.equal_tokens else "**differ**"
        return f"| {self.family} | {self.experts} | {self.path} | {distance} | {self.bound:.4f} | {tokens} |"


def status_of(family: Family, seed: int = 0) -> Status:
    """Runs a random tiny model in float32 and in bf16. Raises ImportError where transformers lacks the family."""
    ids = torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(seed))
    model = family.build(torch.float32, seed=seed)
    eager, ours = (greedy_tokens(model, ids, name, _NEW_TOKENS) for name in ("eager", NAME))
    model = family.build(torch.bfloat16, seed=seed)
    distance = logits_difference(model, ids)
    layers = explain(model)
    paths = {f"native, `{x.activation}`" if x.activation else f"reference: {x.reason}" for x in layers}
    classes = {f"`{x.class_name}`" for x in layers}
    bound = bf16_bound(model.config.num_hidden_layers)
    return Status(
        family.name,
        ", ".join(sorted(classes)),
        "; ".join(sorted(paths)),
        distance,
        bound,
        torch.equal(eager, ours),
    )


def main() -> None:
    """Prints the table in Markdown."""
    print("\n".join(HEADER))
    for family in FAMILIES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                print(status_of(family).markdown(), flush=True)
            except ImportError as error:
                print(f"| {family.name} | - | {error} | - | - | - |", flush=True)


if __name__ == "__main__":
    main()
