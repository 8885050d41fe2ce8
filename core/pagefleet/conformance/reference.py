"""A dense float64 decoder: what every backend is compared with.

It has no pages, no batch and no cache, works head by head, and shares no code with any backend. RoPE is a complex
rotation; its angles come from the textbook formula (Su et al. 2021, arXiv:2104.09864), or from the spec's table when
the model scales them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pagefleet.model import ModelSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]


def tolerance(dtype: str) -> float:
    """Largest relative error ||got - want|| / ||want|| of a vector (a row of logits, a key) computed in `dtype`.

    In a half-width dtype the roundings between ops count: about 0.3 epsilon each, some twenty in a row in these models
    of two or three layers, 1 to 2 epsilons as a random walk, a few more through attention. Sums are float32 there; in
    float32 it is the sums of up to 500 products that count, hence the larger factor. What one wrong position costs is
    a hundred times more than the former and ten thousand times more than the latter.
    """
    mantissa_bits, factor = {"float32": (23, 128), "float16": (10, 12), "bfloat16": (7, 12)}[dtype]
    return factor * 2.0**-mantissa_bits


def relative_error(got: NDArray[Any], want: NDArray[Any]) -> float:
    """The worst ||got - want|| / ||want|| over the vectors of the last axis; inf if anything is not a number."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    if not np.isfinite(got).all():
        return math.inf
    error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    return float(error.max(initial=0.0))


def log_softmax(logits: NDArray[Any]) -> Float64:
    """Log-probabilities of logits [..., vocab_size], in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """A token sequence's results."""

    logits: Float64  # [N, vocab_size]
    ops: Mapping[str, Float64]  # what was computed on the way [N, n], in the order and by the names of `Backend.trace`


class Reference(Protocol):
    """A model that a backend is compared with."""

    def run(self, token_ids: Sequence[int]) -> ReferenceRun:
        """Run the whole sequence at once."""
        ...


class DenseDecoder:
    """A `ModelSpec` over float64 weights: the reference of every op."""

    def __init__(self, model: ModelSpec, weights: Mapping[str, Float64]) -> None:
        self.model = model
        self.weights = weights

    def run(self, token_ids: Sequence[int]) -> ReferenceRun:
        """Run the whole sequence at once."""
        ops = {"embed": self.weights["embed.weight"][np.asarray(token_ids)]}
        x = ops["embed"]
        for layer in range(self.model.num_layers):
            prefix = f"layers.{layer}."
            y = ops[prefix + "attn_norm"] = self._rms_norm(x, prefix + "attn_norm.weight")
            heads = {name: self._heads(y, prefix, name) for name in "qkv"}
            ops |= {prefix + name: np.concatenate(list(value), axis=1) for name, value in heads.items()}
            mixed = self._attention(heads["q"], heads["k"], heads["v"], self.model.windows[layer])
            ops[prefix + "attention"] = mixed
            ops[prefix + "o"] = self._affine(mixed, prefix + "o")
            x = x + ops[prefix + "o"]
            y = ops[prefix + "mlp_norm"] = self._rms_norm(x, prefix + "mlp_norm.weight")
            gate = _activation(self.model.activation)(self._affine(y, prefix + "gate"))
            ops[prefix + "gated"] = gate * self._affine(y, prefix + "up")
            ops[prefix + "down"] = self._affine(ops[prefix + "gated"], prefix + "down")
            x = x + ops[prefix + "down"]
        ops["norm"] = self._rms_norm(x, "norm.weight")
        head = self.weights.get("head.weight", self.weights["embed.weight"])
        return ReferenceRun(ops["norm"] @ head.T, ops)

    def _affine(self, x: Float64, name: str) -> Float64:
        y: Float64 = np.einsum("ni,oi->no", x, self.weights[name + ".weight"])
        return y + self.weights.get(name + ".bias", 0.0)

    def _rms_norm(self, x: Float64, name: str) -> Float64:
        return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + self.model.norm_eps) * self.weights[name])

    def _heads(self, x: Float64, prefix: str, name: str) -> Float64:
        """A projection, head first: [heads, N, head_dim]. Queries and keys as they attend.

        That is normalised where the family does that, then turned by their position.
        """
        flat = self._affine(x, prefix + name)
        heads = np.stack(np.split(flat, flat.shape[1] // self.model.head_dim, axis=1))
        if name == "v":
            return heads
        norm = f"{prefix}{name}_norm.weight"
        if norm in self.weights:
            heads = self._rms_norm(heads, norm)
        turned, half = heads.copy(), self.model.rope.rotary_dim // 2
        pairs = (heads[..., :half] + 1j * heads[..., half : 2 * half]) * self._turns(heads.shape[1])
        turned[..., :half], turned[..., half : 2 * half] = pairs.real, pairs.imag
        return turned

    def _turns(self, num_positions: int) -> NDArray[np.complex128]:
        """exp(i * angle) of every position and pair [N, rotary_dim // 2]."""
        rope = self.model.rope
        if rope.scaling:
            cos, sin = rope.table(self.model.max_position_embeddings)
            return cos[:num_positions].astype(np.complex128) + 1j * sin[:num_positions]
        pair = np.arange(rope.rotary_dim // 2, dtype=np.float64)
        angles = np.arange(num_positions)[:, None] * rope.theta ** (-2 * pair / rope.rotary_dim)
        return np.cos(angles) + 1j * np.sin(angles)

    def _attention(self, queries: Float64, keys: Float64, values: Float64, window: int | None) -> Float64:
        """Full causal attention, one head at a time, all positions by all positions: [N, num_heads * head_dim]."""
        num_heads, length, _ = queries.shape
        seen = np.tri(length)
        if window is not None:
            seen -= np.tri(length, k=-window)
        mixed = []
        for head in range(num_heads):
            kv_head = head // (num_heads // self.model.num_kv_heads)
            scores = queries[head] @ keys[kv_head].T * self.model.attention_scale
            if (cap := self.model.attention_soft_cap) is not None:
                scores = cap * np.tanh(scores / cap)
            if self.model.alibi_slopes is not None:  # Press et al. 2022, arXiv:2108.12409
                scores = scores - self.model.alibi_slopes[head] * (np.arange(length)[:, None] - np.arange(length))
            scores = np.where(seen, scores, -np.inf)
            shares = np.exp(scores - scores.max(axis=1, keepdims=True))
            mixed.append(shares @ values[kv_head] / shares.sum(axis=1, keepdims=True))
        return np.concatenate(mixed, axis=1)


def _activation(name: str) -> Callable[[Float64], Float64]:
    if name == "silu":
        return lambda x: x / (1 + np.exp(-x))
    if name == "gelu_tanh":
        return lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if name == "gelu":
        return lambda x: 0.5 * x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2)))
    raise ValueError(f"unknown activation {name!r}: silu, gelu_tanh and gelu are known")
