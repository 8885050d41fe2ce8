"""The CPU backend's hook. Nothing heavy is imported before an engine asks for the device."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagefleet.backend import Backend, BackendError, BackendInfo, DeviceInfo, Probe, Traits
from pagefleet.hookspecs import hookimpl
from pagefleet.model import FEATURES
from pagefleet_cpu.config import CpuConfig, environment
from pagefleet_cpu.evidence import (
    best_isa,
    check_ipex,
    cpu_flags,
    describe_kernels,
    model_name,
    read_manifest,
    total_memory,
)
from pagefleet_cpu.threads import choose_num_threads
from pagefleet_kernels import ISAS

DTYPES = ("float32", "bfloat16", "float16")
TRAITS = Traits(  # with the compiled kernels
    dtypes=DTYPES,
    copies_blocks=True,
    exchanges_blocks=True,
    batch_invariant=DTYPES,
    weight_formats=("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "int8"),
    kv_dtypes=(*DTYPES, "int8"),
    model_features=FEATURES,
)
PLAIN_TRAITS = Traits(  # without them
    dtypes=DTYPES,
    copies_blocks=True,
    exchanges_blocks=True,
    batch_invariant=DTYPES,
    token_multiple=8,
    model_features=FEATURES,
)


def probe() -> Probe:
    """Usable unless a variable has a wrong value; the evidence: processor, memory, kernels and threads."""
    try:
        config = environment()
        manifest = read_manifest(config)
        check_isa(config, manifest)
        if config.attention == "ipex":
            check_ipex(importlib.metadata.version("torch"))
    except BackendError as error:
        return Probe(False, str(error))
    threads = choose_num_threads(config)
    device = DeviceInfo(model_name(), total_memory(), f"{threads.count} thread{'s' if threads.count > 1 else ''}")
    facts = (
        f"{device.name}, {device.memory / 2**30:.1f} GiB of memory",
        describe_kernels(config, manifest),
    )
    return Probe(True, "; ".join((*facts, threads.evidence)), (device,))


def check_isa(config: CpuConfig, manifest: Mapping[str, Any] | None, cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """BackendError if PAGEFLEET_CPU_ISA names kernels that this processor or this build does not have."""
    if config.isa is None or manifest is None or config.attention == "ipex" or not cpuinfo.exists():
        return  # nothing asked for, no kernels to ask it of, or no way to know before they are loaded
    built, flags = manifest.get("units", ISAS), cpu_flags(cpuinfo)
    runs = [isa for isa in ISAS if isa in built and best_isa((isa,), flags) == isa]
    if config.isa not in runs:
        lacking = "processor" if config.isa in built else "build of the kernels"
        raise BackendError(
            f"PAGEFLEET_CPU_ISA is {config.isa!r}, which this {lacking} does not have; unset it, or take one of "
            f"{', '.join(runs)}"
        )


def load(index: int) -> Backend:
    """The host's processors are one device: `index` is 0."""
    from pagefleet_cpu.backend import CpuBackend

    return CpuBackend(index)


@hookimpl
def pagefleet_backends() -> list[BackendInfo]:
    return [BackendInfo(name="cpu", probe=probe, load=load, traits=traits())]


def traits() -> Traits:
    """Of the backend as it would be loaded now."""
    try:
        config = environment()
    except BackendError:  # the probe says it
        return PLAIN_TRAITS
    if config.attention == "ipex":
        return replace(PLAIN_TRAITS, batch_invariant=(), model_features=())
    manifest = read_manifest(config)
    if manifest is None:
        return PLAIN_TRAITS
    return TRAITS if manifest.get("batch_invariant", True) else replace(TRAITS, batch_invariant=())
