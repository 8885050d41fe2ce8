"""Scheduler: who runs in a step, with how many tokens, on which blocks. No device: tokens are made up."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recall import check_blocks, make_request

from pagefleet.blocks import BlockPool
from pagefleet.request import Request
from pagefleet.sampler import SampledTokens
from pagefleet.scheduler import Scheduler, split_budget
from pagefleet.table import RunningTable, StepPlan


def make_scheduler(num_rows: int = 4, num_blocks: int = 100, budget: int = 16, **options: object) -> Scheduler:
    table = RunningTable(num_rows, 400, 4)
    return Scheduler(table, BlockPool(num_blocks), max_num_batched_tokens=budget, **options)  # type: ignore[arg-type]


def commit(scheduler: Scheduler, plan: StepPlan, token: int = 50) -> list[Request]:
    return scheduler.commit(plan, SampledTokens(np.full(len(plan.sample_rows), token, np.int32)))


def run_step(scheduler: Scheduler) -> StepPlan:
    """Plan a step and commit it."""
    plan = scheduler.schedule()
    assert plan is not None
    commit(scheduler, plan)
    check_blocks(scheduler)
    return plan


def given_tokens(scheduler: Scheduler, plan: StepPlan) -> dict[str, int]:
    """Request id -> tokens it was given, for requests that have not finished."""
    rows = zip(plan.rows.tolist(), plan.num_scheduled.tolist(), strict=True)
    requests = scheduler.table.requests
    return {request.request_id: count for row, count in rows if (request := requests[row]) is not None}


# -- the budget ------------------------------------------------------------------------------------------


@given(wanted=st.lists(st.integers(0, 40), min_size=1, max_size=8), spare=st.integers(0, 60))
@settings(deadline=None, derandomize=True)
def test_everybody_gets_one_token_and_the_first_get_the_rest(wanted: list[int], spare: int) -> None:
    budget = len(wanted) + spare
    left = budget - sum(n > 0 for n in wanted)
    expected = []
    for n in wanted:
        rest = min(left, max(0, n - 1))
        left -= rest
        expected.append(min(n, 1) + rest)
    assert split_budget(budget, np.array(wanted, np.int32)).tolist() == expected


def test_a_long_prompt_runs_in_chunks_of_the_budget() -> None:
    scheduler = make_scheduler(budget=16)
    scheduler.add(make_request("a", range(50), 4))
    plans = [run_step(scheduler) for _ in range(4)]
    assert [plan.num_scheduled.tolist() for plan in plans] == [[16], [16], [16], [2]]
    assert [plan.num_computed.tolist() for plan in plans] == [[0], [16], [32], [48]]
    assert [len(plan.sample_rows) for plan in plans] == [0, 0, 0, 1], "only its last token's logits are drawn from"


def test_running_requests_decode_beside_a_long_prompt() -> None:
    scheduler = make_scheduler(budget=16)
    for name in "abc":
        scheduler.add(make_request(name, [1, 2, 3], 40))
    run_step(scheduler)
    scheduler.add(make_request("long", range(100, 200), 4))
    for _ in range(7):
        assert given_tokens(scheduler, run_step(scheduler)) == {"a": 1, "b": 1, "c": 1, "long": 13}


def test_prompts_in_chunks_do_not_hold_up_those_that_came_later() -> None:
    scheduler = make_scheduler(budget=16)
    scheduler.add(make_request("first", range(100), 4))
    run_step(scheduler)
    scheduler.add(make_request("second", [1, 2], 4))
    assert given_tokens(scheduler, run_step(scheduler)) == {"first": 16}, "the budget is spent"
    for _ in range(4):
        run_step(scheduler)
    assert given_tokens(scheduler, run_step(scheduler)) == {"first": 4, "second": 2}


def test_a_budget_below_the_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens=3 is below max_num_seqs=4"):
        make_scheduler(num_rows=4, budget=3)


@given(
    requests=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 8), st.integers(1, 3)), min_size=1, max_size=12),
    budget=st.integers(4, 40),
    num_blocks=st.sampled_from([17, 30, 200]),
)
@settings(deadline=None, derandomize=True, max_examples=40)
def test_no_step_exceeds_the_budget_and_every_running_request_gets_on(
    requests: list[tuple[int, int, int]], budget: int, num_blocks: int
) -> None:
    scheduler = make_scheduler(num_blocks=num_blocks, budget=budget)
    for i, (length, max_tokens, n) in enumerate(requests):
        scheduler.add(make_request(str(i), range(length), max_tokens, n=n))
    for _ in range(4 * sum((length + max_tokens) * n for length, max_tokens, n in requests)):
        running = set(scheduler._running.tolist())
        plan = scheduler.schedule()
        if plan is None:
            break
        assert 0 < plan.num_scheduled.sum() <= budget
        assert (plan.num_scheduled > 0).all()
        assert len(set(plan.rows.tolist())) == len(plan.rows) <= scheduler.table.num_rows
        kept = {row for row in running if scheduler.table.requests[row] is not None}
        assert kept <= set(plan.rows.tolist()), "whoever is running gets at least one token"
        commit(scheduler, plan)
        check_blocks(scheduler)
    assert scheduler.num_running == scheduler.num_waiting == scheduler.pool.num_held == 0


# -- blocks ----------------------------------------------------------------------------------------------


def test_blocks_are_taken_when_tokens_need_them() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(6), 20))
    held = []
    for _ in range(8):
        run_step(scheduler)
        held.append(scheduler.pool.num_held)
    assert held == [2, 2, 2, 3, 3, 3, 3, 4], "6 tokens, then one more each step, in blocks of 4"


def test_a_cached_prefix_is_not_computed_again() -> None:
    scheduler = make_scheduler(budget=32)
    scheduler.add(first := make_request("first", range(10), 1))
    run_step(scheduler)
    assert first.finished
    scheduler.add(second := make_request("second", [*range(8), 90, 91, 92], 4))
    plan = run_step(scheduler)
    assert (plan.num_computed.tolist(), plan.num_scheduled.tolist()) == ([8], [3])
    assert second.metrics.num_cached_tokens == 8


def test_the_last_token_of_a_cached_prompt_runs_anyway() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("first", range(8), 1))
    run_step(scheduler)
    scheduler.add(make_request("second", range(8), 4))
    plan = run_step(scheduler)
    assert (plan.num_computed.tolist(), plan.num_scheduled.tolist()) == ([4], [4])


def test_requests_that_start_in_one_step_share_their_prefix() -> None:
    scheduler = make_scheduler(budget=64)
    for name, tail in (("a", 90), ("b", 91), ("c", 92)):
        scheduler.add(make_request(name, [*range(16), tail], 4))
    assert given_tokens(scheduler, run_step(scheduler)) == {"a": 17, "b": 1, "c": 1}
    assert scheduler.pool.num_held == 4 + 3


def test_a_chunk_of_a_prompt_is_found_while_the_rest_is_still_to_run() -> None:
    scheduler = make_scheduler(budget=16)
    scheduler.add(make_request("a", range(21), 4))
    run_step(scheduler)
    scheduler.add(make_request("b", [*range(16), 90], 4))
    assert given_tokens(scheduler, run_step(scheduler)) == {"a": 5, "b": 1}


def test_different_salts_share_nothing() -> None:
    scheduler = make_scheduler(budget=64)
    for i, salt in enumerate([None, "one", "two", "one"]):
        scheduler.add(make_request(str(i), range(9), 4, salt=salt))
    assert given_tokens(scheduler, run_step(scheduler)) == {"0": 9, "1": 9, "2": 9, "3": 1}


def test_without_prefix_caching_nothing_is_shared() -> None:
    scheduler = make_scheduler(budget=64, prefix_caching=False)
    for name in "ab":
        scheduler.add(make_request(name, range(9), 4))
    assert given_tokens(scheduler, run_step(scheduler)) == {"a": 9, "b": 9}


def test_a_prompt_to_be_scored_is_computed_whole() -> None:
    scheduler = make_scheduler(budget=64)
    scheduler.add(make_request("a", range(9), 4))
    scheduler.add(make_request("b", range(9), 4, prompt_logprobs=0))
    plan = scheduler.schedule()
    assert plan is not None
    assert given_tokens(scheduler, plan) == {"a": 9, "b": 9}
    assert [(request.request_id, first, end) for request, first, end in plan.scored] == [("b", 0, 8)]


# -- forks -----------------------------------------------------------------------------------------------


def test_siblings_share_the_prompt_and_copy_its_last_block_when_they_write() -> None:
    scheduler = make_scheduler(budget=64)
    scheduler.add(make_request("a", range(10), 8, n=4))
    plan = run_step(scheduler)
    assert len(plan.rows) == 1
    assert len(plan.sample_rows) == 4
    assert scheduler.pool.num_held == 3, "one prompt"
    source = int(scheduler.table.block_ids[plan.rows[0], 2])
    plan = run_step(scheduler)
    assert scheduler.pool.num_held == 2 + 4
    assert plan.copies[:, 0].tolist() == [source] * 3, "the last holder writes in place"
    written = scheduler.table.block_ids[plan.rows, 2].tolist()
    assert sorted(written) == sorted([source, *plan.copies[:, 1].tolist()])
    assert len(run_step(scheduler).copies) == 0, "each has its own by now"


def test_siblings_of_a_prompt_that_fills_its_blocks_copy_nothing() -> None:
    scheduler = make_scheduler(budget=64)
    scheduler.add(make_request("a", range(8), 8, n=3))
    run_step(scheduler)
    assert len(run_step(scheduler).copies) == 0
    assert scheduler.pool.num_held == 2 + 3


def test_where_blocks_cannot_be_copied_a_sibling_computes_its_last_block_itself() -> None:
    scheduler = make_scheduler(budget=64, copies_blocks=False)
    scheduler.add(make_request("a", range(10), 8, n=3))
    assert len(run_step(scheduler).sample_rows) == 1
    plan = run_step(scheduler)
    assert len(plan.copies) == 0
    assert given_tokens(scheduler, plan) == {"a": 1, "a/1": 2, "a/2": 2}
    assert scheduler.pool.num_held == 2 + 3


def test_a_sibling_without_a_row_waits_for_one() -> None:
    scheduler = make_scheduler(num_rows=2, budget=64)
    scheduler.add(make_request("a", range(10), 3, n=3))
    assert len(run_step(scheduler).sample_rows) == 2
    assert scheduler.num_waiting == 1
    run_step(scheduler)
    run_step(scheduler)
    assert given_tokens(scheduler, scheduler.schedule()) == {"a/2": 2}  # type: ignore[arg-type]


# -- preemption and abort --------------------------------------------------------------------------------


def test_the_least_urgent_gives_its_blocks_and_takes_up_where_it_was() -> None:
    scheduler = make_scheduler(num_blocks=6, budget=64)
    scheduler.add(first := make_request("first", range(7), 10))
    scheduler.add(second := make_request("second", range(20, 27), 10))
    while not second.metrics.num_preemptions:
        run_step(scheduler)
    assert first.metrics.num_preemptions == 0
    assert (first.row >= 0, second.row) == (True, -1)
    known = list(second.output_token_ids)
    assert known == [50] * len(known) != []
    while not first.finished:
        run_step(scheduler)
    plan = run_step(scheduler)
    assert plan.num_computed[0] + plan.num_scheduled[0] == 7 + len(known), "all it knew, cached or run"
    while not second.finished:
        run_step(scheduler)
    assert len(first.output_token_ids) == len(second.output_token_ids) == 10
    assert scheduler.pool.num_held == 0


def test_a_late_token_of_a_preempted_request_is_dropped() -> None:
    scheduler = make_scheduler()
    scheduler.add(request := make_request("a", range(5), 4))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler._preempt(request.row)
    again = scheduler.schedule()
    assert again is not None
    assert commit(scheduler, plan, token=60) == []
    commit(scheduler, again, token=61)
    scheduler.sync(request)
    assert request.output_token_ids == [61]


def test_an_aborted_request_frees_its_blocks_at_once_wherever_it_is() -> None:
    scheduler = make_scheduler(num_rows=2, budget=64)
    requests = [make_request(str(i), range(10 * i, 10 * i + 9), 8) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.finish(requests[0], "abort")  # its step is under way
    scheduler.finish(requests[2], "abort")  # waiting
    check_blocks(scheduler)
    assert scheduler.pool.num_held == 3
    assert scheduler.num_waiting == 0
    commit(scheduler, plan)
    assert requests[0].output_token_ids == []
    assert given_tokens(scheduler, run_step(scheduler)) == {"1": 1}


def test_siblings_go_on_when_the_first_is_aborted_before_its_prompt_is_done() -> None:
    scheduler = make_scheduler(budget=16)
    scheduler.add(parent := make_request("a", range(30), 2, n=3))
    siblings = list(parent.siblings)
    run_step(scheduler)
    scheduler.finish(parent, "abort")
    for _ in range(6):
        if scheduler.num_running + scheduler.num_waiting:
            run_step(scheduler)
    assert [sibling.finish_reason for sibling in siblings] == ["length", "length"]
    assert scheduler.pool.num_held == 0


def test_a_failed_step_ends_its_requests_and_distrusts_the_cache() -> None:
    scheduler = make_scheduler(num_rows=2, budget=64)
    for i in range(3):
        scheduler.add(make_request(str(i), [*range(8), i], 8))
    plan = scheduler.schedule()
    assert plan is not None
    error = RuntimeError("broken")
    failed = scheduler.discard(plan, error)
    assert {request.request_id: request.error for request in failed} == {"0": error, "1": error}
    assert all(request.finish_reason == "error" for request in failed)
    assert given_tokens(scheduler, run_step(scheduler)) == {"2": 9}, "no prefix hit on what may not be there"


# -- priorities ------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def served_order(arrivals: Sequence[tuple[str, int, float]], ageing: float, service: float) -> Iterator[str]:
    """Ids in the order of admission: (id, priority, arrival time); one runs at a time, for `service` seconds."""
    clock = Clock()
    scheduler = make_scheduler(num_rows=1, ageing=ageing, clock=clock)
    queue = sorted(arrivals, key=lambda arrival: arrival[2])
    while queue or scheduler.num_waiting:
        if not scheduler.num_waiting:
            clock.now = max(clock.now, queue[0][2])
        while queue and queue[0][2] <= clock.now:
            name, priority, arrival = queue.pop(0)
            scheduler.add(make_request(name, [1, 2, 3], 1, priority=priority, arrival=arrival))
        plan = scheduler.schedule()
        assert plan is not None
        request = scheduler.table.request(int(plan.rows[0]))
        assert request.metrics.first_scheduled_time == clock.now
        yield request.request_id
        commit(scheduler, plan)
        clock.now += service


def test_urgent_requests_come_first_and_equal_ones_in_order() -> None:
    arrivals = [("a", 0, 0.0), ("b", 1, 0.1), ("c", -1, 0.2), ("d", 0, 0.3), ("e", -1, 0.4), ("f", 1, 0.5)]
    assert "".join(served_order(arrivals, ageing=60, service=1)) == "acedbf"


def test_a_waiting_request_is_overtaken_for_the_ageing_time_and_no_longer() -> None:
    steady = [(f"urgent {second}", 0, float(second)) for second in range(300)]
    order = list(served_order([("patient", 1, 0.5), *steady], ageing=60, service=1))
    assert order.index("patient") == 61, "after those that arrived within 60 seconds of it"
    assert order[:61] == [f"urgent {second}" for second in range(61)]


def test_with_infinite_ageing_priorities_are_absolute() -> None:
    arrivals = [("a", 2, 0.1), ("b", 1, 1.0), ("c", 0, 2.0), ("d", -1, 3.0), ("e", 0, 0.0), ("f", 1, 0.5)]
    order = served_order([(name, priority, 0.001 * at) for name, priority, at in arrivals], float("inf"), service=1)
    assert "".join(order) == "edcfba", "e came when nobody else was there; equal ones come in order of arrival"


def test_a_steady_stream_of_urgent_requests_starves_nobody() -> None:
    stream = [(f"urgent {i}", -1, 0.5 * i) for i in range(400)]  # twice what can be served
    others = [(f"other {i}", i % 3, 10.0 * i) for i in range(10)]
    order = list(served_order(stream + others, ageing=20, service=1))
    for name, priority, arrival in others:
        last = arrival + 20 * (priority + 1)  # urgent ones of later arrival come after it
        before = [other for other in order[: order.index(name)] if other.startswith("urgent")]
        assert max(0.5 * int(other.split()[1]) for other in before) <= max(last, 1)


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 50)), min_size=1, max_size=12))
@settings(deadline=None, derandomize=True, max_examples=50)
def test_admission_is_in_order_of_priority_times_ageing_plus_arrival(requests: list[tuple[int, int]]) -> None:
    scheduler = make_scheduler(num_rows=1, ageing=7)
    for i, (priority, arrival) in enumerate(requests):
        scheduler.add(make_request(str(i), [1, 2], 1, priority=priority, arrival=arrival))
    order = []
    while (plan := scheduler.schedule()) is not None:
        order.append(int(scheduler.table.request(int(plan.rows[0])).request_id))
        commit(scheduler, plan)
    assert order == sorted(range(len(requests)), key=lambda i: (7 * requests[i][0] + requests[i][1], i))


def test_the_most_urgent_is_the_last_to_be_preempted() -> None:
    scheduler = make_scheduler(num_blocks=9, budget=64)
    requests = [make_request(str(i), range(20 * i, 20 * i + 7), 20, priority=p) for i, p in enumerate([1, 0, 2])]
    for request in requests:
        scheduler.add(request)
    while not all(request.finished for request in requests):
        run_step(scheduler)
    assert requests[1].metrics.num_preemptions == 0
    assert requests[1].metrics.last_token_time <= requests[0].metrics.last_token_time
    assert requests[0].metrics.num_preemptions + requests[2].metrics.num_preemptions >= 1


def test_a_request_that_does_not_fit_is_not_overtaken_by_a_smaller_one() -> None:
    scheduler = make_scheduler(num_blocks=8, budget=64)
    scheduler.add(make_request("running", range(15), 8))
    run_step(scheduler)
    scheduler.add(make_request("large", range(30, 50), 4))
    scheduler.add(make_request("small", [60, 61], 4))
    order = [given_tokens(scheduler, run_step(scheduler)).keys() for _ in range(7)]
    assert all("small" not in names for names in order)
    for _ in range(2):
        last = given_tokens(scheduler, run_step(scheduler))
    assert list(itertools.islice(last, 2)) == ["large", "small"]
