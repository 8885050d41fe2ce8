"""The CPU's ops: every one of a decoder's served by a compiled kernel of `pagefleet_kernels.cpu`.

A result's bits do not depend on the batch: each row is summed in one order, by whichever thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import cast

import numpy as np
import torch
from torch import Tensor

from pagefleet.backend import ForwardBatch, HostTensor, KVLayout
from pagefleet.model import ModelSpec
from pagefleet.torch_runner.host_tensors import bits, dense
from pagefleet.torch_runner.layer import Layer, Norms, Weight
from pagefleet.torch_runner.ops import Ops, op
from pagefleet.torch_runner.plan import Plan
from pagefleet_cpu import TRAITS
from pagefleet_kernels.cpu import PANEL, CpuKernels, LayerStack, PackedWeight

QUANTISED = TRAITS.weight_formats
STRIP = 128  # rows that are packed at a time, a multiple of PANEL
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class CpuPlan(Plan):
    """The batch's arrays, as the kernels read them. All int32."""

    slots: Tensor  # [T]
    block_tables: Tensor  # [R, B]
    query_starts: Tensor  # [R + 1]
    seq_lens: Tensor  # [R]
    head_dim: int
    soft_cap: float  # 0: none
    alibi_slopes: Tensor | None  # float32 [H]


@dataclass(frozen=True, slots=True)
class MixedWeight:
    """Matrices of several formats below each other: a file may quantise q, k and v differently."""

    parts: tuple[PackedWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


class CpuOps(Ops):
    vector_dtype = torch.float32

    def __init__(self, kernels: CpuKernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.close()

    def close(self) -> None:
        self._layers: Sequence[Layer] = ()  # those last run, and
        self._runs: list[tuple[slice, LayerStack | None]] = []  # how

    def pack(self, parts: Sequence[HostTensor], dtype: torch.dtype, device: torch.device) -> Weight:
        dense_format = str(dtype).removeprefix("torch.")

        def format_of(part: HostTensor) -> str:
            return part.dtype if part.dtype in QUANTISED else dense_format

        packed = [self._pack(format, list(group), dtype) for format, group in groupby(parts, format_of)]
        return packed[0] if len(packed) == 1 else MixedWeight(tuple(packed))

    def _pack(self, format: str, parts: list[HostTensor], dtype: torch.dtype) -> PackedWeight:
        """A strip at a time, so that loading needs little more than the packed weight."""
        outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
        weight = self.kernels.empty_weight(format, outputs, inputs)
        for start in range(0, outputs, STRIP):
            strip = list(_rows(parts, start, start + STRIP))
            rows = torch.cat([bits(part) for part in strip]) if format in QUANTISED else dense(strip, dtype, CPU)
            self.kernels.pack_rows(weight, start, rows)
        return weight

    def plan(self, batch: ForwardBatch, model: ModelSpec, layout: KVLayout, device: torch.device) -> Plan:
        arrays = (batch.slots, batch.block_tables, batch.query_starts, batch.seq_lens)
        tensors = (torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)
        slopes = None if model.alibi_slopes is None else torch.tensor(model.alibi_slopes)
        return CpuPlan(*tensors, layout.head_dim, model.attention_soft_cap or 0.0, slopes)

    @op
    def embed(self, tokens: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
        return self.kernels.gather(tokens, weight, dtype)

    @op
    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        if isinstance(weight, PackedWeight):
            return self.kernels.linear(x, weight, bias)
        biases = [None] * len(weight.parts) if bias is None else bias.split([part.shape[0] for part in weight.parts])
        parts = zip(weight.parts, biases, strict=True)
        return torch.cat([self.kernels.linear(x, part, own) for part, own in parts], 1)

    @op
    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        return self.kernels.linear(x, weight, dtype=torch.float32)

    @op
    def gated_linear(self, x: Tensor, weight: Weight, bias: Tensor | None, activation: str) -> Tensor:
        if isinstance(weight, PackedWeight) and weight.shape[0] % (2 * PANEL) == 0:  # both halves are panels
            return self.kernels.linear(x, weight, bias, activation)
        return self.kernels.gate(self.linear(x, weight, bias), activation)

    @op
    def add_rms_norm(self, residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self.kernels.norm(x, residual, weight, eps), residual

    @op
    def rope_and_write(self, qkv: Tensor, norms: Norms | None, rotary: Tensor, cache: Tensor, plan: Plan) -> Tensor:
        own = cast("CpuPlan", plan)
        if norms is None:
            return self.kernels.rope(qkv, rotary, own.slots, cache, own.head_dim)
        return self.kernels.rope(
            qkv, rotary, own.slots, cache, own.head_dim, q_norm=norms.q, k_norm=norms.k, eps=norms.eps
        )

    @op
    def attention(self, q: Tensor, cache: Tensor, plan: Plan, window: int | None, scale: float) -> Tensor:
        own = cast("CpuPlan", plan)
        return self.kernels.attention(
            *(q, cache, own.block_tables, own.query_starts, own.seq_lens, own.head_dim, scale),
            window=window,
            soft_cap=own.soft_cap,
            alibi_slopes=own.alibi_slopes,
        )

    @op
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
        """In one call, where weights are whole panels of one format each: what is between the kernels costs, too."""
        if self._layers is not layers:
            self._layers, self._runs = layers, _runs(layers, model)
        own = cast("CpuPlan", plan)
        for part, stack in self._runs:
            if stack is None:
                residual, x = super().layers(residual, x, layers[part], model, rotary, kv[part], plan)
                continue
            x = self.kernels.layers(
                residual,
                x,
                stack,
                rotary=rotary,
                slots=own.slots,
                block_tables=own.block_tables,
                query_starts=own.query_starts,
                seq_lens=own.seq_lens,
                cache=kv[part],
                head_dim=model.head_dim,
                activation=model.activation,
                eps=model.norm_eps,
                scale=model.attention_scale,
            )
        return residual, x


def _runs(layers: Sequence[Layer], model: ModelSpec) -> list[tuple[slice, LayerStack | None]]:
    """Runs of like layers, each for one call; None: op by op."""
    runs, start = [], 0
    for kind, group in groupby(layers, lambda layer: _kind(layer, model)):
        run = list(group)
        runs.append((slice(start, start + len(run)), None if kind is None else _stack(run)))
        start += len(run)
    return runs


def _kind(layer: Layer, model: ModelSpec) -> tuple[object, ...] | None:
    """What layers of one call have in common; None: a weight is not of whole panels, or of several formats, or
    attention is more than the kernel of all layers has."""
    matrices = (layer.qkv, layer.o, layer.gate_up, layer.down)
    if not all(isinstance(matrix, PackedWeight) for matrix in matrices) or layer.down.shape[1] % PANEL:
        return None
    if model.features:
        return None
    if layer.qk_norms is not None and layer.qk_norms.eps != model.norm_eps:
        return None
    optional = (layer.qkv_bias, layer.qk_norms, layer.o_bias, layer.gate_up_bias, layer.down_bias)
    return (*(matrix.shape for matrix in matrices), *(vector is None for vector in optional))


def _stack(layers: Sequence[Layer]) -> LayerStack:
    names = ("attn_norm", "qkv", "qkv_bias", "o", "o_bias", "mlp_norm", "gate_up", "gate_up_bias", "down", "down_bias")
    norms = [layer.qk_norms for layer in layers]
    return LayerStack.of(
        **{name: [getattr(layer, name) for layer in layers] for name in names},
        q_norm=[each and each.q for each in norms],
        k_norm=[each and each.k for each in norms],
        window=[layer.window for layer in layers],
    )


def _rows(parts: Sequence[HostTensor], start: int, stop: int) -> Iterator[HostTensor]:
    """Rows start:stop of `parts` below each other."""
    for part in parts:
        if start < part.shape[0] and stop > 0:
            yield part.rows(max(start, 0), min(stop, part.shape[0]))
        start, stop = start - part.shape[0], stop - part.shape[0]
