"""The CPU kernels: the compiled library, the formats of a packed weight, and a wrapper of each op.

`build_scripts/cpu.py` compiles the library; `load()` opens it. Every op's schema and checks are in `csrc/cpu/ops.cpp`.
Outputs are allocated here. The number of threads and the instruction set are the library's, for the whole process.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from pagefleet_kernels import ISAS

LIBRARY = Path(__file__).with_name("_cpu.so")

FORMATS: Mapping[str, int] = MappingProxyType(  # `Format` of csrc/cpu/kernels.h
    {
        name: code
        for code, name in enumerate(
            ("float32", "bfloat16", "float16", "int8", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"),
        )
    }
)
ACTIVATIONS: Mapping[str, int] = MappingProxyType({"silu": 1, "gelu": 2, "gelu_tanh": 3})
OPS = ("pack", "linear", "gather", "norm", "rope", "attention", "gate", "sample", "mask", "layers")
PANEL = 16  # outputs of a weight that are packed together


class KernelError(RuntimeError):
    """The library is missing, does not load, or has no such unit; the message says the way out."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [outputs, inputs] in panels of 16 outputs, its values in the bits of `format`."""

    data: Tensor  # uint8 [num_panels * panel_bytes]
    format: str  # one of FORMATS
    shape: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        return self.data.numel()


@dataclass(frozen=True, slots=True)
class LayerStack:
    """The parameters of several layers as `CpuKernels.layers` takes them."""

    tensors: tuple[Tensor | list[Tensor] | None, ...]  # lists of weights; vectors [layers, size], or None
    formats: list[int]  # of every layer's qkv, o, gate_up, down
    windows: list[int]  # of every layer, 0: none
    inputs: tuple[int, int]  # of o and of down

    @classmethod
    def of(
        cls,
        *,
        attn_norm: Sequence[Tensor],
        qkv: Sequence[PackedWeight],
        qkv_bias: Sequence[Tensor | None],
        q_norm: Sequence[Tensor | None],
        k_norm: Sequence[Tensor | None],
        o: Sequence[PackedWeight],
        o_bias: Sequence[Tensor | None],
        mlp_norm: Sequence[Tensor],
        gate_up: Sequence[PackedWeight],
        gate_up_bias: Sequence[Tensor | None],
        down: Sequence[PackedWeight],
        down_bias: Sequence[Tensor | None],
        window: Sequence[int | None],
    ) -> LayerStack:
        """One entry for each layer; a vector is that of all of them or of none."""
        formats = [FORMATS[weight.format] for layer in zip(qkv, o, gate_up, down, strict=True) for weight in layer]
        tensors = (
            *(_stacked(attn_norm), _data(qkv), _stacked(qkv_bias), _stacked(q_norm), _stacked(k_norm)),
            *(_data(o), _stacked(o_bias), _stacked(mlp_norm), _data(gate_up), _stacked(gate_up_bias)),
            *(_data(down), _stacked(down_bias)),
        )
        return cls(tensors, formats, [each or 0 for each in window], (o[0].shape[1], down[0].shape[1]))


def _data(weights: Sequence[PackedWeight]) -> list[Tensor]:
    return [weight.data for weight in weights]


def _stacked(vectors: Sequence[Tensor | None]) -> Tensor | None:
    present = [vector for vector in vectors if vector is not None]
    return torch.stack(present) if present else None


class _WeightMemory:
    """Memory for weights, one after the other in large pieces: on huge pages, where the system gives them on request.

    A weight is read once a step, so its pages are not in the processor's tables by then: 512 times fewer of them made a
    cold row's product 1.1 to 1.5 times as fast. A piece lives as long as a weight in it.
    """

    PIECE, HUGE_PAGE, ALIGN = 64 << 20, 2 << 20, 64

    def __init__(self) -> None:
        self._piece: Callable[[], mmap.mmap | None] = lambda: None
        self._used = 0
        self._turn = threading.Lock()

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], aligned to 64 bytes. Any thread may ask."""
        with self._turn:
            piece, start = self._piece(), -(-self._used // self.ALIGN) * self.ALIGN
            if piece is None or start + num_bytes > len(piece):
                piece = self._new_piece(max(num_bytes, self.PIECE) + self.HUGE_PAGE)
                self._piece = weakref.ref(piece)
                start = -torch.frombuffer(piece, dtype=torch.uint8).data_ptr() % self.HUGE_PAGE
            self._used = start + num_bytes
            return torch.frombuffer(piece, dtype=torch.uint8, count=num_bytes, offset=start)

    @staticmethod
    def _new_piece(size: int) -> mmap.mmap:
        piece = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones have small pages
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                piece.madvise(mmap.MADV_HUGEPAGE)
        return piece


class CpuKernels:
    """The ops of one loaded library. All tensors are on the CPU."""

    def __init__(self, path: Path) -> None:
        try:
            torch.ops.load_library(path)
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelError(
                f"{path} does not load: {error}. Build it again in this environment: python build_scripts/cpu.py"
            ) from error
        self._declare()
        self._memory = _WeightMemory()
        missing = [name for name in OPS if not hasattr(torch.ops.pagefleet_cpu, name)]
        if missing:
            raise KernelError(
                f"{path} is of other sources than this package: it has no {missing[0]}. "
                "Build it again: python build_scripts/cpu.py"
            )
        ops = torch.ops.pagefleet_cpu
        self._pack, self._linear, self._gather = ops.pack.default, ops.linear.default, ops.gather.default
        self._norm, self._rope, self._gate = ops.norm.default, ops.rope.default, ops.gate.default
        self._attention, self._layers = ops.attention.default, ops.layers.default
        self._sample, self._mask = ops.sample.default, ops.mask.default

    def _declare(self) -> None:
        library = self._library
        library.pagefleet_cpu_isa.restype = library.pagefleet_cpu_force_isa.restype = ctypes.c_char_p
        library.pagefleet_cpu_force_isa.argtypes = [ctypes.c_char_p]
        for function in (library.pagefleet_cpu_row_bytes, library.pagefleet_cpu_panel_bytes):
            function.argtypes, function.restype = [ctypes.c_int, ctypes.c_int64], ctypes.c_int64

    # -- the library ---------------------------------------------------------------------------------------

    @property
    def isa(self) -> str:
        """The instruction set whose kernels run, one of ISAS."""
        return str(self._library.pagefleet_cpu_isa().decode())

    def force_isa(self, isa: str | None) -> None:
        """Run the kernels of that instruction set from now on; None: the best this processor has."""
        reason = self._library.pagefleet_cpu_force_isa((isa or "").encode())
        if reason is not None:
            raise KernelError(f"kernels for {isa!r}: {reason.decode()}; there may be: {', '.join(ISAS)}")

    @property
    def num_threads(self) -> int:
        return int(self._library.pagefleet_cpu_num_threads())

    def set_num_threads(self, count: int) -> None:
        """Threads that work on an op, the calling one included."""
        self._library.pagefleet_cpu_set_num_threads(count)

    def row_bytes(self, format: str, k: int) -> int:
        """Bytes of a row of `k` inputs as a file has it; 0: `k` is not a multiple of the format's block."""
        return int(self._library.pagefleet_cpu_row_bytes(FORMATS[format], k))

    def panel_bytes(self, format: str, k: int) -> int:
        return int(self._library.pagefleet_cpu_panel_bytes(FORMATS[format], k))

    # -- ops -----------------------------------------------------------------------------------------------

    def empty_weight(self, format: str, n: int, k: int) -> PackedWeight:
        """A matrix [n, k] for `pack_rows` to fill."""
        if not self.row_bytes(format, k):
            raise KernelError(f"{k} inputs are no whole blocks of {format}")
        return PackedWeight(self._memory.take(-(-n // PANEL) * self.panel_bytes(format, k)), format, (n, k))

    def pack_rows(self, weight: PackedWeight, start: int, rows: Tensor) -> None:
        """Put rows from `start` (a multiple of 16) into the weight: uint8 as in a file, or the format's dtype."""
        k = weight.shape[1]
        raw = rows.contiguous().view(torch.uint8).view(-1)
        num_rows, panel_bytes = raw.numel() // self.row_bytes(weight.format, k), self.panel_bytes(weight.format, k)
        panels = weight.data.narrow(0, start // PANEL * panel_bytes, -(-num_rows // PANEL) * panel_bytes)
        self._pack(raw, FORMATS[weight.format], num_rows, k, panels)

    def pack(self, format: str, rows: Tensor, n: int, k: int) -> PackedWeight:
        """All rows of a matrix [n, k], see `pack_rows`."""
        weight = self.empty_weight(format, n, k)
        self.pack_rows(weight, 0, rows)
        return weight

    def linear(
        self,
        x: Tensor,
        weight: PackedWeight,
        bias: Tensor | None = None,
        gate: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """x [T, k] @ weight [n, k]^T + bias float32 [n]: [T, n], or gate(left half) * right half: [T, n / 2].

        In `dtype`; None: that of x.
        """
        n, k = weight.shape
        out = torch.empty((x.shape[0], n if gate is None else n // 2), dtype=dtype or x.dtype)
        self._linear(out, x, weight.data, bias, FORMATS[weight.format], n, k, ACTIVATIONS[gate] if gate else 0)
        return out

    def gather(self, ids: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
        """Rows of a weight for `ids` int32 [T], in `dtype`: [T, k]."""
        n, k = weight.shape
        out = torch.empty((ids.shape[0], k), dtype=dtype)
        self._gather(out, ids, weight.data, FORMATS[weight.format], n, k)
        return out

    def norm(
        self,
        x: Tensor | None,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        *,
        bias: Tensor | None = None,
        layer_norm: bool = False,
    ) -> Tensor:
        """residual [..., n] += x, in place; its RMSNorm (or LayerNorm) times float32 `weight` [n], plus `bias`."""
        out = torch.empty(residual.shape, dtype=residual.dtype)
        self._norm(out, x, residual, weight, bias, eps, layer_norm)
        return out

    def rope(
        self,
        qkv: Tensor,
        rotary: Tensor | None,
        slots: Tensor,
        cache: Tensor,
        head_dim: int,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        interleaved: bool = False,
    ) -> Tensor:
        """Normalise and turn queries and keys, write keys and values to `slots` int32 [T]; the queries [T, H, D].

        qkv [T, H + 2 K, D]; rotary float32 [T, 2 (cos, sin), rotary_dim], "sin" with rotate-half's signs; cache
        [2, blocks, K, block_size, D], or [..., D + 4] int8: the values and their float32 scale.
        """
        num_tokens, num_heads, _ = qkv.shape
        out = torch.empty((num_tokens, num_heads - 2 * cache.shape[2], head_dim), dtype=qkv.dtype)
        self._rope(out, qkv, q_norm, k_norm, rotary, slots, cache, eps, head_dim, interleaved)
        return out

    def attention(
        self,
        q: Tensor,
        cache: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        seq_lens: Tensor,
        head_dim: int,
        scale: float,
        *,
        window: int | None = None,
        soft_cap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of q [T, H, D] over the blocks of `block_tables` int32 [R, B]: [T, H * D].

        Row r has tokens query_starts[r]:query_starts[r + 1] (int32 [R + 1]), the last of seq_lens[r] (int32 [R]).
        Tokens in no row have zeros.
        """
        out = torch.empty((q.shape[0], q.shape[1] * head_dim), dtype=q.dtype)
        self._attention(
            out,
            q,
            cache,
            block_tables,
            query_starts,
            seq_lens,
            head_dim,
            window or 0,
            scale,
            soft_cap,
            alibi_slopes,
            sinks,
        )
        return out

    def gate(self, x: Tensor, activation: str) -> Tensor:
        """activation(g) * u of x [T, 2 n] = [g, u]: [T, n]."""
        out = torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype)
        self._gate(out, x, ACTIVATIONS[activation])
        return out

    def sample(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
    ) -> Tensor:
        """The token at quantile `uniforms` float64 [S] of each row of float32 `logits` [S, V]: int32 [S].

        Of the distribution at `temperature` float32 [S] (0: the most likely token), cut to the `top_k` int32 [S] most
        likely (0: all), to `min_p` float32 [S] times the highest probability, and to the nucleus of `top_p` float32
        [S]. A row with NaN, or with -inf alone, gives -1; where logits are inf, one of these tokens is drawn.
        """
        tokens = torch.empty(logits.shape[0], dtype=torch.int32)
        self._sample(tokens, logits, temperature, top_k, top_p, min_p, uniforms)
        return tokens

    def mask(self, logits: Tensor, masks: Tensor) -> None:
        """Float32 `logits` [S, V] of tokens whose bit in `masks` int32 [S, ceil(V / 32)] is 0 become -inf, in place.

        Token i has bit i % 32 of word i // 32.
        """
        self._mask(logits, masks)

    def layers(
        self,
        residual: Tensor,
        x: Tensor | None,
        stack: LayerStack,
        *,
        rotary: Tensor | None,
        slots: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        seq_lens: Tensor,
        cache: Tensor,
        head_dim: int,
        activation: str,
        eps: float,
        scale: float,
    ) -> Tensor:
        """Decoder layers of residual + x, each [T, hidden]: `residual` is overwritten with the new one, and the x yet
        to be added to it returned (in the memory of the x given). `cache` [layers, 2, ...] has that of every layer.
        Everything else as in the ops that layers are made of.
        """
        has_x, x = x is not None, torch.empty_like(residual) if x is None else x
        o_inputs, intermediate = stack.inputs
        shape = o_inputs // head_dim, head_dim, intermediate
        self._layers(
            *(residual, x, has_x, *stack.tensors, rotary, slots, block_tables, query_starts, seq_lens, cache),
            *(stack.formats, stack.windows, *shape, ACTIVATIONS[activation], eps, scale),
        )
        return x


def load(path: Path | None = None) -> CpuKernels:
    """The kernels of `path` (None: of this package); KernelError if they do not load.

    torch keeps one registration of an op, so a process opens one library only.
    """
    return _load((path or LIBRARY).resolve())


@functools.cache
def _load(path: Path) -> CpuKernels:
    if not path.is_file():
        raise KernelError(f"{path} is not there: build it with python build_scripts/cpu.py")
    kernels = CpuKernels(path)
    for name in OPS:
        torch.library.register_fake(f"pagefleet_cpu::{name}", lambda *args: None)  # they only write what they are given
    return kernels


def describe() -> str:
    """One line about the library, for people."""
    try:
        kernels = load()
    except KernelError as error:
        return str(error)
    return f"{LIBRARY.name}: {kernels.isa} kernels, {kernels.num_threads} threads"
