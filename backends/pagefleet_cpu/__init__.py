"""The CPU backend's hook. Nothing heavy is imported before an engine asks for the device."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from pagefleet.backend import Backend, BackendInfo, DeviceInfo, Probe, Traits
from pagefleet.hookspecs import hookimpl

DTYPES = ("float32", "bfloat16", "float16")
TRAITS = Traits(  # with the compiled kernels
    dtypes=DTYPES,
    copies_blocks=True,
    exchanges_blocks=True,
    batch_invariant=DTYPES,
    weight_formats=("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "int8"),
    kv_dtypes=(*DTYPES, "int8"),
)
PLAIN_TRAITS = Traits(  # without them
    dtypes=DTYPES, copies_blocks=True, exchanges_blocks=True, batch_invariant=DTYPES, token_multiple=8
)


def probe() -> Probe:
    """Always usable; the evidence names the processor, its usable cores and the memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    device = DeviceInfo(name=_model_name(), memory=_total_memory(), detail=f"{cores} cores")
    return Probe(True, f"{device.name}, {cores} cores, {device.memory / 2**30:.1f} GiB of memory", (device,))


def load(index: int) -> Backend:
    """The host's processors are one device: `index` is 0."""
    from pagefleet_cpu.backend import CpuBackend

    return CpuBackend(index)


@hookimpl
def pagefleet_backends() -> list[BackendInfo]:
    return [BackendInfo(name="cpu", probe=probe, load=load, traits=TRAITS)]


def _model_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine() or "CPU"


def _total_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0
