"""Whatever is asked of an engine, in whatever order: no block leaks, no request starves, every token is right.

Hypothesis drives an engine with the recall backend, for which the right answers are known. The normal suite runs
some hundreds of steps, always the same ones; the slow test more than 10,000, new ones each time.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from recall import (
    VOCAB,
    RecallBackend,
    check_blocks,
    check_idle,
    expected_beams,
    expected_output,
    history_logits,
    log_softmax,
    make_beam_search,
    make_engine,
    make_request,
)

from pagefleet.backend import Traits
from pagefleet.request import Request
from pagefleet.sampling_params import BeamSearchParams, InvalidRequest

SHARED = [(7 * i + 3) % VOCAB for i in range(24)]  # what prompts may have in common
EOS = (5, 11)
TAILS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)
PROMPTS = st.builds(lambda k, tail: SHARED[:k] + tail, st.integers(0, 24), TAILS)


class EngineMachine(RuleBasedStateMachine):
    num_steps = 0  # of all machines

    @initialize(
        num_blocks=st.sampled_from([14, 20, 40, 400]),
        num_rows=st.integers(1, 6),
        spare=st.integers(0, 20),
        pipeline=st.booleans(),
        asynchronous=st.booleans(),
        copies_blocks=st.booleans(),
        prefix_caching=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        num_rows: int,
        spare: int,
        pipeline: bool,
        asynchronous: bool,
        copies_blocks: bool,
        prefix_caching: bool,
    ) -> None:
        self.backend = RecallBackend(Traits(copies_blocks=copies_blocks, asynchronous=asynchronous))
        self.engine = make_engine(
            num_blocks,
            num_rows=num_rows,
            budget=num_rows + spare,
            pipeline=pipeline,
            backend=self.backend,
            prefix_caching=prefix_caching,
        )
        self.requests: list[Request] = []  # all that ever were
        self.roots: list[Request] = []
        self.faults = 0

    # -- what may be asked of it ---------------------------------------------------------------------------

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, "salt"]),
        stop_ids=st.sampled_from([(), (), EOS, (1, 2, 3, 4, 6, 8)]),
        prompt_logprobs=st.sampled_from([None, None, None, 0, 2]),
        stream=st.booleans(),
    )
    def add(self, prompt: list[int], max_tokens: int, n: int, prompt_logprobs: int | None, **fields: object) -> None:
        name = str(len(self.requests))
        arrival = 0.01 * len(self.requests)
        request = make_request(
            name, prompt, max_tokens, n=n, prompt_logprobs=prompt_logprobs, arrival=arrival, **fields
        )
        family = [request, *request.siblings]
        self.engine.add(request)
        self.requests += family

    @rule(
        prompt=PROMPTS,
        width=st.integers(1, 3),
        max_tokens=st.integers(1, 6),
        early_stopping=st.booleans(),
        priority=st.integers(-1, 1),
    )
    def add_beams(self, prompt: list[int], width: int, max_tokens: int, early_stopping: bool, priority: int) -> None:
        params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, early_stopping=early_stopping)
        root = make_beam_search(f"search {len(self.roots)}", prompt, params, EOS, priority=priority)
        table, pool = self.engine.scheduler.table, self.engine.scheduler.pool
        fits = width <= table.num_rows and width * -(-(len(prompt) + max_tokens - 1) // 4) <= pool.num_blocks
        try:
            self.engine.add(root)
        except InvalidRequest:
            assert not fits
        else:
            assert fits
            self.roots.append(root)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.engine.requests)))
        request, pool = self.engine.requests[name], self.engine.scheduler.pool
        sequences = [request] if request.beam is None else list(request.beam.live)
        rows = [sequence.row for sequence in sequences if sequence.row >= 0]
        table = self.engine.scheduler.table
        held = Counter(block for row in rows for block in table.block_ids[row, : table.num_blocks[row]].tolist())
        alone = sum(pool.ref_counts[block] == count for block, count in held.items())
        available = pool.num_available
        self.engine.abort(name)
        assert pool.num_available == available + alone, "what it alone held is available at once"
        assert all(sequence.finished and sequence.row < 0 for sequence in sequences)

    @rule()
    def reset_cache(self) -> None:
        self.engine.scheduler.pool.reset_cache()

    @rule()
    def device_fault(self) -> None:
        for _, pending in self.engine._in_flight:  # so that it is always the next step that fails
            with suppress(RuntimeError):
                pending.result()
        self.backend.fail_next = True
        self.faults += 1

    # -- what must hold ------------------------------------------------------------------------------------

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        if hasattr(self, "engine"):
            check_blocks(self.engine.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            self._finish()
        finally:
            self.engine.close()

    def _finish(self) -> None:
        # the most urgent request gets at least one token a step, even if it is computed again each time it is alone
        unfinished = [r.length_limit for r in self.requests if not r.finished]
        unfinished += [r.length_limit * r.beam.params.beam_width**2 for r in self.roots if r.beam and r.beam.live]
        for _ in range(3 * sum(unfinished) + 5):
            if not self.engine.has_work:
                break
            self._step()
            check_blocks(self.engine.scheduler)
        check_idle(self.engine)
        for request in self.requests:
            self._check_request(request)
        for root in self.roots:
            assert root.beam is not None
            if root.finish_reason != "abort" and root.beam.error is None:
                expected = expected_beams(root.prompt_token_ids.tolist(), root.beam.params, EOS)
                found = [(beam.token_ids, beam.finish_reason) for beam in root.beam.best()]
                assert found == [(tokens, reason) for tokens, _, reason in expected]
            elif root.beam.error is not None:
                assert self.faults

    def _step(self) -> None:
        updated = self.engine.step()
        assert all(request.finished or request.stream for request in updated)
        for root in self.roots:
            if root.request_id in self.engine.requests and root.beam is not None and not root.beam.live:
                self.engine.finish(root, "stop")
        EngineMachine.num_steps += 1

    def _check_request(self, request: Request) -> None:
        expected, output = expected_output(request), request.output_token_ids
        assert output == expected[: len(output)]
        if request.finish_reason == "error":
            assert self.faults
            assert "on fire" in str(request.error)
        elif request.finish_reason != "abort":
            assert output == expected
            assert request.finish_reason == ("stop" if expected[-1] in request.stop_ids else "length")
            if request.params.prompt_logprobs is not None and "/" not in request.request_id:
                self._check_prompt_logprobs(request)

    def _check_prompt_logprobs(self, request: Request) -> None:
        prompt = request.prompt_token_ids
        assert len(request.prompt_logprobs) == len(prompt) - 1
        for i, row in enumerate(request.prompt_logprobs, 1):
            logprobs = log_softmax(history_logits(prompt[:i]))
            assert row.token_ids[0] == prompt[i]
            np.testing.assert_allclose(row.logprobs, logprobs[row.token_ids], rtol=1e-3, atol=1e-5)


QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


def test_no_leak_no_starvation_and_right_tokens_whatever_is_asked() -> None:
    run_state_machine_as_test(
        EngineMachine, settings=settings(max_examples=80, stateful_step_count=25, derandomize=True, **QUIET)
    )


@pytest.mark.slow
def test_the_same_for_more_than_ten_thousand_steps() -> None:
    EngineMachine.num_steps = 0
    while EngineMachine.num_steps < 10_000:
        run_state_machine_as_test(EngineMachine, settings=settings(max_examples=100, stateful_step_count=40, **QUIET))
    print(f"{EngineMachine.num_steps} engine steps")
