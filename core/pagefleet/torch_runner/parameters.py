"""Parameters: a model's tensors on the device, those that are multiplied with the same input fused into one.

Every tensor goes from its file straight to its place: loading needs the weights' own size, and one tensor more where
the file is quantised.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagefleet.backend import BackendError, HostTensor, WeightSource
from pagefleet.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. What a family does not have is None."""

    attn_norm: Tensor  # [hidden]
    qkv: Tensor  # [(H + 2 K) * D, hidden]
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [H + K, D] q_norm for each query head, then k_norm for each key head
    o: Tensor  # [hidden, H * D]
    o_bias: Tensor | None
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Parameters:
    embed: Tensor  # [vocab_size, hidden]
    norm: Tensor  # [hidden]
    head: Tensor  # [vocab_size, hidden]
    layers: tuple[Layer, ...]
    rotary: Tensor  # float32 [max_position_embeddings, 2 (cos, sin), rotary_dim], see `Ops.rope_and_write`


class ParameterLoader:
    """Reads the tensors of `model` from `weights` onto `device`, in `dtype`."""

    def __init__(self, model: ModelSpec, weights: WeightSource, device: torch.device, dtype: torch.dtype) -> None:
        self.model, self.weights, self.device, self.dtype = model, weights, device, dtype

    def load(self) -> Parameters:
        embed = self._need("embed.weight")  # the largest first, while there is room for a dequantised copy
        head = self._take("head.weight")
        layers = tuple(self._layer(f"layers.{index}.") for index in range(self.model.num_layers))
        return Parameters(embed, self._need("norm.weight"), embed if head is None else head, layers, self._rotary())

    def _layer(self, prefix: str) -> Layer:
        def names(*parts: str, kind: str = "weight") -> list[str]:
            return [f"{prefix}{part}.{kind}" for part in parts]

        return Layer(
            attn_norm=self._need(*names("attn_norm")),
            qkv=self._need(*names("q", "k", "v")),
            qkv_bias=self._take(*names("q", "k", "v", kind="bias")),
            qk_norm=self._qk_norm(*names("q_norm", "k_norm")),
            o=self._need(*names("o")),
            o_bias=self._take(*names("o", kind="bias")),
            mlp_norm=self._need(*names("mlp_norm")),
            gate_up=self._need(*names("gate", "up")),
            gate_up_bias=self._take(*names("gate", "up", kind="bias")),
            down=self._need(*names("down")),
            down_bias=self._take(*names("down", kind="bias")),
        )

    def _take(self, *names: str) -> Tensor | None:
        """The named tensors below each other as one; None if the model has none of them."""
        if not any(name in self.model.tensors for name in names):
            return None
        return self._need(*names)

    def _need(self, *names: str) -> Tensor:
        if missing := [name for name in names if name not in self.model.tensors]:
            raise BackendError(f"the spec of {self.model.model_type} lacks {', '.join(missing)}")
        sizes = [self.model.tensors[name].shape[0] for name in names]
        shape = (sum(sizes), *self.model.tensors[names[0]].shape[1:])
        fused = torch.empty(shape, dtype=self.dtype, device=self.device)
        for name, part in zip(names, fused.split(sizes), strict=True):
            part.copy_(_view(self.weights.read(name)))
        return fused

    def _qk_norm(self, q_name: str, k_name: str) -> Tensor | None:
        both = self._take(q_name, k_name)
        if both is None:
            return None
        repeats = torch.tensor([self.model.num_heads, self.model.num_kv_heads], device=self.device)
        return both.view(2, self.model.head_dim).repeat_interleave(repeats, 0)

    def _rotary(self) -> Tensor:
        cos, sin = map(torch.from_numpy, self.model.rope.table(self.model.max_position_embeddings))
        return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1).to(self.device)


def _view(tensor: HostTensor) -> Tensor:
    """The tensor's bytes where they lie; a quantised tensor's values in float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors; this one is only copied from
        if tensor.dequantise is not None:
            return torch.from_numpy(tensor.numpy())
        data = torch.from_numpy(np.ascontiguousarray(tensor.data))
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        return data.view(dtype).view(tensor.shape)
