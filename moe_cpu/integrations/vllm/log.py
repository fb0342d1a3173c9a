"""The logger of this integration. vLLM shows what comes from loggers below its own name, so ours is one of them."""

from __future__ import annotations

from vllm.logger import init_logger

logger = init_logger("vllm.moe_cpu")
