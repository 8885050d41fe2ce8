"""Engine: the loop between scheduler and device, with a device that remembers tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recall import (
    COPIES,
    VOCAB,
    RecallBackend,
    check_idle,
    expected_output,
    expected_tokens,
    make_engine,
    make_request,
    run_to_end,
)

from pagefleet.backend import ForwardBatch, Traits
from pagefleet.engine import Engine
from pagefleet.request import Request
from pagefleet.sampling_params import InvalidRequest

PROMPT = list(range(20, 30))


def recall(engine: Engine) -> RecallBackend:
    assert isinstance(engine.backend, RecallBackend)
    return engine.backend


def check_outputs(engine: Engine, requests: list[Request]) -> None:
    for request in requests:
        assert request.output_token_ids == expected_output(request)
        assert request.finish_reason == ("stop" if request.output_token_ids[-1] in request.stop_ids else "length")
    check_idle(engine)
    engine.close()


# -- the way it runs does not change the tokens ----------------------------------------------------------


@given(data=st.data())
@settings(deadline=None, derandomize=True, max_examples=40)
def test_every_request_gets_the_tokens_it_would_get_alone(data: st.DataObject) -> None:
    num_rows = data.draw(st.sampled_from([1, 4, 8]), label="num_rows")
    engine = make_engine(
        data.draw(st.sampled_from([22, 60, 1000]), label="num_blocks"),
        num_rows=num_rows,
        budget=num_rows + data.draw(st.integers(0, 40), label="spare budget"),
        pipeline=data.draw(st.booleans(), label="pipeline"),
        traits=Traits(copies_blocks=data.draw(st.booleans()), asynchronous=data.draw(st.booleans())),
        prefix_caching=data.draw(st.booleans(), label="prefix_caching"),
    )
    shared = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=30, max_size=30))
    requests = []
    for i in range(data.draw(st.integers(1, 12), label="requests")):
        tail = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
        prompt = shared[: data.draw(st.integers(0, 30))] + tail
        stop_ids = data.draw(st.sampled_from([(), (5, 6, 7, 8)]))
        n = data.draw(st.sampled_from([1, 1, 3]))
        request = make_request(str(i), prompt, data.draw(st.integers(1, 30)), n=n, stop_ids=stop_ids)
        requests += [request, *request.siblings]
        engine.add(request)
        for _ in range(data.draw(st.integers(0, 3))):
            engine.step()
    run_to_end(engine)
    check_outputs(engine, requests)


@pytest.mark.parametrize("pipeline", [True, False])
def test_preemption_does_not_change_the_tokens(pipeline: bool) -> None:
    engine = make_engine(num_blocks=12, pipeline=pipeline)
    requests = [make_request(str(i), [*PROMPT[:5], i], 30) for i in range(5)]
    for request in requests:
        engine.add(request)
    run_to_end(engine)
    assert sum(request.metrics.num_preemptions for request in requests) > 3
    check_outputs(engine, requests)


def test_chunks_do_not_change_the_tokens() -> None:
    engine = make_engine(num_rows=2, budget=7)
    requests = [make_request(str(i), [*range(50), i], 8) for i in range(3)]
    for request in requests:
        engine.add(request)
    run_to_end(engine)
    check_outputs(engine, requests)


def test_a_prefix_computed_in_the_same_step_is_shared() -> None:
    engine = make_engine(budget=100)
    requests = [make_request(str(i), [*range(40), i], 4) for i in range(8)]
    for request in requests:
        engine.add(request)
    engine.step()
    run_to_end(engine)
    assert recall(engine).num_tokens_run <= 40 + 8 * (1 + 4)
    check_outputs(engine, requests)


@pytest.mark.parametrize("copies_blocks", [True, False])
def test_siblings_compute_their_prompt_once(copies_blocks: bool) -> None:
    engine = make_engine(traits=Traits(copies_blocks=copies_blocks), budget=64)
    request = make_request("a", range(30), 4, n=4)
    requests = [request, *request.siblings]
    engine.add(request)
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.scheduler.pool.num_held)
    assert most <= 7 + 4 * 2, "7 full blocks of the prompt are shared"
    partial = 0 if copies_blocks else 3 * 2
    assert recall(engine).num_tokens_run <= 30 + 4 * 4 + partial
    check_outputs(engine, requests)


# -- the pipeline ----------------------------------------------------------------------------------------


class GatedBackend(RecallBackend):
    """Its forward waits to be let through."""

    def __init__(self, traits: Traits = COPIES) -> None:
        super().__init__(traits)
        self.gate = threading.Semaphore(0)
        self.num_done = 0

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        assert self.gate.acquire(timeout=20)
        logits = super().forward(batch)
        self.num_done += 1
        return logits


def test_the_next_step_is_planned_and_launched_while_the_device_is_busy() -> None:
    backend = GatedBackend()
    engine = make_engine(backend=backend)
    engine.add(request := make_request("a", PROMPT, 3))
    assert engine.step() == [], "step 0 is launched, and the host goes on"
    finished: list[Request] = []
    waiter = threading.Thread(target=lambda: finished.extend(engine.step()))
    waiter.start()  # launches step 1, then waits for step 0
    wait_for(lambda: len(engine._in_flight) == 2 and engine.scheduler._num_planned == 2)
    assert backend.num_done == 0, "two steps are planned, the device has finished none"
    assert engine.scheduler.table.num_computed[request.row] == len(PROMPT) + 1
    assert engine.scheduler.table.num_known[request.row] == len(PROMPT)
    backend.gate.release(100)
    waiter.join()
    run_to_end(engine)
    assert request.output_token_ids == expected_tokens(PROMPT, 3)
    engine.close()


def test_without_the_pipeline_each_step_is_taken_in_before_the_next_is_planned() -> None:
    backend = GatedBackend()
    backend.gate.release(100)
    engine = make_engine(backend=backend, pipeline=False)
    engine.add(request := make_request("a", PROMPT, 3))
    for done in (1, 2, 3):
        engine.step()
        assert backend.num_done == done
        assert not engine._in_flight
    assert request.finished
    engine.close()


def test_an_abort_does_not_wait_for_the_device() -> None:
    backend = GatedBackend()
    engine = make_engine(backend=backend)
    engine.add(make_request("a", PROMPT, 3))
    engine.step()
    engine.abort("a")
    check_idle(engine)
    assert backend.num_done == 0
    backend.gate.release(100)
    engine.add(request := make_request("a", PROMPT, 3))
    run_to_end(engine)
    check_outputs(engine, [request])


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class GatheringBackend(RecallBackend):
    """Resolves token references itself, as an asynchronous device does."""

    def __init__(self) -> None:
        super().__init__(Traits(copies_blocks=True, asynchronous=True, gathers_tokens=True))
        self.last = np.zeros(0, np.int32)
        self.num_gathered = 0

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        missing = batch.token_ids < 0
        self.num_gathered += int(missing.sum())
        batch.token_ids[missing] = self.last[-1 - batch.token_ids[missing]]
        return super().forward(batch)

    def sample(self, logits, sampling):  # type: ignore[no-untyped-def]
        pending = super().sample(logits, sampling)
        self.last = pending.result().token_ids
        return pending


def test_a_device_can_resolve_references_to_tokens_itself() -> None:
    engine = make_engine(backend=GatheringBackend(), num_blocks=30)
    requests = [make_request(str(i), [*PROMPT, i], 5 + i, n=1 + i % 2) for i in range(6)]
    family = [each for request in requests for each in (request, *request.siblings)]
    for request in requests:
        engine.add(request)
    run_to_end(engine)
    assert isinstance(engine.backend, GatheringBackend)
    assert engine.backend.num_gathered > 20
    check_outputs(engine, family)


@pytest.mark.parametrize("pipeline", [True, False])
def test_references_occur_only_with_the_pipeline(pipeline: bool) -> None:
    engine = make_engine(backend=GatheringBackend(), pipeline=pipeline)
    engine.add(request := make_request("a", PROMPT, 6))
    run_to_end(engine)
    assert isinstance(engine.backend, GatheringBackend)
    assert engine.backend.num_gathered == (5 if pipeline else 0)
    check_outputs(engine, [request])


def test_batches_are_padded_as_the_device_asks() -> None:
    seen = []

    class Padded(RecallBackend):
        def forward(self, batch: ForwardBatch) -> np.ndarray:
            seen.append((len(batch.token_ids) % 8, len(batch.logit_rows) % 8))
            return super().forward(batch)

    engine = make_engine(backend=Padded(Traits(copies_blocks=True, token_multiple=8)))
    requests = [make_request(str(i), PROMPT[: 2 + i], 5) for i in range(4)]
    for request in requests:
        engine.add(request)
    run_to_end(engine)
    assert set(seen) == {(0, 0)}
    check_outputs(engine, requests)


# -- what it returns, and what it refuses ----------------------------------------------------------------


def test_a_watched_request_is_returned_after_every_token() -> None:
    engine = make_engine()
    engine.add(request := make_request("a", PROMPT, 4, stream=True))
    engine.add(make_request("b", PROMPT[:4], 4))
    lengths = []
    while engine.has_work:
        lengths += [len(updated.output_token_ids) for updated in engine.step() if updated is request]
    assert lengths == [1, 2, 3, 4]
    engine.close()


def test_a_stop_token_ends_a_request_and_is_told() -> None:
    output = expected_tokens(PROMPT, 6)
    stop = output[3]
    engine = make_engine()
    engine.add(request := make_request("a", PROMPT, 20, stop_ids=(stop, 96)))
    run_to_end(engine)
    assert request.output_token_ids == output[: output.index(stop) + 1]
    assert request.finish_reason == "stop"
    engine.close()


def test_a_request_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = make_engine()
    engine.add(make_request("a", PROMPT, 4, n=2))
    for name in ("a", "a/1"):
        with pytest.raises(InvalidRequest, match=f"request id '{name}' is in use"):
            engine.add(make_request(name, PROMPT, 4))
    engine.add(make_request("b/1", PROMPT, 4))
    with pytest.raises(InvalidRequest, match="request id 'b/1' is in use"):
        engine.add(make_request("b", PROMPT, 4, n=2))
    assert "b" not in engine.requests
    run_to_end(engine)
    engine.add(make_request("a", PROMPT, 4))
    engine.close()


def test_a_request_that_could_never_fit_the_pool_is_refused() -> None:
    engine = make_engine(num_blocks=5)
    with pytest.raises(InvalidRequest, match="22 tokens in 1 sequences: 6 KV blocks, the pool has 5; lower max_tokens"):
        engine.add(make_request("a", range(10), 12))
    assert not engine.has_work
    engine.add(request := make_request("a", range(10), 11))  # the last token is never computed
    run_to_end(engine)
    check_outputs(engine, [request])


def test_ids_that_are_not_there_can_be_aborted() -> None:
    engine = make_engine()
    engine.abort("nobody")
    engine.add(make_request("a", PROMPT, 4))
    run_to_end(engine)
    engine.abort("a")
    check_idle(engine)
    engine.close()


# -- a device that fails ---------------------------------------------------------------------------------

DEVICES = {"in a thread": COPIES, "directly": Traits(copies_blocks=True, asynchronous=True)}


@pytest.mark.parametrize("traits", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("pipeline", [True, False])
def test_a_device_fault_ends_the_requests_of_its_steps_and_no_others(traits: Traits, pipeline: bool) -> None:
    engine = make_engine(num_rows=2, traits=traits, pipeline=pipeline)
    requests = [make_request(str(i), [*PROMPT, i], 6) for i in range(5)]
    for request in requests:
        engine.add(request)
    engine.step()
    for _, pending in engine._in_flight:
        pending.result()
    recall(engine).fail_next = True
    run_to_end(engine)
    assert [request.finish_reason for request in requests] == ["error", "error", "length", "length", "length"]
    for request in requests[:2]:
        assert "on fire" in str(request.error)
        assert request.output_token_ids == expected_output(request)[: len(request.output_token_ids)]
    check_outputs(engine, requests[2:])


@pytest.mark.parametrize("traits", DEVICES.values(), ids=DEVICES)
def test_a_fault_during_the_prompt_leaves_its_siblings_to_go_on(traits: Traits) -> None:
    engine = make_engine(num_rows=3, budget=8, traits=traits)
    request = make_request("a", range(20), 4, n=3)
    siblings = list(request.siblings)
    engine.add(request)
    recall(engine).fail_next = True
    run_to_end(engine)
    assert request.finish_reason == "error"
    check_outputs(engine, siblings)


@pytest.mark.parametrize("traits", DEVICES.values(), ids=DEVICES)
def test_fault_after_fault_the_engine_goes_on(traits: Traits) -> None:
    engine = make_engine(traits=traits)
    for i in range(4):
        recall(engine).fail_next = True
        engine.add(failing := make_request(f"fails {i}", PROMPT, 4))
        run_to_end(engine)
        assert failing.finish_reason == "error"
        recall(engine).fail_next = False
        engine.add(request := make_request(f"works {i}", PROMPT, 4))
        run_to_end(engine)
        assert request.output_token_ids == expected_output(request)
    check_idle(engine)
    engine.close()


def test_a_row_that_cannot_be_sampled_ends_its_request_only() -> None:
    class Broken(RecallBackend):
        def _logits(self, batch: ForwardBatch, row: int, length: int) -> np.ndarray:
            logits = super()._logits(batch, row, length)
            return logits * np.nan if length == len(PROMPT) + 2 else logits

    engine = make_engine(backend=Broken())
    engine.add(broken := make_request("broken", PROMPT, 8))
    engine.add(fine := make_request("fine", PROMPT[:3], 8))
    run_to_end(engine)
    assert broken.finish_reason == "error"
    assert "not finite" in str(broken.error)
    assert broken.output_token_ids == expected_tokens(PROMPT, 2)
    check_outputs(engine, [fine])
