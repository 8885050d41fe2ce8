"""What a caller, an interrupt or a device does wrong ends what it must and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from recall import (
    RecallBackend,
    check_blocks,
    expected_tokens,
    make_beam_search,
    make_engine,
    make_request,
    run_to_end,
)

from pagefleet.backend import BackendError
from pagefleet.engine import Engine
from pagefleet.sampling_params import BeamSearchParams

PROMPT = [5, 6, 7, 8, 9]


def check_as_new(engine: Engine) -> None:
    """Nothing is left, and the engine works."""
    assert not engine.has_work
    assert not engine._in_flight
    assert engine.scheduler.pool.num_held == 0
    check_blocks(engine.scheduler)
    engine.add(request := make_request("afterwards", PROMPT, 6))
    run_to_end(engine)
    assert request.output_token_ids == expected_tokens(PROMPT, 6)


class Interrupting:
    """Raises KeyboardInterrupt once, when it is waited for."""

    def __init__(self, pending: object) -> None:
        self.pending, self.raised = pending, False

    def result(self) -> object:
        if not self.raised:
            self.raised = True
            raise KeyboardInterrupt
        return self.pending.result()  # type: ignore[attr-defined]


def test_an_interrupt_while_waiting_for_the_device_changes_nothing() -> None:
    engine = make_engine()
    engine.add(request := make_request("a", PROMPT, 12))
    engine.step()
    plan, pending = engine._in_flight[0]
    engine._in_flight[0] = plan, Interrupting(pending)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    run_to_end(engine)
    assert request.output_token_ids == expected_tokens(PROMPT, 12)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError], ids=lambda error: error.__name__)
@pytest.mark.parametrize("where", ["schedule", "commit"])
def test_an_exception_amid_a_step_ends_every_request_and_leaves_a_working_engine(
    where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    requests = [make_request(str(i), [*PROMPT, i], 12) for i in range(3)]
    requests.append(make_beam_search("beam", PROMPT, BeamSearchParams(beam_width=3, max_tokens=9)))
    for request in requests:
        engine.add(request)
    for _ in range(4):
        engine.step()

    real: Callable[..., object] = getattr(engine.scheduler.table, "sync" if where == "commit" else "append_blocks")

    def broken(*arguments: object) -> None:
        real(*arguments)
        raise error("amid a step")

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler.table, real.__name__, broken)
        patch.setattr(engine.scheduler.table, "watched", np.ones_like(engine.scheduler.table.watched))
        if issubclass(error, Exception):
            assert {request.request_id for request in engine.step()} == {"0", "1", "2", "beam"}
        else:
            with pytest.raises(error):
                engine.step()
    assert all(request.finish_reason == "error" and request.error is not None for request in requests)
    check_as_new(engine)


def test_whatever_a_device_raises_ends_the_step_and_not_the_engine() -> None:
    class Exiting(RecallBackend):
        def forward(self, batch: object) -> np.ndarray:
            if self.fail_next:
                self.fail_next = False
                raise SystemExit("enough")
            return super().forward(batch)  # type: ignore[arg-type]

    backend = Exiting()
    engine = make_engine(backend=backend)
    engine.add(request := make_request("a", PROMPT, 12))
    backend.fail_next = True
    run_to_end(engine)
    assert request.finish_reason == "error"
    assert "SystemExit" in str(request.error)
    check_as_new(engine)


def test_a_refused_request_is_not_remembered() -> None:
    engine = make_engine()
    with pytest.raises(TypeError):
        engine.add(replace(make_request("a", PROMPT, 3), priority="high"))  # type: ignore[arg-type]
    assert not engine.has_work
    check_as_new(engine)


def test_a_closed_engine_says_so() -> None:
    engine = make_engine()
    engine.close()
    engine.add(make_request("a", PROMPT, 3))
    with pytest.raises(BackendError, match="closed"):
        engine.step()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_is_told_to_make_its_own_engine() -> None:
    engine = make_engine()
    engine.add(make_request("a", PROMPT, 3))
    engine.step()
    child = os.fork()
    if child == 0:
        try:
            engine.step()
        except BackendError as error:
            os._exit(0 if "process" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
