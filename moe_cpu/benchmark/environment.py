"""Where a measurement was made: what somebody needs to judge or repeat it."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from moe_cpu import isa, machine, native_library, ops
from moe_cpu.benchmark import memory

# Of this package, of OpenMP runtimes, of oneDNN (which may be held to an instruction set), and of what is put under all of them.
_VARIABLES = ("MOE_CPU_", "OMP_", "KMP_", "GOMP_", "ONEDNN_", "DNNL_", "MKL_", "LD_PRELOAD", "GLIBC_TUNABLES")
_ROOT = Path(__file__).resolve().parents[2]


def cpu_name(*, thorough: bool = False) -> str:
    """The CPU's name with family and model, which tell generations apart where a hypervisor hides the name.

    `thorough` asks py-cpuinfo, which takes a second for it, and only then /proc/cpuinfo.
    """
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
        if not line.strip():
            break
    brand = (_brand_by_cpuinfo() if thorough else None) or fields.get("model name", platform.machine())
    return f"{brand} (family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"


def _brand_by_cpuinfo() -> str | None:
    try:
        import cpuinfo

        return cpuinfo.get_cpu_info().get("brand_raw")
    except Exception:  # it reads the output of many programs, and fails in as many ways
        return None


def compiler() -> str | None:
    """The compiler that built the native library, which notes itself in the library's .comment section."""
    if not ops.available():
        return None
    path = next(path for path in native_library.candidates() if path.exists())
    notes = path.read_bytes()
    # What Clang builds is linked with start-up files that GCC built, so its note comes first.
    found = re.search(rb"clang version [^\0]+", notes) or re.search(rb"GCC: \([^)\0]*\) [\d.]+", notes)
    return found.group().decode() if found else "unknown"


def commit() -> str | None:
    """Commit of the checkout this package runs from, with "+" when files differ from it; None outside a checkout."""
    if not (_ROOT / ".git").exists():
        return None
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(
        ("git", "-C", str(_ROOT), *arguments), check=True, capture_output=True, text=True
    ).stdout.strip()


def version() -> str:
    """Version of the installed distribution, "not installed" where the package is only on the path."""
    try:
        return metadata.version("moe-cpu")
    except metadata.PackageNotFoundError:
        return "not installed"


def describe(threads: int) -> dict[str, Any]:
    """Everything above, as it goes into a results file."""
    native = machine.cpu_description() if ops.available() else {}
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_name(thorough=True),
        "logical_cpus": len(os.sched_getaffinity(0)),
        "threads": threads,
        "isa": isa.active() if isa.available() else None,
        "isas": list(isa.available()),
        "last_level_cache_bytes": memory.last_level_cache_bytes(),
        # Here and in variables without the folders, which are for nobody else to know.
        "openmp_runtimes": [
            path.rpartition("/site-packages/")[2] for path in native.get("openmp_runtimes", [])
        ],
        "compiler": compiler(),
        "moe_cpu": version(),
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "variables": {
            key: re.sub(r"/[^:\s]*/", "", value)
            for key, value in sorted(os.environ.items())
            if key.startswith(_VARIABLES)
        },
    }
