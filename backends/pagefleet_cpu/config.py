"""What the environment says about the CPU backend. The only file of this package that reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pagefleet.backend import BackendError
from pagefleet_kernels import ISAS

ATTENTIONS = ("native", "ipex")


@dataclass(frozen=True, slots=True)
class CpuConfig:
    """None: the backend decides."""

    threads: int | None = None  # PAGEFLEET_CPU_THREADS, then OMP_NUM_THREADS
    threads_variable: str | None = None  # which of them said so
    isa: str | None = None  # PAGEFLEET_CPU_ISA: run these kernels, not the best this processor has
    library: Path | None = None  # PAGEFLEET_CPU_LIBRARY: these kernels, not those of pagefleet_kernels
    attention: str = "native"  # PAGEFLEET_CPU_ATTENTION


def environment(variables: Mapping[str, str] | None = None) -> CpuConfig:
    """Read the variables of the CPU backend (of the process, unless others are given)."""
    variables = os.environ if variables is None else variables
    threads, threads_variable = _threads(variables)
    library = variables.get("PAGEFLEET_CPU_LIBRARY", "").strip()
    return CpuConfig(
        threads=threads,
        threads_variable=threads_variable,
        isa=_choice(variables, "PAGEFLEET_CPU_ISA", ISAS),
        library=Path(library) if library else None,
        attention=_choice(variables, "PAGEFLEET_CPU_ATTENTION", ATTENTIONS) or "native",
    )


def _threads(variables: Mapping[str, str]) -> tuple[int | None, str | None]:
    own = variables.get("PAGEFLEET_CPU_THREADS", "").strip()
    if own:
        if not own.isdecimal() or int(own) < 1:
            raise BackendError(f"PAGEFLEET_CPU_THREADS is {own!r}; it must be an integer of at least 1")
        return int(own), "PAGEFLEET_CPU_THREADS"
    outermost = variables.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # a list is for nested regions
    if outermost.isdecimal() and int(outermost) > 0:  # else OpenMP ignores it, too
        return int(outermost), "OMP_NUM_THREADS"
    return None, None


def _choice(variables: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str | None:
    value = variables.get(name, "").strip()
    if value and value not in allowed:
        raise BackendError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
    return value or None
