"""Registers `accelerator`: the shared torch runner with its reference ops, on whatever GPU torch finds.

Slow on purpose: it holds the torch runner to its promise that it runs on any torch device.
"""

from __future__ import annotations

from pathlib import Path

from pagefleet.backend import Backend, BackendInfo, DeviceInfo, Probe, Traits
from pagefleet.hookspecs import hookimpl

TRAITS = Traits(dtypes=("float32", "bfloat16", "float16"), copies_blocks=True, exchanges_blocks=True)
DRIVERS = {"NVIDIA": "/dev/nvidia0", "AMD": "/dev/kfd"}


def probe() -> Probe:
    """Usable where a GPU driver has its device file."""
    found = [DeviceInfo(name, detail=path) for name, path in DRIVERS.items() if Path(path).exists()]
    if not found:
        return Probe(False, f"no GPU driver: none of {', '.join(DRIVERS.values())} exists")
    return Probe(True, f"{found[0].name} driver at {found[0].detail}", tuple(found))


def load(index: int) -> Backend:
    import torch

    from pagefleet.torch_runner.backend import TorchBackend
    from pagefleet.torch_runner.ops import ReferenceOps

    torch.backends.cuda.matmul.fp32_precision = "ieee"  # float32 means float32
    return TorchBackend(f"cuda:{index}", ReferenceOps(), TRAITS)


@hookimpl
def pagefleet_backends() -> list[BackendInfo]:
    """Negative priority: never the automatic choice."""
    return [BackendInfo("accelerator", probe, load, TRAITS, priority=-30)]
