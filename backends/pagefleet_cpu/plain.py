"""The ops of a CPU without compiled kernels: half-width weights are multiplied in float32, widened a strip at a time.

torch's own half-width product adds in an order that depends on the number of rows (oneDNN, AMX), or is 2 to 5 times
slower than this (a processor without bfloat16). What is given up: where there is AMX, its speed in prefill.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pagefleet.torch_runner.layer import Weight
from pagefleet.torch_runner.ops import ReferenceOps, op

STRIP = 1 << 20  # weights widened at a time: 4 MiB of float32 stay in the second-level cache


class PlainOps(ReferenceOps):
    tile_bytes = 1 << 20  # what the second-level cache holds

    @op
    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        if weight.dtype == torch.float32:
            return functional.linear(x, weight, bias)
        out = x.new_empty(len(x), len(weight))
        wide = x.float()
        rows = max(1, STRIP // weight.shape[1])
        for strip, part in zip(weight.split(rows), out.split(rows, 1), strict=True):
            part.copy_(functional.linear(wide, strip.float()))
        return out if bias is None else out.add_(bias)
