"""Runs a `ModelSpec` on any torch device: `TorchBackend` with the device's `Ops`."""
