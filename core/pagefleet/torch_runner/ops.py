"""The operations a decoder is made of, and their plain torch reference.

A device inherits `ReferenceOps` and overrides only what it has something faster for, each method marked `@op` so that
the ledger knows which implementation served. The reference runs on any torch device, and on a CPU in a fixed order of
additions per token: a token's result has the same bits whatever else is in the batch. That rests on

- matrix products over a multiple of 8 rows giving each row the same bits (the engine pads tokens, `attention` pads
  its query rows), and over at most `KEY_TILE` keys, the tiles being added one after another;
- exp, tanh and erf, which torch computes alike wherever an element lies (silu, gelu and sigmoid it does not).

This module knows tensors, where they are paged, and what a layer does with them; it does not know models' files.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from pagefleet.backend import ForwardBatch, HostTensor, KVLayout
from pagefleet.model import ModelSpec
from pagefleet.torch_runner.host_tensors import dense
from pagefleet.torch_runner.layer import Layer, Norms, Weight
from pagefleet.torch_runner.plan import KEY_TILE, BatchPlan, Plan, Tile, TilePlan, plan_tiles, plan_writes

ROW_MULTIPLE = 8  # query rows of a matrix product are padded to it: fewer take other kernels, with other bits

_Self = TypeVar("_Self", bound="Ops")
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def op(
    implementation: Callable[Concatenate[_Self, _Args], _Result],
) -> Callable[Concatenate[_Self, _Args], _Result]:
    """Mark a method as an implementation of the op it is named after: each call is counted in `Ops.ledger`."""
    name, served_by = implementation.__name__, implementation.__qualname__.partition(".")[0]

    @functools.wraps(implementation)
    def counted(self: _Self, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        self.ledger[name, served_by] += 1
        return implementation(self, *args, **kwargs)

    return counted


class Ops(ABC):
    """What a decoder asks of a device.

    T tokens, H query heads, K key heads, D head_dim. A layer's cache is [2 (key, value), num_blocks + 1, K,
    block_size, D]; its last block is zeros and is never written.
    """

    vector_dtype: torch.dtype | None = None  # of norms and biases; None: the model's

    def __init__(self) -> None:
        self.ledger: Counter[tuple[str, str]] = Counter()  # (op, implementation) -> calls

    def close(self) -> None:
        """Let go of all that is kept of a model. Others may follow."""

    @abstractmethod
    def pack(self, parts: Sequence[HostTensor], dtype: torch.dtype, device: torch.device) -> Weight:
        """The matrices [out, in] of `parts`, below each other, as one weight of `embed`, `linear` and `logits`.

        A part in a format that the ops multiply with (`Traits.weight_formats`) keeps its bits; others become `dtype`.
        """

    @abstractmethod
    def plan(self, batch: ForwardBatch, model: ModelSpec, layout: KVLayout, device: torch.device) -> Plan:
        """Whatever `rope_and_write` and `attention` want to know of a batch, worked out once a step."""

    @abstractmethod
    def embed(self, tokens: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
        """Rows of `weight` [vocab_size, hidden] for `tokens` int32 [T], in `dtype`: [T, hidden]."""

    @abstractmethod
    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """x [T, in] @ weight [out, in]^T + bias [out]: [T, out]."""

    @abstractmethod
    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        """x [T, in] @ weight [vocab_size, in]^T in float32: [T, vocab_size]."""

    @abstractmethod
    def gated_linear(self, x: Tensor, weight: Weight, bias: Tensor | None, activation: str) -> Tensor:
        """activation(g) * u of [g, u] = linear(x, weight, bias): [T, out / 2]. Activations are those of `ModelSpec`."""

    @abstractmethod
    def add_rms_norm(self, residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """s = residual + x (None: 0), each [T, hidden]: (s / sqrt(mean(s^2) + eps) * weight, s).

        In float32 inside. The memory of `residual` may be that of s afterwards.
        """

    @abstractmethod
    def rope_and_write(self, qkv: Tensor, norms: Norms | None, rotary: Tensor, cache: Tensor, plan: Plan) -> Tensor:
        """Normalise and turn queries and keys, write keys and values to their slots, return the queries [T, H, D].

        qkv [T, H + 2 K, D]. rotary float32 [T, 2 (cos, sin), rotary_dim] has the signs of "rotate half",
        x * cos + roll(x, rotary_dim / 2) * sin; dimensions from rotary_dim on stay as they are.
        """

    @abstractmethod
    def attention(self, q: Tensor, cache: Tensor, plan: Plan, window: int | None, scale: float) -> Tensor:
        """Causal attention of q [T, H, D] over its rows' cached keys, within `window` positions: [T, H * D]."""

    def layers(
        self,
        residual: Tensor,
        x: Tensor | None,
        layers: Sequence[Layer],
        model: ModelSpec,
        rotary: Tensor,
        kv: Tensor,
        plan: Plan,
    ) -> tuple[Tensor, Tensor | None]:
        """Decoder layers of `residual` + x (None: 0), each [T, hidden]: the new residual, and the x yet to be added.

        `kv` [layers, ...] has the cache of each. One op after the other, for a device that has nothing better.
        """
        for layer, cache in zip(layers, kv, strict=True):
            x, residual = self.add_rms_norm(residual, x, layer.attn_norm, model.norm_eps)
            qkv = self.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, model.head_dim)
            q = self.rope_and_write(qkv, layer.qk_norms, rotary, cache, plan)
            x = self.linear(self.attention(q, cache, plan, layer.window, model.attention_scale), layer.o, layer.o_bias)
            x, residual = self.add_rms_norm(residual, x, layer.mlp_norm, model.norm_eps)
            x = self.gated_linear(x, layer.gate_up, layer.gate_up_bias, model.activation)
            x = self.linear(x, layer.down, layer.down_bias)
        return residual, x


class ReferenceOps(Ops):
    """Every op in plain torch, for any device and dtype."""

    tile_bytes = 64 << 20  # of keys that attention gathers at a time; no more than a fast cache holds, if there is one

    def plan(self, batch: ForwardBatch, model: ModelSpec, layout: KVLayout, device: torch.device) -> Plan:
        tiles = plan_tiles(batch, model, layout, device, self.tile_bytes)
        return TilePlan(*plan_writes(batch, layout, device), tiles, model.attention_soft_cap)

    def pack(self, parts: Sequence[HostTensor], dtype: torch.dtype, device: torch.device) -> Weight:
        return dense(parts, dtype, device)

    @op
    def embed(self, tokens: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
        return functional.embedding(tokens, weight).to(dtype)

    @op
    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        return self.linear(x, weight, None).float()

    def gated_linear(self, x: Tensor, weight: Weight, bias: Tensor | None, activation: str) -> Tensor:
        return self.gate(self.linear(x, weight, bias), activation)

    @op
    def add_rms_norm(self, residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = residual if x is None else residual + x
        return _rms_norm(residual, weight, eps), residual

    @op
    def rope_and_write(self, qkv: Tensor, norms: Norms | None, rotary: Tensor, cache: Tensor, plan: Plan) -> Tensor:
        rotary_dim, num_kv_heads, writes = rotary.shape[-1], cache.shape[2], cast("BatchPlan", plan)
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        qk, v = qkv.split([num_heads + num_kv_heads, num_kv_heads], 1)
        if norms is not None:
            q, k = qk.split([num_heads, num_kv_heads], 1)
            qk = torch.cat([_rms_norm(q, norms.q, norms.eps), _rms_norm(k, norms.k, norms.eps)], 1)
        cos, sin = rotary[:, None].unbind(2)
        turning, still = qk[..., :rotary_dim].float(), qk[..., rotary_dim:]
        turned = (turning * cos).add_(turning.roll(rotary_dim // 2, -1).mul_(sin)).to(qk.dtype)
        qk = torch.cat([turned, still], -1) if still.shape[-1] else turned
        for part, new in zip(cache, (qk[:, num_heads:], v), strict=True):
            rows = new.index_select(0, writes.written).to(cache.dtype)
            part.view(-1, v.shape[-1]).index_copy_(0, writes.cache_rows, rows.view(-1, v.shape[-1]))
        return qk[:, :num_heads]

    @op
    def attention(self, q: Tensor, cache: Tensor, plan: Plan, window: int | None, scale: float) -> Tensor:
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        own = cast("TilePlan", plan)
        for tile in own.tiles:
            queries = q.index_select(0, tile.tokens)
            attended = _attend(queries, cache, tile, tile.masks[window], scale, own.soft_cap)
            out.index_copy_(0, tile.tokens, attended.to(q.dtype))
        return out.flatten(1)

    @op
    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(g) * u of gate_up [T, 2 * n] = [g, u]: [T, n]."""
        gate, up = gate_up.float().chunk(2, -1)
        match activation:
            case "silu":
                denominator = torch.neg(gate).exp_().add_(1)
                gate = torch.div(gate, denominator, out=denominator)
            case "gelu":
                gate = torch.erf(gate * math.sqrt(0.5)).add_(1).mul_(gate).mul_(0.5)
            case "gelu_tanh":
                cubic = (gate * gate).mul_(gate).mul_(0.044715).add_(gate)
                gate = torch.tanh(cubic.mul_(math.sqrt(2 / math.pi))).add_(1).mul_(gate).mul_(0.5)
            case _:
                raise ValueError(f"unknown activation {activation!r}; known: silu, gelu, gelu_tanh")
        return gate.mul_(up).to(gate_up.dtype)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], None, eps) * weight


def _attend(q: Tensor, cache: Tensor, tile: Tile, mask: Tensor, scale: float, soft_cap: float | None) -> Tensor:
    """softmax(cap(scale * q k^T) + mask) v of one tile in float32: q [P * Q, H, D] -> [P * Q, H, D].

    The H / K query heads that share a key head are rows of one product, so keys are not repeated.
    """
    num_kv_heads, head_dim = cache.shape[2], cache.shape[4]
    k, v = (_gather(part, tile).view(tile.num_pieces * num_kv_heads, -1, head_dim) for part in cache)
    q = (q.float() * scale).view(tile.num_pieces, -1, num_kv_heads, q.shape[1] // num_kv_heads, head_dim)
    by_head = q.transpose(1, 2)  # [P, K, Q, H / K, D]
    rows = by_head.reshape(len(k), -1, head_dim)
    num_rows = rows.shape[1]
    scores = torch.bmm(functional.pad(rows, (0, 0, 0, -num_rows % ROW_MULTIPLE)), k.transpose(1, 2))
    if soft_cap is not None:
        scores = torch.tanh(scores.div_(soft_cap)).mul_(soft_cap)
    scores[:, :num_rows].view(*by_head.shape[:-1], -1).add_(mask)
    out = _weighted_sum(torch.softmax(scores, -1), v)[:, :num_rows]
    return out.reshape(by_head.shape).transpose(1, 2).reshape(-1, q.shape[2] * q.shape[3], head_dim)


def _gather(part: Tensor, tile: Tile) -> Tensor:
    """The tile's keys (or values) in float32; what a block's former owner left behind (NaN, even) becomes zero."""
    blocks = part.flatten(0, 1).flatten(1).index_select(0, tile.blocks).float()
    return blocks.view(-1, part.shape[-1]).index_fill_(0, tile.unwritten, 0)


def _weighted_sum(weights: Tensor, v: Tensor) -> Tensor:
    """weights [B, M, N] @ v [B, N, D], `KEY_TILE` keys at a time."""
    tiles = list(zip(weights.split(KEY_TILE, -1), v.split(KEY_TILE, 1), strict=True))
    out = torch.bmm(*tiles[0])
    for tile in tiles[1:]:
        out.baddbmm_(*tile)
    return out
