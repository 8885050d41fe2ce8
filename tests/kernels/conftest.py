"""PAGEFLEET_CPU_LIBRARY=build/_cpu_asan.so, say, has the kernels' tests run on that library."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagefleet_cpu.config import environment
from pagefleet_kernels import ISAS, cpu

library = environment().library
if library is not None:
    if not library.is_file():
        raise FileNotFoundError(f"PAGEFLEET_CPU_LIBRARY is {library}, which is not there")
    cpu.LIBRARY = library


@pytest.fixture
def lib() -> cpu.CpuKernels:
    if not cpu.LIBRARY.is_file():  # one that is there and does not load is a failure
        pytest.skip("the CPU kernels are not built here: python build_scripts/cpu.py")
    return cpu.load()


@pytest.fixture(params=ISAS)
def isa(lib: cpu.CpuKernels, request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set's kernels in turn, on two threads."""
    threads = lib.num_threads
    try:
        lib.force_isa(request.param)
    except cpu.KernelError as error:
        pytest.skip(str(error))
    lib.set_num_threads(2)
    yield request.param
    lib.force_isa(None)
    lib.set_num_threads(threads)
