"""Every op of every implementation against float64, on odd sizes.

An implementation joins the grid with a row in `IMPLEMENTATIONS`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from random_tensors import host, normal
from torch import Tensor

from pagefleet.backend import ForwardBatch, KVLayout
from pagefleet.model import ModelSpec
from pagefleet.rope import RopeSpec
from pagefleet.torch_runner.layer import Norms, Weight
from pagefleet.torch_runner.ops import Ops, ReferenceOps
from pagefleet.torch_runner.plan import TilePlan, plan_tiles, plan_writes
from pagefleet_cpu.ops import CpuOps
from pagefleet_cpu.plain import PlainOps
from pagefleet_kernels import cpu as kernels

Rows = tuple[tuple[int, int], ...]  # per row, tokens computed before and tokens in this step

IMPLEMENTATIONS: dict[str, Callable[[], Ops]] = {
    "reference": ReferenceOps,
    "plain": PlainOps,
    "cpu": lambda: CpuOps(kernels.load()),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of the largest value
BATCHES: dict[str, Rows] = {
    "decode": ((70, 1), (0, 1), (16, 1), (299, 1)),
    "prefill": ((0, 5), (0, 150), (33, 40)),
    "mixed": ((0, 7), (70, 1), (130, 7), (15, 2), (128, 1), (0, 200), (250, 33)),
}


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "cpu" and not kernels.LIBRARY.is_file():
        pytest.skip("the CPU kernels are not built here: python build_scripts/cpu.py")
    return IMPLEMENTATIONS[request.param]()


def pack(ops: Ops, *parts: Tensor) -> Weight:
    return ops.pack([host(part) for part in parts], parts[0].dtype, torch.device("cpu"))


def vector(ops: Ops, tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(ops.vector_dtype or tensor.dtype)


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, roundings: int = 1) -> None:
    assert got.dtype == dtype
    assert got.shape == want.shape
    error = (got.double() - want).abs().max().item()
    bound = roundings * TOLERANCE[dtype] * max(want.abs().max().item(), 1)
    assert error <= bound, f"error {error}"  # a NaN fails too


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 576, 192), (8, 64, 32), (16, 100, 37), (61, 1031, 1025)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(ops: Ops, dtype: torch.dtype, rows: int, inputs: int, outputs: int, biased: bool) -> None:
    x, weight = normal(rows, inputs, dtype=dtype), normal(outputs, inputs, dtype=dtype, seed=1) / math.sqrt(inputs)
    bias = normal(outputs, dtype=dtype, seed=2) if biased else None
    want = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    assert_close(ops.linear(x, pack(ops, weight), vector(ops, bias)), want, dtype)
    if bias is None:
        assert_close(ops.logits(x, pack(ops, weight)).to(dtype), want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_of_several_matrices(ops: Ops, dtype: torch.dtype) -> None:
    x = normal(5, 70, dtype=dtype)
    parts = [normal(outputs, 70, dtype=dtype, seed=outputs) / 8 for outputs in (33, 16, 7)]
    want = torch.cat([x.double() @ part.double().T for part in parts], 1)
    assert_close(ops.linear(x, pack(ops, *parts), None), want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("width", [32, 37, 1000])
def test_gated_linear(ops: Ops, dtype: torch.dtype, activation: str, width: int) -> None:
    x, weight = normal(7, 64, dtype=dtype), normal(2 * width, 64, dtype=dtype, seed=1) / 8
    bias = normal(2 * width, dtype=dtype, seed=2)
    want = gated((x.double() @ weight.double().T + bias.double()), activation)
    assert_close(ops.gated_linear(x, pack(ops, weight), vector(ops, bias), activation), want, dtype, roundings=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed(ops: Ops, dtype: torch.dtype) -> None:
    weight = normal(11, 6, dtype=dtype)
    tokens = torch.tensor([3, 0, 10, 3], dtype=torch.int32)
    assert torch.equal(ops.embed(tokens, pack(ops, weight), dtype), weight[[3, 0, 10, 3]])


def normed(y: Tensor, weight: Tensor) -> Tensor:
    return y.double() / (y.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 64), (3, 577)])
def test_norms(ops: Ops, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, delta, weight = (normal(*s, dtype=dtype, seed=i) for i, s in enumerate((shape, shape, shape[1:])))
    scale = vector(ops, weight)
    assert scale is not None
    result, total = ops.add_rms_norm(x.clone(), delta, scale, 1e-5)
    assert torch.equal(total, x + delta)
    assert_close(result, normed(total, weight), dtype)
    result, total = ops.add_rms_norm(x.clone(), None, scale, 1e-5)
    assert torch.equal(total, x)
    assert_close(result, normed(x, weight), dtype)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    curve = {
        "silu": lambda: gate / (1 + torch.exp(-gate)),
        "gelu": lambda: gate / 2 * (1 + torch.erf(gate / math.sqrt(2))),
        "gelu_tanh": lambda: gate / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))),
    }[activation]
    return curve() * up


def test_the_reference_gate_is_finite_and_exact_at_the_ends() -> None:
    gate_up = torch.tensor([[-200.0, -88.0, 0.0, 200.0, 1.0, 1.0, 1.0, 1.0]])
    assert ReferenceOps().gate(gate_up, "silu")[0, [0, 2, 3]].tolist() == [0, 0, 200]


def test_the_reference_gate_names_the_activations_it_knows() -> None:
    with pytest.raises(ValueError, match="unknown activation 'relu'; known: silu"):
        ReferenceOps().gate(torch.zeros(8, 4), "relu")


# -- the paged ops -------------------------------------------------------------------------------------


def model(heads: int, kv_heads: int, head_dim: int, window: int | None = None) -> ModelSpec:
    rope = RopeSpec(head_dim, 1e4)
    return ModelSpec("toy", 8, 8, 8, 1, heads, kv_heads, head_dim, 512, 1e-5, rope, "silu", 1.0, (window,), {})


class Pages:
    """Rows in a shuffled cache. A slot that holds none of their tokens is NaN: to read one is not forgiven."""

    def __init__(self, rows: Rows, spec: ModelSpec, block_size: int, dtype: torch.dtype) -> None:
        self.layout = KVLayout(1, 2000 // block_size, block_size, spec.num_kv_heads, spec.head_dim, "float32")
        self.cache = torch.full((2, self.layout.num_blocks + 1, spec.num_kv_heads, block_size, spec.head_dim), math.nan)
        self.cache = self.cache.to(dtype)
        self.cache[:, -1] = 0
        free = iter(np.random.default_rng(0).permutation(self.layout.num_blocks).tolist())
        block_tables = np.zeros((len(rows), -(-max(map(sum, rows)) // block_size) + 2), np.int32)
        self.slots: list[NDArray[np.int64]] = []  # per row, of all its tokens
        for row, length in enumerate(map(sum, rows)):
            blocks = list(itertools.islice(free, -(-length // block_size)))
            block_tables[row, : len(blocks)] = blocks
            self.slots.append(
                np.repeat(np.array(blocks) * block_size, block_size)[:length] + np.arange(length) % block_size
            )
            self.put(self.slots[row], normal(2, length, spec.num_kv_heads, spec.head_dim, dtype=dtype, seed=row))
        self.batch = self._batch(rows, block_tables)

    def _batch(self, rows: Rows, block_tables: NDArray[np.int32]) -> ForwardBatch:
        query_starts = np.cumsum([0, *(new for _, new in rows)], dtype=np.int32)
        padding = -query_starts[-1] % 8 + 8
        new_slots = [slots[computed:] for slots, (computed, _) in zip(self.slots, rows, strict=True)]
        positions = [np.arange(computed, computed + new) for computed, new in rows]
        return ForwardBatch(
            token_ids=np.zeros(query_starts[-1] + padding, np.int32),
            positions=np.concatenate([*positions, np.zeros(padding)]).astype(np.int32),
            slots=np.concatenate([*new_slots, np.full(padding, -1)]).astype(np.int32),
            query_starts=query_starts,
            seq_lens=np.array(list(map(sum, rows)), np.int32),
            block_tables=block_tables,
            logit_rows=np.zeros(8, np.int32),
        )

    def put(self, slots: NDArray[Any], values: Tensor) -> None:
        block, offset = np.divmod(slots, self.layout.block_size)
        self.cache[:, block, :, offset] = values.transpose(0, 1)

    def get(self, slots: NDArray[Any]) -> Tensor:
        """Keys and values [2, len(slots), K, D]."""
        block, offset = np.divmod(slots, self.layout.block_size)
        return self.cache[:, block, :, offset].transpose(0, 1)


def dense_attention(q: Tensor, pages: Pages, window: int | None, scale: float) -> Tensor:
    """Token by token and head by head, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for slots, start, end in zip(pages.slots, pages.batch.query_starts, pages.batch.query_starts[1:], strict=False):
        k, v = pages.get(slots).double().repeat_interleave(q.shape[1] // pages.cache.shape[2], 2)
        for token in range(start, end):
            seen = slice(
                0 if window is None else max(0, len(k) - (end - token) + 1 - window), len(k) - (end - token) + 1
            )
            weights = torch.softmax(torch.einsum("hd,nhd->hn", q[token].double(), k[seen]) * scale, -1)
            out[token] = torch.einsum("hn,nhd->hd", weights, v[seen])
    return out.flatten(1)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 16), (9, 3, 64), (8, 2, 80), (3, 1, 128)])
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("window", [None, 1, 37])
def test_attention(
    ops: Ops, heads: int, kv_heads: int, head_dim: int, block_size: int, rows: Rows, window: int | None
) -> None:
    spec = model(heads, kv_heads, head_dim, window)
    pages = Pages(rows, spec, block_size, torch.float32)
    q = normal(pages.batch.num_tokens, heads, head_dim, dtype=torch.float32, seed=99)
    plan = ops.plan(pages.batch, spec, pages.layout, q.device)
    got = ops.attention(q, pages.cache, plan, window, head_dim**-0.5)
    num_tokens = int(pages.batch.query_starts[-1])
    assert_close(got[:num_tokens], dense_attention(q, pages, window, head_dim**-0.5)[:num_tokens], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_attention_in_half_width(ops: Ops, dtype: torch.dtype) -> None:
    spec = model(6, 2, 64, 100)
    pages = Pages(BATCHES["mixed"], spec, 16, dtype)
    q = normal(pages.batch.num_tokens, 6, 64, dtype=dtype, seed=99)
    plan = ops.plan(pages.batch, spec, pages.layout, q.device)
    got = ops.attention(q, pages.cache, plan, 100, 0.125)
    num_tokens = int(pages.batch.query_starts[-1])
    assert_close(got[:num_tokens], dense_attention(q, pages, 100, 0.125)[:num_tokens], dtype)


def test_tiles_of_any_size_give_the_same_bits() -> None:
    ops, spec = ReferenceOps(), model(9, 3, 64)
    pages = Pages(BATCHES["mixed"], spec, 16, torch.float32)
    q = normal(pages.batch.num_tokens, 9, 64, dtype=torch.float32, seed=99)
    writes = plan_writes(pages.batch, pages.layout, q.device)
    plans = [
        TilePlan(*writes, plan_tiles(pages.batch, spec, pages.layout, q.device, 1 << bits))
        for bits in (12, 17, 18, 20, 26)
    ]
    assert len({len(plan.tiles) for plan in plans}) > 3
    first, *others = (ops.attention(q, pages.cache, plan, None, 0.125) for plan in plans)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"), [(4, 4, 16, 16), (9, 3, 64, 64), (8, 2, 80, 32)]
)
@pytest.mark.parametrize("block_size", [8, 32])
@pytest.mark.parametrize("hole", [False, True], ids=["", "a token without slot"])
@pytest.mark.parametrize("norm", [False, True], ids=["", "norms"])
def test_rope_and_write(
    ops: Ops,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
    hole: bool,
    norm: bool,
) -> None:
    spec = model(heads, kv_heads, head_dim)
    pages = Pages(BATCHES["mixed"], spec, block_size, dtype)
    batch = pages.batch
    if hole:
        batch.slots[3] = -1
    qkv = normal(batch.num_tokens, heads + 2 * kv_heads, head_dim, dtype=dtype, seed=99)
    qk, v = qkv.split([heads + kv_heads, kv_heads], 1)
    weights = [normal(head_dim, dtype=dtype, seed=seed) for seed in (1, 2)]
    norms = Norms(*(vector(ops, weight) for weight in weights), 1e-5) if norm else None  # type: ignore[arg-type]
    angles = torch.from_numpy(batch.positions)[:, None] * 0.7 ** torch.arange(rotary_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    rotary = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)

    before = pages.cache.clone()
    plan = ops.plan(batch, spec, pages.layout, qk.device)
    q = ops.rope_and_write(qkv, norms, rotary, pages.cache, plan)

    turned = qk.double()
    if norm:
        turned = torch.cat([normed(qk[:, :heads], weights[0]), normed(qk[:, heads:], weights[1])], 1)
    a, b = turned[..., : rotary_dim // 2].clone(), turned[..., rotary_dim // 2 : rotary_dim].clone()
    turned[..., : rotary_dim // 2] = a * cos[:, None] - b * sin[:, None]
    turned[..., rotary_dim // 2 : rotary_dim] = b * cos[:, None] + a * sin[:, None]
    assert_close(q, turned[:, :heads], dtype)
    written = np.flatnonzero(batch.slots >= 0)
    keys, values = pages.get(batch.slots[written])
    assert_close(keys, turned[written, heads:], dtype)
    assert torch.equal(values, v[written])
    pages.cache, after = before, pages.cache
    pages.put(batch.slots[written], torch.stack([keys, values]))
    torch.testing.assert_close(after, pages.cache, rtol=0, atol=0, equal_nan=True)  # and nothing else


def test_the_ledger_says_which_implementation_served() -> None:
    ops = PlainOps()
    ops.linear(torch.zeros(8, 4), torch.zeros(3, 4), None)
    ops.gate(torch.zeros(8, 4), "silu")
    ops.gate(torch.zeros(8, 4), "silu")
    assert ops.ledger == {("linear", "PlainOps"): 1, ("gate", "ReferenceOps"): 2}
