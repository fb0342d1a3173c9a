"""What is to be measured end to end, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_cpu.benchmark.limits import check_seconds, check_seed, check_threads
from moe_cpu.checks import check_count
from moe_cpu.errors import ArgumentError


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: a checkpoint's folder, or the name of a published shape that gets random weights.

    Attributes:
        folder: holds config.json and weights that transformers can load; None for random weights.
        shape: a name of `moe_cpu.models`; None for a checkpoint.
        layers: decoder layers of the random model; None for as many as the published one has.
        experts: experts in each layer of the random model; None for as many as the published one has.
        seed: of the random weights.
    """

    folder: str | None = None
    shape: str | None = None
    layers: int | None = None
    experts: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.folder is None) == (self.shape is None):
            raise ArgumentError(
                "end to end: expected either --model-dir or --random-config, got both or neither"
            )
        if self.folder is not None and (self.layers is not None or self.experts is not None):
            raise ArgumentError(
                "end to end: --layers and --experts are for --random-config; a checkpoint has its own"
            )
        if self.layers is not None:
            check_count("layers", self.layers)


@dataclass(frozen=True)
class Settings:
    """One measurement.

    Attributes:
        source: of the model.
        prompt_tokens: length of each sequence's prompt.
        new_tokens: decode steps after the token that the prompt gives.
        batches: numbers of sequences, measured one after the other.
        implementations: experts implementations of transformers; the others are compared with the first.
        seconds: of measuring for each batch, shared by the implementations; five rounds are made in any case.
        threads: None takes torch's number of threads.
        seed: of the prompts.
    """

    source: ModelSource = field(default_factory=ModelSource)
    prompt_tokens: int = 512
    new_tokens: int = 64
    batches: tuple[int, ...] = (1, 8)
    implementations: tuple[str, ...] = ("grouped_mm", "moe_cpu")
    seconds: float = 10.0
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("prompt-tokens", self.prompt_tokens)
        check_count("new-tokens", self.new_tokens)
        for count in self.batches:
            check_count("batch", count)
        if not self.batches or len(set(self.batches)) < len(self.batches):
            raise ArgumentError(f"batch: expected different numbers, at least one, got {list(self.batches)}")
        check_threads(1 if self.threads is None else self.threads)
        check_seconds(self.seconds)
        check_seed(self.seed)
        if not self.implementations or len(set(self.implementations)) < len(self.implementations):
            raise ArgumentError(
                f"implementations: expected different names, at least one, got {list(self.implementations)}"
            )
