"""Static batching generates the same tokens as the engine, and is charged for what it wastes."""

from __future__ import annotations

import numpy as np
import pytest

from pagefleet import LLM
from pagefleet.bench.static_batching import run_continuous, run_static, slot_bytes
from pagefleet.bench.workloads import BenchRequest


@pytest.fixture
def requests() -> list[BenchRequest]:
    rng = np.random.default_rng(0)
    sizes = [(5, 9), (40, 3), (17, 20), (1, 1), (33, 12)]  # tokens in and out
    return [BenchRequest(tuple(rng.integers(3, 256, size).tolist()), num_output) for size, num_output in sizes]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_the_tokens_are_those_of_the_engine(tiny_llm: LLM, requests: list[BenchRequest], batch_size: int) -> None:
    static, continuous = run_static(tiny_llm, requests, batch_size), run_continuous(tiny_llm, requests)
    assert static.tokens == continuous.tokens
    assert [len(tokens) for tokens in static.tokens] == [each.num_output for each in requests]


def test_the_engine_is_as_it_was_afterwards(tiny_llm: LLM, requests: list[BenchRequest]) -> None:
    before = run_continuous(tiny_llm, requests)
    run_static(tiny_llm, requests, 2)
    assert run_continuous(tiny_llm, requests).tokens == before.tokens


def test_padding_and_waiting_are_computed_and_counted(tiny_llm: LLM, requests: list[BenchRequest]) -> None:
    static = run_static(tiny_llm, requests, 2)
    padded = (2 * 40 + 2 * 8) + (2 * 17 + 2 * 19) + (33 + 11)  # prompts to the longest, rows to the slowest
    assert static.num_computed == padded
    needed = sum(len(each.prompt) + each.num_output - 1 for each in requests)
    assert run_continuous(tiny_llm, requests).num_computed == needed


def test_memory_is_reserved_at_full_length_or_by_the_block(tiny_llm: LLM, requests: list[BenchRequest]) -> None:
    static, continuous = run_static(tiny_llm, requests, 5), run_continuous(tiny_llm, requests)
    assert static.reserved == 5 * 64  # 40 in and 20 out in blocks of 16
    assert static.used == sum(len(each.prompt) + each.num_output - 1 for each in requests)
    assert continuous.used <= continuous.reserved < continuous.used + 16 * len(requests)
    assert slot_bytes(tiny_llm) == 2 * 2 * 2 * 16 * 4  # layers, key and value, heads, head_dim, float32


def test_a_batch_that_does_not_fit_is_refused(tiny_llm: LLM, requests: list[BenchRequest]) -> None:
    with pytest.raises(ValueError, match=r"rows of 60 tokens need .* KV blocks, the cache has"):
        run_static(tiny_llm, requests, 10_000)
