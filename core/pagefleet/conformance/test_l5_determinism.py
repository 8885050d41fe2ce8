"""A step's logits have the same bits however often it is run; where the backend says so, whatever shares the batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pagefleet.backend import Traits
from pagefleet.conformance.cases import Case, cases
from pagefleet.conformance.driver import Driver, Prompt

pytestmark = pytest.mark.conformance_level("L5")

MakeDriver = Callable[..., Driver]


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_the_same_steps_give_the_same_bits(case: Case, dtype: str, make_driver: MakeDriver) -> None:
    """Two instances, the same steps: the logits and, where it can be had, the cache."""
    first, second = make_driver(case, dtype=dtype), make_driver(case, dtype=dtype)
    size = first.layout.block_size
    works = [[driver.prompt(n) for n in (2 * size + 3, size, 9)] for driver in (first, second)]
    for limit in (size + 2, 1, size):
        logits = [
            driver.step([(prompt, min(limit, prompt.pending)) for prompt in prompts if prompt.pending], padding=1)
            for driver, prompts in zip((first, second), works, strict=True)
        ]
        assert logits[0].tobytes() == logits[1].tobytes(), "other logits than the first time"
    if first.backend.traits.exchanges_blocks:
        assert np.array_equal(first.export(), second.export()), "other keys and values than the first time"


def test_batch_invariance(dtype: str, traits: Traits, make_driver: MakeDriver) -> None:
    """A token's logits have the same bits alone, chunked, among others, padded, and in other blocks."""
    if dtype not in traits.batch_invariant:
        pytest.skip(f"Traits.batch_invariant does not name {dtype}")
    driver = make_driver("gqa-tied", dtype=dtype)
    size = driver.layout.block_size
    tokens = driver.prompt(2 * size + 3).tokens
    whole = Prompt(list(tokens))
    want = driver.step([(whole, whole.pending)])
    for chunk, num_others, padding in [(1, 0, 0), (3, 0, 0), (size + 1, 3, 0), (1, 4, 0), (size, 2, 5)]:
        prompt = Prompt(list(tokens))
        got = _logits_among_others(driver, prompt, chunk, num_others, padding)
        same = np.array_equal(got.view(np.uint32), want.view(np.uint32))
        assert same, f"chunks of {chunk} among {num_others} others with {padding} padding: other bits than all at once"
        driver.release(prompt)


def _logits_among_others(driver: Driver, prompt: Prompt, chunk: int, num_others: int, padding: int) -> np.ndarray:
    """All logits of a prompt computed in chunks, in the middle of other rows of random length."""
    rows = []
    while prompt.pending:
        count = min(chunk, prompt.pending)
        others = [driver.prompt(int(n)) for n in driver.rng.integers(1, driver.layout.block_size + 2, num_others)]
        before, after = others[: num_others // 2], others[num_others // 2 :]
        start = sum(other.pending for other in before)
        work = [(p, count if p is prompt else p.pending) for p in (*before, prompt, *after)]
        rows.append(driver.step(work, padding=padding)[start : start + count])
        for other in others:
            driver.release(other)
    return np.concatenate(rows)
