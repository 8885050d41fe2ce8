"""Backends that are wrong in one way each: what the conformance kit must catch.

Each takes the numpy backend and changes one thing, as someone writing a backend would get it wrong. This module is a
plugin: an entry point of the group `pagefleet` that the tests make for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pagefleet_numpy.backend import Array, Ints, NumpyBackend

from pagefleet.backend import BackendInfo, ForwardBatch, KVLayout, ModelSpec, Probe, WeightSource
from pagefleet.hookspecs import hookimpl


class SlotOffByOne(NumpyBackend):
    """Writes each token one slot further on."""

    def write(self, layer: int, keys: Array, values: Array, slots: Ints) -> None:
        num_slots = self.layout.num_blocks * self.layout.block_size
        super().write(layer, keys, values, np.where(slots < 0, slots, (slots + 1) % num_slots))


class PaddedSlotWritten(NumpyBackend):
    """Takes slot -1 for the last slot, as Python does."""

    def write(self, layer: int, keys: Array, values: Array, slots: Ints) -> None:
        super().write(layer, keys, values, slots % (self.layout.num_blocks * self.layout.block_size))


class PaddingInSlotZero(NumpyBackend):
    """Sends padding to slot 0, which is a real one."""

    def write(self, layer: int, keys: Array, values: Array, slots: Ints) -> None:
        super().write(layer, keys, values, np.maximum(slots, 0)[::-1] if slots.min() < 0 else slots)


class WritesWholeBlock(NumpyBackend):
    """Clears the rest of a block when it writes its last token, over whatever a sharer has there."""

    def write(self, layer: int, keys: Array, values: Array, slots: Ints) -> None:
        super().write(layer, keys, values, slots)
        last = slots.max()
        self.cache[last // self.layout.block_size, layer, :, last % self.layout.block_size + 1 :] = 0


class GroupsInterleaved(NumpyBackend):
    """Query head h reads key head h % num_kv_heads instead of h // group."""

    def softmax_mix(self, queries: Array, keys: Array, values: Array, seen: NDArray[np.bool_]) -> Array:
        order = np.arange(self.model.num_heads).reshape(-1, self.model.num_kv_heads).T.reshape(-1)
        out = np.empty_like(queries)
        out[:, order] = super().softmax_mix(queries[:, order], keys, values, seen)
        return out


class WindowTooWide(NumpyBackend):
    """A window of w sees w positions and itself."""

    def visible(self, positions: Ints, num_keys: int, window: int | None) -> NDArray[np.bool_]:
        return super().visible(positions, num_keys, window and window + 1)


class WindowTooNarrow(NumpyBackend):
    """A window of w sees w - 1 positions."""

    def visible(self, positions: Ints, num_keys: int, window: int | None) -> NDArray[np.bool_]:
        return super().visible(positions, num_keys, window and window - 1)


class WindowOfFirstLayer(NumpyBackend):
    """Every layer has the first layer's window."""

    def load(self, model: ModelSpec, weights: WeightSource, dtype: str) -> None:
        super().load(model, weights, dtype)
        self.first_window = model.windows[0]

    def visible(self, positions: Ints, num_keys: int, window: int | None) -> NDArray[np.bool_]:
        return super().visible(positions, num_keys, self.first_window)


class MaskByOne(NumpyBackend):
    """A token sees the next one too, where there is one."""

    def visible(self, positions: Ints, num_keys: int, window: int | None) -> NDArray[np.bool_]:
        return super().visible(positions + 1, num_keys, window and window + 1)


class MaskFromChunk(NumpyBackend):
    """The causal mask counts from the start of the chunk, right for whole prompts and single tokens only."""

    def visible(self, positions: Ints, num_keys: int, window: int | None) -> NDArray[np.bool_]:
        if len(positions) > 1:
            positions = np.arange(len(positions), dtype=np.int32)
        return super().visible(positions, num_keys, window)


class RotatesFromChunk(NumpyBackend):
    """RoPE counts from the start of the step."""

    def rotate(self, x: Array, positions: Ints) -> Array:
        return super().rotate(x, np.arange(len(positions), dtype=np.int32))


class RopeInterleaved(NumpyBackend):
    """Pairs neighbouring dimensions (GPT-J) instead of the two halves (NeoX)."""

    def rotate(self, x: Array, positions: Ints) -> Array:
        dim = self.model.rope.rotary_dim
        order = np.concatenate([np.arange(0, dim, 2), np.arange(1, dim, 2), np.arange(dim, x.shape[-1])])
        out = np.empty_like(x)
        out[..., order] = super().rotate(x[..., order], positions)
        return out


class RopeOverWholeHead(NumpyBackend):
    """Pairs over the head's halves, even when only a part of the head turns."""

    def rotate(self, x: Array, positions: Ints) -> Array:
        order = np.roll(np.arange(x.shape[-1]), x.shape[-1] - self.model.rope.rotary_dim)
        out = np.empty_like(x)
        out[..., order] = super().rotate(x[..., order], positions)
        return out


class MissingScale(NumpyBackend):
    """Scores are not scaled."""

    def softmax_mix(self, queries: Array, keys: Array, values: Array, seen: NDArray[np.bool_]) -> Array:
        return super().softmax_mix(queries / np.float32(self.model.attention_scale), keys, values, seen)


class ScaleFromHeadDim(NumpyBackend):
    """Scores are scaled by 1 / sqrt(head_dim) whatever the model says."""

    def softmax_mix(self, queries: Array, keys: Array, values: Array, seen: NDArray[np.bool_]) -> Array:
        right = self.model.head_dim**-0.5 / self.model.attention_scale
        return super().softmax_mix(queries * np.float32(right), keys, values, seen)


class StaleBlockTable(NumpyBackend):
    """Keeps a row's table from the step before if its shape has not changed."""

    tables: Ints | None = None

    def context_slots(self, batch: ForwardBatch, row: int) -> Ints:
        if self.tables is None or self.tables.shape != batch.block_tables.shape:
            self.tables = batch.block_tables.copy()
        kept = ForwardBatch(**{**_fields(batch), "block_tables": self.tables})
        return super().context_slots(kept, row)


class BlocksInARow(NumpyBackend):
    """Takes a request's blocks for neighbours in memory."""

    def context_slots(self, batch: ForwardBatch, row: int) -> Ints:
        first = batch.block_tables[row, 0] * self.layout.block_size
        num_slots = self.layout.num_blocks * self.layout.block_size
        return np.asarray((first + np.arange(batch.seq_lens[row], dtype=np.int32)) % num_slots)


class LosesFullBlock(NumpyBackend):
    """A context that ends with its block loses that block."""

    def context_slots(self, batch: ForwardBatch, row: int) -> Ints:
        slots = super().context_slots(batch, row)
        size = self.layout.block_size
        return slots[:-size] if len(slots) > size and len(slots) % size == 0 else slots


class ReadsWholeBlocks(NumpyBackend):
    """Weighs slots nobody wrote with zero: harmless until one holds something that is not a number."""

    def context_slots(self, batch: ForwardBatch, row: int) -> Ints:
        blocks = batch.block_tables[row, : -(-batch.seq_lens[row] // self.layout.block_size)]
        slots = blocks[:, None] * self.layout.block_size + np.arange(self.layout.block_size, dtype=np.int32)
        return np.asarray(slots.reshape(-1))


class RowsOneByOne(NumpyBackend):
    """Each row writes when its turn to attend comes: a row cannot see what a later one shares with it."""

    pending: tuple[Array, Array, Ints]

    def write(self, layer: int, keys: Array, values: Array, slots: Ints) -> None:
        self.pending = keys, values, slots

    def attend(self, layer: int, queries: Array, batch: ForwardBatch) -> Array:
        out = np.zeros_like(queries)
        keys, values, slots = self.pending
        for row in range(batch.num_rows):
            own = slice(batch.query_starts[row], batch.query_starts[row + 1])
            super().write(layer, keys[own], values[own], slots[own])
            only = {"query_starts": batch.query_starts[row : row + 2] - own.start, "positions": batch.positions[own]}
            rows = {"seq_lens": batch.seq_lens[row : row + 1], "block_tables": batch.block_tables[row : row + 1]}
            out[own] = super().attend(layer, queries[own], ForwardBatch(**{**_fields(batch), **only, **rows}))
        return out


class UniqueLogitRows(NumpyBackend):
    """Sorts the rows whose logits are wanted."""

    def forward(self, batch: ForwardBatch) -> Array:
        logits = super().forward(batch)
        return logits[np.argsort(batch.logit_rows)]


class LastTokenOfEachRow(NumpyBackend):
    """Ignores logit_rows beyond one a row: what a decode-only engine would ask for."""

    def forward(self, batch: ForwardBatch) -> Array:
        last = batch.query_starts[1:][np.searchsorted(batch.query_starts[1:], batch.logit_rows, side="right")] - 1
        return super().forward(ForwardBatch(**{**_fields(batch), "logit_rows": last.astype(np.int32)}))


class NoKeyBias(NumpyBackend):
    """Leaves out the bias of the keys."""

    def load(self, model: ModelSpec, weights: WeightSource, dtype: str) -> None:
        super().load(model, weights, dtype)
        self.weights = {name: value for name, value in self.weights.items() if not name.endswith("k.bias")}


class NoQueryKeyNorm(NumpyBackend):
    """Leaves out the norm of queries and keys."""

    def load(self, model: ModelSpec, weights: WeightSource, dtype: str) -> None:
        super().load(model, weights, dtype)
        self.weights = {name: value for name, value in self.weights.items() if not name.endswith("q_norm.weight")}


class FixedEpsilon(NumpyBackend):
    """Norms use 1e-6 whatever the model says."""

    def norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6)) * self.weights[name + ".weight"]


class GeluOfTheWrongKind(NumpyBackend):
    """Takes the tanh approximation for the exact GELU."""

    def activate(self, x: Array) -> Array:
        if self.model.activation != "gelu":
            return super().activate(x)
        return x * (1 + np.tanh(np.float32(0.7978845608) * (x + np.float32(0.044715) * x**3))) / 2


class HalfPrecisionScores(NumpyBackend):
    """Computes attention in float16."""

    def softmax_mix(self, queries: Array, keys: Array, values: Array, seen: NDArray[np.bool_]) -> Array:
        half = (x.astype(np.float16).astype(np.float32) for x in (queries, keys, values))
        return super().softmax_mix(*half, seen)


class SharedCache(NumpyBackend):
    """All instances of one shape have one cache."""

    caches: dict[KVLayout, Array] = {}  # noqa: RUF012 - the fault

    def allocate_kv(self, layout: KVLayout) -> None:
        super().allocate_kv(layout)
        self.cache = self.caches.setdefault(layout, self.cache)


class SharedWeights(NumpyBackend):
    """The last loaded model serves all instances."""

    def load(self, model: ModelSpec, weights: WeightSource, dtype: str) -> None:
        super().load(model, weights, dtype)
        type(self).loaded = self.weights

    def linear(self, x: Array, name: str) -> Array:
        self.weights = self.loaded
        return super().linear(x, name)

    loaded: dict[str, Array]


class ExchangesValuesFirst(NumpyBackend):
    """Exports and imports values before keys: consistent with itself, and with nobody else."""

    def export_blocks(self, blocks: Ints) -> NDArray[Any]:
        return super().export_blocks(blocks)[:, :, ::-1]

    def import_blocks(self, blocks: Ints, data: NDArray[Any]) -> None:
        super().import_blocks(blocks, data[:, :, ::-1])


class CopiesFirstLayer(NumpyBackend):
    """Copies blocks in the first layer only."""

    def copy_blocks(self, pairs: Ints) -> None:
        self.cache[pairs[:, 1], 0] = self.cache[pairs[:, 0], 0]


class CopiesBackwards(NumpyBackend):
    """Takes (source, destination) for (destination, source)."""

    def copy_blocks(self, pairs: Ints) -> None:
        super().copy_blocks(pairs[:, ::-1])


def _fields(batch: ForwardBatch) -> dict[str, Ints]:
    return {name: getattr(batch, name) for name in ForwardBatch.__slots__}


def faults() -> list[type[NumpyBackend]]:
    """Every fault of this module."""
    found = [value for value in globals().values() if isinstance(value, type) and issubclass(value, NumpyBackend)]
    return [fault for fault in found if fault is not NumpyBackend]


def info(fault: type[NumpyBackend]) -> BackendInfo:
    """A fault as a backend of its own name."""
    return BackendInfo(
        fault.__name__, lambda: Probe(True, str(fault.__doc__)), lambda index: fault(), fault.traits, priority=-100
    )


@hookimpl
def pagefleet_backends() -> list[BackendInfo]:
    return [info(fault) for fault in faults()]
