"""Op by op against float64: what a backend tells of a step, and attention over a grid of everything it depends on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from pagefleet.backend import Traits
from pagefleet.conformance.cases import Case, cases, model_spec
from pagefleet.conformance.driver import Driver
from pagefleet.conformance.target import find_target

pytestmark = pytest.mark.conformance_level("L1")

MakeDriver = Callable[..., Driver]

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
HEADS = ((2, 2), (4, 2), (3, 1), (8, 2), (8, 1), (5, 5))  # query heads, key heads: groups of 1, 2, 3, 4, 8
WINDOWS = (None, 1, 6, 33)
SCORES: Mapping[str, Mapping[str, Any]] = {  # the features that each needs, by the arguments of `model_spec`
    "plain": {},
    "soft_cap": {"soft_cap": 1.5},
    "alibi": {"alibi_slopes": (0.5, 0.25, 0.125, 1.0, 0.0, 0.3, 0.06, 0.7)},
    "alibi+soft_cap": {"soft_cap": 2.0, "alibi_slopes": (0.5, 0.25, 0.125, 1.0, 0.0, 0.3, 0.06, 0.7)},
}
ROWS = ("prefill", "decode", "mixed", "padded")


def pairwise(factors: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Combinations in which any two values of two factors meet at least once; few of them, always the same."""
    names = list(factors)
    open_pairs = {
        frozenset([(a, x), (b, y)]): None
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(range(len(factors[a])), range(len(factors[b])))
    }
    while open_pairs:
        chosen = dict(next(iter(open_pairs)))
        for name in names:
            if name not in chosen:
                counts = [
                    sum(frozenset([(name, i), other]) in open_pairs for other in chosen.items())
                    for i in range(len(factors[name]))
                ]
                chosen[name] = counts.index(max(counts))
        for pair in itertools.combinations(chosen.items(), 2):
            open_pairs.pop(frozenset(pair), None)
        yield {name: factors[name][chosen[name]] for name in names}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The grid of what the backend offers."""
    if "cell" in metafunc.fixturenames:
        cells = list(pairwise(_factors(find_target(metafunc.config)[0].traits)))
        metafunc.parametrize("cell", cells, ids=["-".join(str(value) for value in cell.values()) for cell in cells])


def _factors(traits: Traits) -> dict[str, Sequence[Any]]:
    return {
        "head_dim": HEAD_DIMS,
        "heads": HEADS,
        "window": WINDOWS,
        "rows": ROWS,
        "score": [name for name in SCORES if name == "plain" or set(name.split("+")) <= set(traits.model_features)],
        "block_size": (16, 5, 1, 32) if traits.block_sizes is None else traits.block_sizes,
        "dtype": traits.dtypes,
    }


def test_attention_over_the_grid(cell: Mapping[str, Any], make_driver: MakeDriver) -> None:
    """Any two of: head size, grouping, window, what is done to scores, block size, dtype, mix of rows."""
    num_heads, num_kv_heads = cell["heads"]
    score = dict(SCORES[cell["score"]])
    if "alibi_slopes" in score:
        score["alibi_slopes"] = score["alibi_slopes"][:num_heads]
    model = model_spec(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=cell["head_dim"], windows=(cell["window"],), **score
    )
    size = cell["block_size"]
    driver = make_driver(Case("grid", model), dtype=cell["dtype"], block_size=size)
    prompts = [driver.prompt(num_tokens) for num_tokens in (min(2 * size + 3, 37), 1, min(size, 16), 13)]
    padding = 3 if cell["rows"] == "padded" else 0
    first = {"prefill": 64, "decode": 1, "mixed": 5, "padded": 4}[cell["rows"]]
    later = {"prefill": 64, "decode": 1, "mixed": 1, "padded": 7}[cell["rows"]]
    driver.step([(prompt, min(first, prompt.pending)) for prompt in prompts], padding=padding)
    while left := [prompt for prompt in prompts if prompt.pending]:
        chunks = [later if i % 2 else first for i in range(len(left))]
        driver.step([(prompt, min(n, prompt.pending)) for prompt, n in zip(left, chunks, strict=True)], padding=padding)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_every_op_a_backend_tells_of(case: Case, make_driver: MakeDriver) -> None:
    """`trace` is the step itself, and what it tells is what the reference has; a backend may tell of nothing."""
    driver = make_driver(case)
    size = driver.layout.block_size
    prompts = [driver.prompt(size + 3), driver.prompt(4)]
    driver.step([(prompts[0], 2)])  # so that one row has something in the cache already
    work = [(prompt, prompt.pending) for prompt in prompts]
    batch, num_tokens = driver.batch(work, padding=3), sum(count for _, count in work)
    told: dict[str, np.ndarray] = {}
    logits = driver.backend.trace(batch, lambda name, value: told.update({name: np.array(value)}))
    driver.compare(driver.backend.to_host(logits)[:num_tokens], driver.expected(work), "logits")
    known = list(driver.run_of(prompts[0]).ops)
    assert list(told) == [name for name in known if name in told], "names that Backend.trace has, in its order"
    for name, value in told.items():
        assert value.ndim == 2, f"{name} has the shape {value.shape}, not [tokens, n]"
        assert len(value) == batch.num_tokens, f"{name} has {len(value)} rows for {batch.num_tokens} tokens"
        driver.compare(value[:num_tokens], driver.expected(work, name), name)
