"""The native draws and token masks, against float64 rankings written out with a sort, and against the host sampler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pagefleet.sampler import Sampler, token_mask
from pagefleet_cpu.sampler import CpuSampler
from pagefleet_kernels import cpu

pytestmark = pytest.mark.usefixtures("isa")

Logits = NDArray[np.float32]
SHAPES = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.3, 0, 1.0, 0.0),
    (1e-30, 0, 1.0, 0.0),
    (1e30, 0, 0.5, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, 700, 1.0, 0.0),
    (1.0, 0, 0.7, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 0.999, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.0, 0, 1.0, 1.0),
    (0.7, 10, 0.9, 0.05),
    (2.0, 40, 0.5, 0.2),
]
SIZES = [1, 3, 15, 64, 65, 1000, 49_152]
SLACK = 2e-5  # of a quantile: float32 weights, and sums of them in another order


def random_logits(seed: int, size: int, spread: float = 2.0) -> Logits:
    return np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)


def draw(lib: cpu.CpuKernels, logits: Logits, shape: tuple[Any, ...], uniforms: NDArray[np.float64]) -> NDArray[Any]:
    """A token of one row of logits at each of the quantiles."""
    temperature, top_k, top_p, min_p = shape
    rows, count = torch.from_numpy(np.tile(logits, (len(uniforms), 1))), len(uniforms)
    return lib.sample(
        rows,
        torch.full((count,), temperature),
        torch.full((count,), top_k, dtype=torch.int32),
        torch.full((count,), top_p),
        torch.full((count,), min_p),
        torch.from_numpy(uniforms),
    ).numpy()


def exact_weights(logits: Logits, temperature: float, top_k: int, top_p: float, min_p: float) -> NDArray[np.float64]:
    """Float64 weights [V] of what is left; cuts are made in the ranking by (weight, first come)."""
    scaled = (logits.astype(np.float64) - float(logits.max())) / temperature
    weights = np.exp(scaled)
    ranking = np.argsort(-logits, kind="stable")
    keep = np.zeros(len(logits), bool)
    keep[ranking[: top_k or len(logits)]] = True
    keep &= weights >= np.float32(min_p)
    weights = np.where(keep, weights, 0)
    ranking = np.argsort(-weights, kind="stable")  # a high temperature may have made different logits equally likely
    before = np.concatenate([[0.0], np.cumsum(weights[ranking])[:-1]])
    weights[ranking[(before >= top_p * weights.sum()) & (np.arange(len(logits)) > 0)]] = 0
    return weights


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_a_draw_is_the_token_at_its_quantile(lib: cpu.CpuKernels, shape: tuple[Any, ...], size: int) -> None:
    logits = random_logits(size, size)
    uniforms = np.concatenate([[0.0, np.nextafter(1, 0)], np.random.default_rng(1).random(60 if size < 2000 else 14)])
    tokens = draw(lib, logits, shape, uniforms)
    weights = exact_weights(logits, *shape)
    shares = np.cumsum(weights) / weights.sum()
    for token, quantile in zip(tokens.tolist(), uniforms.tolist(), strict=True):
        assert weights[token] > 0
        lower = shares[token - 1] if token else 0.0
        assert lower - SLACK <= quantile <= shares[token] + SLACK, (token, quantile)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_of_equal_tokens_at_a_cut_the_first_stay(lib: cpu.CpuKernels, shape: tuple[Any, ...]) -> None:
    logits = np.tile(np.array([0, 1, 2, 1], np.float32), 250)
    uniforms = (np.arange(400) + 0.5) / 400
    drawn = set(draw(lib, logits, shape, uniforms).tolist())
    left = np.flatnonzero(exact_weights(logits, *shape) > 0)
    assert drawn <= set(left.tolist())
    assert len(left) > 200 or drawn == set(left.tolist())


def test_draws_are_those_of_the_host_sampler(lib: cpu.CpuKernels) -> None:
    """Many rows of all kinds at once; a quantile so near to a token's edge that rounding decides is not compared."""
    rng, rows, size = np.random.default_rng(0), 300, 5000
    logits = (rng.normal(0, 1, (rows, size)) * rng.choice([0.01, 1, 5], (rows, 1))).astype(np.float32)
    columns = (
        rng.choice([0, 0.2, 1, 5], rows).astype(np.float32),
        rng.choice([0, 1, 40, 3000, 9000], rows).astype(np.int32),
        rng.choice([0.01, 0.9, 1], rows).astype(np.float32),
        rng.choice([0, 0.02, 0.5], rows).astype(np.float32),
    )
    uniforms = rng.random(rows)
    native = CpuSampler(lib).draw(logits, *columns, uniforms)
    around = [Sampler().draw(logits, *columns, np.clip(uniforms + slack, 0, 1 - 1e-9)) for slack in (-SLACK, SLACK)]
    clear = around[0] == around[1]
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(native[clear], around[0][clear])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("size", [7, 64, 1001])
def test_rows_that_are_not_finite(lib: cpu.CpuKernels, size: int, temperature: float) -> None:
    shape, half = (temperature, 3, 0.9, 0.1), np.array([0.5])
    for broken in (np.full(size, np.nan, np.float32), np.full(size, -np.inf, np.float32)):
        assert draw(lib, broken, shape, half).tolist() == [-1]
    for place in (0, size // 2, size - 1):
        logits = random_logits(1, size)
        logits[place] = np.nan
        assert draw(lib, logits, shape, half).tolist() == [-1]
        logits[place] = np.inf
        assert draw(lib, logits, shape, half).tolist() == [place]
        logits = np.full(size, -np.inf, np.float32)
        logits[place] = -3e38
        assert draw(lib, logits, shape, half).tolist() == [place]


def test_tokens_made_certain_share_the_probability(lib: cpu.CpuKernels) -> None:
    logits = random_logits(2, 300)
    logits[[5, 70, 299]] = np.inf
    uniforms = np.array([0.1, 0.5, 0.9])
    assert draw(lib, logits, (0.7, 0, 1.0, 0.0), uniforms).tolist() == [5, 70, 299]
    assert draw(lib, logits, (0.7, 2, 1.0, 0.0), uniforms).tolist() == [5, 70, 70]
    assert draw(lib, logits, (0.0, 0, 1.0, 0.0), uniforms).tolist() == [5, 5, 5]


def test_greedy_takes_the_first_of_equal_tokens(lib: cpu.CpuKernels) -> None:
    for size in SIZES[1:]:
        logits = np.zeros(size, np.float32)
        logits[[size // 2, size - 1]] = 1
        assert draw(lib, logits, (0.0, 0, 1.0, 0.0), np.array([0.99])).tolist() == [size // 2]


def test_a_step_without_draws(lib: cpu.CpuKernels) -> None:
    logits, nothing = np.zeros((3, 40), np.float32)[:0], np.zeros(0)
    columns = [nothing.astype(kind) for kind in "fiff"]
    for sampler in (CpuSampler(lib), Sampler()):
        assert sampler.draw(logits, *columns, nothing).tolist() == []


def test_a_row_draws_the_same_token_in_any_company(lib: cpu.CpuKernels) -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, (40, 3000)).astype(np.float32)
    columns = [rng.choice([0, 0.5, 1], 40), rng.choice([0, 50], 40), rng.choice([0.9, 1], 40), rng.choice([0, 0.1], 40)]
    typed = [column.astype(kind) for column, kind in zip(columns, "fiff", strict=True)]
    uniforms, sampler = rng.random(40), CpuSampler(lib)
    together = sampler.draw(logits, *typed, uniforms)
    for row in range(40):
        only = slice(row, row + 1)
        assert sampler.draw(logits[only], *(column[only] for column in typed), uniforms[only])[0] == together[row]


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100, 5003])
def test_a_mask_leaves_the_tokens_whose_bit_is_set(lib: cpu.CpuKernels, size: int) -> None:
    rng = np.random.default_rng(size)
    logits = rng.normal(0, 1, (4, size)).astype(np.float32)
    allowed = rng.random((4, size)) < np.array([[0.5], [0.01], [1.0], [0.0]])
    masks = np.stack([token_mask(np.flatnonzero(row).tolist(), size) for row in allowed])
    expected = np.where(allowed, logits, -np.inf)
    for sampler in (CpuSampler(lib), Sampler()):
        masked = logits.copy()
        sampler.mask(masked, masks)
        np.testing.assert_array_equal(masked, expected)


def test_what_a_draw_is_given_is_checked(lib: cpu.CpuKernels) -> None:
    logits, tokens = torch.zeros(2, 40), torch.zeros(2, dtype=torch.int32)
    columns = [torch.ones(2), torch.zeros(2, dtype=torch.int32), torch.ones(2), torch.zeros(2), torch.zeros(2).double()]
    op, mask = torch.ops.pagefleet_cpu.sample, torch.ops.pagefleet_cpu.mask
    op(tokens, logits, *columns)
    for at in range(5):
        short = [column[:1] if i == at else column for i, column in enumerate(columns)]
        with pytest.raises(RuntimeError, match="must be"):
            op(tokens, logits, *short)
    for wrong in (logits.double(), logits[0], logits.t(), torch.zeros(2, 0)):
        with pytest.raises(RuntimeError, match=r"logits|tokens"):
            op(tokens, wrong, *columns)
    with pytest.raises(RuntimeError, match="masks must be"):
        mask(logits, torch.zeros(2, 1, dtype=torch.int32))
    assert tokens.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("column", "wrong"), [(0, -1.0), (0, np.inf), (0, np.nan), (2, 0.0), (3, 1.5), (4, 1.0), (4, -0.1)]
)
def test_a_parameter_out_of_its_range_is_refused_before_anything_is_drawn(
    lib: cpu.CpuKernels, column: int, wrong: float
) -> None:
    columns = [torch.ones(2), torch.zeros(2, dtype=torch.int32), torch.ones(2), torch.zeros(2), torch.zeros(2).double()]
    columns[column][1] = wrong
    with pytest.raises(RuntimeError, match=r"temperature is|top_p is|min_p is|uniforms must be"):
        lib.sample(torch.zeros(2, 40), *columns)


def test_zeros_of_both_signs_are_equal(lib: cpu.CpuKernels) -> None:
    logits = np.array([-0.0, 0.0, -1.0, -0.0], np.float32)
    assert draw(lib, logits, (1.0, 1, 1.0, 0.0), np.array([0.5])).tolist() == [0]
    assert draw(lib, logits, (1.0, 2, 1.0, 0.0), np.array([0.9])).tolist() == [1]


def test_the_end_of_the_distribution_is_not_drawn_by_rounding(lib: cpu.CpuKernels) -> None:
    """The last token has a probability of 1e-35: no quantile that a float64 holds is its."""
    for seed in range(20):
        logits = random_logits(seed, 64)
        logits[-1] = logits.max() - 80
        uniforms = 1 - 2.0 ** -np.arange(20, 54, dtype=np.float64)
        assert 63 not in draw(lib, logits, (1.0, 0, 1.0, 0.0), uniforms)
