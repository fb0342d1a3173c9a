"""Which instruction sets can run here, which one does, and why not the others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from moe_cpu import native_library as native
from moe_cpu import ops
from moe_cpu.errors import IsaUnavailable

ENVIRONMENT_VARIABLE = "MOE_CPU_ISA"
# An emulation is for tests: it is never chosen, only asked for.
_ONLY_ON_REQUEST = ("amx_emulated",)

_forced: str | None = None
_active: int | None = None


def names() -> tuple[str, ...]:
    """Every instruction set this build has kernels for, in the order in which they are tried on this CPU.

    That is the order of speed: Intel's AVX512-BF16 comes after its AVX-512, which does twice as many products a cycle; AMD's before it.
    """
    known = ops.isas()
    return tuple(known[native.library().moe_isa_in_order(place)] for place in range(len(known)))


def why_not(isa: str) -> str | None:
    """The sentence saying why `isa` cannot run here, or None when it can.

    Raises:
        IsaUnavailable: there is no instruction set of that name; the message lists them.
    """
    if isa not in names():
        raise IsaUnavailable(f"isa: expected one of {', '.join(names())}, got {isa!r}")
    return ops.isa_why_not(isa)


def available() -> tuple[str, ...]:
    """The instruction sets that can run here, best first; empty when the native library is missing or the CPU is older than AVX2."""
    return tuple(isa for isa in names() if ops.isa_why_not(isa) is None)


def resolve(isa: str | None = None) -> str:
    """`isa` itself if it can run, else the choice of `use`, of the environment variable MOE_CPU_ISA, or the first available, in this order.

    Raises:
        IsaUnavailable: the one asked for cannot run here, or none can; the message has every reason. A forced choice never falls back.
    """
    source = "isa"
    if isa is None:
        isa = _forced
    if isa is None and os.environ.get(ENVIRONMENT_VARIABLE):
        source, isa = ENVIRONMENT_VARIABLE, os.environ[ENVIRONMENT_VARIABLE]
    if isa is not None:
        if isa not in names():
            raise IsaUnavailable(
                f"{source}: expected one of {', '.join(names()) or '(no native library)'}, got {isa!r}"
            )
        reason = ops.isa_why_not(isa)
        if reason is not None:
            raise IsaUnavailable(f"{source} = {isa}: {reason}")
        return isa
    for name in available():
        if name not in _ONLY_ON_REQUEST:
            return name
    reasons = "; ".join(
        f"{name}: {ops.isa_why_not(name)}" for name in names() if name not in _ONLY_ON_REQUEST
    )
    raise IsaUnavailable(f"no instruction set can run here: {reasons or ops.why_not()}")


def active() -> str:
    """The instruction set that a call without an explicit one uses. Raises IsaUnavailable as `resolve` does."""
    return ops.isas()[active_index()]


def active_index() -> int:
    """`active` as the native library's number. Looked up once; `use` and `forget` make it look again."""
    global _active
    if _active is None:
        _active = ops.isas().index(resolve())
    return _active


def forget() -> None:
    """Drops the remembered choice, so that a changed MOE_CPU_ISA takes effect."""
    global _active
    _active = None


@contextlib.contextmanager
def use(isa: str | None) -> Iterator[str]:
    """Makes `isa` the active one for the length of a ``with`` block, in the whole process; None means the automatic choice.

    Raises:
        IsaUnavailable: `isa` cannot run here.
    """
    global _forced
    before = _forced
    if isa is not None:
        resolve(isa)
    _forced = isa
    forget()
    try:
        yield active()
    finally:
        _forced = before
        forget()


ops.active_isa = active_index
