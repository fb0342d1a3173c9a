"""With and without a native library, and without the memory it asks for."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from calls import call
from strategies import make_case

import moe_cpu
from moe_cpu import errors, isa, native_library, ops
from moe_cpu.experts import create, registry
from moe_cpu.experts.cpu import SelectedExperts
from moe_cpu.functional import _stages
from moe_cpu.scratch import Scratch


@pytest.fixture
def no_library(monkeypatch):
    """As if there were none; what was chosen with it is forgotten, before and after."""
    monkeypatch.delenv(native_library.PATH_VARIABLE, raising=False)
    monkeypatch.setattr(native_library, "_library", None)
    monkeypatch.setattr(native_library, "_reason", "no libmoe_cpu.so anywhere")
    monkeypatch.setattr(ops, "_isas", None)
    monkeypatch.setattr(registry, "_warned", False)
    isa.forget()
    _stages.cache_clear()
    yield
    isa.forget()
    _stages.cache_clear()


def test_a_library_asked_for_by_name_is_never_replaced(no_library, monkeypatch):
    monkeypatch.setenv(native_library.PATH_VARIABLE, "/nowhere/libmoe_cpu.so")
    for backend in ("auto", "native"):
        with pytest.raises(errors.BackendUnavailable, match=r"MOE_CPU_LIBRARY|native.*no libmoe_cpu\.so"):
            call(make_case(seed=151), backend=backend)
    with pytest.raises(
        errors.NativeLibraryMissing, match=r"MOE_CPU_LIBRARY is set.*no libmoe_cpu\.so anywhere"
    ):
        call(make_case(seed=151))
    call(make_case(seed=151), backend="reference")


@pytest.mark.parametrize("left", [0, 10, 64, 500, 5000, 0.5, 0.9, -64, -1])
def test_a_cut_off_library_is_refused_before_it_is_mapped(left, tmp_path, monkeypatch):
    """The dynamic loader would map what is not there, and the process would die of a bus error."""
    whole = next(p for p in native_library.candidates() if p.exists()).read_bytes()
    file = tmp_path / "libmoe_cpu.so"
    end = int(left * len(whole)) if isinstance(left, float) else left % len(whole)
    file.write_bytes(whole[:end])
    monkeypatch.setenv(native_library.PATH_VARIABLE, str(file))
    library, reason = native_library._load()
    assert library is None
    if end < 64:
        assert re.search(rf"{file} cannot be loaded: .*", reason)
    else:
        assert f"{file} is cut off, its last {len(whole) - end} bytes are missing; reinstall" in reason


def test_a_file_that_is_no_library_is_left_to_the_loader(tmp_path, monkeypatch):
    file = tmp_path / "libmoe_cpu.so"
    monkeypatch.setenv(native_library.PATH_VARIABLE, str(file))
    for content in (b"text" * 100, b"\x7fELF\x01\x01" + bytes(100)):
        file.write_bytes(content)
        assert "cannot be loaded" in native_library._load()[1]
    file.unlink()
    file.mkdir()
    assert "cannot be loaded" in native_library._load()[1]


def test_a_skipped_native_backend_is_told_once(no_library):
    case = make_case(seed=152)
    with pytest.warns(UserWarning, match=r"native backend is skipped.*no libmoe_cpu\.so anywhere"):
        call(case)
    _stages.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(case)


def test_weights_that_it_would_not_take_need_no_warning(no_library):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(make_case(seed=153, w_dtype=torch.float32))


def test_supports_swallows_nothing_but_a_refusal(monkeypatch):
    def broken(self, config):
        raise RuntimeError("broken")

    monkeypatch.setattr(SelectedExperts, "select", broken)
    with pytest.raises(RuntimeError, match="broken"):
        SelectedExperts().supports(None)


def test_a_name_that_cannot_be_had_is_no_attribute(monkeypatch):
    def missing(name):
        raise errors.BackendUnavailable(f"backend {name}: its module cannot be imported: no driver")

    monkeypatch.setattr(registry, "backend_class", missing)
    assert not hasattr(moe_cpu, "TritonExperts")
    with pytest.raises(AttributeError, match=r"TritonExperts.*no driver"):
        moe_cpu.TritonExperts  # noqa: B018


def test_without_a_choice_of_an_instruction_set():
    with pytest.raises(errors.IsaUnavailable, match=r"moe_cpu\.isa"):
        ops._undecided()


def test_scratch_that_cannot_be_had_is_named_with_its_bytes(monkeypatch):
    case = make_case(seed=154)
    want = call(case, backend="native")
    size = 1 << 60
    with pytest.raises(errors.OutOfMemory, match=str(size)):
        ops._mine.grow(size)
    assert ops._mine.scratch_bytes == 0
    assert torch.equal(call(case, backend="native"), want), "the next call finds no freed memory"
    with pytest.raises(MemoryError, match=rf"{2 * size} bytes"):
        Scratch().workspaces(size, 0, torch.bfloat16, torch.device("cpu"))


def test_batched_scratch_is_sized_by_the_experts_that_are_here():
    a, aq = torch.empty(8, 64, dtype=torch.bfloat16), torch.empty(2, 8, 64, dtype=torch.bfloat16)
    sizes = [create("native").workspace_shapes(a, aq, 8, 96, 64, 2, experts) for experts in (2, 256)]
    assert sizes[0] == sizes[1]


def test_a_source_tree_that_hides_the_package_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("MOE_CPU_LIBRARY", raising=False)
    path = tmp_path / "moe_cpu" / "_lib" / native_library.FILE_NAME
    monkeypatch.setattr(native_library, "candidates", lambda: [path])
    assert "build it with `pip install .`" in native_library._load()[1]
    (tmp_path / "pyproject.toml").touch()
    assert "this is the source tree, which hides an installed package" in native_library._load()[1]
    monkeypatch.undo()
    monkeypatch.setenv(native_library.PATH_VARIABLE, "/libmoe_cpu.so")
    assert native_library._load()[1].startswith("no libmoe_cpu.so at /libmoe_cpu.so; build it")


def test_a_library_of_another_version_is_refused_by_its_version(monkeypatch):
    """Not by the first function that one of the two lacks."""
    ahead = native_library.ABI_VERSION + 1
    monkeypatch.setattr(native_library, "ABI_VERSION", ahead)
    monkeypatch.setitem(native_library._SIGNATURES, "moe_of_tomorrow", (None, []))
    library, reason = native_library._load()
    assert library is None
    assert f"has interface version {ahead - 1}, this package needs {ahead}; reinstall" in reason
