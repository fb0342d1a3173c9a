"""The backends by name, in the order in which they are tried, and the choice of one with its reasons."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from moe_cpu import isa, native_library
from moe_cpu.errors import ArgumentError, BackendUnavailable, NativeLibraryMissing, unknown_name_error
from moe_cpu.experts.config import BackendStatus, ExpertsConfig
from moe_cpu.modular_kernel import FusedMoEPermuteExpertsUnpermute

ENVIRONMENT_VARIABLE = "MOE_CPU_BACKEND"

# name -> class, fastest first; the module has the name of the backend and is imported when it is first looked at.
_CLASSES = {
    "native": "NativeExperts",
    "onednn": "OneDNNExperts",
    "ipex": "IPEXExperts",
    "triton": "TritonExperts",
    "reference": "ReferenceExperts",
}
_PREFIX = "backend "
_warned = False
NAMES: tuple[str, ...] = tuple(_CLASSES)
CPU_NAMES: tuple[str, ...] = tuple(name for name in NAMES if name != "triton")


def backend_class(name: str) -> type[Any]:
    """The class of a backend.

    Raises: ArgumentError for an unknown name, BackendUnavailable when its module cannot be imported.
    """
    if name not in _CLASSES:
        raise unknown_name_error("backend", name, ("auto", *NAMES))
    try:
        return getattr(importlib.import_module(f"moe_cpu.experts.{name}"), _CLASSES[name])
    except ImportError as error:
        raise BackendUnavailable(f"{_PREFIX}{name}: its module cannot be imported: {error}") from error


def requested(backend: str = "auto") -> str:
    """`backend` itself unless it is "auto" and the environment variable MOE_CPU_BACKEND names another.

    Raises: ArgumentError for an unknown name, saying where it came from.
    """
    kind = "backend"
    if backend == "auto":
        kind, backend = ENVIRONMENT_VARIABLE, os.environ.get(ENVIRONMENT_VARIABLE) or "auto"
    if backend != "auto" and backend not in _CLASSES:
        raise unknown_name_error(kind, backend, ("auto", *NAMES))
    return backend


def why_not(name: str, config: ExpertsConfig) -> str | None:
    """The sentence saying why a backend cannot run a configuration here, or None when it can."""
    try:
        cls = backend_class(name)
    except BackendUnavailable as error:
        return str(error).removeprefix(f"{_PREFIX}{name}: ")
    supported, reason = cls.supports(config)
    return None if supported else reason


def select(config: ExpertsConfig, candidates: Sequence[str] = NAMES) -> str:
    """The first of `candidates` that supports `config` and does not have to be asked for by name. Warns, once, when the native backend would be it
    but for its missing library.

    Raises: BackendUnavailable listing every candidate with its reason; IsaUnavailable when MOE_CPU_ISA, NativeLibraryMissing when MOE_CPU_LIBRARY cannot
        be had, for what was forced must not end in another backend.
    """
    if config.device == "cpu" and "native" in candidates and native_library.forced_but_missing():
        raise NativeLibraryMissing(
            f"{native_library.PATH_VARIABLE} is set, but {native_library.why_not()}; correct or unset it"
        )
    if os.environ.get(isa.ENVIRONMENT_VARIABLE):
        isa.resolve()
    reasons = []
    for name in candidates:
        reason = why_not(name, config)
        if reason is None:
            reason = getattr(backend_class(name), "only_on_request", None)
        if reason is None:
            _warn_without_library(config, candidates)
            return name
        reasons.append(f"{name}: {reason}")
    raise BackendUnavailable(f"no backend can run {config}: " + "; ".join(reasons))


def _warn_without_library(config: ExpertsConfig, candidates: Sequence[str]) -> None:
    global _warned
    reason = native_library.why_not()
    native_would_do = (
        config.device == "cpu" and config.weight_dtype == torch.bfloat16 and "native" in candidates
    )
    if reason is not None and native_would_do and not _warned:
        _warned = True
        warnings.warn(
            f"the native backend is skipped, so this layer is much slower than it could be: {reason}",
            stacklevel=3,
        )


def check_forced(name: str, config: ExpertsConfig) -> None:
    """Raises BackendUnavailable with the reason when the backend asked for cannot run `config`; nothing else is tried."""
    reason = why_not(name, config)
    if reason is not None:
        raise BackendUnavailable(f"backend {name!r} cannot run this layer: {reason}")


def create(name: str, isa_name: str | None = None) -> FusedMoEPermuteExpertsUnpermute:
    """An instance of a backend; `isa_name` is an instruction set, which only the native backend takes.

    Raises: ArgumentError, BackendUnavailable, and for the native backend IsaUnavailable.
    """
    if isa_name is None:
        return backend_class(name)()
    if name != "native":
        raise ArgumentError(
            f"isa: expected None for backend {name!r}, got {isa_name!r}; only 'native' takes an instruction set"
        )
    return backend_class(name)(isa=isa_name)


def list_backends() -> list[BackendStatus]:
    """Every backend in the order in which it is tried, asked about a plain bf16 silu layer on its own kind of device.

    Raises: ArgumentError when MOE_CPU_BACKEND names none of them, as every layer's call does.
    """
    requested()
    rows = []
    for name in NAMES:
        config = ExpertsConfig(
            device="cuda" if name == "triton" else "cpu",
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
        reason = why_not(name, config)
        rows.append(BackendStatus(name, reason is None, reason or ""))
    return rows
