"""What the probe says of this host, from files alone: no torch, no library opened."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pagefleet.backend import BackendError
from pagefleet_cpu.config import CpuConfig
from pagefleet_kernels import ISAS

_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = {*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq"}
NEEDS = {  # flags of /proc/cpuinfo; the same that dispatch.cpp asks the processor for
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512bf16": {*_AVX512, "avx512_vnni", "avx512_bf16"},
}
IPEX, IPEX_TORCH = "intel_extension_for_pytorch", "2.8"
NOT_IPEX = "unset PAGEFLEET_CPU_ATTENTION to use pagefleet's own attention, which is faster"
NO_KERNELS = (
    "no native kernels: reference ops, several times slower; build them with `python build_scripts/cpu.py` in a "
    "checkout (g++ >= 11 or clang >= 14)"
)


def read_manifest(config: CpuConfig) -> dict[str, Any] | None:
    """How the kernels were built; {} if that is not recorded; None if there are none."""
    library = config.library or _library()
    if library is None or not library.is_file():
        return None
    try:
        return dict(json.loads(library.with_suffix(".json").read_text()))
    except (OSError, ValueError):
        return {}


def check_ipex(torch_version: str) -> None:
    """BackendError if Intel's extension does not load in this torch."""
    if torch_version.split(".")[:2] != IPEX_TORCH.split("."):
        raise BackendError(
            f"PAGEFLEET_CPU_ATTENTION is 'ipex', but this is torch {torch_version}: {IPEX} ended with 2.8 and loads in "
            f"torch {IPEX_TORCH} only; {NOT_IPEX}"
        )


def describe_kernels(config: CpuConfig, manifest: dict[str, Any] | None, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Which kernels will run and who built them, or what is lost without."""
    if config.attention == "ipex":
        return "attention by Intel's extension (PAGEFLEET_CPU_ATTENTION), all else plain torch"
    if config.library and manifest is None:
        return f"PAGEFLEET_CPU_LIBRARY is {config.library}, which is not there: {NO_KERNELS}"
    if manifest is None:
        return NO_KERNELS
    flags = cpu_flags(cpuinfo)
    built, possible = best_isa(manifest.get("units", ISAS), flags), best_isa(ISAS, flags)
    notes = [f"kernels {config.isa} (forced)" if config.isa else f"kernels {built}"]
    if built != possible and not config.isa:
        notes.append(
            f"this processor has {possible}, which the build left out (ARCH_SPECIFIC_OPTIMIZATIONS=1 builds it)"
        )
    notes.append(f"built by {manifest.get('compiler', 'an unknown compiler')}")
    if manifest.get("batch_invariant") is False:
        notes.append("fast math: not batch-invariant")
    return ", ".join(notes)


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """What the processor has, in Linux's words."""
    return set(_cpuinfo(cpuinfo, "flags").split())


def best_isa(units: Collection[str], flags: set[str]) -> str:
    """The best unit that a processor with these flags runs, of those in the library."""
    return next((isa for isa in reversed(NEEDS) if isa in units and NEEDS[isa] <= flags), "scalar")


def model_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    return _cpuinfo(cpuinfo, "model name") or platform.processor() or platform.machine() or "CPU"


def total_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0


def _library() -> Path | None:
    spec = importlib.util.find_spec("pagefleet_kernels")
    return Path(spec.origin).with_name("_cpu.so") if spec and spec.origin else None


def _cpuinfo(path: Path, field: str) -> str:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    found = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field)
    return next(found, "")
