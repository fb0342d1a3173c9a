"""What takes part in a measurement: one of our backends, or a competitor's kernel behind the same four methods."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from moe_cpu.benchmark.inputs import DenseLayer, Inputs
from moe_cpu.models import ModelShape


class Contender(ABC):
    """Computes one layer, out[m] = sum over slots s of topk_weights[m, s] * expert[topk_ids[m, s]](x[m]).

    Attributes:
        name: as given on the command line.
        isa: the instruction set it is tied to, or None.
        ours: whether a wrong answer is our bug (the run fails) or somebody else's (the row says so).
        keeps_dense: whether it works on the dense weights themselves.
        copies: layouts of its own it makes of a layer's weights; counted when memory is planned.
        max_tokens: largest call it can take, or None.
        fixed_threads: whether its threads are those it had when it prepared its first layer.
        settle: seconds its threads need to go to sleep after a call, so that they do not take the next contender's cores.
    """

    name: str
    isa: str | None = None
    ours: bool = False
    keeps_dense: bool = False
    copies: int = 0
    max_tokens: int | None = None
    fixed_threads: bool = False
    settle: float = 0.0

    @abstractmethod
    def why_not(self, shape: ModelShape) -> str | None:
        """A sentence saying why it cannot run this shape here, or None."""

    def prepare(self, layer: DenseLayer, shape: ModelShape) -> Any:
        """The layer in the form that `run` takes; not timed."""
        return layer

    @abstractmethod
    def run(self, prepared: Any, inputs: Inputs, shape: ModelShape) -> Tensor:
        """One call; timed. Returns `[M, K]` bf16."""

    def scratch_bytes(self, prepared: Any, inputs: Inputs, shape: ModelShape) -> int | None:
        """Bytes that such a call works in, beside its arguments and its result; None where nobody says."""
        return None

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Entered around each call, outside the time taken: for settings of the whole process."""
        return contextlib.nullcontext()
