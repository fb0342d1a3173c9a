"""Packing a whole model ahead of its first token, with or without giving its dense weights up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from moe_cpu import released
from moe_cpu.errors import ArgumentError
from moe_cpu.integrations.transformers.detect import Plan, is_experts_module, names_of, plan_of
from moe_cpu.integrations.transformers.forward import NAME
from moe_cpu.pack_cache import forget, packed_for
from moe_cpu.packing import layout_of
from moe_cpu.released import dense, is_released, packed_of, restore


class LayerReport(NamedTuple):
    """One experts module: its name in the model, its class, the kernels' activation or the reason why it is left alone."""

    name: str
    class_name: str
    activation: str | None
    reason: str

    def __str__(self) -> str:
        how = f"kernels, {self.activation}" if self.activation else f"reference path: {self.reason}"
        return f"{self.name} ({self.class_name}): {how}"


class PackReport(NamedTuple):
    """What `pack` did: layers taken, layers left with their reasons, bytes of the packed weights and of the dense ones given up."""

    taken: list[LayerReport]
    left: list[LayerReport]
    packed_bytes: int
    released_bytes: int

    def __str__(self) -> str:
        lines = [
            f"packed {len(self.taken)} of {len(self.taken) + len(self.left)} experts layers, {self.packed_bytes / 2**20:.1f} MiB; "
            f"released {self.released_bytes / 2**20:.1f} MiB of dense weights"
        ]
        return "\n".join([*lines, *(f"  left {layer}" for layer in self.left)])


def explain(model: nn.Module) -> list[LayerReport]:
    """How each experts module of `model` runs under the implementation "moe_cpu", with the reason for the reference path."""
    return [LayerReport(name, type(m).__name__, *plan) for name, m, plan in _layers(model)]


def pack(model: nn.Module, progress: bool = True, release: bool = False) -> PackReport:
    """Packs the weights of every experts module that the kernels run, so that the first token does not wait for it.

    Args:
        model: a transformers model whose experts implementation is "moe_cpu".
        progress: show a bar that counts experts.
        release: give the dense weights up layer by layer; `state_dict` and `save_pretrained` still return them, unpacked on demand,
            and `unpack` brings them back for good.
    Returns: a `PackReport`.
    Raises: ArgumentError: the model has no experts module, or `release` on a model in training mode.
    Memory: without `release` the packed copy stays beside the dense weights. With it the peak is the model and one layer's packed weights.
    """
    layers = list(_layers(model))
    if not layers:
        raise ArgumentError(
            f"model: expected one with layers on transformers' experts interface, {type(model).__name__} has none"
        )
    if release and model.training:
        raise ArgumentError("model: expected one in evaluation mode for release=True; call model.eval()")
    taken: list[LayerReport] = []
    left: list[LayerReport] = []
    jobs: list[tuple[Any, Plan]] = []
    for name, module, plan in layers:
        reason = plan.reason if plan.activation is None else _left_because(module, release)
        report = LayerReport(name, type(module).__name__, None if reason else plan.activation, reason)
        (left if reason else taken).append(report)
        if not reason:
            jobs.append((module, plan))
    total = sum(_experts(module) for module, _ in jobs)
    packed_bytes = released_bytes = 0
    with _bar(total, progress) as bar:
        for module, plan in jobs:
            packed, given_up = _pack_one(module, plan, release, bar)
            packed_bytes += packed
            released_bytes += given_up
    return PackReport(taken, left, packed_bytes, released_bytes)


def unpack(model: nn.Module) -> int:
    """Brings every released dense weight of `model` back and returns the number of layers that had none."""
    return sum(restore(module) for module in model.modules())


def _pack_one(module: Any, plan: Plan, give_up: bool, bar: Any) -> tuple[int, int]:
    """Bytes of the packed weights and of the dense ones given up."""
    assert plan.activation is not None
    known = packed_of(module)
    if known is not None:
        bar.update(known.E)
        return known.nbytes, 0
    names = names_of(module)
    w1, w2, b1, b2 = dense(module, names)
    if not give_up:
        packed = packed_for(w1, w2, b1, b2, plan.activation)
        bar.update(packed.E)
        return packed.nbytes, 0
    size = w1.nbytes + w2.nbytes
    forget(w1, w2)  # a copy from earlier calls would be a second one
    del w1, w2
    packed = released.release(module, names, layout_of(plan.activation), bar)
    if _dense_for_others not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_dense_for_others)
    return packed.nbytes, size


def _dense_for_others(module: Any, _: Any) -> None:
    """Another implementation, chosen after the release, needs the dense weights."""
    if module.config._experts_implementation != NAME:
        restore(module)


def _left_because(module: Any, give_up: bool) -> str:
    chosen = module.config._experts_implementation
    if chosen != NAME:
        return f'its experts implementation is {chosen!r}; call model.set_experts_implementation("{NAME}")'
    if not give_up and not is_released(module) and getattr(module, names_of(module).w1).is_inference():
        return "its weights were made under torch.inference_mode and a change could not be noticed; pass release=True"
    return ""


def _layers(model: nn.Module) -> Iterator[tuple[str, Any, Plan]]:
    for name, module in model.named_modules():
        if is_experts_module(module):
            yield name, module, plan_of(module)


def _experts(module: Any) -> int:
    packed = packed_of(module)
    return getattr(module, names_of(module).w1).shape[0] if packed is None else packed.E


def _bar(total: int, show: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="packing experts", unit="expert", disable=not show)
