"""ModelSpec: a decoder described by numbers and names, so that one runner carries every family.

A family's file in `models/` maps a checkpoint's `config.json` to a `ModelSpec`; a backend reads only the spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pagefleet.rope import RopeSpec

FEATURES = ("alibi", "soft_cap")
"""What a model may ask beyond the plain decoder; a backend names those it has in `Traits.model_features`."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One parameter: what the checkpoint calls it, and its shape."""

    checkpoint_name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A pre-norm decoder: per layer, attention and a gated MLP, each with its norm and residual.

    A norm is RMSNorm: x / sqrt(mean(x^2) + norm_eps) * weight. Queries and keys have theirs before RoPE, per head.
    RoPE turns the pair of dimensions i and i + rotary_dim / 2 and leaves those from rotary_dim on:
    `rope.table(max_position_embeddings)` is cos and sin, float32 [positions, rotary_dim / 2], scaled as the model
    wants them. The MLP is down(activation(gate(x)) * up(x)). A score of attention is attention_scale * q k; then, where
    the model has them, cap * tanh(score / cap) and - slope * (positions between query and key), in this order.

    `tensors` names every parameter in the engine's own terms. A matrix is [out, in]. Biases, q_norm, k_norm and the
    head are absent where a family has none, and the step that would use them is left out; the others are always there:

    - `embed.weight`, `norm.weight`, `head.weight` (absent: the embedding is used, tied)
    - `layers.{i}.` + `attn_norm.weight`, `q|k|v|o.weight`, `q|k|v|o.bias`, `q_norm.weight`, `k_norm.weight` [head_dim],
      `mlp_norm.weight`, `gate|up|down.weight`, `gate|up|down.bias`
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # positions a backend prepares for; the engine sets its own limit here
    norm_eps: float
    rope: RopeSpec
    activation: str  # "silu" | "gelu_tanh" | "gelu", of the gate
    attention_scale: float
    windows: tuple[int | None, ...]  # [num_layers] a token sees this many positions, itself included; None: all
    tensors: Mapping[str, TensorSpec] = field(repr=False)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    attention_soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None  # [num_heads]

    @property
    def features(self) -> tuple[str, ...]:
        """Those of `FEATURES` that the model has: it runs only where `Traits.model_features` names them all."""
        has = {"alibi": self.alibi_slopes is not None, "soft_cap": self.attention_soft_cap is not None}
        return tuple(name for name in FEATURES if has[name])

    @property
    def num_parameters(self) -> int:
        total = 0
        for tensor in self.tensors.values():
            count = 1
            for size in tensor.shape:
                count *= size
            total += count
        return total
