"""Backends that are wrong in one way each: what the conformance kit must catch.

Each takes the numpy backend and changes one thing, as someone writing a backend would get it wrong. This module is a
plugin: an entry point of the group `pagefleet` that the tests make for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pagefleet_numpy.backend import Array, Ints, NumpyBackend

from pagefleet.backend import (
    BackendInfo,
    ForwardBatch,
    KVLayout,
    ModelSpec,
    PendingTokens,
    Probe,
    SamplingBatch,
    WeightSource,
)
from pagefleet.hookspecs import hookimpl
from pagefleet.sampler import Sampler


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


class WindowForgottenInDecode(NumpyBackend):
    """A row of one token sees its whole context, as if its kernel had no window."""

    def visible(self, positions: Ints, num_keys: int, window: int | None) -> NDArray[np.bool_]:
        return super().visible(positions, num_keys, window if len(positions) > 1 else None)


class ChunkAlone(NumpyBackend):
    """A row of several tokens sees these only, as a prefill kernel without a cache would."""

    def visible(self, positions: Ints, num_keys: int, window: int | None) -> NDArray[np.bool_]:
        seen = super().visible(positions, num_keys, window)
        if len(positions) > 1:
            seen[:, : positions[0]] = False
        return seen


class TableTooNarrow(NumpyBackend):
    """Takes a table to be as wide as its longest row needs, and reads it with that stride."""

    def context_slots(self, batch: ForwardBatch, row: int) -> Ints:
        width = -(-int(batch.seq_lens.max()) // self.layout.block_size)
        tables = batch.block_tables.reshape(-1)[: width * batch.num_rows].reshape(batch.num_rows, width)
        return super().context_slots(ForwardBatch(**{**_fields(batch), "block_tables": tables}), row)


class SixteenRows(NumpyBackend):
    """Rows from the 17th on get nothing: a grid that is too small."""

    def attend(self, layer: int, queries: Array, batch: ForwardBatch) -> Array:
        out = super().attend(layer, queries, batch)
        out[batch.query_starts[min(16, batch.num_rows)] :] = 0
        return out


class LateCopies(NumpyBackend):
    """Copies are done after the step's writes, as on another stream without an event."""

    pairs: Ints | None = None

    def copy_blocks(self, pairs: Ints) -> None:
        self.pairs = pairs

    def forward(self, batch: ForwardBatch) -> Array:
        logits = super().forward(batch)
        if self.pairs is not None:
            super().copy_blocks(self.pairs)
            self.pairs = None
        return logits


class LateWrites(NumpyBackend):
    """The first slot of a block is written too late: attention finds what was there before the step."""

    def attend(self, layer: int, queries: Array, batch: ForwardBatch) -> Array:
        kept = self.cache[:, layer, :, 0].copy()
        self.cache[:, layer, :, 0] = self.before[:, layer, :, 0]
        out = super().attend(layer, queries, batch)
        self.cache[:, layer, :, 0] = kept
        return out

    def forward(self, batch: ForwardBatch) -> Array:
        self.before = self.cache.copy()
        return super().forward(batch)


class GateForUp(NumpyBackend):
    """Activates the up projection instead of the gate."""

    def mlp(self, prefix: str, x: Array) -> Array:
        up = self.activate(self.linear(x, prefix + "up"))
        return self.linear(self.told(prefix + "gated", up * self.linear(x, prefix + "gate")), prefix + "down")


class HeadFromEmbedding(NumpyBackend):
    """Takes every model's embeddings to be tied."""

    def load(self, model: ModelSpec, weights: WeightSource, dtype: str) -> None:
        super().load(model, weights, dtype)
        self.weights.pop("head.weight", None)


class BiasTwice(NumpyBackend):
    """Adds the output projection's bias once per half, as two ranks would."""

    def linear(self, x: Array, name: str) -> Array:
        out = super().linear(x, name)
        return out + self.weights[name + ".bias"] if name.endswith(".o") and name + ".bias" in self.weights else out


class NormAfterRope(NumpyBackend):
    """Turns queries and keys by their positions, and only then normalises them."""

    def norm(self, x: Array, name: str) -> Array:
        return x if name.endswith(("q_norm", "k_norm")) else super().norm(x, name)

    def attend(self, layer: int, queries: Array, batch: ForwardBatch) -> Array:
        if f"layers.{layer}.q_norm.weight" in self.weights:
            queries = super().norm(queries, f"layers.{layer}.q_norm")
        return super().attend(layer, queries, batch)

    def write(self, layer: int, keys: Array, values: Array, slots: Ints) -> None:
        if f"layers.{layer}.k_norm.weight" in self.weights:
            keys = super().norm(keys, f"layers.{layer}.k_norm")
        super().write(layer, keys, values, slots)


class ScalingIgnored(NumpyBackend):
    """RoPE's scaling is ignored."""

    def load(self, model: ModelSpec, weights: WeightSource, dtype: str) -> None:
        super().load(model, weights, dtype)
        self.cos, self.sin = replace(model.rope, scaling={}).table(model.max_position_embeddings)


class PositionsClipped(NumpyBackend):
    """RoPE's table ends at 64 positions; those beyond take the last."""

    def rotate(self, x: Array, positions: Ints) -> Array:
        return super().rotate(x, np.minimum(positions, 63))


class NoMaximum(NumpyBackend):
    """Softmax without subtracting the maximum."""

    def softmax_mix(self, queries: Array, keys: Array, values: Array, seen: NDArray[np.bool_]) -> Array:
        grouped = queries.reshape(len(queries), self.model.num_kv_heads, -1, self.model.head_dim)
        scores = np.einsum("qhgd,khd->hgqk", grouped, keys) * np.float32(self.model.attention_scale)
        weights = np.where(seen, np.exp(scores), np.float32(0))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("hgqk,khd->qhgd", weights, values).reshape(queries.shape)


class HalfPrecisionSums(NumpyBackend):
    """Matrix products are summed in float16."""

    def linear(self, x: Array, name: str) -> Array:
        wide = x.astype(np.float16)[:, None, :] * self.weights[name + ".weight"].astype(np.float16)[None]
        bias = self.weights.get(name + ".bias", np.float32(0))
        return np.asarray(wide.sum(axis=-1, dtype=np.float16).astype(np.float32) + bias)


class HalfPrecisionWeights(NumpyBackend):
    """Keeps weights in float16, whatever dtype it was asked for."""

    def load(self, model: ModelSpec, weights: WeightSource, dtype: str) -> None:
        super().load(model, weights, dtype)
        self.weights = {name: w.astype(np.float16).astype(np.float32) for name, w in self.weights.items()}


class CopiesKeysOnly(NumpyBackend):
    """Copies the keys of a block, and not its values."""

    def copy_blocks(self, pairs: Ints) -> None:
        self.cache[pairs[:, 1], :, 0] = self.cache[pairs[:, 0], :, 0]


class ImportsInOrder(NumpyBackend):
    """Imports into the blocks in ascending order, whatever the order they were named in."""

    def import_blocks(self, blocks: Ints, data: NDArray[Any]) -> None:
        super().import_blocks(np.sort(blocks), data)


class GreedyAlways(NumpyBackend):
    """Ignores the temperature."""

    def sample(self, logits: Array, sampling: SamplingBatch) -> PendingTokens:
        return super().sample(logits, replace(sampling, temperature=np.zeros_like(sampling.temperature)))


class TopKByOne(NumpyBackend):
    """Keeps one token more than top_k."""

    def sample(self, logits: Array, sampling: SamplingBatch) -> PendingTokens:
        return super().sample(logits, replace(sampling, top_k=sampling.top_k + (sampling.top_k > 0)))


class SeedOfTheRow(NumpyBackend):
    """Draws by the row a request has in the batch, not by its seed."""

    def sample(self, logits: Array, sampling: SamplingBatch) -> PendingTokens:
        return super().sample(logits, replace(sampling, seeds=np.arange(len(sampling.seeds), dtype=np.uint64)))


class MaskOfOtherBits(NumpyBackend):
    """Reads token masks from the highest bit down."""

    class Reversed(Sampler):
        def mask(self, logits: Array, masks: Ints) -> None:
            bits = np.unpackbits(masks.view(np.uint8), axis=1, count=logits.shape[1], bitorder="big")
            logits[bits == 0] = -np.inf

    sampler = Reversed()


class ClaimsInvariance(NumpyBackend):
    """Says that a row does not depend on its batch, while it leaves that to a BLAS."""

    traits = replace(NumpyBackend.traits, batch_invariant=("float32",))


class Noise(NumpyBackend):
    """The last bits differ from run to run, as sums in no fixed order do."""

    def forward(self, batch: ForwardBatch) -> Array:
        logits = super().forward(batch)
        return logits * (1 + np.random.default_rng().uniform(-1e-7, 1e-7, logits.shape).astype(np.float32))


class Leaks(NumpyBackend):
    """Something keeps every instance alive."""

    kept: list[NumpyBackend] = []  # noqa: RUF012 - the fault

    def load(self, model: ModelSpec, weights: WeightSource, dtype: str) -> None:
        super().load(model, weights, dtype)
        self.weights = {name: weight.copy() for name, weight in self.weights.items()}
        self.kept.append(self)


class ClosesOnce(NumpyBackend):
    """Fails when it is closed twice, or before it was loaded."""

    def close(self) -> None:
        del self.weights


class SwallowsErrors(NumpyBackend):
    """Goes on with zeros when weights cannot be read."""

    def load(self, model: ModelSpec, weights: WeightSource, dtype: str) -> None:
        try:
            super().load(model, weights, dtype)
        except OSError:
            self.weights = {name: np.zeros(tensor.shape, np.float32) for name, tensor in model.tensors.items()}


class EachLogitRowOnce(NumpyBackend):
    """Drops logit rows that repeat."""

    def forward(self, batch: ForwardBatch) -> Array:
        return super().forward(replace(batch, logit_rows=np.unique(batch.logit_rows)))


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
