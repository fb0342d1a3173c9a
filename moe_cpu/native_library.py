"""Finds, loads and describes the native library: C signatures, and its status codes as exceptions."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from pathlib import Path
from typing import Any

import torch  # first: the library then shares torch's OpenMP runtime instead of bringing a second one

from moe_cpu.errors import (
    ArgumentError,
    IsaUnavailable,
    MoEError,
    NativeLibraryMissing,
    expert_id_error,
    expert_map_error,
    token_count_error,
)

ABI_VERSION = 3
FILE_NAME = "libmoe_cpu.so"
PATH_VARIABLE = "MOE_CPU_LIBRARY"

OK, BAD_EXPERT_ID, ISA_UNAVAILABLE, SCRATCH_TOO_SMALL, BAD_ARGUMENT = 0, 1, 2, 3, 4
TOO_LARGE, BAD_TOKEN_COUNT, BAD_EXPERT_MAP = 5, 7, 8

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int32: 3, torch.int64: 4}
ACTIVATION_CODES = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "swigluoai": 3, "relu2": 4}
GATE_LAYOUT_CODES = {"concatenated": 0, "interleaved": 1, "none": 2}
REDUCED, UNREDUCED, BATCHED = 0, 1, 2

Info = ctypes.c_int64 * 4

# Header of a 64-bit little-endian ELF file: identification, e_phoff, e_shoff, then size and number of the entries of both tables. Of an entry of the program
# header table: p_offset and p_filesz. (System V ABI, "Object Files" and "Program Loading".)
_ELF_HEADER, _ELF_SEGMENT = struct.Struct("<6s26xQQ6xHHHH2x"), struct.Struct("<8xQ16xQ16x")
_ELF_64_LITTLE = b"\x7fELF\x02\x01"

_i32: Any = ctypes.c_int32
_i64: Any = ctypes.c_int64
_f64: Any = ctypes.c_double
_ptr: Any = ctypes.c_void_p
_str: Any = ctypes.c_char_p
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "moe_abi_version": (_i32, []),
    "moe_isa_count": (_i32, []),
    "moe_isa_name": (_str, [_i32]),
    "moe_isa_why_not": (_str, [_i32]),
    "moe_isa_in_order": (_i32, [_i32]),
    "moe_cpu_features": (_str, []),
    "moe_cache_bytes": (_i64, [_i32]),
    "moe_openmp_max_threads": (_i32, []),
    "moe_parallel_team": (_i32, [_i32]),
    "moe_align_scratch_bytes": (_i64, [_i64, _i64, _i64, _i32]),
    "moe_align_block_size": (
        _i32,
        [_ptr, _i32] + [_i64] * 6 + [_ptr, _i64, _i64] + [_ptr] * 4 + [_i32, _ptr],
    ),
    "moe_packed_elements": (_i64, [_i64, _i64, _i32]),
    "moe_pack_expert": (_i32, [_ptr, _i32, _i64, _i64, _i64, _i64, _i32, _ptr, _i32, _ptr]),
    "moe_unpack_expert": (_i32, [_ptr, _i64, _i64, _i32, _ptr, _i32, _ptr]),
    "moe_layer_scratch_bytes": (_i64, [_ptr]),
    "moe_layer": (_i32, [_ptr, _ptr]),
    "moe_probe_matrix_peak": (_f64, [_i32, _i32, _f64]),
    "moe_probe_read_bandwidth": (_f64, [_ptr, _i64, _i32, _f64]),
    "moe_probe_copy_bandwidth": (_f64, [_ptr, _ptr, _i64, _i32, _f64]),
}

_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_reason: str | None = None


def candidates() -> list[Path]:
    """Paths the library is looked for at, in order: ``MOE_CPU_LIBRARY`` alone when it is set, else beside the package's modules."""
    forced = os.environ.get(PATH_VARIABLE)
    if forced:
        return [Path(forced).resolve()]
    import moe_cpu

    return [Path(folder) / "_lib" / FILE_NAME for folder in moe_cpu.__path__]


def _load() -> tuple[ctypes.CDLL | None, str | None]:
    paths = candidates()
    path = next((p for p in paths if p.exists()), None)
    if path is None:
        fix = "build it with `pip install .` (Linux on x86-64, g++ >= 12)"
        if not os.environ.get(PATH_VARIABLE) and any(
            (p.parents[2] / "pyproject.toml").exists() for p in paths
        ):
            fix = "this is the source tree, which hides an installed package: start Python elsewhere, or `pip install -e .`"
        return None, f"no {FILE_NAME} at {' or '.join(map(str, paths))}; {fix}"
    try:
        missing = _missing_bytes(path)
        if missing > 0:
            return None, f"{path} is cut off, its last {missing} bytes are missing; reinstall moe-cpu"
        library = ctypes.CDLL(str(path))
        version = library.moe_abi_version()  # before the rest, which another version may lack
        if version != ABI_VERSION:
            return (
                None,
                f"{path} has interface version {version}, this package needs {ABI_VERSION}; reinstall moe-cpu",
            )
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return None, f"{path} cannot be loaded: {error}"
    return library, None


def _missing_bytes(path: Path) -> int:
    """How many bytes of an ELF file its own tables speak of lie behind its end. The dynamic loader does not ask: it maps them, and the process dies of a
    bus error at the first look. A file of another kind has none; the loader says what is wrong with it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_ELF_HEADER.size)
        if not head.startswith(_ELF_64_LITTLE) or len(head) < _ELF_HEADER.size:
            return 0
        _, segments, sections, segment_size, number, section_size, section_number = _ELF_HEADER.unpack(head)
        end = max(segments + number * segment_size, sections + section_number * section_size)
        file.seek(segments)
        table = file.read(number * segment_size)
    if segment_size == _ELF_SEGMENT.size:
        whole = len(table) // segment_size * segment_size
        end = max([end, *(start + length for start, length in _ELF_SEGMENT.iter_unpack(table[:whole]))])
    return end - size


def why_not() -> str | None:
    """The reason why the native library cannot be used, or None when it can."""
    global _library, _reason
    if _library is None and _reason is None:
        with _lock:
            if _library is None and _reason is None:
                _library, _reason = _load()
    return _reason


def forced_but_missing() -> bool:
    """Whether ``MOE_CPU_LIBRARY`` names a library that cannot be used."""
    return bool(os.environ.get(PATH_VARIABLE)) and why_not() is not None


def library() -> ctypes.CDLL:
    """The loaded library. Raises NativeLibraryMissing with the reason when there is none."""
    if _library is None and why_not() is not None:
        raise NativeLibraryMissing(f"the native library is not usable: {_reason}")
    assert _library is not None
    return _library


def failure(status: int, info: ctypes.Array[ctypes.c_int64], what: str, topk: int = 1) -> MoEError:
    """The exception for a status code; ``info`` holds the numbers as c_api.h says."""
    a, b, c = info[0], info[1], info[2]
    if status == BAD_EXPERT_ID:
        row, slot = divmod(a, max(topk, 1))
        return expert_id_error(row, slot, b, c)
    if status == BAD_EXPERT_MAP:
        return expert_map_error(a, b, c)
    if status == BAD_TOKEN_COUNT:
        return token_count_error(a, b, c)
    if status == TOO_LARGE:
        return ArgumentError(f"{what}: {a} exceeds the limit of {b}; split the tokens into several calls")
    if status == ISA_UNAVAILABLE:
        return IsaUnavailable(
            f"{what}: instruction set number {a} cannot run on this CPU; see `moe-cpu info`"
        )
    return ArgumentError(f"{what}: the native library refused the call (status {status}, {a}, {b}, {c})")
