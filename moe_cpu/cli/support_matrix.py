"""What each backend supports, as a table made by asking the backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from moe_cpu import experts, native_library, ops
from moe_cpu.checks import ACTIVATIONS, default_gate_layout
from moe_cpu.errors import BackendUnavailable
from moe_cpu.experts import ExpertsConfig

_PLAIN = ExpertsConfig(
    device="cpu",
    x_dtype=torch.bfloat16,
    weight_dtype=torch.bfloat16,
    packed=False,
    activation="silu",
    has_bias=False,
    gate_layout="concatenated",
    E=8,
    K=1024,
    I=1024,
    topk=2,
)
_YES, _NO = "yes", "-"


def _with_activation(activation: str) -> Callable[[ExpertsConfig], ExpertsConfig]:
    return lambda plain: replace(plain, activation=activation, gate_layout=default_gate_layout(activation))


_FEATURES: tuple[tuple[str, Callable[[ExpertsConfig], ExpertsConfig]], ...] = (
    ("dense bf16 weights", lambda plain: plain),
    ("`PackedExperts`", lambda plain: replace(plain, packed=True)),
    ("float32 weights kept", lambda plain: replace(plain, weight_dtype=torch.float32, x_dtype=torch.float32)),
    ("float16 weights kept", lambda plain: replace(plain, weight_dtype=torch.float16, x_dtype=torch.float16)),
    *((f"activation `{name}`", _with_activation(name)) for name in ACTIVATIONS),
    ("biases", lambda plain: replace(plain, has_bias=True)),
    ("K, I not multiples of 32", lambda plain: replace(plain, K=1001, I=333)),
)


def rows() -> list[tuple[str, ...]]:
    """Header, then one row for each feature: its name and each backend's answer, the same on every machine."""
    classes = {name: _class(name) for name in experts.NAMES}
    names = [name for name, found in classes.items() if found is not None]
    table = [("", *(f"`{name}`" for name in names))]
    table.append(("device", *(_device(name) for name in names)))
    for feature, change in _FEATURES:
        table.append((feature, *(_YES if supports(name, change) else _NO for name in names)))
    table.append(
        ("gradients", *(_YES if getattr(classes[name], "has_backward", False) else _NO for name in names))
    )
    return table


def supports(name: str, change: Callable[[ExpertsConfig], ExpertsConfig]) -> bool:
    """Whether a backend takes a variant of the plain layer, on a machine where it takes the plain one.

    Backends look at the layer before they look at the machine. So where the plain layer is refused, it is for the machine, and a variant that is
    refused in the same words would be taken elsewhere.
    """
    plain = replace(_PLAIN, device=_device(name))
    backend = experts.backend_class(name)
    ok, reason = backend.supports(change(plain))
    return ok or reason == backend.supports(plain)[1]


def _class(name: str) -> type | None:
    try:
        return experts.backend_class(name)
    except BackendUnavailable:
        return None


def _device(name: str) -> str:
    return "cuda" if name == "triton" else "cpu"


def markdown() -> str:
    """The table and the instruction sets of the native backend, as Markdown.

    Raises:
        NativeLibraryMissing: the library, which knows the instruction sets, is not there.
    """
    native_library.library()
    table = rows()
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in table
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    sets = ", ".join(f"`{name}`" for name in ops.isas())
    order = "`moe-cpu info` has their order on this CPU, the fastest first"
    return "\n".join([*lines, "", f"Instruction sets of `native`: {sets}. {order}."])
