"""Plans: where a batch's tokens lie in the paged cache, worked out once a step and used in every layer.

Attention works on tiles: pieces of rows with equally many query tokens, whose keys are gathered through the block
tables into one padded array. All is decided here on the host's arrays, so that the device is never waited for.

This module knows where tokens and blocks are; it does not know what is computed with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagefleet.backend import ForwardBatch, KVLayout
from pagefleet.model import ModelSpec

KEY_TILE = 128  # keys that one matrix product sums over: the order of a longer sum depends on its length
MAX_QUERIES = 128  # query tokens of a piece: longer ones compute more products that the causal mask throws away


@dataclass(frozen=True, slots=True)
class Tile:
    """P pieces of Q query tokens each, their keys padded to N (B blocks)."""

    num_pieces: int
    tokens: Tensor  # [P * Q] the query tokens' places in the batch
    blocks: Tensor  # [P * K * B] rows of a cache seen as [(num_blocks + 1) * K, block_size * D]
    unwritten: Tensor  # rows of the gathered keys, seen as [P * K * N, D], that hold nothing yet
    masks: dict[
        int | None, Tensor
    ]  # window -> what to add to the scores: [P, 1, Q, 1, N], or with ALiBi [P, K, Q, H / K, N]


class Plan:
    """What a device's ops want to know of a batch; each has its own kind."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class BatchPlan(Plan):
    """Where a batch's tokens go in the cache, as the reference writes them."""

    written: Tensor  # [W] the tokens that have a slot
    cache_rows: Tensor  # [W * K] theirs of a cache seen as [-1, D]


@dataclass(frozen=True, slots=True)
class TilePlan(BatchPlan):
    """And the tiles that the reference's attention is computed in."""

    tiles: tuple[Tile, ...]
    soft_cap: float | None = None  # of the scores, before a mask is added


@dataclass(frozen=True, slots=True)
class _Piece:
    row: int
    first_token: int
    num_queries: int
    num_keys: int  # the keys its last query token sees
    padded_keys: int


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A host array on the device, without waiting for the device."""
    return torch.from_numpy(array).to(device, non_blocking=True)


def plan_writes(batch: ForwardBatch, layout: KVLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """`written` and `cache_rows` of the batch's plan."""
    written = np.flatnonzero(batch.slots >= 0)
    block, offset = np.divmod(batch.slots[written, None].astype(np.int64), layout.block_size)
    cache_rows = (block * layout.num_kv_heads + np.arange(layout.num_kv_heads)) * layout.block_size + offset
    return to_device(written, device), to_device(cache_rows.ravel(), device)


def plan_tiles(
    batch: ForwardBatch, model: ModelSpec, layout: KVLayout, device: torch.device, tile_bytes: int
) -> tuple[Tile, ...]:
    """The tiles of the batch's attention; the keys of each, and its scores, take about `tile_bytes` in float32.

    The cache holds one block more than `layout` says, of zeros: the padding of the block tables points there.
    """
    pieces = sorted(
        _cut_rows(batch, layout, tile_bytes // (4 * model.num_heads)),
        key=lambda piece: (piece.num_queries, piece.padded_keys),
    )
    groups = _group(pieces, tile_bytes // (4 * layout.num_kv_heads * layout.head_dim))
    return tuple(_tile(batch, group, model, layout, device) for group in groups)


def _cut_rows(batch: ForwardBatch, layout: KVLayout, max_scores: int) -> Iterator[_Piece]:
    """Every row's query tokens, cut so that a piece has at most about `max_scores` query-key pairs."""
    unit = math.lcm(KEY_TILE, layout.block_size)
    starts, ends = batch.query_starts[:-1].tolist(), batch.query_starts[1:].tolist()
    for row, (start, end, seq_len) in enumerate(zip(starts, ends, batch.seq_lens.tolist(), strict=True)):
        size = min(max(max_scores // seq_len, 8), MAX_QUERIES)
        for first in range(start, end, size):
            num_queries = min(size, end - first)
            num_keys = seq_len - (end - first) + num_queries
            yield _Piece(row, first, num_queries, num_keys, -(-num_keys // unit) * unit)


def _group(pieces: list[_Piece], max_keys: int) -> Iterator[list[_Piece]]:
    """Neighbours that share a tile: equally many queries, about as many keys, at most `max_keys` when padded."""
    group: list[_Piece] = []
    for piece in pieces:
        if group and (
            piece.num_queries != group[0].num_queries
            or piece.padded_keys > 2 * group[0].padded_keys
            or piece.padded_keys * (len(group) + 1) > max_keys
        ):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _tile(batch: ForwardBatch, pieces: list[_Piece], model: ModelSpec, layout: KVLayout, device: torch.device) -> Tile:
    num_queries, padded_keys = pieces[0].num_queries, pieces[-1].padded_keys
    num_keys = np.array([piece.num_keys for piece in pieces])[:, None]
    num_blocks = -(-num_keys // layout.block_size)
    tables = batch.block_tables[[piece.row for piece in pieces], : padded_keys // layout.block_size]
    blocks = np.full((len(pieces), padded_keys // layout.block_size), layout.num_blocks)  # the block of zeros
    used = np.arange(tables.shape[1]) < num_blocks
    blocks[:, : tables.shape[1]][used] = tables[used]
    block_rows = blocks[:, None] * layout.num_kv_heads + np.arange(layout.num_kv_heads)[:, None]
    keys = np.arange(padded_keys)
    unwritten = ((keys >= num_keys) & (keys < num_blocks * layout.block_size))[:, None]
    queries = np.arange(num_queries)
    positions = to_device(num_keys - num_queries + queries, device)
    return Tile(
        num_pieces=len(pieces),
        tokens=to_device((np.array([piece.first_token for piece in pieces])[:, None] + queries).ravel(), device),
        blocks=to_device(block_rows.ravel(), device),
        unwritten=to_device(np.flatnonzero(unwritten.repeat(layout.num_kv_heads, 1)), device),
        masks={window: _mask(positions, padded_keys, window, model) for window in set(model.windows)},
    )


def _mask(positions: Tensor, num_keys: int, window: int | None, model: ModelSpec) -> Tensor:
    """-inf where a key comes after the query at `positions` [P, Q] or has left its window; elsewhere 0, or ALiBi's."""
    distance = positions[:, None, :, None, None] - torch.arange(num_keys, device=positions.device)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    if model.alibi_slopes is None:
        return torch.zeros_like(hidden, dtype=torch.float32).masked_fill_(hidden, -math.inf)
    slopes = torch.tensor(model.alibi_slopes, device=positions.device).view(model.num_kv_heads, 1, -1, 1)
    return (-slopes * distance).masked_fill_(hidden, -math.inf)
