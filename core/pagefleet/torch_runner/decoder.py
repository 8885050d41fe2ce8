"""Decoder: the forward pass of every model family.

This module knows which step follows which; how a step is computed is up to `Ops`.
"""

from __future__ import annotations

from torch import Tensor

from pagefleet.model import ModelSpec
from pagefleet.torch_runner.ops import Ops
from pagefleet.torch_runner.parameters import Parameters
from pagefleet.torch_runner.plan import Plan


class Decoder:
    def __init__(self, model: ModelSpec, parameters: Parameters, ops: Ops) -> None:
        self.model, self.parameters, self.ops = model, parameters, ops

    def forward(self, tokens: Tensor, positions: Tensor, logit_rows: Tensor, plan: Plan, kv: Tensor) -> Tensor:
        """Logits float32 [L, vocab_size] of the tokens named by `logit_rows`; keys and values go to `kv`.

        tokens, positions int32 [T], logit_rows int32 [L]; `kv` has a cache for each layer, see `Ops`.
        """
        model, ops, parameters = self.model, self.ops, self.parameters
        rotary = parameters.rotary.index_select(0, positions)
        residual = ops.embed(tokens, parameters.embed, parameters.dtype)
        residual, x = ops.layers(residual, None, parameters.layers, model, rotary, kv, plan)
        x, _ = ops.add_rms_norm(residual, x, parameters.norm, model.norm_eps)
        return ops.logits(x.index_select(0, logit_rows), parameters.head)
