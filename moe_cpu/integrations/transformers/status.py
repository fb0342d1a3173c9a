"""The table of model families, made by running each: ``python -m moe_cpu.integrations.transformers.status``."""

from __future__ import annotations

import warnings

import torch

from moe_cpu.integrations.transformers import NAME, explain
from moe_cpu.integrations.transformers.agreement import bf16_bound, greedy_tokens, logits_difference
from moe_cpu.integrations.transformers.families import FAMILIES, VOCABULARY, Family

HEADER = (
    "| family | runs on | bf16 logits: distance from eager (bound) | float32 greedy tokens |",
    "|---|---|---|---|",
)


def row(family: Family, seed: int = 0) -> str:
    """One line of the table: a random tiny model, bf16 logits and float32 generation against eager."""
    ids = torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(seed))
    try:
        model = family.build(torch.float32, seed=seed)
    except ImportError as error:
        return f"| {family.name} | {error} | | |"
    same = torch.equal(greedy_tokens(model, ids, "eager", 8), greedy_tokens(model, ids, NAME, 8))
    model = model.to(torch.bfloat16)
    distance, bound = logits_difference(model, ids), bf16_bound(model.config.num_hidden_layers)
    layers = explain(model)
    runs_on = ", ".join(
        sorted({f"kernels ({x.activation})" if x.activation else f"reference: {x.reason}" for x in layers})
    )
    verdict = "" if distance <= bound else " **outside**"
    return f"| {family.name} | {runs_on} | {distance:.4f} ({bound:.4f}){verdict} | {'equal' if same else '**differ**'} |"


def main() -> None:
    """Prints the table in Markdown."""
    print("\n".join(HEADER))
    for family in FAMILIES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            print(row(family), flush=True)


if __name__ == "__main__":
    main()
