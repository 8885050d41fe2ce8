"""PAGEFLEET_CPU_LIBRARY=build/_cpu_asan.so, say, has the kernels' tests run on that library."""

from __future__ import annotations

from pagefleet_cpu.config import environment
from pagefleet_kernels import cpu

library = environment().library
if library is not None:
    if not library.is_file():
        raise FileNotFoundError(f"PAGEFLEET_CPU_LIBRARY is {library}, which is not there")
    cpu.LIBRARY = library
