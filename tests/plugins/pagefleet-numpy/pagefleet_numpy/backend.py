"""A decoder over a paged KV cache, in numpy: the whole of what a device has to do.

There is no prefill and no decode: a row brings one token or many, writes their keys and values into the slots it was
given, and reads back its context through its block table. Plain before fast; float32 throughout.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagefleet.backend import Backend, ForwardBatch, KVLayout, ModelSpec, Observe, WeightSource
from pagefleet_numpy import TRAITS

Array = NDArray[np.float32]
Ints = NDArray[np.int32]


class NumpyBackend(Backend):
    """Weights are a dict of float32 arrays, the KV cache is one array in the exchange form."""

    traits = TRAITS
    observe: Observe = staticmethod(lambda name, value: None)  # see `trace`

    def load(self, model: ModelSpec, weights: WeightSource, dtype: str) -> None:
        self.model = model
        self.weights = {name: weights.read(name).numpy() for name in model.tensors}
        self.cos, self.sin = model.rope.table(model.max_position_embeddings)

    def allocate_kv(self, layout: KVLayout) -> None:
        self.layout = layout
        shape = (layout.num_blocks, layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_dim)
        self.cache = np.zeros(shape, np.float32)

    def forward(self, batch: ForwardBatch) -> Array:
        """Logits [L, vocab_size]. Padding tokens are computed like any other and then dropped."""
        hidden = self.told("embed", self.weights["embed.weight"][batch.token_ids])
        for layer in range(self.model.num_layers):
            prefix = f"layers.{layer}."
            normed = self.told(prefix + "attn_norm", self.norm(hidden, prefix + "attn_norm"))
            hidden = hidden + self.told(prefix + "o", self.attention(layer, normed, batch))
            normed = self.told(prefix + "mlp_norm", self.norm(hidden, prefix + "mlp_norm"))
            hidden = hidden + self.told(prefix + "down", self.mlp(prefix, normed))
        head = "head" if "head.weight" in self.weights else "embed"
        return self.linear(self.norm(hidden[batch.logit_rows], "norm"), head)

    def to_host(self, logits: Array) -> Array:
        return logits

    def export_blocks(self, blocks: Ints) -> NDArray[Any]:
        return self.cache[blocks]

    def import_blocks(self, blocks: Ints, data: NDArray[Any]) -> None:
        self.cache[blocks] = data

    def trace(self, batch: ForwardBatch, observe: Observe) -> Array:
        self.observe = observe
        try:
            return self.forward(batch)
        finally:
            del self.observe

    def told(self, name: str, x: Array) -> Array:
        self.observe(name, x.reshape(len(x), -1))
        return x

    # -- the layers ----------------------------------------------------------------------------------------

    def linear(self, x: Array, name: str) -> Array:
        out = x @ self.weights[name + ".weight"].T
        bias = self.weights.get(name + ".bias")
        return out if bias is None else out + bias

    def norm(self, x: Array, name: str) -> Array:
        """RMSNorm over the last axis."""
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self.model.norm_eps))
        return x * scale * self.weights[name + ".weight"]

    def mlp(self, prefix: str, x: Array) -> Array:
        gate = self.activate(self.linear(x, prefix + "gate"))
        return self.linear(self.told(prefix + "gated", gate * self.linear(x, prefix + "up")), prefix + "down")

    def activate(self, x: Array) -> Array:
        if self.model.activation == "silu":
            return x * (1 + np.tanh(x / 2)) / 2
        if self.model.activation == "gelu_tanh":
            return x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3))) / 2
        erf = np.vectorize(math.erf, otypes=[np.float32])  # numpy has no erf of its own
        return x * (1 + erf(x / np.float32(math.sqrt(2)))) / 2

    def attention(self, layer: int, x: Array, batch: ForwardBatch) -> Array:
        model, prefix = self.model, f"layers.{layer}."
        queries = self.linear(x, prefix + "q").reshape(len(x), model.num_heads, model.head_dim)
        keys = self.linear(x, prefix + "k").reshape(len(x), model.num_kv_heads, model.head_dim)
        values = self.linear(x, prefix + "v").reshape(len(x), model.num_kv_heads, model.head_dim)
        if prefix + "q_norm.weight" in self.weights:
            queries, keys = self.norm(queries, prefix + "q_norm"), self.norm(keys, prefix + "k_norm")
        self.write(layer, self.rotate(keys, batch.positions), values, batch.slots)
        queries = self.told(prefix + "q", self.rotate(queries, batch.positions))
        for kind, index in (("k", 0), ("v", 1)):
            self.told(prefix + kind, self.written(layer, index, batch.slots))
        mixed = self.told(prefix + "attention", self.attend(layer, queries, batch))
        return self.linear(mixed.reshape(len(x), -1), prefix + "o")

    def rotate(self, x: Array, positions: Ints) -> Array:
        """RoPE: dimension i is paired with i + rotary_dim / 2; dimensions from rotary_dim on are left alone."""
        half = self.model.rope.rotary_dim // 2
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        cos, sin = self.cos[positions, None], self.sin[positions, None]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)

    # -- the paged cache -----------------------------------------------------------------------------------

    def write(self, layer: int, keys: Array, values: Array, slots: Ints) -> None:
        """Put each token's key and value into its slot; slot -1 is padding."""
        real = slots >= 0
        block, offset = np.divmod(slots[real], self.layout.block_size)
        self.cache[block, layer, 0, offset] = keys[real]
        self.cache[block, layer, 1, offset] = values[real]

    def written(self, layer: int, index: int, slots: Ints) -> Array:
        """What the cache has for each token; 0 for padding."""
        block, offset = np.divmod(np.maximum(slots, 0), self.layout.block_size)
        return np.where(slots[:, None, None] >= 0, self.cache[block, layer, index, offset], np.float32(0))

    def attend(self, layer: int, queries: Array, batch: ForwardBatch) -> Array:
        """Every row over its own context; the keys and values of all rows are already in the cache."""
        out = np.zeros_like(queries)
        for row in range(batch.num_rows):
            own = slice(batch.query_starts[row], batch.query_starts[row + 1])
            slots = self.context_slots(batch, row)
            block, offset = np.divmod(slots, self.layout.block_size)
            seen = self.visible(batch.positions[own], len(slots), self.model.windows[layer])
            keys, values = self.cache[block, layer, 0, offset], self.cache[block, layer, 1, offset]
            out[own] = self.softmax_mix(queries[own], keys, values, seen)
        return out

    def context_slots(self, batch: ForwardBatch, row: int) -> Ints:
        """The slots of positions 0 .. seq_len - 1 of a row, through its block table."""
        block, offset = np.divmod(np.arange(batch.seq_lens[row], dtype=np.int32), self.layout.block_size)
        return np.asarray(batch.block_tables[row, block] * self.layout.block_size + offset)

    def visible(self, positions: Ints, num_keys: int, window: int | None) -> NDArray[np.bool_]:
        """[Q, K]: whether a query at a position sees a key: not the future, and not beyond the window."""
        distance = positions[:, None] - np.arange(num_keys)
        return (distance >= 0) & (distance < (window or num_keys))

    def softmax_mix(self, queries: Array, keys: Array, values: Array, seen: NDArray[np.bool_]) -> Array:
        """Attention [Q, heads, dim]; each key head serves `num_heads // num_kv_heads` neighbouring query heads."""
        grouped = queries.reshape(len(queries), self.model.num_kv_heads, -1, self.model.head_dim)
        scores = np.einsum("qhgd,khd->hgqk", grouped, keys) * np.float32(self.model.attention_scale)
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("hgqk,khd->qhgd", weights, values).reshape(queries.shape)
