"""``python generate.py JOBS.json RESULTS.json``: greedy tokens, and the log probabilities of all others, from one vLLM engine after the other.

A program, because an engine wants a process whose vLLM is new, with the plug-in or without it. A job is {"model", "options", "prompts", "new_tokens"} and
optionally "reload", a checkpoint to load into the running engine before a second round. A result is {"rounds", "native_calls", "in_graphs"}: rounds of
{"tokens", "logprobs"} for each prompt, how often our kernels were called, and how often our operator is in a compiled graph. The last two are about this
process, which does all of the work where VLLM_ENABLE_V1_MULTIPROCESSING=0.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._inductor import compile_fx
from vllm import LLM, SamplingParams
from vllm.model_executor.models import registry

from moe_cpu import ops


def run(job: dict[str, Any]) -> dict[str, Any]:
    before = _counts()
    engine = LLM(
        job["model"],
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=8,
        max_logprobs=-1,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
        **job["options"],
    )
    rounds = [generate(engine, job)]
    if "reload" in job:
        engine.collective_rpc("reload_weights", kwargs={"weights_path": job["reload"]})
        rounds.append(generate(engine, job))
    engine.llm_engine.engine_core.shutdown()
    del engine
    gc.collect()
    return {"rounds": rounds, **{name: count - before[name] for name, count in _counts().items()}}


def generate(engine: LLM, job: dict[str, Any]) -> list[dict[str, Any]]:
    greedy = SamplingParams(
        temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=True, logprobs=-1, detokenize=False
    )
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], greedy, use_tqdm=False)
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [[at[token].logprob for token in sorted(at)] for at in output.outputs[0].logprobs],
        }
        for output in outputs
    ]


def _counts() -> dict[str, int]:
    return {"native_calls": native_calls.count, "in_graphs": operators.count}


class Counter:
    """Calls of a function of a module, each counted `weight` times."""

    def __init__(self, module: Any, name: str, weight: Callable[..., int] = lambda *_: 1) -> None:
        self.count = 0
        function = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += weight(*args)
            return function(*args, **kwargs)

        setattr(module, name, counted)


def _ours(graph: torch.fx.GraphModule, *_: Any) -> int:
    return sum("moe_cpu.experts_into" in str(node.target) for node in graph.graph.nodes)


if __name__ == "__main__":
    # vLLM looks at each model's class in a process of its own, lest CUDA be initialised in this one; that takes longer than the rest.
    registry._run_in_subprocess = lambda look: look()
    native_calls, operators = Counter(ops, "fused_experts"), Counter(compile_fx, "compile_fx", _ours)
    jobs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([run(job) for job in jobs]))
