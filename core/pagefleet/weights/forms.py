"""The form in which a backend is handed a checkpoint's tensors: as stored, dense, or quantised on the way.

Each form is a `WeightSource` over another; tensors are converted one at a time, when they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pagefleet.backend import HostTensor, WeightSource
from pagefleet.weights import gguf_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

GGML_BLOCK = 32  # values of a block of Q4_0 and Q8_0
STRIP = 1 << 20  # values converted at a time: a vocabulary's matrix is not held in float32


class DenseWeights:
    """A source without quantised tensors: their values in float32 instead."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def read(self, name: str) -> HostTensor:
        tensor = self._source.read(name)
        if tensor.dequantise is None:
            return tensor
        values = np.ascontiguousarray(tensor.numpy(), np.float32)
        return replace(tensor, dtype="float32", data=values.reshape(-1).view(np.uint8), dequantise=None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)


class Int8Weights:
    """A source whose matrices are int8, each output (row) with the scale that makes its largest value 127."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def read(self, name: str) -> HostTensor:
        tensor = self._source.read(name)
        if len(tensor.shape) != 2:
            return tensor
        return replace(tensor, dtype="int8", data=quantise_rows(tensor), dequantise=dequantise_rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)


class Int4Weights:
    """A source whose matrices are ggml blocks of 32 values: Q4_0 in the layers, Q8_0 for embedding and head.

    A matrix whose rows are no whole blocks is left as it is.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def read(self, name: str) -> HostTensor:
        tensor = self._source.read(name)
        if len(tensor.shape) != 2 or tensor.shape[1] % GGML_BLOCK:
            return tensor
        dtype = "Q4_0" if name.startswith("layers.") else "Q8_0"
        if tensor.dtype == dtype:
            return tensor
        return replace(tensor, dtype=dtype, data=quantise_blocks(tensor, dtype), dequantise=gguf_file.dequantise)

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)


def quantise_blocks(tensor: HostTensor, dtype: str) -> NDArray[np.uint8]:
    """The tensor's rows as blocks of a ggml type, as the gguf library quantises them."""
    import gguf

    kind = gguf.GGMLQuantizationType[dtype]
    step = max(1, STRIP // tensor.shape[1])
    strips = (tensor.rows(start, min(start + step, tensor.shape[0])) for start in range(0, tensor.shape[0], step))
    rows: NDArray[np.uint8] = np.concatenate([gguf.quants.quantize(strip.numpy(), kind) for strip in strips])
    return rows.reshape(-1)


def quantise_rows(tensor: HostTensor) -> NDArray[np.uint8]:
    """Rows [n, 4 + k] of the format "int8": a float32 scale, then round(value / scale), ties to even."""
    outputs, inputs = tensor.shape
    rows = np.empty((outputs, 4 + inputs), np.uint8)
    step = max(1, STRIP // inputs)
    for start in range(0, outputs, step):
        part = rows[start : start + step]
        values = tensor.rows(start, start + len(part)).numpy()
        scale = np.abs(values).max(1, keepdims=True) / np.float32(127)
        quantised = np.rint(values / np.where(scale > 0, scale, np.float32(1)))
        part[:, :4] = scale.astype("<f4").view(np.uint8)
        part[:, 4:] = np.clip(quantised, -127, 127).astype(np.int8).view(np.uint8)
    return rows.reshape(-1)


def dequantise_rows(tensor: HostTensor) -> NDArray[np.float32]:
    """The values of a tensor of the format "int8": float32 in `tensor.shape`."""
    rows = tensor.data.reshape(tensor.shape[0], 4 + tensor.shape[1])
    scales: NDArray[np.float32] = np.ascontiguousarray(rows[:, :4]).view("<f4")
    return rows[:, 4:].view(np.int8) * scales
