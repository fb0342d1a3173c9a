"""A benchmark case is data, and a suite is a grid of cases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from moe_cpu.benchmark.limits import check_seconds, check_seed, check_threads
from moe_cpu.benchmark.routing import check_routing
from moe_cpu.checks import ACTIVATIONS, check_count
from moe_cpu.errors import ArgumentError
from moe_cpu.models import ModelShape, find

SCHEMES = ("bf16",)
DEVICES = ("cpu", "cuda")
_LISTS = ("shapes", "tokens", "contenders", "routings")


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        shape: the layer.
        M: tokens of one call.
        contender: name of a backend or of a baseline; ``native:avx2`` names a backend and an instruction set.
        scheme: how the weights are stored; "bf16".
        threads: OpenMP threads.
        routing: "uniform" (every expert equally likely), "zipf" (the r-th most popular expert has weight 1/r), "zipf-1.2" (weight r**-1.2), "single"
            (every token takes the same topk experts) or "router" (a checkpoint's own router on random hidden states).
        seed: of weights, tokens and routing.
    """

    shape: ModelShape
    M: int
    contender: str
    scheme: str
    threads: int
    routing: str
    seed: int


@dataclass(frozen=True)
class Suite:
    """Every combination of its shapes, token counts, routings and contenders.

    Attributes:
        shapes, tokens, contenders, routings, scheme, seed: see `Case`.
        baseline: the contender that the others are compared with, or "" for no comparison.
        threads: a number, or several, with each of which every point is measured; None takes torch's number.
        seconds: time spent on one point and routing, shared by its contenders.
        cold: whether weights must come from memory. If not, one layer is used and may stay in the cache: for smoke runs.
        name: for reports.
        device: "cpu", or "cuda" for the current GPU.
    """

    shapes: tuple[ModelShape, ...]
    tokens: tuple[int, ...] = (1, 16, 64, 256)
    contenders: tuple[str, ...] = ("native", "onednn", "grouped_mm")
    routings: tuple[str, ...] = ("uniform",)
    baseline: str = "grouped_mm"
    scheme: str = "bf16"
    threads: int | tuple[int, ...] | None = None
    seed: int = 0
    seconds: float = 2.0
    cold: bool = True
    name: str = "suite"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for routing in self.routings:
            check_routing(routing)
        if self.device not in DEVICES:
            raise ArgumentError(f"device: expected one of {', '.join(DEVICES)}, got {self.device!r}")
        if self.scheme not in SCHEMES:
            raise ArgumentError(f"scheme: expected one of {', '.join(SCHEMES)}, got {self.scheme!r}")
        if not self.shapes or not self.tokens or not self.contenders:
            raise ArgumentError(
                f"suite {self.name!r}: expected at least one shape, token count and contender"
            )
        for M in self.tokens:
            check_count("tokens", M)
        if len(set(self.tokens)) < len(self.tokens):
            raise ArgumentError(f"tokens: expected different numbers, got {', '.join(map(str, self.tokens))}")
        counts = (
            self.threads
            if isinstance(self.threads, tuple)
            else (1 if self.threads is None else self.threads,)
        )
        check_threads(*counts)
        if self.device == "cuda" and len(counts) > 1:
            raise ArgumentError(f"threads: expected one number on cuda, got {self.threads!r}")
        check_seconds(self.seconds)
        check_seed(self.seed)

    @property
    def thread_counts(self) -> tuple[int, ...]:
        """Numbers of threads, least first."""
        if self.threads is None:
            return (torch.get_num_threads(),)
        return tuple(sorted(self.threads)) if isinstance(self.threads, tuple) else (self.threads,)

    def points(self) -> Iterator[tuple[str, int]]:
        """Routing and token count of every point of one shape, for a device that measures one routing at a time."""
        for routing in self.routings:
            for M in self.tokens:
                yield routing, M

    @classmethod
    def load(cls, path: str | Path) -> Suite:
        """Reads a suite from a JSON file; see bench/README.md for the form.

        Raises:
            ArgumentError: the file is not JSON, or has an unknown key or value.
        """
        path = Path(path)
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ArgumentError(f"suite: {path} cannot be read: {error}") from error
        if not isinstance(data, dict):
            raise ArgumentError(f"suite: expected a JSON object in {path}, got {type(data).__name__}")
        data.pop("about", None)
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ArgumentError(
                f"suite {path}: expected keys among {', '.join(sorted(known))}; got {', '.join(unknown)}"
            )
        data.setdefault("name", path.stem)
        for key in _LISTS:
            if not isinstance(data.get(key, []), list):
                raise ArgumentError(f"suite {path}: expected a list of {key}, got {data[key]!r}")
        data["shapes"] = [parse_shape(entry) for entry in data.get("shapes", ())]
        data = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
        return cls(**data)


def parse_shape(entry: str | dict[str, Any]) -> ModelShape:
    """A shape from a suite file: a model's name, ``{"model": name, "E": fewer experts}``, or the fields of a `ModelShape`.

    Raises:
        ArgumentError: an unknown model or field, or a field that is missing.
    """
    if isinstance(entry, str):
        return find(entry)
    if not isinstance(entry, dict):
        raise ArgumentError(f"shape: expected a model's name or an object, got {entry!r}")
    for symbol in ("E", "topk", "K", "I"):
        if not isinstance(entry.get(symbol, 1), int):
            raise ArgumentError(f"shape: expected a whole number {symbol}, got {entry[symbol]!r}")
    if "model" in entry:
        extra = sorted(set(entry) - {"model", "E"})
        if extra:
            raise ArgumentError(f"shape: beside a model only E can be given, got {', '.join(extra)}")
        shape = find(entry["model"])
        return shape.with_experts(entry["E"]) if "E" in entry else shape
    try:
        shape = ModelShape(**{"name": "custom", **entry})
    except TypeError as error:
        raise ArgumentError(
            f"shape: expected name, E, topk, K, I and other fields of ModelShape, got {entry}: {error}"
        ) from error
    if shape.activation not in ACTIVATIONS:
        raise ArgumentError(
            f"shape: expected an activation among {', '.join(ACTIVATIONS)}, got {shape.activation!r}"
        )
    if not 1 <= shape.topk <= shape.E or min(shape.K, shape.I) < 1:
        raise ArgumentError(
            f"shape: expected 1 <= topk <= E, K >= 1, I >= 1; got E={shape.E}, topk={shape.topk}, K={shape.K}, I={shape.I}"
        )
    return shape
