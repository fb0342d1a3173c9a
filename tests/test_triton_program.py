"""How compiled kernels are launched; with Triton installed, but without a GPU."""

from __future__ import annotations

import pytest
import torch

triton_program = pytest.importorskip("moe_cpu.triton_program")


def test_after_the_first_launch_addresses_go_to_the_machine_code(monkeypatch):
    seen = []

    class Kernel:
        arg_names = ("pointer", "number", "BLOCK")
        function, packed_metadata = 11, (4, 1, 0)

        def __getitem__(self, grid):
            def launch(*arguments, **values):
                seen.append((grid, arguments, values))
                return self

            return launch

        def run(self, *everything):
            seen.append(everything)

    monkeypatch.setattr(triton_program, "current_stream", lambda device: 77)
    program = triton_program.Program(Kernel(), {"BLOCK": 8}, {"num_warps": 4, "num_stages": 3})
    room = torch.empty(64, dtype=torch.uint8)
    first = -room.data_ptr() % 16
    usual, shifted, grid = room[first : first + 8], room[first + 1 : first + 9], (2, 1, 1)

    def launch(tensor):
        launcher = triton_program.Launcher(0, [program], [tensor, None])
        launcher(program, grid, launcher.pointers[0], 5)

    options = {"BLOCK": 8, "num_warps": 4, "num_stages": 3}
    for tensor in (shifted, usual, usual, shifted):
        launch(tensor)
    direct = (*grid, 77, 11, (4, 1, 0), None, None, None, usual.data_ptr(), 5, 8)
    assert seen == [
        (grid, (shifted, 5), options), (grid, (usual, 5), options), direct, (grid, (shifted, 5), options),
    ]  # fmt: skip

    def hook(metadata):
        pass

    runtime = triton_program.knobs.runtime
    runtime.launch_enter_hook.add(hook)
    try:
        launch(usual)
    finally:
        runtime.launch_enter_hook.remove(hook)
    assert seen[-1] == (grid, (usual, 5), options), "a profiler hears of it"
