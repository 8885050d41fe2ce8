"""Greedy tokens are the most likely ones, and can feed the next step before the host has seen them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pagefleet.backend import SamplingBatch, Traits
from pagefleet.conformance.driver import Driver
from pagefleet.sampler import NO_LOGPROBS, Sampler, uniform

pytestmark = pytest.mark.conformance_level("L4")


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


def test_draws_are_those_of_the_reference(make_driver: Callable[..., Driver]) -> None:
    """Of any temperature, top-k, top-p and min-p; a quantile at a token's very edge may fall to either side."""
    driver, rng, num_rows = make_driver(), np.random.default_rng(0), 24
    batch = driver.batch([(driver.prompt(num_rows), num_rows)], logit_rows=list(range(num_rows)))
    logits = driver.backend.forward(batch)
    host = driver.backend.to_host(logits)[:num_rows].copy()
    sampling = replace(
        greedy(num_rows),
        temperature=rng.choice([0, 0.3, 1, 3], num_rows).astype(np.float32),
        top_k=rng.choice([0, 1, 7], num_rows).astype(np.int32),
        top_p=rng.choice([0.1, 0.9, 1], num_rows).astype(np.float32),
        min_p=rng.choice([0, 0.05], num_rows).astype(np.float32),
        seeds=np.arange(num_rows, dtype=np.uint64),
    )
    columns = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    quantiles = uniform(sampling.seeds, sampling.positions)
    lower, upper = (Sampler().draw(host, *columns, np.clip(quantiles + e, 0, 1 - 1e-9)) for e in (-1e-5, 1e-5))
    drawn = driver.backend.sample(logits, sampling).result()
    assert not drawn.errors
    clear = lower == upper
    assert clear.sum() > num_rows / 2
    assert drawn.token_ids[clear].tolist() == lower[clear].tolist()


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
