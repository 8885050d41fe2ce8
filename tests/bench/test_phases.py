"""What a step must cost by the model, counted by hand; and any backend's steps timed from outside."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pagefleet.backend import ForwardBatch
from pagefleet.bench.phases import ModelCost, timed_phases
from pagefleet.bench.roofline import Ceilings
from pagefleet.conformance.cases import model_spec


def batch(*rows: tuple[int, int]) -> ForwardBatch:
    """Rows of (tokens so far, of which new)."""
    counts = [new for _, new in rows]
    return ForwardBatch(
        token_ids=np.zeros(sum(counts), np.int32),
        positions=np.zeros(sum(counts), np.int32),
        slots=np.zeros(sum(counts), np.int32),
        query_starts=np.cumsum([0, *counts], dtype=np.int32),
        seq_lens=np.array([length for length, _ in rows], np.int32),
        block_tables=np.zeros((len(rows), 1), np.int32),
        logit_rows=np.zeros(len(rows), np.int32),
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_decode_step_reads_every_matrix_once_and_each_context(tied: bool) -> None:
    model = model_spec(num_heads=4, num_kv_heads=2, windows=(None, 5), tied=tied)
    matrices = 2 * (64 * 256 * 2 + 64 * 128 * 2 + 3 * 64 * 96) + 97 * 64
    moved, flop = ModelCost(model, 2, 4)(batch((10, 1), (3, 1)))
    contexts = (10 + 3) + (min(10, 1 + 5) + 3)
    assert moved == 2 * matrices + contexts * 2 * 2 * 64 * 4
    assert flop == 2 * 2 * matrices + 4 * 4 * 64 * ((10 + 3) + (5 + 3))


def test_a_prompt_attends_to_a_triangle() -> None:
    model = model_spec(windows=(None,))
    _, one = ModelCost(model, 2, 2)(batch((1, 1)))
    _, chunk = ModelCost(model, 2, 2)(batch((8, 4)))  # positions 4 to 7
    per_token = 2 * (4 * 64 * 128 + 3 * 64 * 96)
    assert one == per_token + 2 * 97 * 64 + 4 * 2 * 64
    assert chunk == 4 * per_token + 2 * 97 * 64 + 4 * 2 * 64 * (5 + 6 + 7 + 8)


def test_steps_of_any_backend_are_sorted_into_phases() -> None:
    class Anything(SimpleNamespace):
        def forward(self, batch: ForwardBatch) -> Any:
            return batch

    backend: Any = Anything()
    cost = ModelCost(model_spec(), 2, 2)
    with timed_phases(backend, cost, Ceilings(1e9, {"bfloat16": 1e9}), "bfloat16") as phases:
        for rows in ([(8, 8)], [(9, 1)], [(10, 1)], [(10, 1), (4, 1)], [(1, 1)]):
            step = batch(*rows)
            assert backend.forward(step) is step
    assert {name: len(phase.seconds) for name, phase in phases.items()} == {
        "prefill": 1,
        "decode of 1": 2,
        "decode of 2": 1,
    }
    assert all(phase.floor >= max(phase.num_bytes, phase.flop) / 1e9 - 1e-9 for phase in phases.values())
    assert "forward" not in vars(backend)
