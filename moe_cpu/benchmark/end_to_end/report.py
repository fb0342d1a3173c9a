"""Results of an end-to-end measurement, and their JSON file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_cpu.benchmark.end_to_end.high_water import Bytes
from moe_cpu.benchmark.report import FAILED, OK, WRONG, read_json
from moe_cpu.benchmark.timing import Comparison, Times
from moe_cpu.errors import ArgumentError

# What tells these files from those of single layers.
KIND = "end_to_end"
# Raised when the meaning of a field changes.
SCHEMA = 1


@dataclass
class Phase:
    """Calls of one kind: "prefill" (the whole prompt, until the first token is chosen) or "decode" (one token of every sequence).

    Attributes:
        tokens: of one call, all sequences together.
        whole, experts: seconds of a call, and those inside experts modules.
        experts_share: median over the calls of experts / whole.
        whole_comparison, experts_comparison: with the first implementation, call by call; None for itself.
    """

    name: str
    tokens: int
    whole: Times
    experts: Times
    experts_share: float
    whole_comparison: Comparison | None = None
    experts_comparison: Comparison | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.whole.median


@dataclass
class Agreement:
    """How an implementation's answers compare with the first one's.

    Attributes:
        distance: |logits - logits'| / |logits| in the 2-norm after the prompt, both with the first one's routing.
        bound: of that distance, from the roundings of two bf16 runs of a model this deep.
        equal_tokens: greedy tokens until the first difference, each going on with its own, summed over the sequences.
        equal_choices: greedy tokens that are equal where both were fed the same ones.
        tokens: how many there were to compare.
    """

    distance: float
    bound: float
    equal_tokens: int
    equal_choices: int
    tokens: int


@dataclass
class Point:
    """One implementation with one number of sequences.

    Attributes:
        status: "ok", "wrong" (logits outside the bound, so there are no times) or "failed" (it raised).
        reason: a sentence, for every status but "ok".
        agreement: with the first implementation; None for itself.
    """

    batch: int
    implementation: str
    status: str = OK
    reason: str | None = None
    agreement: Agreement | None = None
    phases: list[Phase] = field(default_factory=list)


@dataclass
class Released:
    """Memory of a process of its own that loads the model and packs it, giving each layer's dense weights up in turn.

    Attributes:
        before: held before loading: interpreter, torch, transformers.
        load, pack, run: peaks while the model was loaded (or made), packed, and while the largest batch ran.
        after: held at the end.
        separate: whether resident peaks were counted separately; if not, each includes those before it.
        taken, left: layers packed, and layers left to the reference path.
    """

    before: Bytes
    load: Bytes
    pack: Bytes
    run: Bytes
    after: Bytes
    separate: bool
    taken: int
    left: int


@dataclass
class EndToEndReport:
    """Everything measured.

    Attributes:
        environment: as `moe_cpu.benchmark.environment.describe` has it, and the version of transformers.
        settings: `Settings` as a dictionary.
        model: `needs.Sizes` as a dictionary.
        planned: `needs.Needs` as a dictionary.
        released: None when moe_cpu does not take part, or when the process failed; a note says so.
        both_layouts: the most bytes resident while implementations took turns, with dense and packed weights side by side and pages of a mapped checkpoint.
        points: by batch, then by implementation.
        notes: sentences a reader should know.
    """

    environment: dict[str, Any]
    settings: dict[str, Any]
    model: dict[str, Any]
    planned: dict[str, Any]
    released: Released | None = None
    both_layouts: int | None = None
    points: list[Point] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every implementation ran, within the bound of the first, and memory was measured where it was to be."""
        missing = self.released is None and "moe_cpu" in self.settings["implementations"]
        return not missing and not any(point.status in (WRONG, FAILED) for point in self.points)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; derived numbers are left out."""
        return {"kind": KIND, "schema": SCHEMA, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> EndToEndReport:
        """Reads what `to_dict` made.

        Raises:
            ArgumentError: another kind or schema.
        """
        found = (data.get("kind"), data.get("schema"))
        if found != (KIND, SCHEMA):
            raise ArgumentError(f"results: expected kind {KIND!r} and schema {SCHEMA}, got {found}")
        rest = {key: value for key, value in data.items() if key not in ("kind", "schema")}
        rest["released"] = None if rest["released"] is None else released_from(rest["released"])
        rest["points"] = [_point(point) for point in rest["points"]]
        return cls(**rest)

    def save(self, path: str | Path) -> None:
        """Writes the JSON file, and the folders above it if they are missing."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> EndToEndReport:
        """Reads a JSON file that `save` wrote.

        Raises:
            ArgumentError: it is not one.
        """
        try:
            return cls.from_dict(read_json(path))
        except (KeyError, TypeError) as error:
            raise ArgumentError(f"results: {path} cannot be read: {error}") from error


def released_from(data: dict[str, Any]) -> Released:
    """`Released` from its JSON form."""
    read: dict[str, Any] = {name: Bytes(*v) if isinstance(v, list) else v for name, v in data.items()}
    return Released(**read)


def _made(kind: Any, data: dict[str, Any] | None) -> Any:
    return None if data is None else kind(**data)


def _point(data: dict[str, Any]) -> Point:
    phases = [_phase(phase) for phase in data["phases"]]
    return Point(**{**data, "agreement": _made(Agreement, data["agreement"]), "phases": phases})


def _phase(data: dict[str, Any]) -> Phase:
    comparisons = {name: _made(Comparison, data[name]) for name in ("whole_comparison", "experts_comparison")}
    times = {name: Times(**data[name]) for name in ("whole", "experts")}
    return Phase(**{**data, **times, **comparisons})
