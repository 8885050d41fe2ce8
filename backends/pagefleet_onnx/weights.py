"""A segment's weights as its graph has them: dense tensors below each other, or GGUF's blocks in MatMulNBits' order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagefleet.backend import HostTensor, WeightSource
from pagefleet.model import ModelSpec
from pagefleet.torch_runner.host_tensors import bits, dense
from pagefleet_onnx.graphs import BITS, BLOCK, SegmentGraph, Weight


class SegmentSource:
    """One segment's graph, in the formats that its weights come in, and the weights."""

    def __init__(self, model: ModelSpec, weights: WeightSource, index: int) -> None:
        self._weights = weights
        self._matrices: dict[str, HostTensor] = {}  # read already
        self.graph = SegmentGraph(model, index, self._format_of)

    def initialisers(self) -> dict[str, Tensor]:
        """Of all the graph's weights."""
        values: dict[str, Tensor] = {}
        for weight in self.graph.weights:
            tensors = [self._matrices.get(name) or self._weights.read(name) for name in weight.tensors]
            values |= initialisers(weight, tensors)
        return values

    def _format_of(self, name: str) -> str:
        self._matrices[name] = self._weights.read(name)
        return self._matrices[name].dtype if self._matrices[name].dtype in BITS else "float32"


def initialisers(weight: Weight, tensors: Sequence[HostTensor]) -> dict[str, Tensor]:
    """The tensors of `weight.initialisers()`, made of those it is made of."""
    if weight.format in BITS:
        parts = [_split(tensor, weight.format) for tensor in tensors]
        values = [torch.cat([part[i] for part in parts]) for i in range(2)]
    else:
        values = [dense(tensors, torch.float32, torch.device("cpu"))]
    named = zip(weight.initialisers().items(), values, strict=True)
    return {name: value.view(shape) for (name, (_, shape)), value in named}


def _split(tensor: HostTensor, format: str) -> tuple[Tensor, Tensor]:
    """Quants uint8 [blocks, bytes] and scales float32 [blocks] of a matrix in Q4_0 or Q8_0.

    A block of either is a float16 scale, then 32 values: bytes 0 to 127 and -128 to -1, which become value + 128; or
    nibbles of value + 8, the low ones of 16 bytes before the high ones, which become neighbours.
    """
    blocks = bits(tensor).numpy().reshape(-1, 2 + BLOCK * BITS[format] // 8)
    scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32).reshape(-1)
    quants = blocks[:, 2:]
    if format == "Q8_0":
        quants = quants ^ np.uint8(128)
    else:
        values = np.concatenate([quants & 15, quants >> 4], axis=1)
        quants = values[:, ::2] | values[:, 1::2] << 4
    return torch.from_numpy(np.ascontiguousarray(quants)), torch.from_numpy(scales)
