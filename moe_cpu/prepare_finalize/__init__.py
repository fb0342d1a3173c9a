"""First and last stage of a layer, one file per way of moving tokens."""

from __future__ import annotations

from moe_cpu.prepare_finalize.batched import BatchedPrepareAndFinalize
from moe_cpu.prepare_finalize.no_ep import MoEPrepareAndFinalizeNoEP

__all__ = ["BatchedPrepareAndFinalize", "MoEPrepareAndFinalizeNoEP"]
