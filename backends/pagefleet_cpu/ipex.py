"""Attention by Intel's extension for PyTorch, for whoever has it: PAGEFLEET_CPU_ATTENTION=ipex. The rest is plain.

The extension ended with 2.8, for torch 2.8 and no other; its project is archived. It looks at no shape: a cache in
another layout ends the process with a segmentation fault. So every shape is checked here before it is called.
Its caches are [num_blocks, num_kv_heads, block_size, head_dim], which is what a layer's cache is made of.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from pagefleet.backend import BackendError, ForwardBatch, KVLayout
from pagefleet.model import ModelSpec
from pagefleet.torch_runner.ops import op
from pagefleet.torch_runner.plan import BatchPlan, Plan, plan_writes
from pagefleet_cpu.evidence import IPEX, NOT_IPEX, check_ipex
from pagefleet_cpu.plain import PlainOps


@dataclass(frozen=True, slots=True)
class IpexPlan(BatchPlan):
    """The batch's rows as the extension reads them. All tensors int32."""

    block_tables: Tensor  # [R, B]
    query_starts: Tensor  # [R + 1]
    key_starts: Tensor  # [R + 1]
    seq_lens: Tensor  # [R]
    num_tokens: int  # of the rows; padding follows
    max_queries: int
    max_keys: int


def load_paged_attention(
    torch_version: str = torch.__version__, import_module: Callable[[str], Any] = importlib.import_module
) -> Any:
    """The extension's `PagedAttention`; BackendError where it cannot be had. Imported here and nowhere else."""
    check_ipex(torch_version)
    try:
        return import_module(f"{IPEX}.llm.modules").PagedAttention
    except Exception as error:  # whatever an old package runs into: NameError, with transformers 5
        raise BackendError(
            f"PAGEFLEET_CPU_ATTENTION is 'ipex', but {IPEX} does not load ({error!r}): pip install {IPEX}==2.8.0, "
            f"or {NOT_IPEX}"
        ) from error


class IpexAttention(PlainOps):
    """Plain ops with the extension's attention. Its sums are its own affair: not batch-invariant."""

    def __init__(self, paged_attention: Any) -> None:
        super().__init__()
        self._paged_attention = paged_attention

    def plan(self, batch: ForwardBatch, model: ModelSpec, layout: KVLayout, device: torch.device) -> Plan:
        _check_batch(batch, layout)
        key_starts = np.concatenate([[0], np.cumsum(batch.seq_lens)])
        arrays = (batch.block_tables, batch.query_starts, key_starts, batch.seq_lens)
        return IpexPlan(
            *plan_writes(batch, layout, device),
            *(torch.from_numpy(np.ascontiguousarray(array, np.int32)) for array in arrays),
            num_tokens=int(batch.query_starts[-1]),
            max_queries=int(np.diff(batch.query_starts).max()),
            max_keys=int(batch.seq_lens.max()),
        )

    @op
    def attention(self, q: Tensor, cache: Tensor, plan: Plan, window: int | None, scale: float) -> Tensor:
        own = cast("IpexPlan", plan)
        _check_tensors(q, cache, own)
        out = torch.zeros(q.shape, dtype=q.dtype)
        if window == 1:  # which the extension takes for none: a token sees its own value
            values = cache[1].reshape(-1, q.shape[2])[own.cache_rows].view(-1, cache.shape[2], q.shape[2])
            out[own.written] = values.repeat_interleave(q.shape[1] // cache.shape[2], 1)
            return out.flatten(1)
        queries, result = q[: own.num_tokens].contiguous(), out[: own.num_tokens]
        if own.max_queries == 1:
            head_mapping = torch.arange(q.shape[1], dtype=torch.int32) // (q.shape[1] // cache.shape[2])
            self._paged_attention.single_query_cached_kv_attention(
                *(result, queries, cache[0], cache[1], head_mapping, scale, own.block_tables, own.seq_lens),
                *(cache.shape[3], own.max_keys, None, -1 if window is None else window),
            )
        else:
            self._paged_attention.flash_attn_varlen_func(
                *(result, queries, cache[0], cache[1], own.query_starts, own.key_starts, own.max_queries, own.max_keys),
                *(scale, True, own.block_tables, None, -1 if window is None else window - 1),  # keys to the left
            )
        return out.flatten(1)


def _check_batch(batch: ForwardBatch, layout: KVLayout) -> None:
    """That no row reads a block that is not there."""
    tables = batch.block_tables
    if tables.size and not 0 <= tables.min() <= tables.max() < layout.num_blocks:
        raise ValueError(f"block tables name blocks {tables.min()} to {tables.max()} of {layout.num_blocks}")
    if len(tables) != batch.num_rows or int(batch.seq_lens.max()) > tables.shape[1] * layout.block_size:
        raise ValueError(
            f"{batch.seq_lens.max()} keys do not fit block tables {tables.shape} of {layout.block_size} slots"
        )
    if np.diff(batch.query_starts).min() < 1 or np.any(np.diff(batch.query_starts) > batch.seq_lens):
        raise ValueError("every row has at least one token, and no more than its keys")


def _check_tensors(q: Tensor, cache: Tensor, plan: IpexPlan) -> None:
    """That the cache is in the extension's layout and the queries are of its kind."""
    if cache.dim() != 5 or cache.shape[0] != 2 or not cache.is_contiguous():
        raise ValueError(
            f"the cache is {tuple(cache.shape)}; it must be contiguous [2, blocks, kv_heads, block_size, dim]"
        )
    if q.dim() != 3 or q.shape[2] != cache.shape[4] or q.shape[1] % cache.shape[2] or len(q) < plan.num_tokens:
        raise ValueError(
            f"queries {tuple(q.shape)} do not go with {plan.num_tokens} tokens and a cache {tuple(cache.shape)}"
        )
    if q.dtype != cache.dtype or q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"queries are {q.dtype} and the cache {cache.dtype}; both must be one of the float types")
    if plan.block_tables.max() >= cache.shape[1]:
        raise ValueError(f"block tables name block {plan.block_tables.max()} of {cache.shape[1]}")
