"""Tensors that several tests of kernels are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from pagefleet.backend import HostTensor


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normally distributed, the same for a seed in every dtype but for rounding."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def host(tensor: Tensor) -> HostTensor:
    """The tensor as a checkpoint has it."""
    name = str(tensor.dtype).removeprefix("torch.")
    data = tensor.contiguous().view(torch.uint8).reshape(-1).numpy()
    return HostTensor("w", name, tuple(tensor.shape), data)
