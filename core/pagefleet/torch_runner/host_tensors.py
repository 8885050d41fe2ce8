"""Host tensors as torch tensors: straight from their file to their place on the device.

Needs the tensors' own size, and one tensor more where the file is quantised.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagefleet.backend import HostTensor


def dense(parts: Sequence[HostTensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values of `parts`, below each other, in `dtype`."""
    sizes = [part.shape[0] for part in parts]
    joined = torch.empty((sum(sizes), *parts[0].shape[1:]), dtype=dtype, device=device)
    for part, place in zip(parts, joined.split(sizes), strict=True):
        place.copy_(values(part))
    return joined


def values(tensor: HostTensor) -> Tensor:
    """The tensor's bytes where they lie; a quantised tensor's values in float32."""
    if tensor.dequantise is not None:
        return _borrow(tensor.numpy())
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return bits(tensor).view(dtype).view(tensor.shape)


def bits(tensor: HostTensor) -> Tensor:
    """The tensor's bytes where they lie: uint8 [num_bytes]."""
    return _borrow(np.ascontiguousarray(tensor.data))


def _borrow(array: NDArray[Any]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors; this one is only copied from
        return torch.from_numpy(array)
