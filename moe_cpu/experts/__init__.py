"""Middle stage of a layer: one file for each backend, none of which imports another, and the choice among them."""

from __future__ import annotations

from moe_cpu.experts.config import BackendStatus, ExpertsConfig
from moe_cpu.experts.cpu import CPUExperts, SelectedExperts
from moe_cpu.experts.registry import NAMES, backend_class, create, list_backends, select

__all__ = [
    "NAMES",
    "BackendStatus",
    "CPUExperts",
    "ExpertsConfig",
    "SelectedExperts",
    "backend_class",
    "create",
    "list_backends",
    "select",
]
