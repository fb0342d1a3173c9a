"""From router logits to `topk_weights` and `topk_ids`, one file for each way of choosing experts."""

from __future__ import annotations

from moe_cpu.routers.grouped_topk import grouped_topk
from moe_cpu.routers.selection import Routing
from moe_cpu.routers.sigmoid_top1 import sigmoid_top1
from moe_cpu.routers.softmax_topk import softmax_topk

__all__ = ["Routing", "grouped_topk", "sigmoid_top1", "softmax_topk"]
