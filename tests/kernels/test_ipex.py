"""Attention by Intel's extension: what it is called with, when it is refused, and its result against float64.

The extension loads in torch 2.8 only, which pagefleet is not installed with: it is stood in for by a module of the same
functions. In an environment that has the real one these tests run against it as well.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagefleet.backend import BackendError, ForwardBatch, KVLayout
from pagefleet.model import ModelSpec
from pagefleet.rope import RopeSpec
from pagefleet_cpu.ipex import IpexAttention, load_paged_attention

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {F32: 2e-6, BF16: 8e-3, F16: 1e-3}  # of the largest value
Rows = tuple[tuple[int, int], ...]  # per row, tokens computed before and tokens in this step
BATCHES: dict[str, Rows] = {
    "decode": ((70, 1), (0, 1), (16, 1), (299, 1)),
    "prefill": ((0, 5), (0, 150), (33, 40)),
    "mixed": ((0, 7), (70, 1), (130, 7), (15, 2), (0, 60)),
}


class StandIn:
    """`PagedAttention` of the extension 2.8 as it behaves, with the checks that it lacks: it would crash."""

    @staticmethod
    def single_query_cached_kv_attention(
        output: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        head_mapping: Tensor,
        scale: float,
        block_tables: Tensor,
        context_lens: Tensor,
        block_size: int,
        max_context_len: int,
        alibi_slopes: Tensor | None,
        window_size: int = -1,
    ) -> None:
        num_heads = query.shape[1]
        group = num_heads // key_cache.shape[1]
        assert head_mapping.dtype == torch.int32
        assert head_mapping.tolist() == [head // group for head in range(num_heads)]
        assert len(query) == len(context_lens)
        assert block_size == key_cache.shape[2]
        starts = torch.arange(len(query) + 1, dtype=torch.int32)
        assert max_context_len == context_lens.max()
        window = window_size if window_size > 0 else None
        StandIn._attend(
            output, query, key_cache, value_cache, starts, context_lens, scale, block_tables, alibi_slopes, window
        )

    @staticmethod
    def flash_attn_varlen_func(
        output: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        scale: float,
        is_causal: bool,
        block_tables: Tensor,
        alibi_slopes: Tensor | None,
        window_size_left: int = -1,
    ) -> None:
        assert is_causal
        assert cu_seqlens_kv.dtype == torch.int32
        assert max_seqlen_q == cu_seqlens_q.diff().max()
        assert max_seqlen_kv == cu_seqlens_kv.diff().max()
        lens = cu_seqlens_kv.diff().int()
        window = window_size_left + 1 if window_size_left > 0 else None  # beside the token itself; 0: none
        StandIn._attend(
            output, query, key_cache, value_cache, cu_seqlens_q, lens, scale, block_tables, alibi_slopes, window
        )

    @staticmethod
    def _attend(
        output: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        starts: Tensor,
        lens: Tensor,
        scale: float,
        tables: Tensor,
        alibi: Tensor | None,
        window: int | None,
    ) -> None:
        assert key_cache.shape == value_cache.shape
        assert key_cache.is_contiguous()
        assert value_cache.is_contiguous()
        _, num_kv_heads, block_size, head_dim = key_cache.shape  # the layout that the real one takes for granted
        assert query.is_contiguous()
        assert query.shape == output.shape
        assert (query.shape[1] % num_kv_heads, query.shape[2]) == (0, head_dim)
        assert query.dtype == output.dtype == key_cache.dtype
        assert starts.dtype == lens.dtype == tables.dtype == torch.int32
        assert starts[-1] == len(query)
        assert alibi is None
        for row, keys in enumerate(lens.tolist()):
            blocks = tables[row, : -(-keys // block_size)].long()
            assert blocks.max() < len(key_cache)
            k, v = (part[blocks].transpose(0, 1).flatten(1, 2)[:, :keys] for part in (key_cache, value_cache))
            start, end = int(starts[row]), int(starts[row + 1])
            output[start:end] = attend(query[start:end], k, v, scale, window).to(output.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """The last len(q) of the positions of k and v [K, N, D], in float64."""
    k, v = (part.double().repeat_interleave(q.shape[1] // len(part), 0) for part in (k, v))
    distance = torch.arange(k.shape[1] - len(q), k.shape[1])[:, None] - torch.arange(k.shape[1])
    hidden = (distance < 0) | (distance >= (window or k.shape[1]))
    scores = torch.einsum("qhd,hnd->hqn", q.double(), k) * scale
    return torch.einsum("hqn,hnd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


@pytest.fixture(params=["stand-in", "real"] if torch.__version__.startswith("2.8.") else ["stand-in"])
def ops(request: pytest.FixtureRequest) -> IpexAttention:
    if request.param == "stand-in":
        return IpexAttention(StandIn)
    try:
        return IpexAttention(load_paged_attention())
    except BackendError as error:
        pytest.skip(str(error))


class Pages:
    """Rows in shuffled blocks; a slot without a token is NaN."""

    def __init__(
        self, rows: Rows, heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> None:
        lengths = [computed + new for computed, new in rows]
        tables = np.zeros((len(rows), -(-max(lengths) // block_size) + 1), np.int32)
        blocks = iter(np.random.default_rng(0).permutation(tables.size).tolist())
        self.layout = KVLayout(1, tables.size, block_size, kv_heads, head_dim, "float32")
        self.cache = torch.full((2, tables.size + 1, kv_heads, block_size, head_dim), math.nan, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        self.keys = [torch.randn(2, kv_heads, length, head_dim, generator=generator).to(dtype) for length in lengths]
        for table, keys in zip(tables, self.keys, strict=True):
            for index, part in enumerate(keys.split(block_size, 2)):
                table[index] = next(blocks)
                self.cache[:, table[index], :, : part.shape[2]] = part
        query_starts = np.cumsum([0, *(new for _, new in rows)], dtype=np.int32)
        tokens = int(query_starts[-1]) + 3  # padding
        zeros = np.zeros(tokens, np.int32)
        seq_lens, logit_rows = np.array(lengths, np.int32), np.zeros(1, np.int32)
        self.batch = ForwardBatch(zeros, zeros, zeros - 1, query_starts, seq_lens, tables, logit_rows)
        self.q = torch.randn(tokens, heads, head_dim, generator=generator).to(dtype)

    def want(self, scale: float, window: int | None) -> Tensor:
        starts = self.batch.query_starts
        rows = zip(starts, starts[1:], self.keys, strict=False)
        return torch.cat([attend(self.q[a:b], *keys, scale, window) for a, b, keys in rows]).flatten(1)


def spec(heads: int, kv_heads: int, head_dim: int, window: int | None) -> ModelSpec:
    rope = RopeSpec(head_dim, 1e4)
    return ModelSpec("toy", 8, 8, 8, 1, heads, kv_heads, head_dim, 512, 1e-5, rope, "silu", 1.0, (window,), {})


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 16), (9, 3, 64), (8, 2, 80)])
@pytest.mark.parametrize("window", [None, 2, 37])
def test_attention(
    ops: IpexAttention, dtype: torch.dtype, rows: Rows, heads: int, kv_heads: int, head_dim: int, window: int | None
) -> None:
    pages = Pages(rows, heads, kv_heads, head_dim, 16, dtype)
    plan = ops.plan(pages.batch, spec(heads, kv_heads, head_dim, window), pages.layout, torch.device("cpu"))
    got, want = ops.attention(pages.q, pages.cache, plan, window, 0.2), pages.want(0.2, window)
    assert got.dtype == dtype
    assert (got[: len(want)].double() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()
    assert not got[len(want) :].any()  # padding


@pytest.mark.parametrize("change", ["layout", "strided", "dtype", "queries", "heads"])
def test_what_would_crash_the_extension_is_refused(change: str) -> None:
    ops, pages = IpexAttention(None), Pages(BATCHES["decode"], 8, 2, 64, 16, F32)
    plan = ops.plan(pages.batch, spec(8, 2, 64, None), pages.layout, torch.device("cpu"))
    q, cache = pages.q, pages.cache
    changed: dict[str, tuple[Tensor, Tensor]] = {
        "layout": (q, cache.transpose(2, 3).flatten(3)),
        "strided": (q, cache.transpose(2, 3)),
        "dtype": (q.bfloat16(), cache),
        "queries": (q[:2], cache),
        "heads": (q[:, :7], cache),
    }
    with pytest.raises(ValueError, match=r"cache|queries"):
        ops.attention(*changed[change], plan, None, 1.0)


def test_a_block_that_is_not_there_is_refused() -> None:
    ops, pages = IpexAttention(None), Pages(BATCHES["decode"], 8, 2, 64, 16, F32)
    pages.batch.block_tables[1, 0] = pages.layout.num_blocks
    with pytest.raises(ValueError, match="block tables name blocks"):
        ops.plan(pages.batch, spec(8, 2, 64, None), pages.layout, torch.device("cpu"))


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
def test_a_window_of_one_which_the_extension_takes_for_none(rows: Rows) -> None:
    ops, pages = IpexAttention(None), Pages(rows, 8, 2, 64, 16, F32)
    batch, slots = pages.batch, pages.batch.slots.copy()
    for row, (start, end) in enumerate(itertools.pairwise(batch.query_starts)):
        positions = np.arange(batch.seq_lens[row] - (end - start), batch.seq_lens[row])
        slots[start:end] = batch.block_tables[row, positions // 16] * 16 + positions % 16
    plan = ops.plan(replace(batch, slots=slots), spec(8, 2, 64, 1), pages.layout, torch.device("cpu"))
    got, want = ops.attention(pages.q, pages.cache, plan, 1, 0.2), pages.want(0.2, 1)
    assert torch.equal(got[: len(want)], want.to(got.dtype))
    assert not got[len(want) :].any()  # padding


def test_another_torch_is_refused_before_the_extension_is_imported() -> None:
    def import_module(name: str) -> Any:
        raise AssertionError(f"{name} was imported")

    with pytest.raises(BackendError, match=r"this is torch 2\.13\.0\+cpu: .* torch 2\.8 only; unset PAGEFLEET_CPU_ATT"):
        load_paged_attention("2.13.0+cpu", import_module)
    with pytest.raises(BackendError, match=r"torch 2\.80\.1"):
        load_paged_attention("2.80.1", import_module)


def test_an_extension_that_does_not_load_says_why() -> None:
    def import_module(name: str) -> Any:
        raise NameError("name 'MoeModelOutputWithPast' is not defined")  # the real one's, beside transformers 5

    with pytest.raises(BackendError, match=r"does not load .*MoeModelOutputWithPast"):
        load_paged_attention("2.8.0+cpu", import_module)


def test_it_is_taken_from_where_the_extension_has_it() -> None:
    modules = {"intel_extension_for_pytorch.llm.modules": SimpleNamespace(PagedAttention=StandIn)}
    assert load_paged_attention("2.8.0", modules.__getitem__) is StandIn


def test_the_ledger_names_it() -> None:
    ops, pages = IpexAttention(StandIn), Pages(BATCHES["decode"], 8, 2, 64, 16, F32)
    plan = ops.plan(pages.batch, spec(8, 2, 64, None), pages.layout, torch.device("cpu"))
    ops.attention(pages.q, pages.cache, plan, None, 1.0)
    assert ops.ledger == {("attention", "IpexAttention"): 1}
