"""Products with quantised weights, bit for bit against integers summed in numpy, on every instruction set there is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from pagefleet_kernels import cpu

BLOCK = {"Q8_0": 32, "Q4_0": 32, "Q4_1": 32, "Q4_K": 256, "Q6_K": 256, "int8": 1}
F32 = np.float32


@pytest.fixture
def kernels(lib: cpu.CpuKernels, isa: str) -> cpu.CpuKernels:
    return lib


def random_rows(format: str, n: int, k: int, seed: int = 0) -> NDArray[np.uint8]:
    """Rows of a weight as a file has them; K-quants from random bits (the gguf library does not quantise to them)."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((n, k)).astype(F32)
    if format == "int8":
        scale = (np.abs(values).max(1, keepdims=True) / 127).astype(F32)
        q = np.rint(values / scale).astype(np.int8)
        return np.concatenate([scale.view(np.uint8), q.view(np.uint8)], 1)
    kind = GGMLQuantizationType[format]
    if format in ("Q8_0", "Q4_0", "Q4_1"):
        return quantize(values, kind)
    size, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (n, k // size, num_bytes), dtype=np.uint8)
    halves = rng.uniform(0.001, 0.01, (n, k // size, 2)).astype(np.float16).view(np.uint8)
    if format == "Q4_K":
        blocks[..., :4] = halves
    else:
        blocks[..., 208:] = halves[..., :2]
    return blocks.reshape(n, -1)


def integers(
    format: str, rows: NDArray[np.uint8], k: int
) -> tuple[NDArray[np.int32], NDArray[F32], NDArray[F32] | None]:
    """Integer weights [n, k], their scales [n, k / group] in float32, and what is added per group and sum of x.

    Q6_K's integers are its values times their own integer scales.
    """
    n = len(rows)
    if format == "int8":
        return rows[:, 4:].view(np.int8).astype(np.int32), np.ascontiguousarray(rows[:, :4]).view(F32), None
    size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[format]]
    blocks = rows.reshape(n, k // size, num_bytes)

    def half(at: int) -> NDArray[F32]:
        return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16).astype(F32)[..., 0]

    def nibbles(data: NDArray[np.uint8]) -> NDArray[np.int32]:
        return np.concatenate([data & 15, data >> 4], -1).astype(np.int32)

    if format == "Q8_0":
        return blocks[..., 2:].view(np.int8).astype(np.int32).reshape(n, k), half(0), None
    if format == "Q4_0":
        return nibbles(blocks[..., 2:]).reshape(n, k) - 8, half(0), None
    if format == "Q4_1":
        return nibbles(blocks[..., 4:]).reshape(n, k), half(0), half(2)
    if format == "Q4_K":
        q = nibbles(blocks[..., 16:].reshape(n, -1, 4, 32)).reshape(n, k)
        codes = blocks[..., 4:16].astype(np.int32)
        low, high = codes[..., :4] & 63, (codes[..., 8:] & 15) | ((codes[..., :4] >> 6) << 4)
        scale = np.concatenate([low, high], -1)
        minimum = np.concatenate([codes[..., 4:8] & 63, (codes[..., 8:] >> 4) | ((codes[..., 4:8] >> 6) << 4)], -1)
        d, m = half(0)[..., None] * scale.astype(F32), half(2)[..., None] * minimum.astype(F32)
        return q, d.reshape(n, -1), -m.reshape(n, -1)
    ql, qh = blocks[..., :128].reshape(n, -1, 2, 64), blocks[..., 128:192].reshape(n, -1, 2, 32)
    low = np.concatenate([ql & 15, ql >> 4], -1).reshape(n, -1, 2, 4, 32)
    high = np.stack([(qh >> shift) & 3 for shift in (0, 2, 4, 6)], 3)
    q = (low | (high << 4)).astype(np.int32).reshape(n, k) - 32
    q *= np.repeat(blocks[..., 192:208].view(np.int8).astype(np.int32), 16, -1).reshape(n, k)
    return q, np.repeat(half(208), 8, -1), None


def expected(format: str, rows: NDArray[np.uint8], x: NDArray[F32]) -> NDArray[F32]:
    """x @ w^T in the arithmetic that quantised.h states: exact integers, then float32 operations one by one."""
    (m, k), n = x.shape, len(rows)
    w, scales, offsets = integers(format, rows, k)
    blocks = np.pad(x, ((0, 0), (0, -k % 32))).reshape(m, -1, 32)
    highest = np.abs(blocks).max(-1, keepdims=True)
    highest[highest < 2.0**-100] = 0
    inverse = np.divide(F32(127), highest, out=np.zeros_like(highest), where=highest > 0)
    q = np.clip(np.rint(blocks * inverse), -127, 127).astype(np.int64).reshape(m, -1)[:, :k]
    s = (highest / F32(127))[..., 0]  # [m, blocks]
    total = np.zeros((m, n), F32)
    group = 32 if format == "int8" else k // scales.shape[1]
    for g in range(-(-k // group)):
        part = slice(g * group, (g + 1) * group)
        dot, scale = (q[:, part] @ w[:, part].T.astype(np.int64)).astype(F32), s[:, g * group // 32, None]
        total = total + dot * (scale if format == "int8" else scales[:, g] * scale)
        if offsets is not None:
            total = total + offsets[:, g] * (scale * q[:, part].sum(1).astype(F32)[:, None])
    return total * scales[:, 0] if format == "int8" else total


def pack(kernels: cpu.CpuKernels, format: str, rows: NDArray[np.uint8], k: int) -> cpu.PackedWeight:
    return kernels.pack(format, torch.from_numpy(rows), len(rows), k)


@pytest.mark.parametrize("format", BLOCK)
@pytest.mark.parametrize("n", [16, 37, 192])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_products_have_the_bits_of_integer_arithmetic(
    kernels: cpu.CpuKernels, format: str, n: int, blocks: int
) -> None:
    k = blocks * max(BLOCK[format], 32) + (5 if format == "int8" else 0)
    rows = random_rows(format, n, k)
    weight = pack(kernels, format, rows, k)
    assert weight.num_bytes <= 1.1 * -(-n // 16) * 16 * rows.shape[1] + 64 * 16
    x = np.random.default_rng(1).standard_normal((64, k)).astype(F32)
    x[3] = 0
    x[4] *= F32(2.0**-102)  # too small to have a scale, or nearly
    x[5] *= F32(2.0**-90)
    want = expected(format, rows, x)
    for m in (1, 2, 3, 4, 5, 7, 13, 64):
        got = kernels.linear(torch.from_numpy(x[:m]), weight).numpy()
        np.testing.assert_array_equal(got.view(np.int32), want[:m].view(np.int32))


@pytest.mark.parametrize("format", BLOCK)
def test_products_are_near_those_of_the_dequantised_weight(kernels: cpu.CpuKernels, format: str) -> None:
    k, n = 512, 48
    rows = random_rows(format, n, k)
    w, scales, offsets = integers(format, rows, k)
    group = k // scales.shape[1]
    dense = w * scales.repeat(group, 1).astype(np.float64) + (0 if offsets is None else offsets.repeat(group, 1))
    x = np.random.default_rng(1).standard_normal((9, k)).astype(F32)
    got = kernels.linear(torch.from_numpy(x), pack(kernels, format, rows, k)).numpy()
    error = np.linalg.norm(got - x @ dense.T) / np.linalg.norm(x @ dense.T)
    assert error < 0.015  # activations of 8 bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", BLOCK)
def test_bias_gate_and_half_width_rows(kernels: cpu.CpuKernels, format: str, dtype: torch.dtype) -> None:
    k, n = 256, 96
    rows = random_rows(format, n, k)
    weight = pack(kernels, format, rows, k)
    x = torch.randn(5, k, generator=torch.Generator().manual_seed(0)).to(dtype)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(1))
    want = torch.from_numpy(expected(format, rows, x.float().numpy())) + bias
    torch.testing.assert_close(kernels.linear(x, weight, bias), want.to(dtype))
    gate, up = want.chunk(2, 1)
    want = (gate.double() * torch.sigmoid(gate.double()) * up.double()).to(dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(kernels.linear(x, weight, bias, "silu"), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("format", BLOCK)
def test_gathered_rows_are_those_of_the_gguf_library(kernels: cpu.CpuKernels, format: str) -> None:
    k, n = 512, 37
    rows = random_rows(format, n, k)
    if format == "int8":
        want = rows[:, 4:].view(np.int8) * np.ascontiguousarray(rows[:, :4]).view(F32)
    else:
        want = dequantize(rows, GGMLQuantizationType[format])
    ids = torch.tensor([0, 36, 17, 17, 5], dtype=torch.int32)
    weight = pack(kernels, format, rows, k)
    np.testing.assert_array_equal(kernels.gather(ids, weight, torch.float32).numpy(), want[ids])
    assert torch.equal(kernels.gather(ids, weight, torch.bfloat16), torch.from_numpy(want[ids]).bfloat16())


@pytest.mark.parametrize("format", BLOCK)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_harms_no_other(kernels: cpu.CpuKernels, format: str, bad: float) -> None:
    k, n = 256, 32
    weight = pack(kernels, format, random_rows(format, n, k), k)
    x = torch.randn(6, k, generator=torch.Generator().manual_seed(0))
    want = kernels.linear(x, weight)
    x[2, 100] = bad
    got = kernels.linear(x, weight)
    assert not got[2].isfinite().any()
    keep = [0, 1, 3, 4, 5]
    assert torch.equal(got[keep], want[keep])


def test_a_weight_that_is_no_whole_blocks_is_refused(kernels: cpu.CpuKernels) -> None:
    assert kernels.row_bytes("Q4_K", 288) == 0
    with pytest.raises(cpu.KernelError, match="33 inputs are no whole blocks of Q8_0"):
        kernels.pack("Q8_0", torch.zeros(16, 34, dtype=torch.uint8), 16, 33)
