"""A torch device that brings two ops of its own and takes the rest from the shared runner.

It stands for an accelerator with an attention kernel: it pages blocks of 16 tokens only, cannot copy or export them,
wants no padding, and reads the cache block by block with an online softmax (Milakov and Gimelshein 2018,
arXiv:1805.02867), where the reference gathers all keys first. Its tensors are CPU tensors: a torch device of its own
name needs C++, and would change nothing here but the device string.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagefleet.backend import ForwardBatch, KVLayout, ModelSpec
from pagefleet.torch_runner.backend import TorchBackend
from pagefleet.torch_runner.ops import ReferenceOps, op
from pagefleet.torch_runner.plan import BatchPlan, plan_writes
from pagefleet_toy10 import TRAITS


class ToyBackend(TorchBackend):
    def __init__(self) -> None:
        super().__init__("cpu", ToyOps(), TRAITS)


@dataclass(frozen=True, slots=True)
class ToyPlan(BatchPlan):
    """Where to write, as for any torch device, and the batch itself, to read by."""

    batch: ForwardBatch


class ToyOps(ReferenceOps):
    def plan(self, batch: ForwardBatch, model: ModelSpec, layout: KVLayout, device: torch.device) -> BatchPlan:
        return ToyPlan(*plan_writes(batch, layout, device), batch)

    @op
    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = x if residual is None else x + residual
        wide = residual.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return scaled.to(x.dtype) * weight, residual

    @op
    def attention(self, q: Tensor, cache: Tensor, plan: BatchPlan, window: int | None, scale: float) -> Tensor:
        assert isinstance(plan, ToyPlan)
        batch, out = plan.batch, torch.zeros_like(q)
        for row in range(batch.num_rows):
            own = slice(int(batch.query_starts[row]), int(batch.query_starts[row + 1]))
            positions = torch.from_numpy(batch.positions[own])
            table, length = batch.block_tables[row].tolist(), int(batch.seq_lens[row])
            out[own] = _attend(q[own].float() * scale, positions, cache, table, length, window).to(q.dtype)
        return out.flatten(1)


def _attend(q: Tensor, positions: Tensor, cache: Tensor, table: list[int], length: int, window: int | None) -> Tensor:
    """One row: q [Q, H, D] float32 and scaled, against its blocks one after the other."""
    num_kv_heads, block_size, head_dim = cache.shape[-3:]
    q = q.view(len(q), num_kv_heads, -1, head_dim)
    highest, total, mixed = q.new_full(q.shape[:3], -1e30), q.new_zeros(q.shape[:3]), torch.zeros_like(q)
    for start in range(0, length, block_size):
        block = cache[:, table[start // block_size], :, : length - start].float()  # only slots that hold a token
        scores = torch.einsum("qkgd,knd->qkgn", q, block[0])
        distance = positions[:, None] - torch.arange(start, start + block.shape[2])
        hidden = (distance < 0) | (distance >= (window or length))
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        higher = torch.maximum(highest, scores.amax(-1))
        shrink, weights = torch.exp(highest - higher), torch.exp(scores - higher[..., None])
        total = total * shrink + weights.sum(-1)
        mixed = mixed * shrink[..., None] + torch.einsum("qkgn,knd->qkgd", weights, block[1])
        highest = higher
    return (mixed / total[..., None]).flatten(1, 2)
