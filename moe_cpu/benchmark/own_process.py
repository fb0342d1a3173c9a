"""Runs a module in a process of its own, whose peak memory is nobody else's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from moe_cpu.errors import BackendUnavailable

_ROOT = str(Path(__file__).resolve().parents[2])


def run(module: str, what: str, *arguments: str) -> Any:
    """What the last line says, in JSON, that `python -m module arguments` prints.

    Args:
        what: what it does, for the message.

    Raises:
        BackendUnavailable: the process failed, with its last words.
    """
    paths = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise BackendUnavailable(
            f"{what} in a process of its own ended with status {done.returncode}: {words[0]}"
        )
    return json.loads(done.stdout.splitlines()[-1])
