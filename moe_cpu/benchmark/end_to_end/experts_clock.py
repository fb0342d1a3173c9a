"""How long a model spends inside its experts modules."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from moe_cpu.integrations.transformers.detect import is_experts_module


class ExpertsClock:
    """Adds up the seconds between entering and leaving each experts module, by hooks that live as long as the ``with`` block.

    What is inside is the routed experts alone, from hidden states and ids to their weighted sum: routers and shared experts are not.
    """

    def __init__(self, model: Any) -> None:
        self._modules = [m for m in model.modules() if is_experts_module(m)]
        self._handles: list[Any] = []
        self._seconds = self._started = 0.0

    def take(self) -> float:
        """Seconds since the last `take`."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def __enter__(self) -> ExpertsClock:
        def start(*_: Any) -> None:
            self._started = time.perf_counter()

        def stop(*_: Any) -> None:
            self._seconds += time.perf_counter() - self._started

        for module in self._modules:
            self._handles += [module.register_forward_pre_hook(start), module.register_forward_hook(stop)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
