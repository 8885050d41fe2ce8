"""The native CPU kernels' paged attention: against float64, and bit for bit however a batch is put together.

What no query may see is poison in every test: unwritten slots, blocks of nobody, blocks that have left the window.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from random_tensors import normal
from torch import Tensor

from pagefleet_kernels import cpu

Rows = tuple[tuple[int, int], ...]  # per row, tokens computed before and tokens in this step

F32, BF16, F16, I8 = torch.float32, torch.bfloat16, torch.float16, torch.int8
TOLERANCE = {F32: 4e-6, BF16: 5e-3, F16: 7e-4}  # of the largest value; of the output's dtype
CANARY = 77.0
BATCHES: dict[str, Rows] = {
    "decode": ((70, 1), (0, 1), (16, 1), (299, 1), (1100, 1)),
    "prefill": ((0, 5), (0, 130), (33, 40)),
    "mixed": ((0, 7), (70, 1), (511, 7), (15, 2), (512, 1), (250, 33)),
}


@dataclass(frozen=True)
class Case:
    rows: Rows = BATCHES["mixed"]
    dtype: torch.dtype = F32
    kv_dtype: torch.dtype = F32
    head_dim: int = 64
    kv_heads: int = 2
    group: int = 3
    block_size: int = 16
    window: int | None = None
    soft_cap: float = 0.0
    alibi: bool = False
    sinks: bool = False

    def __str__(self) -> str:
        short = {F32: "f32", BF16: "bf16", F16: "f16", I8: "i8"}
        batch = next((name for name, rows in BATCHES.items() if rows == self.rows), f"{len(self.rows)}rows")
        options = [name for name in ("window", "soft_cap", "alibi", "sinks") if getattr(self, name)]
        sizes = f"{self.kv_heads}x{self.group}x{self.head_dim}-b{self.block_size}"
        return "-".join([batch, short[self.dtype], short[self.kv_dtype], sizes, *options])

    @property
    def scale(self) -> float:
        return 1.5 / math.sqrt(self.head_dim)


def stored(x: Tensor, kv_dtype: torch.dtype) -> tuple[Tensor, NDArray[np.float64]]:
    """x [..., D] as cache rows, and the values that those rows stand for."""
    if kv_dtype != I8:
        return x.to(kv_dtype), x.to(kv_dtype).double().numpy()
    scale = x.abs().amax(-1, keepdim=True) / 127
    values = (x / scale).round().to(I8)
    return torch.cat([values, scale.view(I8)], -1), (values.double() * scale.double()).numpy()


class Batch:
    """Rows with all their keys in a paged cache, the queries of this step, and float64 attention over them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        lengths = [before + tokens for before, tokens in case.rows]
        num_blocks = [-(-length // case.block_size) for length in lengths]
        order = torch.randperm(sum(num_blocks) + 3, generator=torch.Generator().manual_seed(1)).tolist()
        self.poison = order.pop()
        width = case.head_dim + (4 if case.kv_dtype == I8 else 0)
        shape = (2, sum(num_blocks) + 3, case.kv_heads, case.block_size, width)
        self.cache = torch.full(shape, -1, dtype=I8) if case.kv_dtype == I8 else torch.full(shape, math.nan)
        self.cache = self.cache.to(case.kv_dtype)  # int8: scales of four bytes 0xff are NaN, too
        self.tables, self.keys, self.values = [], [], []
        for row, length in enumerate(lengths):
            blocks = [order.pop() for _ in range(num_blocks[row])]
            self.tables.append(blocks)
            for part, seed, known in ((0, 10, self.keys), (1, 11, self.values)):
                rows, meant = stored(normal(length, case.kv_heads, case.head_dim, seed=seed + 2 * row), case.kv_dtype)
                known.append(meant)
                for first in range(0, length, case.block_size):
                    piece = rows[first : first + case.block_size].transpose(0, 1)
                    self.cache[part, blocks[first // case.block_size], :, : piece.shape[1]] = piece
        heads = case.kv_heads * case.group
        self.queries = [
            normal(length, heads * case.head_dim, seed=1000 + row).to(case.dtype) for row, length in enumerate(lengths)
        ]
        self.slopes = torch.tensor([2 ** -(8 * (i + 1) / heads) for i in range(heads)]) if case.alibi else None
        self.sinks = normal(heads, seed=5) if case.sinks else None

    def run(self, rows: Rows, which: list[int] | None = None) -> list[Tensor]:
        """The kernel's output for each of `rows`, which are tokens of the rows numbered by `which`."""
        case = self.case
        which = list(range(len(rows))) if which is None else which
        lengths = [before + tokens for before, tokens in rows]
        width = max(-(-length // case.block_size) for length in lengths) + 1
        tables = torch.full((len(rows), width), self.poison, dtype=torch.int32)
        for i, (row, length, (before, _)) in enumerate(zip(which, lengths, rows, strict=True)):
            used = -(-length // case.block_size)
            gone = 0 if case.window is None else max(before - case.window + 1, 0) // case.block_size
            tables[i, gone:used] = torch.tensor(self.tables[row][gone:used], dtype=torch.int32)
        starts = torch.tensor([0, *itertools.accumulate(tokens for _, tokens in rows)], dtype=torch.int32)
        q = torch.cat([self.queries[row][b : b + t] for row, (b, t) in zip(which, rows, strict=True)])
        q = torch.cat([q, torch.full_like(q[:1], math.nan)])  # a token of no row
        memory = torch.full((len(q) + 2, q.shape[1]), CANARY, dtype=case.dtype)
        torch.ops.pagefleet_cpu.attention(
            memory[1:-1], q.view(len(q), -1, case.head_dim), self.cache, tables, starts,
            torch.tensor(lengths, dtype=torch.int32), case.head_dim, case.window or 0, case.scale, case.soft_cap,
            self.slopes, self.sinks,
        )  # fmt: skip
        assert (memory[[0, -1]] == CANARY).all()
        assert (memory[-2] == 0).all()
        return [memory[1 + int(start) : 1 + int(end)] for start, end in itertools.pairwise(starts)]

    def expected(self, row: int, before: int, tokens: int) -> NDArray[np.float64]:
        case = self.case
        length = before + tokens
        q = self.queries[row][before:length].double().numpy().reshape(tokens, -1, case.head_dim)
        keys, values = (x[row][:length].repeat(case.group, 1) for x in (self.keys, self.values))
        scores = np.einsum("qhd,khd->hqk", q, keys) * case.scale
        if case.soft_cap:
            scores = case.soft_cap * np.tanh(scores / case.soft_cap)
        distance = np.arange(length) - np.arange(before, length)[:, None]
        if self.slopes is not None:
            scores = scores + self.slopes.double().numpy()[:, None, None] * distance
        hidden = distance > 0
        if case.window is not None:
            hidden |= distance <= -case.window
        weights = np.exp(np.where(hidden, -np.inf, scores))
        total = weights.sum(-1, keepdims=True)
        if self.sinks is not None:
            total = total + np.exp(self.sinks.double().numpy())[:, None, None]
        return np.einsum("hqk,khd->qhd", weights / total, values).reshape(tokens, -1)


def check(case: Case) -> None:
    batch = Batch(case)
    for row, got in enumerate(batch.run(case.rows)):
        want = batch.expected(row, *case.rows[row])
        error = np.abs(got.double().numpy() - want).max()
        assert error <= TOLERANCE[case.dtype] * max(np.abs(want).max(), 1), f"row {row}: error {error}"


GRID: dict[str, list[Any]] = {
    "rows": list(BATCHES.values()),
    "dtype": [F32, BF16, F16],
    "kv_dtype": [F32, BF16, F16, I8],
    "head_dim": [32, 64, 80, 96, 128, 256],
    "group": [1, 3, 4, 8],
    "block_size": [8, 16, 32],
    "window": [None, None, 40, 700],
    "soft_cap": [0.0, 0.0, 3.0],
    "alibi": [False, True],
    "sinks": [False, True],
}


def sampled(count: int, seed: int) -> list[Case]:
    """Cases of the grid in which each value of each dimension comes about equally often."""
    rng = random.Random(seed)
    columns = {}
    for name, values in GRID.items():
        column = [values[i % len(values)] for i in range(count)]
        rng.shuffle(column)
        columns[name] = column
    return [Case(**{name: column[i] for name, column in columns.items()}) for i in range(count)]


@pytest.mark.parametrize("case", sampled(24, 0), ids=str)
def test_against_float64(isa: str, case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_many_cases_against_float64(isa: str, seed: int) -> None:
    for case in sampled(60, seed):
        check(case)


@pytest.mark.parametrize("kv_dtype", [F32, BF16, F16, I8])
@pytest.mark.parametrize(("head_dim", "block_size", "group"), [(34, 1, 2), (72, 5, 71), (66, 256, 1), (250, 24, 5)])
def test_odd_sizes(isa: str, kv_dtype: torch.dtype, head_dim: int, block_size: int, group: int) -> None:
    rows = ((0, 3), (70, 1), (40, 21))
    check(Case(rows, kv_dtype=kv_dtype, head_dim=head_dim, kv_heads=1, group=group, block_size=block_size, window=30))


PLAIN = Case(rows=((0, 90), (1500, 1), (600, 70), (90, 3), (5, 1)), kv_dtype=BF16, head_dim=64)
VARIANTS = [
    PLAIN,
    dataclasses.replace(PLAIN, kv_dtype=F32, window=100, block_size=8),
    dataclasses.replace(PLAIN, kv_dtype=F16, soft_cap=5.0, alibi=True, group=1, head_dim=80),
    dataclasses.replace(PLAIN, kv_dtype=I8, sinks=True, group=8, window=600),
    dataclasses.replace(PLAIN, kv_dtype=BF16, dtype=BF16, group=4, head_dim=128, block_size=32),
    dataclasses.replace(PLAIN, kv_dtype=BF16, head_dim=40, block_size=3),
]


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("case", VARIANTS, ids=str)
def test_a_row_has_the_same_bits_alone_and_on_any_number_of_threads(lib: cpu.CpuKernels, isa: str, case: Case) -> None:
    batch = Batch(case)
    lib.set_num_threads(1)
    want = batch.run(case.rows)
    for threads in (2, 16):
        lib.set_num_threads(threads)
        for got, expected in zip(batch.run(case.rows), want, strict=True):
            assert_same_bits(got, expected)
        for row, tokens in enumerate(case.rows):
            assert_same_bits(batch.run((tokens,), [row])[0], want[row])


@pytest.mark.parametrize("case", VARIANTS, ids=str)
def test_a_row_has_the_same_bits_in_chunks(lib: cpu.CpuKernels, isa: str, case: Case) -> None:
    batch = Batch(case)
    before, tokens = case.rows[2]
    lib.set_num_threads(2)
    (want,) = batch.run((case.rows[2],), [2])
    for chunk in (1, 7, 33):
        firsts = range(0, tokens, chunk)
        chunks = tuple((before + first, min(chunk, tokens - first)) for first in firsts)
        apart = [batch.run((piece,), [2])[0] for piece in chunks]
        assert_same_bits(torch.cat(apart), want)
        together = batch.run((*chunks, case.rows[0]), [*([2] * len(chunks)), 0])
        assert_same_bits(torch.cat(together[:-1]), want)


@pytest.mark.parametrize("case", VARIANTS, ids=str)
def test_instruction_sets_with_fma_agree_on_every_bit(lib: cpu.CpuKernels, isa: str, case: Case) -> None:
    if isa in ("scalar", "avx2"):
        pytest.skip("scalar multiplies and adds apart; avx2 is what the others are compared with")
    batch = Batch(case)
    got = batch.run(case.rows)
    lib.force_isa("avx2")
    for mine, want in zip(got, batch.run(case.rows), strict=True):
        assert_same_bits(mine, want)


def test_a_row_without_query_tokens_is_nothing(isa: str) -> None:
    batch = Batch(dataclasses.replace(PLAIN, rows=((10, 2), (20, 1), (0, 4))))
    want = batch.run(batch.case.rows)
    got = batch.run(((10, 2), (20, 0), (0, 4)), [0, 1, 2])
    assert len(got[1]) == 0
    assert_same_bits(got[0], want[0])
    assert_same_bits(got[2], want[2])


def test_a_poisoned_query_stays_alone(isa: str) -> None:
    batch = Batch(dataclasses.replace(PLAIN, rows=((100, 9), (20, 1))))
    want = batch.run(batch.case.rows)
    batch.queries[0][104] = math.nan
    got = batch.run(batch.case.rows)
    assert got[0][4].isnan().all()
    got[0][4] = want[0][4]
    assert_same_bits(got[0], want[0])
    assert_same_bits(got[1], want[1])


def test_large_scores_do_not_overflow(isa: str) -> None:
    batch = Batch(dataclasses.replace(PLAIN, rows=((700, 20),), kv_dtype=F32))
    batch.queries[0] *= 1e4
    (got,) = batch.run(batch.case.rows)
    assert got.isfinite().all()
    keys = np.einsum("hd,khd->hk", batch.queries[0][719].double().reshape(6, -1).numpy(), batch.keys[0].repeat(3, 1))
    winners = batch.values[0].repeat(3, 1)[keys.argmax(1), np.arange(6)]
    np.testing.assert_allclose(got[19].reshape(6, -1).numpy(), winners, rtol=1e-5)
