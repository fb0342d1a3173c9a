"""Launches past Triton, without a GPU: which way they take, and what goes to the machine code."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from moe_cpu import triton_program


def test_after_the_first_launch_addresses_go_to_the_machine_code(monkeypatch):
    monkeypatch.setattr(triton_program, "_KNOWN_INSIDE", ())
    seen = []

    class Kernel:
        arg_names = ("pointer", "other", "number", "BLOCK")

        def __getitem__(self, grid):
            def launch(*arguments, **values):
                seen.append((grid, arguments, values))
                return self

            return launch

    program = triton_program.Program(Kernel(), {"BLOCK": 8}, {"num_warps": 4, "num_stages": 3})
    series = triton_program.Series([triton_program.Step(program, (2, 1, 1), (2, 0), (5,))])
    for keep in (False, True):
        series.through_triton(keep, ["a", "b", "c"])
        assert series.ready is keep
    series.direct(77, [4096, 0, 8192])
    usual = ((2, 1, 1), ("c", "a", 5), {"BLOCK": 8, "num_warps": 4, "num_stages": 3})
    assert seen == [usual, usual, ((2, 1, 1), (8192, 4096, 5, 8), {"stream": 77})]


def inside_code(seen: list, scratch: int = 0):
    """Machine code as a release of Triton whose inside is known has it."""

    class Run:
        global_scratch_size, profile_scratch_size = scratch, 0
        launch_cooperative_grid, launch_pdl = False, True
        launch = partial(
            lambda *everything: seen.append(everything)
        )  # no Python function, as Triton's is none

    class Code:
        function, packed_metadata, run = 11, (4, 1, 0), Run()

        def __getitem__(self, grid):
            return lambda *arguments, stream: seen.append((grid, arguments, stream))

    return Code()


@pytest.mark.parametrize(
    ("release", "past"), [("3.6.0", True), ("3.6.1+cu130", True), ("3.5.1", False), ("3.60.0", False)]
)
def test_only_known_releases_are_launched_from_inside(release, past, monkeypatch):
    seen = []
    monkeypatch.setattr(triton_program.triton, "__version__", release)
    triton_program._launcher(inside_code(seen), (2, 3, 1), None)(77, 4096, 5)
    usual = ((2, 3, 1), (4096, 5), 77)
    direct = (2, 3, 1, 77, 11, False, True, None, None, (4, 1, 0), None, None, None, 4096, 5)
    assert seen == [direct if past else usual]


@pytest.mark.parametrize("change", ["memory", "names", "parts"])
def test_what_is_not_as_expected_inside_is_left_to_triton(change, monkeypatch):
    seen = []
    monkeypatch.setattr(triton_program.triton, "__version__", "3.6.0")
    code = inside_code(seen, scratch=128 if change == "memory" else 0)
    if change == "names":
        code.run.launch = lambda *everything: seen.append(everything)
    if change == "parts":
        del type(code.run).launch_pdl
    triton_program._launcher(code, (2, 3, 1), None)(77, 4096)
    assert seen == [((2, 3, 1), (4096,), 77)]


def test_descriptors_are_encoded_once_for_each_weight_and_kernel(monkeypatch):
    """With the function that Triton's launcher wraps, and by what it knows of the kernel's descriptor."""
    seen, made = [], []
    monkeypatch.setattr(triton_program.triton, "__version__", "3.6.0")
    code = inside_code(seen)

    def wrapped(launcher, tensordesc_meta):
        return lambda *everything: launcher(*everything, tensordesc_meta)

    code.run.launch = wrapped(code.run.launch, ["swizzle"])

    def encoded(self, descriptor):
        made.append(
            (self._meta, descriptor.base.value, descriptor.shape, descriptor.strides, descriptor.block_shape)
        )
        return "map", *descriptor.shape

    monkeypatch.setattr(triton_program._Inside, "encoded", encoded)
    launch = triton_program._launcher(
        code, (2, 3, 1), triton_program.Engine(1, torch.bfloat16, (256, 64), (32, 16))
    )
    for weight in (4096, 8192, 4096):
        launch(77, 16, weight, None, 5)
    assert made == [("swizzle", weight, [256, 64], [64, 1], [32, 16]) for weight in (4096, 8192)]
    assert [call[-6:] for call in seen] == [(16, weight, "map", 256, 64, 5) for weight in (4096, 8192, 4096)]


def test_a_profiler_hears_of_every_launch(monkeypatch):
    """Triton calls its hooks, so what goes past it waits until nobody listens."""
    monkeypatch.setattr(triton_program.triton, "__version__", "3.6.0")
    series = triton_program.Series([])
    series.through_triton(True, [])
    assert series.ready
    runtime = triton_program.triton.knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        monkeypatch.setattr(hook, "calls", [print])
        assert not series.ready
        monkeypatch.setattr(hook, "calls", [])
    assert series.ready
    monkeypatch.setattr(triton_program.triton, "__version__", "3.5.0")
    series = triton_program.Series([])
    series.through_triton(True, [])
    monkeypatch.setattr(runtime.launch_enter_hook, "calls", [print])
    assert series.ready, "there, the way that is taken calls them"


def test_alignment_is_that_of_all_tensors():
    room = torch.empty(64, dtype=torch.uint8)
    first = -room.data_ptr() % 16
    one, two = room[first : first + 8], room[first + 8 : first + 16]
    assert triton_program.addresses_of([one, None]) == ([one.data_ptr(), None], True)
    assert triton_program.addresses_of([one, two])[1] is False
