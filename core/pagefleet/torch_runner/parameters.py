"""Parameters: a model's tensors on the device, those that are multiplied with the same input fused into one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagefleet.backend import BackendError, WeightSource
from pagefleet.model import ModelSpec
from pagefleet.torch_runner.host_tensors import dense
from pagefleet.torch_runner.layer import Layer, Norms, Weight
from pagefleet.torch_runner.ops import Ops


@dataclass(frozen=True, slots=True)
class Parameters:
    embed: Weight  # [vocab_size, hidden]
    norm: Tensor  # [hidden]
    head: Weight  # [vocab_size, hidden]
    layers: tuple[Layer, ...]
    rotary: Tensor  # float32 [max_position_embeddings, 2 (cos, sin), rotary_dim], see `Ops.rope_and_write`
    dtype: torch.dtype  # of activations


class ParameterLoader:
    """Reads the tensors of `model` from `weights` onto `device`: vectors in `dtype`, matrices as `ops` packs them."""

    def __init__(
        self, model: ModelSpec, weights: WeightSource, ops: Ops, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.model, self.weights, self.ops, self.device, self.dtype = model, weights, ops, device, dtype

    def load(self) -> Parameters:
        embed = self.matrix("embed.weight")  # the largest first, while there is room for a dequantised copy
        head = self.matrix("head.weight") if self._has("head.weight") else embed
        layers = tuple(self._layer(f"layers.{index}.", window) for index, window in enumerate(self.model.windows))
        return Parameters(embed, self._vector("norm.weight"), head, layers, self.rotary(), self.dtype)

    def _layer(self, prefix: str, window: int | None) -> Layer:
        def names(*parts: str, kind: str = "weight") -> list[str]:
            return [f"{prefix}{part}.{kind}" for part in parts]

        return Layer(
            attn_norm=self._vector(*names("attn_norm")),
            qkv=self.matrix(*names("q", "k", "v")),
            qkv_bias=self._bias(*names("q", "k", "v", kind="bias")),
            qk_norms=self.qk_norms(prefix),
            o=self.matrix(*names("o")),
            o_bias=self._bias(*names("o", kind="bias")),
            mlp_norm=self._vector(*names("mlp_norm")),
            gate_up=self.matrix(*names("gate", "up")),
            gate_up_bias=self._bias(*names("gate", "up", kind="bias")),
            down=self.matrix(*names("down")),
            down_bias=self._bias(*names("down", kind="bias")),
            window=window,
        )

    def _has(self, *names: str) -> bool:
        return any(name in self.model.tensors for name in names)

    def _check(self, *names: str) -> None:
        if missing := [name for name in names if name not in self.model.tensors]:
            raise BackendError(f"the spec of {self.model.model_type} lacks {', '.join(missing)}")

    def matrix(self, *names: str) -> Weight:
        """The named matrices below each other."""
        self._check(*names)
        return self.ops.pack([self.weights.read(name) for name in names], self.dtype, self.device)

    def _vector(self, *names: str) -> Tensor:
        """The named vectors after each other."""
        self._check(*names)
        parts = [self.weights.read(name) for name in names]
        return dense(parts, self.ops.vector_dtype or self.dtype, self.device)

    def _bias(self, *names: str) -> Tensor | None:
        return self._vector(*names) if self._has(*names) else None

    def qk_norms(self, prefix: str) -> Norms | None:
        """Those of the layer whose tensors begin with `prefix`, if it has them."""
        q_name, k_name = f"{prefix}q_norm.weight", f"{prefix}k_norm.weight"
        if not self._has(q_name, k_name):
            return None
        return Norms(self._vector(q_name), self._vector(k_name), self.model.norm_eps)

    def rotary(self) -> Tensor:
        """`Parameters.rotary`."""
        cos, sin = map(torch.from_numpy, self.model.rope.table(self.model.max_position_embeddings))
        return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1).to(self.device)
