"""Runs a `ModelSpec` on any torch device: `TorchBackend` with the device's `Ops`."""

from pagefleet.torch_runner.backend import TorchBackend
from pagefleet.torch_runner.ops import Ops, ReferenceOps, op

__all__ = ["Ops", "ReferenceOps", "TorchBackend", "op"]
