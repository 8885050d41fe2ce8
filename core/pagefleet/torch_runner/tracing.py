"""TracedOps: a device's ops, one after the other, each telling what it computed, under the names of `Backend.trace`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagefleet.backend import ForwardBatch, HostTensor, KVLayout, Observe
from pagefleet.model import ModelSpec
from pagefleet.torch_runner.layer import Norms, Weight
from pagefleet.torch_runner.ops import Ops
from pagefleet.torch_runner.plan import Plan, to_device

LAYER = ("attn_norm", "", "q", "attention", "o", "mlp_norm", "gated", "down")
"""What `Ops.layers` calls in a layer; q, k and v are told of when they have been turned and written."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Tells `observe` of one batch's values."""

    observe: Observe
    batch: ForwardBatch
    layout: KVLayout

    def tell(self, name: str, value: Tensor) -> None:
        self.observe(name, value.flatten(1).float().cpu().numpy())

    def tell_written(self, prefix: str, q: Tensor, cache: Tensor) -> None:
        """Of a layer's turned queries [T, H, D], and of what its cache has for the batch's tokens."""
        self.tell(prefix + "q", q)
        slots = to_device(self.batch.slots, cache.device).long()
        block, offset = slots.clamp(min=0) // self.layout.block_size, slots.clamp(min=0) % self.layout.block_size
        for part, kind in zip(cache, "kv", strict=True):
            rows = _values(part[block, :, offset], self.layout)
            self.tell(prefix + kind, rows.masked_fill((slots < 0)[:, None, None], 0))


class TracedOps(Ops):
    """Stands in for `ops` for one batch. Layers are run op by op, even where `ops` has them in one call."""

    def __init__(self, ops: Ops, watch: Watch, num_layers: int) -> None:
        super().__init__()
        self.ops, self.watch = ops, watch
        self.ledger = ops.ledger
        self._names = _names(num_layers)

    def _told(self, value: Tensor) -> Tensor:
        """The value of the op that comes next."""
        name = next(self._names)
        if not name.endswith("."):
            self.watch.tell(name, value)
        return value

    def pack(self, parts: Sequence[HostTensor], dtype: torch.dtype, device: torch.device) -> Weight:
        return self.ops.pack(parts, dtype, device)

    def plan(self, batch: ForwardBatch, model: ModelSpec, layout: KVLayout, device: torch.device) -> Plan:
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

    def rope_and_write(self, qkv: Tensor, norms: Norms | None, rotary: Tensor, cache: Tensor, plan: Plan) -> Tensor:
        prefix = next(self._names).removesuffix("q")
        q = self.ops.rope_and_write(qkv, norms, rotary, cache, plan)
        self.watch.tell_written(prefix, q, cache)
        return q

    def attention(self, q: Tensor, cache: Tensor, plan: Plan, window: int | None, scale: float) -> Tensor:
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
