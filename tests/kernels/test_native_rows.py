"""The native CPU kernels that work row by row: norms, gates, and what turns and stores keys. Against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from random_tensors import normal
from torch import Tensor

from pagefleet_kernels import cpu

F32, BF16, F16, I8 = torch.float32, torch.bfloat16, torch.float16, torch.int8
DTYPES = (F32, BF16, F16)
TOLERANCE = {F32: 2e-6, BF16: 4e-3, F16: 5e-4}  # relative: half a unit of the last place, and a little of float32's
CANARY = 77.0
pytestmark = pytest.mark.usefixtures("isa")


def double(x: Tensor) -> NDArray[np.float64]:
    return x.double().numpy()


def assert_close(got: Tensor, want: NDArray[np.float64], dtype: torch.dtype, near_zero: float = 1e-6) -> None:
    assert got.dtype == dtype
    np.testing.assert_allclose(double(got), want, rtol=TOLERANCE[dtype], atol=near_zero)


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def framed(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory with a row more at both ends, and what is between them."""
    memory = torch.full((shape[0] + 2, *shape[1:]), CANARY, dtype=dtype)
    return memory, memory[1:-1]


# -- norms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 5, 16, 63, 100, 576, 1031])
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_norm(dtype: torch.dtype, n: int, layer_norm: bool, added: bool) -> None:
    rows, eps = 5, 1e-5
    residual_memory, residual = framed(rows, n, dtype=dtype)
    residual.copy_(normal(rows, n) + 3 * layer_norm)
    x = normal(rows, n, seed=1).to(dtype) if added else None
    weight, bias = normal(n, seed=2), normal(n, seed=3) if layer_norm else None
    total = residual.clone() if x is None else residual + x  # torch rounds the sum to `dtype`, and so does the kernel
    out_memory, out = framed(rows, n, dtype=dtype)
    torch.ops.pagefleet_cpu.norm(out, x, residual, weight, bias, eps, layer_norm)
    assert_same_bits(residual, total)
    want = double(total)
    if layer_norm:
        want = want - want.mean(-1, keepdims=True)
    want = want / np.sqrt((want * want).mean(-1, keepdims=True) + eps) * double(weight)
    if bias is not None:
        want += double(bias)
    assert_close(out, want, dtype, near_zero=1e-5 if layer_norm else 1e-6)  # what a mean leaves is not exact
    for memory in (residual_memory, out_memory):
        assert (memory[[0, -1]] == CANARY).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_norm_has_the_same_bits_alone(lib: cpu.CpuKernels, dtype: torch.dtype) -> None:
    residual, x, weight = normal(70, 300).to(dtype), normal(70, 300, seed=1).to(dtype), normal(300, seed=2)
    want = lib.norm(x, residual.clone(), weight, 1e-6)
    for row in (0, 33, 69):
        assert_same_bits(lib.norm(x[row : row + 1], residual[row : row + 1].clone(), weight, 1e-6), want[row : row + 1])


def test_norms_have_the_same_bits_on_every_instruction_set_with_fma(lib: cpu.CpuKernels, isa: str) -> None:
    if isa == "scalar":
        pytest.skip("multiplies and adds apart")
    residual, weight = normal(7, 1031), normal(1031, seed=2)
    got = lib.norm(None, residual, weight, 1e-6)
    lib.force_isa("avx2")
    assert_same_bits(got, lib.norm(None, residual, weight, 1e-6))


# -- gates ---------------------------------------------------------------------------------------------


def activated(x: NDArray[np.float64], activation: str) -> NDArray[np.float64]:
    if activation == "silu":
        return x / (1 + np.exp(-x))
    if activation == "gelu":
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 16, 37, 200, 1025])
@pytest.mark.parametrize("activation", cpu.ACTIVATIONS)
def test_gate(lib: cpu.CpuKernels, dtype: torch.dtype, n: int, activation: str) -> None:
    x = (4 * normal(5, 2 * n)).to(dtype)
    memory, out = framed(5, n, dtype=dtype)
    torch.ops.pagefleet_cpu.gate(out, x, cpu.ACTIVATIONS[activation])
    gate, up = double(x)[:, :n], double(x)[:, n:]
    # 1 + erf and 1 + tanh cancel where the gate is far below 0: what counts there is that it is small
    assert_close(out, activated(gate, activation) * up, dtype, near_zero=2e-5 if dtype == F32 else 1e-4)
    assert (memory[[0, -1]] == CANARY).all()
    for row in (0, 4):
        assert_same_bits(lib.gate(x[row : row + 1], activation), out[row : row + 1])


@pytest.mark.parametrize("activation", cpu.ACTIVATIONS)
def test_gates_of_extremes(lib: cpu.CpuKernels, activation: str) -> None:
    gate = torch.tensor([-1e30, -200.0, -0.0, 0.0, 200.0, 1e30])
    got = lib.gate(torch.cat([gate, torch.ones(6)])[None], activation)[0]
    np.testing.assert_allclose(got.numpy(), gate.clamp(min=0).numpy(), atol=1e-30)


# -- queries, keys, values -----------------------------------------------------------------------------


def rotary_of(tokens: int, rotary_dim: int) -> Tensor:
    """[tokens, 2, rotary_dim]: cos twice, and sin with a minus in its first half."""
    frequencies = 10000 ** -(np.arange(rotary_dim // 2) / (rotary_dim // 2))
    angles = (np.arange(tokens) * 37 % 101)[:, None] * frequencies
    table = np.stack([np.tile(np.cos(angles), 2), np.concatenate([-np.sin(angles), np.sin(angles)], -1)], 1)
    return torch.from_numpy(table.astype(np.float32))


def turned(x: NDArray[np.float64], rotary: Tensor, interleaved: bool) -> NDArray[np.float64]:
    """x [T, H, D] as complex numbers, times e^(i angle)."""
    rotary_dim = rotary.shape[-1]
    half = rotary_dim // 2
    angle = double(rotary[:, 0, :half]) + 1j * double(rotary[:, 1, half:])
    first, second = (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)) if interleaved else (
        slice(0, half), slice(half, rotary_dim)
    )  # fmt: skip
    numbers = (x[..., first] + 1j * x[..., second]) * angle[:, None]
    out = x.copy()
    out[..., first], out[..., second] = numbers.real, numbers.imag
    return out


def normed(x: NDArray[np.float64], weight: Tensor | None, eps: float) -> NDArray[np.float64]:
    return x if weight is None else x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * double(weight)


def cache_of(blocks: int, kv_heads: int, block_size: int, head_dim: int, kv_dtype: torch.dtype) -> Tensor:
    width = head_dim + (4 if kv_dtype == I8 else 0)
    return torch.full((2, blocks, kv_heads, block_size, width), 77, dtype=kv_dtype)


def check_stored(rows: Tensor, want: NDArray[np.float64], head_dim: int) -> None:
    """Cache rows [T, K, width] against the keys or values [T, K, D] they were made of."""
    if rows.dtype != I8:
        assert_close(rows, want, rows.dtype, near_zero=2e-6)
        return
    scale = double(rows[..., head_dim:].contiguous().view(F32))
    np.testing.assert_allclose(scale[..., 0] * 127, np.abs(want).max(-1), rtol=1e-5)
    error = np.abs(double(rows[..., :head_dim]) * scale - want)
    assert (error <= 0.501 * scale + 1e-6).all()


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (F32, F16), (BF16, I8)]
)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 128), (80, 20), (34, 34), (256, 64), (40, 0)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("with_norms", [False, True])
def test_rope(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, rotary_dim: int, interleaved: bool, with_norms: bool
) -> None:
    tokens, heads, kv_heads, block_size, eps = 7, 6, 2, 5, 1e-6
    qkv = normal(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    rotary = rotary_of(tokens, rotary_dim) if rotary_dim else None
    q_norm, k_norm = (normal(head_dim, seed=seed) if with_norms else None for seed in (1, 2))
    slots = torch.tensor([3, 19, -1, 0, 4, 5, -1], dtype=torch.int32)
    cache = cache_of(4, kv_heads, block_size, head_dim, kv_dtype)
    memory, out = framed(tokens, heads * head_dim, dtype=dtype)
    torch.ops.pagefleet_cpu.rope(
        out.view(tokens, heads, head_dim), qkv, q_norm, k_norm, rotary, slots, cache, eps, head_dim, interleaved
    )
    assert (memory[[0, -1]] == CANARY).all()
    q, keys = normed(double(qkv[:, :heads]), q_norm, eps), normed(double(qkv[:, heads:-kv_heads]), k_norm, eps)
    if rotary is not None:
        q, keys = turned(q, rotary, interleaved), turned(keys, rotary, interleaved)
    assert_close(out.view(tokens, heads, head_dim), q, dtype, near_zero=2e-6)
    written = slots >= 0
    flat = cache.transpose(2, 3).flatten(1, 2)  # [2, slots, kv_heads, width]
    check_stored(flat[0][slots[written].long()], keys[written.numpy()], head_dim)
    check_stored(flat[1][slots[written].long()], double(qkv[:, -kv_heads:])[written.numpy()], head_dim)
    others = torch.ones(flat.shape[1], dtype=torch.bool)
    others[slots[written].long()] = False
    assert (flat[:, others] == 77).all()


def test_int8_keys_of_zeros_are_zeros(lib: cpu.CpuKernels) -> None:
    cache = cache_of(1, 1, 4, 32, I8)
    lib.rope(torch.zeros(1, 3, 32), None, torch.tensor([2], dtype=torch.int32), cache, 32)
    assert (cache[:, 0, 0, 2] == 0).all()


@pytest.mark.parametrize("kv_dtype", [F32, I8])
def test_a_token_has_the_same_bits_alone(lib: cpu.CpuKernels, kv_dtype: torch.dtype) -> None:
    qkv, rotary, norm = normal(9, 4, 96).to(BF16), rotary_of(9, 96), normal(96, seed=1)
    slots = torch.arange(9, dtype=torch.int32)
    together, alone = (cache_of(2, 1, 8, 96, kv_dtype) for _ in range(2))
    want = lib.rope(qkv, rotary, slots, together, 96, q_norm=norm, k_norm=norm, eps=1e-6)
    for i in range(9):
        one = slice(i, i + 1)
        got = lib.rope(qkv[one], rotary[one], slots[one], alone, 96, q_norm=norm, k_norm=norm, eps=1e-6)
        assert_same_bits(got, want[one])
    assert_same_bits(alone, together)
