"""What a decoder layer is made of: its weights, in whatever form the ops keep them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

Weight = Any
"""A matrix [out, in] in whatever form the ops keep it; only the `Ops` that packed it looks inside."""


@dataclass(frozen=True, slots=True)
class Norms:
    """The RMSNorm of every query head and of every key head, before they are turned."""

    q: Tensor  # [D]
    k: Tensor  # [D]
    eps: float


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. What a family does not have is None."""

    attn_norm: Tensor  # [hidden]
    qkv: Weight  # [(H + 2 K) * D, hidden]
    qkv_bias: Tensor | None
    qk_norms: Norms | None
    o: Weight  # [hidden, H * D]
    o_bias: Tensor | None
    mlp_norm: Tensor  # [hidden]
    gate_up: Weight  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None
    down: Weight  # [hidden, intermediate]
    down_bias: Tensor | None
    window: int | None  # positions that attention sees, the token's own included; None: all
