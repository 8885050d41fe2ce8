"""The paged cache: a step writes the slots it names and no other, and blocks can be copied and moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pagefleet.backend import Traits
from pagefleet.conformance.cases import Case, case_named, cases
from pagefleet.conformance.driver import Driver, Prompt, Work, decode

pytestmark = pytest.mark.conformance_level("L2")

MakeDriver = Callable[..., Driver]


@pytest.fixture
def _exchanges(traits: Traits) -> None:
    if not traits.exchanges_blocks:
        pytest.skip("Traits.exchanges_blocks is False")


@pytest.fixture
def _copies(traits: Traits) -> None:
    if not traits.copies_blocks:
        pytest.skip("Traits.copies_blocks is False")


@pytest.mark.usefixtures("_exchanges")
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_step_writes_its_slots_and_no_other(case: Case, make_driver: MakeDriver) -> None:
    """Every slot of the cache compared bit by bit around each step; what was written is what the reference has."""
    driver = make_driver(case)
    driver.imprint()
    size = driver.layout.block_size
    prompts = [driver.prompt(2 * size + 1), driver.prompt(size), driver.prompt(3)]
    while work := [(prompt, min(size - 1 or 1, prompt.pending)) for prompt in prompts if prompt.pending]:
        _step_around_canaries(driver, work)


def _step_around_canaries(driver: Driver, work: Work) -> None:
    batch = driver.batch(work, padding=3)
    before = driver.export()
    driver.compare(driver.forward(batch)[: sum(n for _, n in work)], driver.expected(work), "logits")
    after = driver.export()
    changed = np.flatnonzero((before != after).any(axis=(1, 2, 3, 4)))
    named = np.sort(batch.slots[batch.slots >= 0])
    assert changed.tolist() == named.tolist(), "left: slots that changed; right: slots the step named"
    for prompt, count in work:
        slots = driver.slots(prompt, prompt.computed, prompt.computed + count)
        written = decode(after[slots], driver.dtype)  # [count, layers, 2, heads, dim]
        for i, (kind, what) in enumerate([("k", "keys (normalised and turned)"), ("v", "values")]):
            layers = [driver.expected([(prompt, count)], f"layers.{n}.{kind}") for n in range(driver.model.num_layers)]
            driver.compare(written[:, :, i], np.stack(layers, axis=1).reshape(written[:, :, i].shape), what)
    driver.advance(work)


def test_two_instances_share_nothing(make_driver: Callable[..., Driver]) -> None:
    """Two models of one shape on one device, their steps interleaved, in caches with the same block numbers."""
    drivers = [make_driver(replace(case_named("plain"), seed=seed)) for seed in (0, 1)]
    prompts = [driver.prompt(2 * driver.layout.block_size + 1) for driver in drivers]
    while all(prompt.pending for prompt in prompts):
        for driver, prompt in zip(drivers, prompts, strict=True):
            driver.step([(prompt, min(3, prompt.pending))])


def test_bystanders_survive(make_driver: MakeDriver) -> None:
    """The same by logits alone: requests that sit out many steps find their context as they left it."""
    driver = make_driver("gqa-tied")
    size = driver.layout.block_size
    bystanders = [driver.prompt(n + 2) for n in (2 * size, size + 1, size - 1 or 1)]
    driver.step([(prompt, prompt.pending - 2) for prompt in bystanders])
    for chunk in (1, size, 2 * size + 1):
        passer_by = driver.prompt(3 * size + 1)
        while passer_by.pending:
            driver.step([(passer_by, min(chunk, passer_by.pending))], padding=3)
        driver.release(passer_by)
    driver.finish(bystanders, chunk=1)


@pytest.mark.usefixtures("_exchanges")
def test_blocks_go_out_as_they_came_in(dtype: str, make_driver: MakeDriver) -> None:
    driver = make_driver(dtype=dtype)
    driver.imprint()
    before = driver.export()
    blocks = np.array([7, 2, 11], np.int32)
    data = np.array(driver.backend.export_blocks(blocks))
    driver.backend.import_blocks(blocks[::-1].copy(), data)
    after = driver.export().reshape(driver.layout.num_blocks, -1)
    before = before.reshape(driver.layout.num_blocks, -1)
    others = np.setdiff1d(driver.all_blocks(), blocks)
    assert np.array_equal(after[blocks[::-1]], before[blocks])
    assert np.array_equal(after[others], before[others])


@pytest.mark.usefixtures("_exchanges")
def test_a_request_moves_to_another_instance(dtype: str, make_driver: MakeDriver) -> None:
    """Half computed here, the rest over there, in other blocks."""
    here, there = make_driver("gqa-tied", dtype=dtype), make_driver("gqa-tied", dtype=dtype)
    size = here.layout.block_size
    prompt = here.prompt(3 * size)
    here.step([(prompt, 2 * size + 1)])
    data = here.backend.export_blocks(np.array(prompt.blocks, np.int32))
    moved = Prompt(prompt.tokens, [], prompt.computed)
    there.step([(there.prompt(size), size)])
    there.grow(moved, moved.computed)
    there.backend.import_blocks(np.array(moved.blocks, np.int32), data)
    there.finish([moved], chunk=2)


@pytest.mark.usefixtures("_copies")
def test_forks_part_after_a_copied_block(dtype: str, make_driver: MakeDriver) -> None:
    """Two forks share the full blocks, each has its own copy of the last one; then all three go on together."""
    driver = make_driver("window", dtype=dtype)
    size = driver.layout.block_size
    parent = driver.prompt(3 * size)
    driver.step([(parent, max(2 * size - 1, size + 1))])
    common = parent.tokens[: parent.computed]
    endings = [driver.prompt(size + 1).tokens for _ in range(2)]
    forks = [Prompt(common + ending, [parent.blocks[0], driver.free.pop()], len(common)) for ending in endings]
    pairs = np.array([[parent.blocks[1], fork.blocks[1]] for fork in forks], np.int32)
    driver.backend.copy_blocks(pairs)
    driver.finish([forks[0], parent, forks[1]], chunk=1)


@pytest.mark.usefixtures("_copies", "_exchanges")
def test_a_copy_touches_its_destinations_only(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.imprint()
    want = driver.export().reshape(driver.layout.num_blocks, -1)
    pairs = np.array([[3, 8], [5, 1], [3, 0]], np.int32)
    driver.backend.copy_blocks(pairs)
    want[pairs[:, 1]] = want[pairs[:, 0]]
    assert np.array_equal(driver.export().reshape(driver.layout.num_blocks, -1), want)
