"""Python threads, OpenMP threads, forks and fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from calls import TIMEOUT, call, in_child, native, pack, run_kernel
from strategies import make_case

from moe_cpu import (
    FusedMoEModularKernel,
    MoEPrepareAndFinalizeNoEP,
    machine,
    moe_align_block_size,
    ops,
    pack_cache,
)
from moe_cpu.experts import create

CASES = [make_case(M=m, K=160, I=96, E=6, topk=2, seed=m) for m in (1, 5, 33, 70)]


def bits(tensor: torch.Tensor) -> np.ndarray:
    """For comparisons in a child, where torch's own parallel loops must not be used."""
    return tensor.view(torch.int16).numpy().copy()


@pytest.mark.parametrize("threads", [1, 4])
def test_python_threads_on_one_and_on_several_layers(threads, set_threads):
    set_threads(threads)
    layers = [(case, pack(case)) for case in CASES]
    wanted = [native(case, None, packed) for case, packed in layers]
    start = threading.Barrier(6)

    def work(rank: int) -> bool:
        torch.set_num_threads(threads)
        start.wait()
        order = [(rank + i) % 4 for i in range(25)]
        return all(torch.equal(native(layers[i][0], None, layers[i][1]), wanted[i]) for i in order)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_python_threads_on_one_kernel(backend):
    """Scratch memory belongs to the calling thread, also inside one instance."""

    class NoReduce(MoEPrepareAndFinalizeNoEP):
        def accepts_reduced(self):
            return False

    kernel = FusedMoEModularKernel(NoReduce(), create(backend))
    wanted = [run_kernel(kernel, case) for case in CASES]
    start = threading.Barrier(4)

    def work(rank: int) -> bool:
        start.wait()
        return all(
            torch.equal(run_kernel(kernel, CASES[i % 4]), wanted[i % 4]) for i in range(rank, rank + 15)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_first_use_from_several_threads_packs_correctly():
    case = make_case(M=9, K=160, I=96, E=6, seed=121)
    start = threading.Barrier(6)

    def work(_: int) -> torch.Tensor:
        start.wait()
        return call(case, backend="native")

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(work, range(6)))
    case.check(results[0])
    assert all(torch.equal(r, results[0]) for r in results)
    pack_cache.forget(case.w1)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_forked_child_computes_with_its_own_threads(threads, set_threads):
    set_threads(threads)
    case, packed = CASES[3], pack(CASES[3])
    wanted = bits(native(case, None, packed))

    def work() -> None:
        for _ in range(3):
            assert np.array_equal(bits(native(case, None, packed)), wanted)
        torch.set_num_threads(3)
        assert np.array_equal(bits(native(case, None, packed)), wanted)

    in_child(work)
    assert np.array_equal(bits(native(case, None, packed)), wanted), "the parent goes on"


def test_align_and_pack_in_a_forked_child(set_threads):
    set_threads(4)
    ids = torch.randint(64, (30_000, 4), dtype=torch.int32)
    wanted = moe_align_block_size(ids, 32, 64)[0].numpy().copy()
    packed = bits(pack(CASES[2]).w1)

    def work() -> None:
        assert np.array_equal(moe_align_block_size(ids, 32, 64)[0].numpy(), wanted)
        assert np.array_equal(bits(pack(CASES[2]).w1), packed)

    in_child(work)


def test_a_grandchild_and_a_thread_of_a_child(set_threads):
    set_threads(3)
    case, packed = CASES[2], pack(CASES[2])
    wanted = bits(native(case, None, packed))
    seen = []

    def right() -> None:
        torch.set_num_threads(3)
        seen.append(np.array_equal(bits(native(case, None, packed)), wanted))

    def work() -> None:
        right()
        thread = threading.Thread(target=right)
        thread.start()
        thread.join()
        in_child(right)
        assert seen == [True, True]

    in_child(work)


def python(*arguments: str) -> str:
    """Standard output of a fresh interpreter that can import the tests' modules."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    result = subprocess.run(
        [sys.executable, *arguments], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        timeout=2 * TIMEOUT, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_spawned_processes_compute_the_same(tmp_path):
    case = make_case(M=20, seed=122)
    pack(case).save(tmp_path / "packed.pt")
    np.save(tmp_path / "want.npy", bits(native(case, None)))
    script = tmp_path / "spawned.py"
    script.write_text(f"""
import multiprocessing
import numpy as np
from calls import native
from moe_cpu import PackedExperts
from strategies import make_case
from test_threads_and_fork import bits

def work(_):
    got = native(make_case(M=20, seed=122), None, PackedExperts.load({str(tmp_path / "packed.pt")!r}))
    return np.array_equal(bits(got), np.load({str(tmp_path / "want.npy")!r}))

if __name__ == "__main__":
    print(multiprocessing.get_context("spawn").Pool(2).map(work, range(2)))
""")
    assert python(str(script)) == "[True, True]"


def test_packed_weights_as_an_argument_of_spawned_processes(tmp_path):
    """Sending them moves the sender's tensors to shared memory; both sides go on computing the same."""
    script = tmp_path / "argument.py"
    script.write_text("""
import torch
from calls import native, pack
from strategies import make_case

CASE = make_case(M=20, bias=True, seed=123)

def work(rank, packed, want):
    assert torch.equal(native(CASE, None, packed), want)

if __name__ == "__main__":
    packed = pack(CASE)
    want = native(CASE, None, packed)
    torch.multiprocessing.spawn(work, (packed, want), nprocs=2)
    assert torch.equal(native(CASE, None, packed), want)
    print("same")
""")
    assert python(str(script)) == "same"


def test_torchs_thread_count_governs_and_one_openmp_is_loaded():
    out = python(
        "-c",
        """
import os, torch
torch.set_num_threads(1)
from strategies import make_case
from calls import native, pack
from moe_cpu import machine, ops
case = make_case(M=8, K=512, I=256, E=4, topk=2)
packed = pack(case)
tasks = lambda: len(os.listdir("/proc/self/task"))
before = tasks()
native(case, None, packed)
alone = tasks()
torch.set_num_threads(5)
native(case, None, packed)
maps = open("/proc/self/maps").read().splitlines()
runtimes = {line.split()[-1] for line in maps if any(n in line for n in ("libgomp", "libiomp", "libomp"))}
print(alone - before, tasks() - alone, len(runtimes), machine.cpu_description()["threads"])
""",
    )
    assert out == "0 4 1 5"


def test_importing_prints_nothing_and_imports_little():
    out = python(
        "-c",
        """
import sys
import moe_cpu
heavy = ("triton", "transformers", "vllm", "intel_extension_for_pytorch", "matplotlib", "safetensors")
print([name for name in heavy if name in sys.modules])
""",
    )
    assert out == "[]"


def test_the_description_names_the_runtime_and_every_isa():
    description = machine.cpu_description()
    assert description["threads"] == torch.get_num_threads()
    assert set(description["isas"]) == set(ops.isas())
    assert any("gomp" in path or "omp" in path for path in description["openmp_runtimes"])
