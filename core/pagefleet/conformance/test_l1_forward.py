"""Logits of any mix of prefill and decode rows, over any placement of blocks, against the dense reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagefleet.conformance.cases import MAX_POSITIONS, Case, cases, model_spec
from pagefleet.conformance.driver import Driver, Prompt, compositions

pytestmark = pytest.mark.conformance_level("L1")

MakeDriver = Callable[..., Driver]
every_case = pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)


@every_case
def test_prefill(case: Case, make_driver: MakeDriver) -> None:
    driver = make_driver(case)
    size = driver.layout.block_size
    prompts = [driver.prompt(num_tokens) for num_tokens in (2 * size + 5, 1, size)]
    driver.step([(prompt, prompt.pending) for prompt in prompts])


@every_case
def test_decode(case: Case, make_driver: MakeDriver) -> None:
    """From the first token on, each step one token of each row."""
    driver = make_driver(case)
    driver.finish([driver.prompt(driver.layout.block_size + 6), driver.prompt(9), driver.prompt(3)], chunk=1)


@every_case
def test_mixes_of_prefill_and_decode(case: Case, dtype: str, make_driver: MakeDriver) -> None:
    """Random rows in random order, with chunks of random length, some of them of one token."""
    driver = make_driver(case, dtype=dtype)
    size = driver.layout.block_size
    prompts = [driver.prompt(num_tokens) for num_tokens in (3 * size + 2, size + 1, 2 * size, 7, 12)]
    while active := [prompt for prompt in prompts if prompt.pending]:
        order = driver.rng.permutation(len(active))[: driver.rng.integers(1, 5)]
        limits = driver.rng.choice([1, 1, 3, size + 1], len(order))
        driver.step([(active[i], min(active[i].pending, int(n))) for i, n in zip(order, limits, strict=True)])


def test_every_chunking(make_driver: MakeDriver) -> None:
    """Six tokens across a block border, cut in each of the 32 ways there are."""
    driver = make_driver("window")
    start = max(0, driver.layout.block_size - 3)
    tokens = driver.prompt(start + 6).tokens
    for chunks in compositions(6):
        prompt = Prompt(list(tokens))
        for chunk in (start, *chunks) if start > 0 else chunks:
            driver.step([(prompt, chunk)])
        driver.release(prompt)


def test_lengths_around_block_borders(block_size: int, make_driver: MakeDriver) -> None:
    driver = make_driver("gqa-tied", block_size=block_size)
    lengths = [max(1, n * block_size + offset) for n in (1, 2) for offset in (-1, 0, 1)]
    prompts = [driver.prompt(length + 2) for length in lengths]
    driver.step([(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)])
    driver.finish(prompts, chunk=1)


@pytest.mark.parametrize("order", ["ascending", "descending", "scattered"])
def test_physical_order_of_blocks_does_not_matter(order: str, make_driver: MakeDriver) -> None:
    driver = make_driver("gqa-tied")
    size = driver.layout.block_size
    if order != "scattered":
        driver.free.sort(reverse=order == "ascending")  # handed out from the end
    driver.finish([driver.prompt(3 * size + 1), driver.prompt(3 * size + 1)], chunk=size + 2)


def test_block_tables_change_from_step_to_step(make_driver: MakeDriver) -> None:
    """The same row of the batch, of the same length, belongs to another request each step; blocks are reused."""
    driver = make_driver()
    size = driver.layout.block_size
    first, second = driver.prompt(2 * size + 2), driver.prompt(2 * size + 2)
    for prompt in (first, second):
        driver.step([(prompt, 2 * size)])
    driver.step([(first, 1), (second, 1)])
    driver.step([(second, 1), (first, 1)])
    driver.release(first)
    driver.finish([driver.prompt(2 * size + 2)], chunk=2 * size)


def test_unused_columns_of_the_block_table(make_driver: MakeDriver) -> None:
    """A table wider than its longest row: the rest is 0, which is also a real block."""
    driver = make_driver("window")
    prompt = driver.prompt(2 * driver.layout.block_size + 2)
    driver.step([(prompt, prompt.pending - 1)], extra_columns=3)
    driver.step([(prompt, 1)], extra_columns=3)
    driver.step([(driver.prompt(n), n) for n in (3, 2 * driver.layout.block_size, 1)], extra_columns=2)


@pytest.mark.parametrize("num_rows", [33, 130])
def test_many_rows(num_rows: int, make_driver: MakeDriver) -> None:
    """More rows than small grids, tables and buckets hold: first few, then many, then few again."""
    driver = make_driver("gqa-tied", num_tokens=num_rows * 16)
    prompts = [driver.prompt(6 + i % 5) for i in range(num_rows)]
    driver.step([(prompt, 2) for prompt in prompts[:3]])
    driver.step([(prompt, 4 if prompt.computed == 0 else 1) for prompt in prompts])
    driver.step([(prompt, 1) for prompt in prompts])
    driver.step([(prompt, 1) for prompt in prompts[-2:]])


@pytest.mark.parametrize("name", ["plain", "window", "scaled-rope"])
def test_contexts_as_long_as_the_model_allows(name: str, make_driver: MakeDriver) -> None:
    """In long chunks, among short rows, and one by one up to the last position."""
    driver = make_driver(name, num_tokens=MAX_POSITIONS + 64)
    driver.limit *= 4  # the worst of a thousand positions, not of twenty
    prompt, short = driver.prompt(MAX_POSITIONS), driver.prompt(7)
    driver.step([(prompt, 600)])
    driver.step([(short, 4), (prompt, MAX_POSITIONS - 603)])
    driver.finish([short, prompt], chunk=1)


def test_scores_too_large_for_an_exponential(make_driver: MakeDriver) -> None:
    """Attention's scores reach hundreds; in float32 only, for their own rounding grows with them."""
    driver = make_driver(Case("peaked", model_spec(attention_scale=40.0, windows=(None,))))
    if driver.dtype != "float32":
        pytest.skip("Traits.dtypes does not name float32")
    driver.limit *= 8
    driver.finish([driver.prompt(9), driver.prompt(5)], chunk=4)


def test_prefix_shared_by_rows(make_driver: MakeDriver) -> None:
    """Rows whose first blocks are another's, computed earlier; all of them in one step."""
    driver = make_driver("gqa-tied")
    size = driver.layout.block_size
    owner = driver.prompt(3 * size + 1)
    driver.step([(owner, 3 * size)])
    sharers = [driver.prompt(2 * size + 3, prefix=owner, num_shared=n) for n in (1, 2)]
    driver.step([(sharers[0], sharers[0].pending), (owner, 1), (sharers[1], sharers[1].pending)])


@pytest.mark.parametrize("writer_first", [True, False], ids=["writer-first", "reader-first"])
def test_prefix_written_and_read_in_one_step(writer_first: bool, make_driver: MakeDriver) -> None:
    """In every layer all rows write before any row attends, so the order of the rows does not matter."""
    driver = make_driver()
    size = driver.layout.block_size
    writer = driver.prompt(2 * size + 1)
    reader = driver.prompt(2 * size + 3, prefix=writer, num_shared=2)
    work = [(writer, writer.pending), (reader, reader.pending)]
    driver.step(work if writer_first else work[::-1])


def test_padding_is_computed_for_nobody(make_driver: MakeDriver) -> None:
    """Tokens beyond the last row: written nowhere, seen by no one, then and later."""
    driver = make_driver("gqa-tied")
    size = driver.layout.block_size
    prompts = [driver.prompt(2 * size + 3), driver.prompt(size)]
    while work := [(prompt, min(size - 1 or 1, prompt.pending)) for prompt in prompts if prompt.pending]:
        driver.step(work, padding=5)


@pytest.mark.parametrize("logit_rows", [[6], [8, 0, 3], [2, 2, 7, 2], []], ids=["one", "unordered", "repeated", "none"])
def test_logit_rows(logit_rows: list[int], make_driver: MakeDriver) -> None:
    """Only the logits asked for, in that order; the other tokens are in the cache all the same."""
    driver = make_driver()
    prompts = [driver.prompt(6), driver.prompt(6)]
    work = [(prompts[0], 5), (prompts[1], 4)]
    want = driver.expected(work)[logit_rows]
    got = driver.forward(driver.batch(work, logit_rows=logit_rows))
    driver.compare(got[: len(logit_rows)], want, "logits")
    driver.advance(work)
    driver.finish(prompts, chunk=1)
