"""Decoder: the forward pass of every model family, a dozen steps a layer.

This module knows which step follows which; how a step is computed is up to `Ops`.
"""

from __future__ import annotations

from torch import Tensor

from pagefleet.model import ModelSpec
from pagefleet.torch_runner.ops import Ops
from pagefleet.torch_runner.parameters import Layer, Parameters
from pagefleet.torch_runner.plan import BatchPlan


class Decoder:
    def __init__(self, model: ModelSpec, parameters: Parameters, ops: Ops) -> None:
        self.model, self.parameters, self.ops = model, parameters, ops

    def forward(self, tokens: Tensor, positions: Tensor, logit_rows: Tensor, plan: BatchPlan, kv: Tensor) -> Tensor:
        """Logits float32 [L, vocab_size] of the tokens named by `logit_rows`; keys and values go to `kv`.

        tokens, positions int32 [T], logit_rows int32 [L]; `kv` has a cache for each layer, see `Ops`.
        """
        ops, parameters, eps = self.ops, self.parameters, self.model.norm_eps
        rotary = parameters.rotary.index_select(0, positions)
        residual, x = ops.embed(tokens, parameters.embed), None
        for layer, window, cache in zip(parameters.layers, self.model.windows, kv, strict=True):
            x, residual = ops.add_rms_norm(residual, x, layer.attn_norm, eps)
            x = self._attention(x, layer, window, rotary, cache, plan)
            x, residual = ops.add_rms_norm(residual, x, layer.mlp_norm, eps)
            x = self._mlp(x, layer)
        x, _ = ops.add_rms_norm(residual, x, parameters.norm, eps)
        return ops.linear(x.index_select(0, logit_rows), parameters.head, None).float()

    def _attention(
        self, x: Tensor, layer: Layer, window: int | None, rotary: Tensor, cache: Tensor, plan: BatchPlan
    ) -> Tensor:
        model, ops = self.model, self.ops
        qkv = ops.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, model.head_dim)
        qk, v = qkv.split([model.num_heads + model.num_kv_heads, model.num_kv_heads], 1)
        if layer.qk_norm is not None:
            qk = ops.rms_norm(qk, layer.qk_norm, model.norm_eps)
        q = ops.rope_and_write(qk, v, rotary, cache, plan)
        x = ops.attention(q, cache, plan, window, model.attention_scale)
        return ops.linear(x, layer.o, layer.o_bias)

    def _mlp(self, x: Tensor, layer: Layer) -> Tensor:
        gate_up = self.ops.linear(x, layer.gate_up, layer.gate_up_bias)
        return self.ops.linear(self.ops.gate(gate_up, self.model.activation), layer.down, layer.down_bias)
