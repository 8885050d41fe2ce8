"""What a step must read and compute by the model alone, and the share of the ceilings that each phase reaches of it.

This holds for any backend: its calls of `forward` are looked at from outside. A step's floor is what its bytes take at
the read bandwidth or its arithmetic at the peak rate, whichever is longer; its time lasts to the start of the next, so
what the host needs beyond the device counts too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from pagefleet.bench.roofline import attended

if TYPE_CHECKING:
    from pagefleet.backend import Backend, ForwardBatch
    from pagefleet.bench.roofline import Ceilings
    from pagefleet.model import ModelSpec

WEIGHT_BYTES: Mapping[str, float] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int4": 0.5625}
"""Of a parameter of a matrix; int4 with its float16 scale for each 32."""


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Counts a step's bytes and operations from its batch."""

    spec: ModelSpec
    weight_bytes: float  # of a parameter of a matrix
    kv_bytes: float  # of a number in the KV cache

    def __call__(self, batch: ForwardBatch) -> tuple[float, float]:
        """Bytes and floating-point operations: every matrix once, each row's keys and values once a layer."""
        sizes = {
            name: int(np.prod(tensor.shape)) for name, tensor in self.spec.tensors.items() if len(tensor.shape) > 1
        }
        head = sizes.get("head.weight", sizes["embed.weight"])
        matrices = sum(size for name, size in sizes.items() if name.startswith("layers."))
        num_tokens, num_logits = int(batch.query_starts[-1]), min(len(batch.logit_rows), batch.num_rows)
        moved = self.weight_bytes * (matrices + (head if num_logits else 0))
        flop = 2.0 * matrices * num_tokens + 2.0 * head * num_logits
        for window in self.spec.windows:
            num_keys, num_pairs = attended(batch, window)
            moved += 2.0 * self.spec.num_kv_heads * self.spec.head_dim * self.kv_bytes * num_keys
            flop += 4.0 * self.spec.num_heads * self.spec.head_dim * num_pairs
        return moved, flop


@dataclass(slots=True)
class PhaseCost:
    """All steps of one phase."""

    seconds: list[float] = field(default_factory=list)
    num_bytes: float = 0.0
    flop: float = 0.0
    floor: float = 0.0  # seconds at the ceilings; 0: they are not known


@contextmanager
def timed_phases(
    backend: Backend, cost: ModelCost, ceilings: Ceilings | None, dtype: str
) -> Iterator[Mapping[str, PhaseCost]]:
    """Time every step of `backend` while the block runs; the phases (prefill, decode of N) are there at its end."""
    phases: dict[str, PhaseCost] = {}
    steps: list[tuple[float, str, tuple[float, float]]] = []
    forward: Callable[[ForwardBatch], Any] = backend.forward

    def timed(batch: ForwardBatch) -> Any:
        decoding = int(batch.query_starts[-1]) == batch.num_rows
        steps.append((time.perf_counter(), f"decode of {batch.num_rows}" if decoding else "prefill", cost(batch)))
        return forward(batch)

    setattr(backend, "forward", timed)  # noqa: B010  (mypy: a method)
    try:
        yield phases
    finally:
        del backend.__dict__["forward"]  # the class's own shows again
    for (start, name, (moved, flop)), (end, *_) in pairwise(steps):
        phase = phases.setdefault(name, PhaseCost())
        phase.seconds.append(end - start)
        phase.num_bytes += moved
        phase.flop += flop
        phase.floor += ceilings.floor((int(moved), int(flop)), dtype) if ceilings else 0.0
