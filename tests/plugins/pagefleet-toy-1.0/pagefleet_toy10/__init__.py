"""Registers the toy backend. Importing this, and probing, imports no torch."""

from __future__ import annotations

from importlib.util import find_spec

from pagefleet.backend import Backend, BackendInfo, DeviceInfo, Probe, Traits
from pagefleet.hookspecs import hookimpl

TRAITS = Traits(dtypes=("float32", "bfloat16"), block_sizes=(16,))


def probe() -> Probe:
    """Usable where torch is installed: found, not imported."""
    if find_spec("torch") is None:
        return Probe(False, "torch is not installed: pip install torch")
    return Probe(True, "torch is installed", (DeviceInfo("toy10", detail="the CPU under another name"),))


def load(index: int) -> Backend:
    """A fresh backend; there is one device."""
    from pagefleet_toy10.backend import ToyBackend

    return ToyBackend()


@hookimpl
def pagefleet_backends() -> list[BackendInfo]:
    """Negative priority: never the automatic choice."""
    return [BackendInfo("toy10", probe, load, TRAITS, priority=-20, contract=">=1.0,<2")]
