"""vLLM: after `register()`, the experts of bf16 models on vLLM's CPU backend run on our kernels.

vLLM calls it in each of its processes, for the installed package is an entry point of the group `vllm.general_plugins`. The environment variable MOE_CPU_VLLM
switches: 0 leaves vLLM as it is, "force" tries a vLLM that this module was not tested with. A layer that the kernels do not cover stays with vLLM's own
experts; the log says, once for each kind of layer, which ones it has and why.

This module imports vLLM when it is called, its siblings when they are imported, and nothing else in the package does.
"""

from __future__ import annotations

import os

from moe_cpu import isa
from moe_cpu.errors import IsaUnavailable, unknown_name_error

ENVIRONMENT_VARIABLE = "MOE_CPU_VLLM"
# vLLM changes the interface of experts in nearly every minor version, so each is tested before it is named here.
TESTED = ("0.32",)
_CHOICES = ("", "1", "0", "force")

__all__ = ["ENVIRONMENT_VARIABLE", "TESTED", "register"]


def register() -> None:
    """Puts this package's experts in the place of vLLM's for unquantised layers, in this process; once, however often it is called.

    Logs one line when it leaves vLLM as it is. (Where vLLM runs on something else than a CPU that is its debug level, for nobody expects us there.)

    Raises: ArgumentError for an unknown MOE_CPU_VLLM; IsaUnavailable when MOE_CPU_ISA names an instruction set that cannot run;
        ImportError when MOE_CPU_VLLM is "force" and this vLLM lacks what the experts are built on.
    """
    choice = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if choice not in _CHOICES:
        raise unknown_name_error(ENVIRONMENT_VARIABLE, choice, _CHOICES[1:])
    from vllm.platforms import current_platform

    from moe_cpu.integrations.vllm.log import logger

    if not current_platform.is_cpu():
        logger.debug("moe_cpu leaves this vLLM as it is: it does not run on the CPU")
        return
    reason = _why_not(choice)
    if reason is None:
        from moe_cpu.integrations.vllm.method import install

        reason = install()
    if reason is not None:
        logger.warning("moe_cpu leaves vLLM's experts as they are: %s", reason)


def _why_not(choice: str) -> str | None:
    """The reason against taking part in this vLLM on this machine, or None."""
    if choice == "0":
        return f"{ENVIRONMENT_VARIABLE}=0"
    from vllm import __version__ as version

    if choice != "force" and not any(version == v or version.startswith(v + ".") for v in TESTED):
        return f"tested with vLLM {', '.join(TESTED)}, this is {version}; {ENVIRONMENT_VARIABLE}=force tries it all the same"
    try:
        isa.resolve()
    except IsaUnavailable as error:
        if os.environ.get(isa.ENVIRONMENT_VARIABLE):
            raise
        return str(error)
    return None
