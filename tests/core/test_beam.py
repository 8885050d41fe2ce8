"""Beam search on shared blocks, against one by the book."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from recall import (
    COPIES,
    VOCAB,
    RecallBackend,
    check_idle,
    expected_beams,
    expected_output,
    make_beam_search,
    make_engine,
    make_request,
    run_to_end,
)

from pagefleet.backend import Traits
from pagefleet.beam import BeamSearch
from pagefleet.engine import Engine
from pagefleet.request import Request
from pagefleet.sampling_params import BeamSearchParams, InvalidRequest

EOS = (5, 11, 50)
PROMPT = list(range(20, 30))


def check(search: BeamSearch, prompt: list[int], eos_ids: tuple[int, ...] = EOS) -> None:
    expected = expected_beams(prompt, search.params, eos_ids)
    assert [(beam.token_ids, beam.finish_reason) for beam in search.best()] == [
        (t, reason) for t, _, reason in expected
    ]
    np.testing.assert_allclose([beam.score for beam in search.best()], [score for _, score, _ in expected], rtol=1e-4)


def search(engine: Engine, prompt: list[int], params: BeamSearchParams, eos_ids: tuple[int, ...] = EOS) -> None:
    """Run one search on the engine and check its answer."""
    root = make_beam_search("root", prompt, params, eos_ids)
    engine.add(root)
    run_to_end(engine)
    assert root.beam is not None
    check(root.beam, prompt, eos_ids)
    check_idle(engine)
    engine.close()


@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.6, 1.0, 2.0])
def test_finds_the_beams_of_a_search_by_the_book(width: int, length_penalty: float) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=9, length_penalty=length_penalty)
    search(make_engine(), PROMPT, params)


@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_early_stopping_ends_with_as_many_beams_as_the_width(width: int) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=12, early_stopping=True)
    root = make_beam_search("root", PROMPT, params, EOS)
    engine = make_engine()
    engine.add(root)
    steps = run_to_end(engine)
    assert root.beam is not None
    check(root.beam, PROMPT)
    if all(beam.finish_reason == "stop" for beam in root.beam.best()):
        assert steps < 2 * 12, "it ended before its last token"
    engine.close()


@pytest.mark.parametrize("width", [1, 3])
def test_end_of_sequence_can_be_ignored(width: int) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=9, ignore_eos=True)
    root = make_beam_search("root", PROMPT, params, EOS)
    engine = make_engine()
    engine.add(root)
    run_to_end(engine)
    assert root.beam is not None
    check(root.beam, PROMPT)
    assert {beam.finish_reason for beam in root.beam.best()} == {"length"}
    assert {len(beam.token_ids) for beam in root.beam.best()} == {9}
    engine.close()


def test_a_beam_of_one_token() -> None:
    search(make_engine(), PROMPT, BeamSearchParams(beam_width=4, max_tokens=1))


def test_a_beam_tells_what_stopped_it() -> None:
    root = make_beam_search("root", PROMPT, BeamSearchParams(beam_width=4, max_tokens=12), tuple(range(0, VOCAB, 3)))
    engine = make_engine()
    engine.add(root)
    run_to_end(engine)
    assert root.beam is not None
    stopped = [beam for beam in root.beam.best() if beam.finish_reason == "stop"]
    assert stopped
    assert all(beam.stop_reason == beam.token_ids[-1] for beam in stopped)
    assert all(beam.stop_reason is None for beam in root.beam.best() if beam not in stopped)
    engine.close()


@pytest.mark.parametrize("pipeline", [True, False])
@pytest.mark.parametrize("copies_blocks", [True, False])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("num_rows", [4, 8])
def test_the_way_it_runs_does_not_change_the_answer(
    pipeline: bool, copies_blocks: bool, prefix_caching: bool, num_rows: int
) -> None:
    engine = make_engine(
        num_rows=num_rows,
        budget=max(num_rows, 5),
        pipeline=pipeline,
        traits=Traits(copies_blocks=copies_blocks),
        prefix_caching=prefix_caching,
    )
    search(engine, PROMPT, BeamSearchParams(beam_width=4, max_tokens=7))


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("max_tokens", [3, 8, 15])
@pytest.mark.parametrize("copies_blocks", [True, False])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_pool_that_barely_holds_its_sequences_is_enough(
    width: int, max_tokens: int, copies_blocks: bool, prefix_caching: bool
) -> None:
    prompt = PROMPT[:6]
    num_blocks = width * -(-(len(prompt) + max_tokens - 1) // 4)
    engine = make_engine(num_blocks, traits=Traits(copies_blocks=copies_blocks), prefix_caching=prefix_caching)
    search(engine, prompt, BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True))


def test_a_search_that_could_not_fit_is_refused() -> None:
    engine = make_engine(num_blocks=11)
    with pytest.raises(InvalidRequest, match="beam_width"):
        engine.add(make_beam_search("root", PROMPT[:6], BeamSearchParams(beam_width=4, max_tokens=7), EOS))
    with pytest.raises(InvalidRequest, match="max_num_seqs is 8; lower beam_width"):
        engine.add(make_beam_search("root", PROMPT[:6], BeamSearchParams(beam_width=9, max_tokens=2), EOS))
    assert not engine.has_work
    engine.close()


@pytest.mark.parametrize(
    ("num_blocks", "copies_blocks", "pipeline", "prefix_caching"),
    [*product([22, 40, 400], [True, False], [True, False], [True, False])],
)
def test_several_searches_run_beside_ordinary_requests(
    num_blocks: int, copies_blocks: bool, pipeline: bool, prefix_caching: bool
) -> None:
    engine = make_engine(
        num_blocks,
        num_rows=6,
        pipeline=pipeline,
        traits=Traits(copies_blocks=copies_blocks),
        prefix_caching=prefix_caching,
    )
    searches: list[Request] = []
    requests: list[Request] = []
    for i in range(4):
        prompt = [*PROMPT[: 2 + 2 * i], 40 + i]
        params = BeamSearchParams(beam_width=1 + i, max_tokens=11 - 2 * i, length_penalty=0.5 * i)
        searches.append(make_beam_search(f"search {i}", prompt, params, EOS))
        requests.append(make_request(f"request {i}", PROMPT[: 9 - i], 6, n=1 + i % 2))
        engine.add(searches[-1])
        engine.add(requests[-1])
    run_to_end(engine)
    check_idle(engine)
    for root in searches:
        assert root.beam is not None
        check(root.beam, root.prompt_token_ids.tolist())
    for request in requests:
        assert request.output_token_ids == expected_output(request)
    engine.close()


def test_a_tiny_pool_really_preempts_sequences() -> None:
    engine = make_engine(num_blocks=18, num_rows=9, prefix_caching=False)
    preempted = []
    preempt = engine.scheduler._preempt

    def watched(row: int) -> None:
        preempted.append(engine.scheduler.table.request(row).beam)
        preempt(row)

    engine.scheduler._preempt = watched  # type: ignore[method-assign]
    for i in range(3):
        params = BeamSearchParams(beam_width=3, max_tokens=11, ignore_eos=True)
        engine.add(make_beam_search(str(i), [*PROMPT, i], params))
    roots = list(engine.requests.values())
    run_to_end(engine)
    assert any(beam is not None for beam in preempted)
    for root in roots:
        assert root.beam is not None
        check(root.beam, root.prompt_token_ids.tolist(), ())
    engine.close()


def test_sequences_share_the_blocks_of_what_they_have_in_common() -> None:
    width, max_tokens, prompt = 4, 12, list(range(40))
    engine = make_engine(prefix_caching=False)
    engine.add(
        make_beam_search("root", prompt, BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True))
    )
    most = 0
    while engine.requests["root"].beam.live:  # type: ignore[union-attr]
        engine.step()
        most = max(most, engine.scheduler.pool.num_held)
    of_prompt, of_each = len(prompt) // 4, -(-max_tokens // 4)
    assert most <= of_prompt + width * of_each
    backend = engine.backend
    assert isinstance(backend, RecallBackend)
    assert backend.num_tokens_run <= len(prompt) + width * max_tokens, "nothing is computed twice"
    engine.close()


def test_the_end_of_a_search_frees_its_blocks_at_once() -> None:
    engine = make_engine()
    engine.add(make_beam_search("root", PROMPT, BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True)))
    for _ in range(8):
        engine.step()
    assert engine.scheduler.pool.num_held > 0
    assert engine.scheduler.num_running == 4
    engine.abort("root")
    check_idle(engine)
    engine.close()


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("steps", [0, 3, 6])
def test_a_device_fault_ends_the_search_with_the_error(asynchronous: bool, steps: int) -> None:
    backend = RecallBackend(Traits(copies_blocks=True, asynchronous=asynchronous))
    engine = make_engine(backend=backend)
    root = make_beam_search("root", PROMPT, BeamSearchParams(beam_width=3, max_tokens=20, ignore_eos=True))
    engine.add(root)
    for _ in range(steps):
        engine.step()
    backend.fail_next = True
    run_to_end(engine)
    assert root.beam is not None
    assert "on fire" in str(root.beam.error)
    check_idle(engine)
    search(engine, PROMPT, BeamSearchParams(beam_width=3, max_tokens=5))


def test_logits_that_are_not_finite_end_the_search_and_leave_others_alone() -> None:
    class Broken(RecallBackend):
        def _logits(self, batch, row, length):  # type: ignore[no-untyped-def]
            logits = super()._logits(batch, row, length)
            return logits * np.nan if length == len(PROMPT) + 4 else logits

    engine = make_engine(backend=Broken(COPIES))
    root = make_beam_search("root", PROMPT, BeamSearchParams(beam_width=3, max_tokens=20, ignore_eos=True))
    other = make_request("other", PROMPT[:3], 5)
    engine.add(root)
    engine.add(other)
    run_to_end(engine)
    assert root.beam is not None
    assert "not finite" in str(root.beam.error)
    assert other.output_token_ids == expected_output(other)
    check_idle(engine)
    engine.close()
