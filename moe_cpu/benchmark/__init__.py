"""Measures MoE layers: every answer is checked first, contenders take turns, and each time stands beside the limit of the machine.

`run(suite)` returns a `Report`; nothing here prints. The command line for it is ``moe-cpu bench``.
"""

from __future__ import annotations

from moe_cpu.benchmark.case import Case, Suite
from moe_cpu.benchmark.report import Report, Row
from moe_cpu.benchmark.routing import ROUTINGS
from moe_cpu.benchmark.runner import run

__all__ = ["ROUTINGS", "Case", "Report", "Row", "Suite", "run"]
