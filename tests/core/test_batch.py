"""build_batch and build_sampling against the same thing written as loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recall import make_request

from pagefleet.batch import build_batch, build_sampling
from pagefleet.blocks import BlockPool
from pagefleet.sampler import SampledTokens
from pagefleet.scheduler import Scheduler
from pagefleet.table import RunningTable, StepPlan


def batch_by_loops(plan: StepPlan, table: RunningTable, multiple: int) -> dict[str, list[Any]]:
    """What build_batch has to return, one token at a time."""
    size = table.block_size
    token_ids, positions, slots, starts = [], [], [], [0]
    logit_rows = {}
    for query, row in enumerate(plan.rows):
        first = plan.num_computed[query]
        for position in range(first, first + plan.num_scheduled[query]):
            known = position < table.num_known[row]
            token_ids.append(table.token_ids[row, position] if known else -1 - plan.pending[query])
            positions.append(position)
            slots.append(table.block_ids[row, position // size] * size + position % size)
            logit_rows[int(row), int(position)] = len(positions) - 1
        starts.append(len(positions))
    wanted = [starts[query + 1] - 1 for query in plan.sample_queries]
    for request, first, end in plan.scored:
        wanted += [logit_rows[request.row, position] for position in range(first, end)]
    padding, logit_padding = -len(token_ids) % multiple, -len(wanted) % multiple
    width = max(table.num_blocks[row] for row in plan.rows)
    return {
        "token_ids": token_ids + [0] * padding,
        "positions": positions + [0] * padding,
        "slots": slots + [-1] * padding,
        "query_starts": starts,
        "seq_lens": [n + k for n, k in zip(plan.num_computed, plan.num_scheduled, strict=True)],
        "block_tables": [table.block_ids[row, :width].tolist() for row in plan.rows],
        "logit_rows": wanted + [0] * logit_padding,
    }


@given(data=st.data(), multiple=st.sampled_from([1, 8, 16]), block_size=st.sampled_from([1, 3, 4, 16]))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_the_arrays_are_those_of_a_loop_over_tokens(data: st.DataObject, multiple: int, block_size: int) -> None:
    table = RunningTable(5, 80, block_size)
    num_blocks = -(-40 // block_size) * data.draw(st.integers(1, 6), label="pool, in requests")
    scheduler = Scheduler(table, BlockPool(num_blocks), max_num_batched_tokens=data.draw(st.integers(5, 40)))
    plans: list[StepPlan] = []
    for step in range(data.draw(st.integers(1, 12), label="steps")):
        for i in range(data.draw(st.integers(0, 2), label="new")):
            prompt = list(range(data.draw(st.integers(1, 30), label="prompt")))
            scored, n = data.draw(st.sampled_from([None, None, 0, 3])), data.draw(st.sampled_from([1, 1, 3]))
            scheduler.add(make_request(f"{step}/{i}", prompt, 9, n=n, prompt_logprobs=scored))
        plan = scheduler.schedule()
        if plan is not None:
            batch = build_batch(plan, table, multiple)
            for name, expected in batch_by_loops(plan, table, multiple).items():
                array = getattr(batch, name)
                assert array.dtype == np.int32, name
                np.testing.assert_array_equal(array, expected, err_msg=name)
            assert batch.num_tokens % multiple == 0
            assert batch.num_rows == len(plan.rows)
            build_sampling(plan, table)
            plans.append(plan)
        if len(plans) > 1 or (plan is None and plans):  # one step stays under way: some tokens are not known
            oldest = plans.pop(0)
            num_scores = sum(end - first for _, first, end in oldest.scored)
            sampled = SampledTokens(np.full(len(oldest.sample_rows), 50, np.int32), prompt_logprobs=[None] * num_scores)  # type: ignore[list-item]
            scheduler.commit(oldest, sampled)


def one_step(*requests: Any, num_rows: int = 4) -> tuple[StepPlan, RunningTable]:
    table = RunningTable(num_rows, 64, 4)
    scheduler = Scheduler(table, BlockPool(100), max_num_batched_tokens=64)
    for request in requests:
        scheduler.add(request)
    plan = scheduler.schedule()
    assert plan is not None
    return plan, table


def test_a_step_of_two_prompts() -> None:
    plan, table = one_step(make_request("a", [11, 12, 13, 14, 15]), make_request("b", [21, 22]))
    batch = build_batch(plan, table)
    assert batch.token_ids.tolist() == [11, 12, 13, 14, 15, 21, 22]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert batch.query_starts.tolist() == [0, 5, 7]
    assert batch.seq_lens.tolist() == [5, 2]
    assert batch.logit_rows.tolist() == [4, 6]
    assert batch.block_tables.shape == (2, 2)
    first, second = batch.block_tables
    assert second[1] == 0, "unused entries are 0"
    assert batch.slots.tolist() == [
        *range(4 * first[0], 4 * first[0] + 4),
        4 * first[1],
        4 * second[0],
        4 * second[0] + 1,
    ]


def test_padding_is_in_no_row_and_writes_nowhere() -> None:
    plan, table = one_step(make_request("a", [11, 12, 13, 14, 15]))
    batch = build_batch(plan, table, multiple=8)
    assert batch.num_tokens == 8
    assert batch.query_starts.tolist() == [0, 5]
    assert batch.slots[5:].tolist() == [-1, -1, -1]
    assert batch.logit_rows.tolist() == [4, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("multiple", [1, 8])
def test_a_token_that_is_not_known_yet_is_named_by_its_sample(multiple: int) -> None:
    table = RunningTable(4, 64, 4)
    scheduler = Scheduler(table, BlockPool(100), max_num_batched_tokens=64)
    for name in "abc":
        scheduler.add(make_request(name, [1, 2, 3]))
    scheduler.schedule()
    scheduler.finish(table.request(1), "abort")
    plan = scheduler.schedule()
    assert plan is not None
    batch = build_batch(plan, table, multiple)
    assert batch.token_ids[:2].tolist() == [-1, -3], "samples 0 and 2 of the step before"
    assert batch.positions[:2].tolist() == [3, 3]


def test_siblings_draw_from_one_row_of_logits() -> None:
    plan, table = one_step(make_request("a", [1, 2, 3], n=3), make_request("b", [4, 5]))
    batch, sampling = build_batch(plan, table), build_sampling(plan, table)
    assert sorted(batch.logit_rows.tolist()) == [2, 2, 2, 4]
    assert sampling.positions[batch.logit_rows == 2].tolist() == [3, 3, 3]
    assert sampling.positions[batch.logit_rows == 4].tolist() == [2]


def test_scored_prompt_tokens_follow_the_samples() -> None:
    plan, table = one_step(make_request("a", [1, 2, 3]), make_request("b", [7, 8, 9, 10], prompt_logprobs=2))
    batch, sampling = build_batch(plan, table), build_sampling(plan, table)
    assert batch.logit_rows.tolist() == [2, 6, 3, 4, 5]
    assert sampling.prompt_targets.tolist() == [8, 9, 10]
    assert sampling.prompt_num_logprobs.tolist() == [2, 2, 2]
