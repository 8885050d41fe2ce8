"""TracedOps: a device's ops, one after the other, each telling what it computed under the names of `Backend.trace`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pagefleet.backend import ForwardBatch, HostTensor, KVLayout, Observe
from pagefleet.model import ModelSpec
from pagefleet.torch_runner.layer import Norms, Weight
from pagefleet.torch_runner.ops import Ops
from pagefleet.torch_runner.plan import BatchPlan, to_device

LAYER = ("attn_norm", "", "q", "attention", "o", "mlp_norm", "gated", "down")
"""What `Ops.layers` calls in a layer; q, k and v are told of when they have been turned and written."""


class TracedOps(Ops):
    """Stands in for `ops` for one batch. Layers are run op by op, even where `ops` has them in one call."""

    def __init__(self, ops: Ops, observe: Observe, model: ModelSpec, batch: ForwardBatch, layout: KVLayout) -> None:
        super().__init__()
        self.ops, self.observe, self.batch, self.layout = ops, observe, batch, layout
        self.ledger = ops.ledger
        self._names = _names(model.num_layers)

    def _told(self, value: Tensor) -> Tensor:
        """The value of the op that comes next."""
        name = next(self._names)
        if not name.endswith("."):
            self.observe(name, value.flatten(1).float().cpu().numpy())
        return value

    def pack(self, parts: Sequence[HostTensor], dtype: torch.dtype, device: torch.device) -> Weight:
        return self.ops.pack(parts, dtype, device)

    def plan(self, batch: ForwardBatch, model: ModelSpec, layout: KVLayout, device: torch.device) -> BatchPlan:
        return self.ops.plan(batch, model, layout, device)

    def embed(self, tokens: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
        return self._told(self.ops.embed(tokens, weight, dtype))

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        return self._told(self.ops.linear(x, weight, bias))

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        return self.ops.logits(x, weight)

    def gated_linear(self, x: Tensor, weight: Weight, bias: Tensor | None, activation: str) -> Tensor:
        return self._told(self.ops.gated_linear(x, weight, bias, activation))

    def add_rms_norm(self, residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, residual = self.ops.add_rms_norm(residual, x, weight, eps)
        return self._told(normed), residual

    def rope_and_write(
        self, qkv: Tensor, norms: Norms | None, rotary: Tensor, cache: Tensor, plan: BatchPlan
    ) -> Tensor:
        name = next(self._names).removesuffix("q")
        q = self.ops.rope_and_write(qkv, norms, rotary, cache, plan)
        self.observe(name + "q", q.flatten(1).float().cpu().numpy())
        slots = to_device(self.batch.slots, cache.device).long()
        block, offset = slots.clamp(min=0) // self.layout.block_size, slots.clamp(min=0) % self.layout.block_size
        for part, kind in zip(cache, "kv", strict=True):
            rows = _values(part[block, :, offset], self.layout)
            self.observe(name + kind, rows.masked_fill((slots < 0)[:, None, None], 0).flatten(1).cpu().numpy())
        return q

    def attention(self, q: Tensor, cache: Tensor, plan: BatchPlan, window: int | None, scale: float) -> Tensor:
        return self._told(self.ops.attention(q, cache, plan, window, scale))


def _names(num_layers: int) -> Iterator[str]:
    yield "embed"
    for layer in range(num_layers):
        for name in LAYER:
            yield f"layers.{layer}.{name}"
    yield "norm"


def _values(rows: Tensor, layout: KVLayout) -> Tensor:
    """Rows of the cache [T, K, row_size] in float32 [T, K, head_dim]."""
    if layout.dtype != "int8":
        return rows.float()
    scale = rows[..., layout.head_dim :].contiguous().view(torch.float32)
    return rows[..., : layout.head_dim].float() * scale
