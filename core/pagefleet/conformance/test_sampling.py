"""Greedy tokens are the most likely ones, and can feed the next step before the host has seen them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pagefleet.backend import SamplingBatch, Traits
from pagefleet.conformance.driver import Driver
from pagefleet.sampler import NO_LOGPROBS


def greedy(num_rows: int) -> SamplingBatch:
    """Rows that take the most likely token, and nothing else."""
    nothing = np.zeros(0, np.int32)
    return SamplingBatch(
        temperature=np.zeros(num_rows, np.float32),
        top_k=np.zeros(num_rows, np.int32),
        top_p=np.ones(num_rows, np.float32),
        min_p=np.zeros(num_rows, np.float32),
        seeds=np.zeros(num_rows, np.uint64),
        positions=np.zeros(num_rows, np.int32),
        num_logprobs=np.full(num_rows, NO_LOGPROBS, np.int32),
        rules={},
        prompt_targets=nothing,
        prompt_num_logprobs=nothing,
    )


def test_greedy_tokens(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver()
    batch = driver.batch([(driver.prompt(5), 5), (driver.prompt(3), 3)], logit_rows=[4, 7])
    logits = driver.backend.forward(batch)
    drawn = driver.backend.sample(logits, greedy(2)).result()
    assert drawn.token_ids.tolist() == driver.backend.to_host(logits)[:2].argmax(axis=1).tolist()


def test_tokens_still_on_the_device(make_driver: Callable[..., Driver], traits: Traits) -> None:
    """The next step names tokens by the rows that drew them, in another order."""
    if not traits.gathers_tokens:
        pytest.skip("Traits.gathers_tokens is False")
    driver = make_driver()
    first, second = driver.prompt(5), driver.prompt(3)
    batch = driver.batch([(first, 5), (second, 3)], logit_rows=[4, 7])
    pending = driver.backend.sample(driver.backend.forward(batch), greedy(2))
    driver.advance([(first, 5), (second, 3)])
    for prompt in (first, second):
        prompt.tokens.append(0)  # not known yet
    work = [(second, 1), (first, 1)]
    batch = driver.batch(work)
    batch.token_ids[:2] = [-2, -1]
    logits = driver.backend.forward(batch)
    for prompt, token in zip((first, second), pending.result().token_ids.tolist(), strict=True):
        prompt.tokens[-1] = token
    driver.compare(driver.backend.to_host(logits)[:2], driver.expected(work), "logits")
