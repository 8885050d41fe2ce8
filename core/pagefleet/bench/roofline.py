"""What each op of a backend costs, and the share of the machine's ceilings that it reaches.

A backend whose device has an object `ops`, each op a method marked `@op`, can be looked at: the methods are replaced by
timed ones for one run. `layers`, where a device does them in one call, can be split into the ops that it stands for.

An op's floor is what its bytes take at the read bandwidth or its arithmetic at the peak rate, whichever is longer, call
by call; the share is the floors' sum over the time it took. Above 100 % means data that lay in a cache. Bytes and FLOP
are counted from the shapes of what the op was given (`COUNTS`, one line an op).

This module sees tensors only as things with `shape`, `numel`, `element_size`; a weight may say `num_bytes` itself.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pagefleet.backend import Backend, ForwardBatch

Cost = tuple[int, int]
"""Bytes that must be read or written, and floating-point operations."""


@dataclass(slots=True)
class OpCost:
    """All calls of one op, or of one shape of it."""

    calls: int = 0
    seconds: float = 0.0
    num_bytes: int = 0
    flop: int = 0
    floor: float = 0.0  # seconds at the ceilings; 0: they are not known


@dataclass(slots=True)
class Step:
    """One call of `Backend.forward`."""

    start: float
    num_rows: int
    num_tokens: int  # padding left out
    in_ops: float = 0.0  # seconds


@dataclass(slots=True)
class Profile:
    """What a run did. Times in seconds."""

    seconds: float = 0.0  # of the whole run
    ops: dict[str, OpCost] = field(default_factory=lambda: defaultdict(OpCost))
    steps: list[Step] = field(default_factory=list)

    def host_share(self, num_rows: int) -> float | None:
        """Share of a step outside of ops, while `num_rows` requests decode: the median. None: there were no such steps.

        A step lasts from its start to the start of the next: planning that overlaps with the device costs nothing.
        """
        pairs = zip(self.steps, self.steps[1:], strict=False)
        shares = [
            1 - step.in_ops / (following.start - step.start)
            for step, following in pairs
            if step.num_rows == step.num_tokens == num_rows
        ]
        return statistics.median(shares) if shares else None


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine can do: bytes read a second, and operations a second by the type that is multiplied."""

    bandwidth: float
    rates: Mapping[str, float]

    def floor(self, cost: Cost, dtype: str) -> float:
        """Seconds that a cost takes at least; a type without instructions of its own can be multiplied as float32."""
        rate = max(self.rates.get(dtype, 0.0), self.rates.get("float32", 0.0))
        return max(cost[0] / self.bandwidth, cost[1] / rate if rate else 0.0)


@contextmanager
def profiled(backend: Backend, ceilings: Ceilings | None = None, *, split: bool = False) -> Iterator[Profile]:
    """Time each op of `backend` while the block runs; `split`: a layer's ops one by one, as the base class has them.

    A device that works asynchronously is waited for at each op. Raises ValueError for a backend without ops.
    """
    ops = getattr(backend, "ops", None)
    classes = type(ops).__mro__
    marked = {name for each in classes for name, value in vars(each).items() if hasattr(value, "__wrapped__")}
    if ops is None or not marked:
        raise ValueError(f"{type(backend).__name__} has no ops that can be timed")
    profile = Profile()
    timer = _Timer(backend, profile, ceilings)
    replaced: dict[str, Callable[..., Any]] = {name: timer.op(name, getattr(ops, name)) for name in marked}
    if split:
        composed = [vars(each)["layers"] for each in classes if "layers" in vars(each)]
        replaced |= {"layers": partial(composed[-1], ops)} if composed else {}
    for name, method in replaced.items():
        setattr(ops, name, method)
    setattr(backend, "forward", timer.step(backend.forward))  # noqa: B010  (mypy: a method)
    start = time.perf_counter()
    try:
        yield profile
    finally:
        profile.seconds = time.perf_counter() - start
        del backend.__dict__["forward"]  # the class's own shows again
        for name in replaced:
            delattr(ops, name)


class _Timer:
    def __init__(self, backend: Backend, profile: Profile, ceilings: Ceilings | None) -> None:
        self.profile, self.ceilings = profile, ceilings
        self._wait = backend.synchronize if backend.traits.asynchronous else None
        self._batch: ForwardBatch | None = None
        self._inside = False  # an op that is built of others counts as one

    def step(self, forward: Callable[[ForwardBatch], Any]) -> Callable[[ForwardBatch], Any]:
        def timed(batch: ForwardBatch) -> Any:
            self._batch = batch
            self.profile.steps.append(Step(time.perf_counter(), batch.num_rows, int(batch.query_starts[-1])))
            return forward(batch)

        return timed

    def op(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside or self._batch is None:
                return method(*args, **kwargs)
            self._inside = True
            try:
                start = time.perf_counter()
                result = method(*args, **kwargs)
                if self._wait is not None:
                    self._wait()
                seconds = time.perf_counter() - start
            finally:
                self._inside = False
            self._record(name, self._batch, (*args, *kwargs.values()), result, seconds)
            return result

        return timed

    def _record(self, name: str, batch: ForwardBatch, args: tuple[Any, ...], result: Any, seconds: float) -> None:
        num_bytes, flop = COUNTS.get(name, _count_elementwise)(batch, args, result)
        entry = self.profile.ops[_label(name, args)]
        entry.calls += 1
        entry.seconds += seconds
        entry.num_bytes += num_bytes
        entry.flop += flop
        if self.ceilings is not None:
            entry.floor += self.ceilings.floor((num_bytes, flop), _dtype(name, args))
        self.profile.steps[-1].in_ops += seconds


# -- what an op must read, write and compute, from its arguments --------------------------------------------


def num_bytes(value: Any) -> int:
    """Of a tensor, a weight, or a tuple of such; 0 for anything else."""
    if isinstance(value, tuple | list):
        return sum(map(num_bytes, value))
    if isinstance(size := getattr(value, "num_bytes", None), int):
        return size
    return int(value.numel() * value.element_size()) if hasattr(value, "element_size") else 0


def _count_embed(batch: ForwardBatch, args: tuple[Any, ...], result: Any) -> Cost:
    return 2 * num_bytes(result), 0  # the rows that are wanted, of a table that is not read


def _count_linear(batch: ForwardBatch, args: tuple[Any, ...], result: Any) -> Cost:
    x, weight, *rest = args  # a bias, an activation
    return num_bytes((x, weight, *rest, result)), _product(batch, x, weight)


def _product(batch: ForwardBatch, x: Any, weight: Any) -> int:
    """Operations of x [T, in] times weight [out, in]; padding is work that nobody asked for."""
    num_rows = int(batch.query_starts[-1]) if len(x) == batch.num_tokens else min(len(x), batch.num_rows)
    return 2 * num_rows * int(np.prod(weight.shape))


def _count_attention(batch: ForwardBatch, args: tuple[Any, ...], result: Any) -> Cost:
    q, cache, _, window, *_ = args
    kv, flop = _scores(batch, int(q.shape[1]), cache, window)
    return kv + num_bytes((q, result)), flop


def attended(batch: ForwardBatch, window: int | None) -> tuple[int, int]:
    """Keys that are read, each row's once, and pairs of a query and a key that it sees."""
    lengths = np.diff(batch.query_starts).astype(np.int64)  # [R] queries
    first = batch.seq_lens - lengths  # position of each row's first query
    positions = np.arange(lengths.sum()) - np.repeat(batch.query_starts[:-1] - first, lengths)
    seen = positions + 1 if window is None else np.minimum(positions + 1, window)
    read = batch.seq_lens if window is None else np.minimum(batch.seq_lens, lengths + window)
    return int(read.sum()), int(seen.sum())


def _scores(batch: ForwardBatch, num_heads: int, cache: Any, window: int | None) -> Cost:
    """Keys and values read, and what is done with them."""
    num_keys, num_pairs = attended(batch, window)
    num_kv_heads, head_dim = int(cache.shape[2]), int(cache.shape[4])
    return 2 * num_keys * num_kv_heads * head_dim * int(cache.element_size()), 4 * num_heads * head_dim * num_pairs


def _count_layers(batch: ForwardBatch, args: tuple[Any, ...], result: Any) -> Cost:
    residual, x, layers, model, _, caches, *_ = args
    moved, flop = num_bytes((residual, x, result)), 0
    for layer, cache in zip(layers, caches, strict=True):
        parameters = [getattr(layer, name) for name in layer.__dataclass_fields__]
        matrices = [each for each in parameters if len(getattr(each, "shape", ())) == 2]
        kv, scores = _scores(batch, model.num_heads, cache, layer.window)
        moved += kv + num_bytes(parameters)
        flop += scores + sum(_product(batch, residual, matrix) for matrix in matrices)
    return moved, flop


def _count_rope_and_write(batch: ForwardBatch, args: tuple[Any, ...], result: Any) -> Cost:
    return 2 * num_bytes(_but_caches(args)), 0  # each is read, and written turned or to its slots


def _count_elementwise(batch: ForwardBatch, args: tuple[Any, ...], result: Any) -> Cost:
    return num_bytes(_but_caches(args)) + num_bytes(result), 0


def _but_caches(args: tuple[Any, ...]) -> list[Any]:
    return [arg for arg in args if len(getattr(arg, "shape", ())) != 5]


COUNTS: Mapping[str, Callable[[ForwardBatch, tuple[Any, ...], Any], Cost]] = {
    "embed": _count_embed,  # tokens, weight
    "linear": _count_linear,  # x, weight, bias
    "logits": _count_linear,  # x, weight
    "gated_linear": _count_linear,  # x, weight, bias, activation
    "attention": _count_attention,  # q, cache, plan, window, scale
    "layers": _count_layers,  # residual, x, the layers' parameters, model, rotary, caches, plan
    "rope_and_write": _count_rope_and_write,  # what is turned and written, rotary, cache, plan
}  # any other: its arguments are read and its results written


def _label(name: str, args: tuple[Any, ...]) -> str:
    if COUNTS.get(name) is _count_linear:
        return f"{name} {'x'.join(str(int(size)) for size in args[1].shape)}"
    return name


def _dtype(name: str, args: tuple[Any, ...]) -> str:
    """The type that is multiplied: the weight's, or the cache's."""
    operand = args[1] if len(args) > 1 else args[0]
    return str(getattr(operand, "dtype", "float32")).rpartition(".")[2]
