"""Weights: from a folder of safetensors, a GGUF file or a hub name to a checked `Checkpoint`.

Files are memory-mapped and never unpickled; this package imports no torch.
"""

from __future__ import annotations

from pagefleet.weights.checkpoint import Checkpoint, open_checkpoint
from pagefleet.weights.files import CheckpointError
from pagefleet.weights.forms import DenseWeights, Int4Weights, Int8Weights

__all__ = ["Checkpoint", "CheckpointError", "DenseWeights", "Int4Weights", "Int8Weights", "open_checkpoint"]
