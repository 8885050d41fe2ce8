"""The contract between the engine and a device: everything a backend author needs, and nothing else.

A backend turns a `ForwardBatch` into logits. It supplies four methods (`load`, `allocate_kv`, `forward`,
`to_host`); the rest has device-agnostic defaults. What it can do beyond that it says in `Traits`; what the
engine knows of a device is in `Traits` or is not known at all.

This module imports no torch and no device, and it does not know about requests, prompts or text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pagefleet.model import ModelSpec
from pagefleet.sampler import RowLogprobs, SampledTokens, Sampler, SamplingBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "CONTRACT_VERSION",
    "Backend",
    "BackendError",
    "BackendInfo",
    "DeviceInfo",
    "ForwardBatch",
    "HostTensor",
    "KVLayout",
    "ModelSpec",
    "Observe",
    "PendingTokens",
    "Probe",
    "ReadyTokens",
    "RowLogprobs",
    "SampledTokens",
    "Sampler",
    "SamplingBatch",
    "Traits",
    "WeightSource",
]

CONTRACT_VERSION = "1.2"
"""Semantic version of this module: a plugin states the range it supports, see `BackendInfo.contract`."""


class BackendError(RuntimeError):
    """A backend cannot do what was asked; the message says what, why and what would work."""


# -- what a backend says of itself ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device a probe found."""

    name: str
    memory: int = 0  # bytes, 0: unknown
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """What `BackendInfo.probe` found, with the evidence either way."""

    usable: bool
    evidence: str
    devices: tuple[DeviceInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class Traits:
    """What a backend can do. Every field has the default of the simplest possible device."""

    dtypes: tuple[str, ...] = ("float32",)  # of dense weights, activations and KV; the first is the default
    block_sizes: tuple[int, ...] | None = None  # KV block sizes it can page; None: any
    asynchronous: bool = False  # forward() and sample() return before the device is done
    gathers_tokens: bool = False  # resolves token ids < 0 itself (see ForwardBatch.token_ids)
    copies_blocks: bool = False  # copy_blocks() may be called; without it forks are computed from their tokens
    exchanges_blocks: bool = False  # export_blocks() and import_blocks() may be called
    batch_invariant: tuple[str, ...] = ()  # dtypes in which a row's logits do not depend on its batch, bit for bit
    token_multiple: int = 1  # forward() is handed T and L padded to a multiple of this
    weight_formats: tuple[str, ...] = ()  # quantised formats of `HostTensor` that it multiplies in their own bits
    kv_dtypes: tuple[str, ...] = ()  # what `KVLayout.dtype` may be instead of the dtype of load()
    model_features: tuple[str, ...] = ()  # of `pagefleet.model.FEATURES`; a model that has others is refused


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What the hook `pagefleet_backends` returns: how to find out about a backend, and how to get one."""

    name: str  # what TARGET_DEVICE says; no colon, no spaces
    probe: Callable[[], Probe]  # cheap; imports nothing heavy, initialises no device
    load: Callable[[int], Backend]  # device index -> a fresh backend; heavy imports belong here
    traits: Traits = field(default_factory=Traits)  # those of the backend it loads
    priority: int = 0  # the usable backend with the highest priority is the automatic choice
    contract: str = ">=1.0,<2"  # the range of CONTRACT_VERSION it supports


# -- what crosses the seam -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostTensor:
    """One checkpoint tensor, still in its file: shape, format and (memory-mapped) bytes.

    `dtype` is a safetensors name in lower case (`"float32"`, `"bfloat16"`, `"float16"`), a ggml type (`"Q4_1"`), or
    `"int8"`; a quantised tensor keeps its own bits in `data`, row after row. A row of `"int8"` is its float32 scale,
    then as many int8 values. A backend keeps the formats that it named in `Traits.weight_formats`; others it
    dequantises.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]  # [nbytes], read-only
    dequantise: Callable[[HostTensor], NDArray[np.float32]] | None = None

    def rows(self, start: int, stop: int) -> HostTensor:
        """Rows start:stop of it, where they lie."""
        row_bytes = len(self.data) // self.shape[0]
        data = self.data[start * row_bytes : stop * row_bytes]
        return replace(self, shape=(stop - start, *self.shape[1:]), data=data)

    def numpy(self) -> NDArray[np.float32]:
        """The values as float32, in `shape` (a copy unless the file holds float32)."""
        if self.dequantise is not None:
            return self.dequantise(self)
        if self.dtype == "bfloat16":  # the upper half of a float32
            bits = self.data.view(np.uint16).astype(np.uint32) << np.uint32(16)
            return bits.view(np.float32).reshape(self.shape)
        return self.data.view(self.dtype).reshape(self.shape).astype(np.float32, copy=False)


class WeightSource(Protocol):
    """Where a backend reads a model's weights from, by the names of `ModelSpec.tensors`."""

    def read(self, name: str) -> HostTensor:
        """The tensor under that name, its shape already checked against the spec."""
        ...

    def __iter__(self) -> Iterator[str]: ...


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The paged KV cache: `num_blocks` blocks of `block_size` token slots in every layer.

    Slot `s` is token `s % block_size` of block `s // block_size`. A slot that no token was written to may hold
    anything, NaN included, which must not reach a result. `dtype` is that of `Backend.load`, or one that the backend
    named in `Traits.kv_dtypes`. A row (one head of one key or value) is `row_size` elements of it: `head_dim` values,
    and in int8 four more, the bytes of the float32 scale that the values are multiplied with.

    The exchange form of n blocks is an array [n, num_layers, 2 (key, value), block_size, num_kv_heads, row_size] of
    `dtype` (bfloat16 as its uint16 bits); keys as they are attended to, after their norm and RoPE.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def row_size(self) -> int:
        """Elements of one head of one key or value."""
        return self.head_dim + (4 if self.dtype == "int8" else 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks, keys and values of every layer."""
        itemsize = {"float32": 4, "int8": 1}.get(self.dtype, 2)
        return self.num_blocks * 2 * self.num_layers * self.block_size * self.num_kv_heads * self.row_size * itemsize


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's work: R >= 1 rows (requests) with T tokens between them, as small int32 numpy arrays.

    Row r owns tokens `query_starts[r]:query_starts[r+1]`, at least one: the last of its `seq_lens[r]` tokens so far,
    so `positions` end at `seq_lens[r] - 1`. A token attends to the slots of its row's block table at positions up to
    its own (and within the layer's window). In every layer the keys and values of ALL tokens are written before ANY
    row attends: rows may share blocks. No two tokens have one slot.

    Tokens from `query_starts[R]` on are padding: id and position 0, slot -1, in no row. Logit rows are padded with 0.
    Their logits are returned like any others, and not looked at.
    """

    token_ids: NDArray[np.int32]  # [T] below 0: -1 - i is token i of the previous step's sample()
    positions: NDArray[np.int32]  # [T]
    slots: NDArray[np.int32]  # [T] where the token's key and value go; -1: nowhere
    query_starts: NDArray[np.int32]  # [R+1]
    seq_lens: NDArray[np.int32]  # [R]
    block_tables: NDArray[np.int32]  # [R, B] unused entries are 0
    logit_rows: NDArray[np.int32]  # [L] tokens whose logits are wanted, in this order; may repeat; L may be 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens)


Logits = Any
"""[L, vocab_size] in whatever form the device keeps them; only the backend that made them looks inside."""


class PendingTokens(Protocol):
    """Tokens being sampled: they stay on the device until asked for."""

    def result(self) -> SampledTokens:
        """Wait for the step and return what it drew."""
        ...


@dataclass(frozen=True, slots=True)
class ReadyTokens:
    """`PendingTokens` of a device that has already finished."""

    tokens: SampledTokens

    def result(self) -> SampledTokens:
        return self.tokens


Observe = Callable[[str, "NDArray[np.float32]"], None]
"""What `Backend.trace` tells its values to: a name and float32 [T, n]."""


# -- the backend ---------------------------------------------------------------------------------------


class Backend(ABC):
    """A device. Calls come from one thread at a time, in order; nothing is shared between two instances."""

    traits: Traits = Traits()
    sampler: Sampler = Sampler()  # of the default sample()

    # a device supplies these

    @abstractmethod
    def load(self, model: ModelSpec, weights: WeightSource, dtype: str) -> None:
        """Take every tensor of `model.tensors` from `weights`, and compute in `dtype` (one of `traits.dtypes`).

        A tensor that comes in one of `traits.weight_formats` is kept as it is; every other one becomes `dtype`.
        """

    @abstractmethod
    def allocate_kv(self, layout: KVLayout) -> None:
        """Reserve the paged KV cache. Called once, after `load`."""

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Logits:
        """Run the model over the batch: write its keys and values, return logits of `batch.logit_rows`."""

    @abstractmethod
    def to_host(self, logits: Logits) -> NDArray[np.float32]:
        """Logits as [L, vocab_size] on the host; the array may be overwritten by the next forward()."""

    # these have device-agnostic defaults

    def kv_budget(self) -> int | None:
        """Bytes to give to the KV cache; None: the engine decides. Called after `load`."""
        return None

    def sample(self, logits: Logits, sampling: SamplingBatch) -> PendingTokens:
        """Draw a token from each of logits 0..S-1 and score S..S+P-1; the rest is padding. See `SamplingBatch`.

        The default samples on the host, with `sampler`.
        """
        return ReadyTokens(self.sampler.sample(self.to_host(logits), sampling))

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """Copy KV blocks, `pairs` [C, 2] of (source, destination), in every layer. No destination is a source."""
        self.import_blocks(pairs[:, 1], self.export_blocks(pairs[:, 0]))

    def export_blocks(self, blocks: NDArray[np.int32]) -> NDArray[Any]:
        """The blocks in the exchange form of `KVLayout`."""
        raise BackendError(f"{type(self).__name__} does not exchange KV blocks (Traits.exchanges_blocks is False)")

    def import_blocks(self, blocks: NDArray[np.int32], data: NDArray[Any]) -> None:
        """Overwrite the blocks with `data`, in the exchange form of `KVLayout`."""
        raise BackendError(f"{type(self).__name__} does not exchange KV blocks (Traits.exchanges_blocks is False)")

    def trace(self, batch: ForwardBatch, observe: Observe) -> Logits:
        """`forward`, telling `observe` on the way what it computes: so that one can see where two backends part.

        Names, in this order, as many of them as the backend can: `embed`; for each layer `layers.{i}.` + `attn_norm`,
        `q` (as it attends), `k`, `v` (as they lie in the cache, read back from the tokens' slots; 0 where a token has
        none), `attention`, `o`, `mlp_norm`, `gated` (activation(gate) * up), `down`; `norm`.
        Values are of the op alone: without the residual. A name may be told of by one backend and not by another.
        """
        return self.forward(batch)

    def warm_up(self) -> None:
        """Anything worth doing before the first request; the KV cache holds nothing yet."""

    def synchronize(self) -> None:
        """Return when the device has finished all it was given."""

    def explain(self) -> Mapping[str, str]:
        """op -> the implementation that served it and how often, for `LLM.explain()`."""
        return {}

    def close(self) -> None:
        """Give back the device's memory; the backend is not used afterwards. May be called before load(), and twice."""
