"""Layers in one call: the same bits as op after op, and what the call is given is checked."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from random_tensors import host, normal
from torch import Tensor

from pagefleet.backend import ForwardBatch, HostTensor, KVLayout
from pagefleet.model import ModelSpec
from pagefleet.rope import RopeSpec
from pagefleet.torch_runner.layer import Layer, Norms
from pagefleet.torch_runner.ops import Ops
from pagefleet_cpu.ops import CpuOps, CpuPlan
from pagefleet_kernels import cpu

pytestmark = pytest.mark.usefixtures("isa")

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, BLOCK, BLOCKS = 48, 4, 2, 16, 64, 8, 12
TOKENS = 21
MODEL = ModelSpec(
    model_type="test",
    vocab_size=10,
    hidden_size=HIDDEN,
    intermediate_size=INTERMEDIATE,
    num_layers=3,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    max_position_embeddings=64,
    activation="silu",
    norm_eps=1e-5,
    rope=RopeSpec(HEAD_DIM, 10000.0),
    attention_scale=0.25,
    windows=(None, 5, None),
    tensors={},
)


def make_layer(ops: Ops, seed: int, dtype: torch.dtype, extras: bool, window: int | None, mixed: bool) -> Layer:
    def matrix(outputs: int, inputs: int, at: int, *, split: bool = False) -> Any:
        values = (normal(outputs, inputs, seed=100 * seed + at) / inputs**0.5).to(dtype)
        parts = values.chunk(2) if split else (values,)
        hosts = [host(part) for part in parts]
        if split:  # the second half as int8, a format of its own
            scales, values = torch.full((len(parts[1]), 1), 0.01), (parts[1] * 100).to(torch.int8)
            rows = torch.cat([scales.view(torch.uint8), values.view(torch.uint8)], 1)
            hosts[1] = HostTensor("w", "int8", tuple(values.shape), rows.reshape(-1).numpy())
        return ops.pack(hosts, dtype, torch.device("cpu"))

    def vector(size: int, at: int) -> Tensor:
        return normal(size, seed=100 * seed + at)

    qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    return Layer(
        attn_norm=vector(HIDDEN, 1),
        qkv=matrix(qkv, HIDDEN, 2, split=mixed),
        qkv_bias=vector(qkv, 3) if extras else None,
        qk_norms=Norms(vector(HEAD_DIM, 4), vector(HEAD_DIM, 5), 1e-5) if extras else None,
        o=matrix(HIDDEN, HEADS * HEAD_DIM, 6),
        o_bias=vector(HIDDEN, 7) if extras else None,
        mlp_norm=vector(HIDDEN, 8),
        gate_up=matrix(2 * INTERMEDIATE, HIDDEN, 9),
        gate_up_bias=None,
        down=matrix(HIDDEN, INTERMEDIATE, 10),
        down_bias=None,
        window=window,
    )


def make_plan(ops: Ops) -> CpuPlan:
    """A prefill of 12 tokens, 8 more of a row that has 11, and one of a row that has 20."""
    lengths, before = np.array([12, 8, 1]), np.array([0, 11, 20])
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tables = np.array([[1, 2, 0, 0], [3, 4, 5, 0], [6, 7, 8, 0]], np.int32)
    positions = np.concatenate([np.arange(b, b + n) for b, n in zip(before, lengths, strict=True)]).astype(np.int32)
    rows = np.repeat(np.arange(3), lengths)
    slots = (tables[rows, positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32)
    batch = ForwardBatch(
        np.zeros(TOKENS, np.int32), positions, slots, starts, (before + lengths).astype(np.int32), tables,
        np.zeros(0, np.int32),
    )  # fmt: skip
    layout = KVLayout(3, BLOCKS, BLOCK, KV_HEADS, HEAD_DIM, "float32")
    plan = ops.plan(batch, MODEL, layout, torch.device("cpu"))
    assert isinstance(plan, CpuPlan)
    return plan


def make_cache(dtype: torch.dtype) -> Tensor:
    return normal(3, 2, BLOCKS + 1, KV_HEADS, BLOCK, HEAD_DIM, seed=7).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "biases and head norms"])
@pytest.mark.parametrize("mixed", [False, True], ids=["one format", "a layer of two formats"])
def test_layers_are_their_ops_bit_for_bit(lib: cpu.CpuKernels, dtype: torch.dtype, extras: bool, mixed: bool) -> None:
    ops = CpuOps(lib)
    windows = enumerate(MODEL.windows)
    layers = [make_layer(ops, i, dtype, extras, window, mixed and i == 1) for i, window in windows]
    plan, rotary = make_plan(ops), normal(TOKENS, 2, HEAD_DIM, seed=8)
    results = []
    for run in (ops.layers, lambda *args: Ops.layers(ops, *args)):
        residual, cache = normal(TOKENS, HIDDEN, seed=9).to(dtype), make_cache(dtype)
        residual, x = run(residual, None, layers, MODEL, rotary, cache, plan)
        results.append((residual, x, cache))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
        assert got.isfinite().all()
    assert ops.ledger["attention", "CpuOps"] == (4 if mixed else 3)  # of the second run, and of what could not be fused


def test_what_layers_are_given_is_checked(lib: cpu.CpuKernels) -> None:
    ops = CpuOps(lib)
    layers = [make_layer(ops, i, torch.float32, True, window, False) for i, window in enumerate(MODEL.windows)]
    plan, rotary, cache = make_plan(ops), normal(TOKENS, 2, HEAD_DIM, seed=8), make_cache(torch.float32)

    def refused(layers: list[Layer], cache: Tensor, plan: CpuPlan, match: str) -> None:
        residual, before = normal(TOKENS, HIDDEN, seed=9), cache.clone()
        with pytest.raises(RuntimeError, match=match):
            ops.layers(residual, None, layers, MODEL, rotary, cache, plan)
        assert torch.equal(residual, normal(TOKENS, HIDDEN, seed=9))
        assert torch.equal(cache, before)

    refused(layers, cache[:2], plan, "the cache is of 2 layers")
    refused(layers, cache[:, :1].contiguous(), plan, "the cache must be")
    far = plan.block_tables.clone()
    far[1, 1] = BLOCKS + 1
    refused(layers, cache, replace(plan, block_tables=far), "names block 13")
    slots = plan.slots.clone()
    slots[-1] = BLOCK * (BLOCKS + 1)
    refused(layers, cache, replace(plan, slots=slots), "slot 104 is beyond")
    refused([replace(layer, gate_up=layer.o) for layer in layers], cache, plan, "the packed weight is smaller")
    refused([replace(layer, attn_norm=layer.attn_norm[:-1]) for layer in layers], cache, plan, "attn_norm must be")
    refused([replace(layer, window=-3) for layer in layers], cache, plan, "window is -3")


def test_weights_lie_in_common_memory_that_lasts_as_long_as_they_do(lib: cpu.CpuKernels) -> None:
    rows = torch.arange(64 * 64, dtype=torch.float32).view(64, 64)
    first, second = (lib.pack("float32", rows + i, 64, 64) for i in range(2))
    assert first.data.data_ptr() % 64 == second.data.data_ptr() % 64 == 0
    assert second.data.data_ptr() - first.data.data_ptr() == first.num_bytes
    large = lib.pack("float32", torch.ones(8192, 4096), 8192, 4096)  # more than a piece holds
    third = lib.pack("float32", rows, 64, 64)
    del first
    gc.collect()
    x = torch.eye(64)
    assert torch.equal(lib.linear(x, second), rows.T + 1)
    assert torch.equal(lib.linear(x, third), rows.T)
    assert lib.linear(torch.ones(1, 4096), large)[0, -1] == 4096


def test_weights_of_several_threads_do_not_overlap(lib: cpu.CpuKernels) -> None:
    def take(found: list[tuple[int, int]]) -> None:
        for _ in range(200):
            weight = lib.empty_weight("float32", 16, 4)
            kept.append(weight)
            found.append((weight.data.data_ptr(), weight.num_bytes))

    kept: list[cpu.PackedWeight] = []
    found: list[list[tuple[int, int]]] = [[] for _ in range(4)]
    threads = [threading.Thread(target=take, args=(each,)) for each in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    places = sorted(place for each in found for place in each)
    assert all(start + size <= following for (start, size), (following, _) in pairwise(places))


def test_a_closed_model_lets_its_weights_go(lib: cpu.CpuKernels) -> None:
    ops = CpuOps(lib)
    layers = [make_layer(ops, i, torch.float32, False, window, False) for i, window in enumerate(MODEL.windows)]
    residual, cache = normal(TOKENS, HIDDEN, seed=9), make_cache(torch.float32)
    ops.layers(residual, None, layers, MODEL, normal(TOKENS, 2, HEAD_DIM, seed=8), cache, make_plan(ops))
    alive = weakref.ref(layers[0].attn_norm)
    del layers
    ops.close()
    gc.collect()
    assert alive() is None


def test_layers_that_differ_are_run_as_they_are(lib: cpu.CpuKernels) -> None:
    """One without biases among others, and head norms with an epsilon of their own."""
    ops = CpuOps(lib)
    layers = [make_layer(ops, i, torch.float32, True, None, False) for i in range(3)]
    norms = layers[2].qk_norms
    assert norms is not None
    layers = [layers[0], replace(layers[1], qkv_bias=None), replace(layers[2], qk_norms=replace(norms, eps=0.5))]
    plan, rotary = make_plan(ops), normal(TOKENS, 2, HEAD_DIM, seed=8)
    results = []
    for run in (ops.layers, lambda *args: Ops.layers(ops, *args)):
        results.append(
            run(normal(TOKENS, HIDDEN, seed=9), None, layers, MODEL, rotary, make_cache(torch.float32), plan)
        )
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("shape", [(2, 4, 0, 8, 16), (2, 4, 1, 0, 16)])
def test_a_cache_without_heads_or_slots_is_refused(lib: cpu.CpuKernels, shape: tuple[int, ...]) -> None:
    plan = make_plan(CpuOps(lib))
    with pytest.raises(RuntimeError, match="no heads, or blocks of no slots"):
        lib.attention(
            torch.zeros(TOKENS, 4, 16), torch.zeros(shape), plan.block_tables, plan.query_starts, plan.seq_lens, 16, 1.0
        )
