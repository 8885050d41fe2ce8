"""Registers the numpy backend. Importing this, and probing, is cheap: the backend itself is imported by `load`."""

from __future__ import annotations

import platform

from pagefleet.backend import Backend, BackendInfo, DeviceInfo, Probe, Traits
from pagefleet.hookspecs import hookimpl

TRAITS = Traits(copies_blocks=True, exchanges_blocks=True)


def probe() -> Probe:
    """Always usable: numpy is a dependency of this package."""
    return Probe(True, "numpy runs on any host", (DeviceInfo(platform.machine() or "host"),))


def load(index: int) -> Backend:
    """A fresh backend; there is one host, so any index means the same."""
    from pagefleet_numpy.backend import NumpyBackend

    return NumpyBackend()


@hookimpl
def pagefleet_backends() -> list[BackendInfo]:
    """Name the backend; its entry point carries the same name. Negative priority: never the automatic choice."""
    return [BackendInfo("numpy", probe, load, TRAITS, priority=-10)]
