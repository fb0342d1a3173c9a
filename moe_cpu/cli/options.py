"""What commands share: lists on the command line, files that can be written, a bar for long work."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from moe_cpu.errors import ArgumentError

T = TypeVar("T")

# Options of `moe-cpu bench` that only a measurement of layers has a meaning for.
OF_LAYERS = ("suite", "checkpoint", "layer", "tokens", "routing", "device", "backend", "baseline", "isa")


def given(options: argparse.Namespace, names: tuple[str, ...]) -> list[str]:
    """Those of the options that were given."""
    return [name for name in names if getattr(options, name) is not None]


def names(text: str) -> list[str]:
    """`a,b` as a list."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"expected names separated by commas, got {text!r}")
    return found


def counts(text: str) -> list[int]:
    """`1,8` as numbers."""
    try:
        return [int(part) for part in names(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers separated by commas, got {text!r}"
        ) from None


def file_name(text: str) -> str:
    """What is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("expected the name of a file, got ''")
    return text


def check_files(options: argparse.Namespace) -> None:
    """Raises ArgumentError when --json or --plot cannot be written, or are one file."""
    files = [options.json, options.plot]
    for file in filter(None, files):
        check_writable("bench", file)
    if all(files) and len(set(map(os.path.realpath, files))) == 1:
        raise ArgumentError(f"bench: expected two files for --json and --plot, got {options.json} for both")


def check_writable(command: str, file: str) -> None:
    """Raises ArgumentError when no results file can be made there: better now than after the measurement."""
    path = Path(os.path.realpath(file))
    new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise ArgumentError(
            f"{command}: expected a file that can be written, got {file}: {error.strerror}; its folder must exist"
        ) from None


def with_progress(work: Callable[[Callable[[str], None]], T], steps: int) -> T:
    """Runs `work` with a bar on standard error; a bar is only drawn on a terminal."""
    from tqdm import tqdm

    with (
        tqdm(
            total=steps,
            file=sys.stderr,
            disable=None,
            leave=False,
            ncols=shutil.get_terminal_size().columns,  # 80 on a terminal that does not say, where tqdm would draw nothing
            bar_format="{desc} |{bar}| {n}/{total} {elapsed}",
        ) as bar
    ):
        started = False

        def tell(text: str) -> None:
            nonlocal started
            bar.update(int(started))
            started = True
            bar.set_description_str(text)

        return work(tell)
