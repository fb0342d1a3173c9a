"""Which instruction sets the tests run on, how many threads, and how many hypothesis examples.

Environment:
    MOE_CPU_TEST_REQUIRE_ISAS: names separated by commas; their tests fail where such an instruction set cannot run. Others are left out, and listed at the top.
    MOE_CPU_TEST_SLOW: run the tests that need gigabytes or minutes.
    HYPOTHESIS_PROFILE: "ci" (the default: same examples every time) or "dev" (new and more examples).
"""

from __future__ import annotations

import os

# NumPy's own threads would fight with the ones under test for the same cores. It reads this when it is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from collections.abc import Callable, Iterator

import hypothesis
import pytest
import torch

from moe_cpu import isa as selection
from moe_cpu import ops
from moe_cpu.cli import main

hypothesis.settings.register_profile(
    "ci",
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.register_profile(
    "dev", parent=hypothesis.settings.get_profile("ci"), max_examples=200, derandomize=False
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

REQUIRED = tuple(
    name.strip() for name in os.environ.get("MOE_CPU_TEST_REQUIRE_ISAS", "").split(",") if name.strip()
)


def _isas_to_test() -> list[str]:
    able = selection.available()
    return [*able, *(name for name in REQUIRED if name not in able)]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "sanitize: short enough, and near enough to memory, for a run under AddressSanitizer"
    )
    config.addinivalue_line("markers", "pure: needs no device")
    config.addinivalue_line("markers", "slow: needs gigabytes or minutes; runs with MOE_CPU_TEST_SLOW=1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("MOE_CPU_TEST_SLOW"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: set MOE_CPU_TEST_SLOW=1"))


def pytest_report_header() -> list[str]:
    lines = [f"threads: {torch.get_num_threads()}, native library: {ops.why_not() or 'loaded'}"]
    for name in ops.isas():
        reason = ops.isa_why_not(name)
        lines.append(f"isa {name}: {'will be tested' if reason is None else reason}")
    if REQUIRED:
        lines.append(f"isas that must run: {', '.join(REQUIRED)}")
    return lines


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isa" in metafunc.fixturenames:
        metafunc.parametrize("isa", _isas_to_test(), indirect=True, scope="session")


@pytest.fixture(scope="session")
def isa(request: pytest.FixtureRequest) -> str:
    """Every instruction set that can run here, one after the other; one that must run and cannot fails the test."""
    if request.param not in selection.available():
        known = request.param in ops.isas()
        reason = ops.isa_why_not(request.param) if known else ops.why_not() or "no such instruction set"
        pytest.fail(f"MOE_CPU_TEST_REQUIRE_ISAS names {request.param}, which cannot run here: {reason}")
    return request.param


@pytest.fixture
def native() -> None:
    """For tests of the native library that are not about one instruction set."""
    if not ops.available():
        message = f"the native library is not usable: {ops.why_not()}"
        pytest.fail(message) if REQUIRED else pytest.skip(message)


@pytest.fixture
def amx() -> None:
    """For tests that need the silicon."""
    if "amx" not in selection.available():
        reason = ops.isa_why_not("amx") if ops.available() else ops.why_not()
        pytest.fail(str(reason)) if "amx" in REQUIRED else pytest.skip(f"amx: {reason}")


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """`torch.set_num_threads`, taken back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(20240229)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command: exit status, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            status = main([str(a) for a in arguments])
        except SystemExit as exit:  # argparse's way of refusing
            status = exit.code
        out, err = capsys.readouterr()
        return status, out, err

    return run
