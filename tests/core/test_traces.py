"""Real traces: the prefix hits are those of a trie, and few KV slots are wasted. See tests/bench/traces.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from traces import Arrival, read_azure, read_mooncake, replay, trie_hits

DATA = Path(__file__).parents[1] / "data"
MOONCAKE, AZURE = DATA / "mooncake_conversation_600.jsonl", DATA / "azure_code_600.csv"


def hits(arrivals: list[Arrival], **options: object) -> int:
    cached, rest = divmod(replay(arrivals, **options).num_cached_tokens, arrivals[0].hashed)  # type: ignore[arg-type]
    assert rest == 0
    return cached


@pytest.mark.parametrize("budget", [256, 1000, 8192])
def test_prefix_hits_are_exactly_those_of_a_trie(budget: int) -> None:
    arrivals = read_mooncake(MOONCAKE, 32)
    expected = trie_hits(arrivals, "served")
    assert expected > 500
    assert hits(arrivals, budget=budget) == expected


def test_requests_that_arrive_all_at_once_hit_as_often() -> None:
    arrivals = [replace(arrival, time=0.0) for arrival in read_mooncake(MOONCAKE, 32)]
    assert hits(arrivals) == trie_hits(arrivals, "served")


def test_the_last_token_of_a_prompt_is_the_only_loss() -> None:
    prompt = Arrival(0.0, 48, 4, (1, 2, 3), 16)
    arrivals = [prompt, replace(prompt, time=9.0), replace(prompt, time=18.0, prompt_length=50, hashes=(1, 2, 3, 4))]
    assert [trie_hits(arrivals, rule) for rule in ("all", "full", "served")] == [6, 6, 5]
    assert hits(arrivals) == 5


def test_without_prefix_caching_there_are_no_hits() -> None:
    assert hits(read_mooncake(MOONCAKE, 32)[:100], prefix_caching=False) == 0


def test_less_than_four_percent_of_the_slots_are_wasted_at_usual_lengths() -> None:
    result = replay(read_azure(AZURE))
    assert 0 < result.wasted < 0.04
