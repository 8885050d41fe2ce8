"""The host sampler with the compiled kernels: a step's rows are drawn by all threads, without a sort."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from pagefleet.backend import Sampler
from pagefleet_kernels.cpu import CpuKernels


class CpuSampler(Sampler):
    def __init__(self, kernels: CpuKernels) -> None:
        self.kernels = kernels

    def mask(self, logits: NDArray[np.float32], masks: NDArray[np.int32]) -> None:
        self.kernels.mask(torch.from_numpy(logits), torch.from_numpy(masks))

    def draw(
        self,
        logits: NDArray[np.float32],
        temperature: NDArray[np.float32],
        top_k: NDArray[np.int32],
        top_p: NDArray[np.float32],
        min_p: NDArray[np.float32],
        uniforms: NDArray[np.float64],
    ) -> NDArray[np.int32]:
        columns = (torch.from_numpy(column) for column in (temperature, top_k, top_p, min_p, uniforms))
        return self.kernels.sample(torch.from_numpy(logits), *columns).numpy()
