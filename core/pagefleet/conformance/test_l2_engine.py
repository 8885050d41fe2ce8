"""The scheduler's real steps on the backend: chunks, preemption, shared prefixes, forks, aborts.

Every token an engine returns is checked against the reference, teacher-forced with what the engine generated: its
log-probability is the reference's, and a greedy token is the reference's best, or as good within the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from pagefleet.blocks import BlockPool
from pagefleet.conformance.cases import Case, model_spec
from pagefleet.conformance.driver import Driver
from pagefleet.conformance.reference import log_softmax, tolerance
from pagefleet.engine import Engine
from pagefleet.request import Request, RequestMetrics
from pagefleet.sampling_params import SamplingParams
from pagefleet.scheduler import Scheduler
from pagefleet.table import RunningTable

pytestmark = pytest.mark.conformance_level("L2")

MakeDriver = Callable[..., Driver]
MakeEngine = Callable[..., "Run"]
CASE = Case("engine", model_spec(num_heads=4, num_kv_heads=2, windows=(None, 7)))


class Run:
    """An engine over a driver's backend, and what was asked of it."""

    def __init__(self, driver: Driver, num_blocks: int, *, rows: int = 6, budget: int = 24, pipeline: bool) -> None:
        traits, size = driver.backend.traits, driver.layout.block_size
        table = RunningTable(rows, num_blocks * size, size)
        scheduler = Scheduler(
            table, BlockPool(num_blocks), max_num_batched_tokens=budget, copies_blocks=traits.copies_blocks
        )
        self.driver, self.size = driver, size
        self.requests: list[Request] = []
        self.engine = Engine(driver.backend, scheduler, pipeline=pipeline)

    def tokens(self, count: int) -> list[int]:
        return self.driver.prompt(count).tokens

    def add(self, prompt: Sequence[int], num_tokens: int, *, n: int = 1, temperature: float = 0.0) -> Request:
        """A request for exactly that many tokens, and its n - 1 siblings."""
        made = [
            Request(
                request_id=f"{len(self.requests) + i}",
                prompt_token_ids=np.array(prompt, np.int32),
                params=SamplingParams(temperature=temperature, max_tokens=num_tokens, logprobs=1, seed=i),
                metrics=RequestMetrics(0.0),
                seed=i,
                length_limit=len(prompt) + num_tokens,
            )
            for i in range(n)
        ]
        made[0].siblings = made[1:]
        self.requests += made
        self.engine.add(made[0])
        return made[0]

    def finish(self, max_steps: int = 2000) -> None:
        """Step to the end, then check what every request got."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.engine.step()
        assert not self.engine.has_work, f"{len(self.engine.requests)} requests are not done after {max_steps} steps"
        for request in self.requests:
            if request.finish_reason != "abort":
                assert request.error is None, request.error
                assert len(request.output_token_ids) == request.length_limit - len(request.prompt_token_ids)
            self.check(request)

    def check(self, request: Request) -> None:
        """The log-probabilities of its tokens are the reference's; greedy ones are its best."""
        logits = self.driver.reference.run(request.token_ids.tolist()).logits[len(request.prompt_token_ids) - 1 : -1]
        want = log_softmax(logits)
        margins = 2 * tolerance(self.driver.dtype) * np.linalg.norm(logits, axis=1)
        for i, (token, scored) in enumerate(zip(request.output_token_ids, request.logprobs, strict=True)):
            where, margin = f"token {i} of request {request.request_id}", margins[i]
            assert int(scored.token_ids[0]) == token, f"{where} is {token}, its log-probability is another token's"
            error = abs(float(scored.logprobs[0]) - want[i, token])
            assert error <= margin, f"the log-probability of {where} is off by {error:.2e}, more than {margin:.2e}"
            behind = want[i].max() - want[i, token]
            if request.params.greedy:
                assert behind <= margin, f"{where} is {token}, which the reference has {behind:.2e} below its best"


@pytest.fixture(params=[True, False], ids=["pipelined", "step-by-step"])
def make_engine(make_driver: MakeDriver, request: pytest.FixtureRequest) -> Iterator[MakeEngine]:
    """A function that returns a `Run`."""
    engines: list[Engine] = []

    def make(num_blocks: int | None = None, *, dtype: str | None = None, **limits: int) -> Run:
        driver = make_driver(CASE, dtype=dtype)
        made = Run(driver, num_blocks or driver.layout.num_blocks, pipeline=request.param, **limits)
        engines.append(made.engine)
        return made

    yield make
    for engine in engines:
        engine.close()


def test_prompts_in_chunks(make_engine: MakeEngine) -> None:
    """A budget below the prompts' lengths: steps hold pieces of prompts, and decode rows beside them."""
    run = make_engine(rows=3, budget=5)
    for length in (2 * run.size + 5, 3, run.size, 11):
        run.add(run.tokens(length), 4)
    run.finish()


def test_preempted_requests_go_on_where_they_were(make_engine: MakeEngine) -> None:
    """A pool too small for all: some lose their blocks, and are computed again."""
    run = make_engine(num_blocks=8)
    requests = [run.add(run.tokens(run.size + 1), 3 * run.size) for _ in range(4)]
    run.finish()
    assert sum(request.metrics.num_preemptions for request in requests) > 0, "this test is for preemption"


def test_a_cached_prefix_is_not_computed_again(make_engine: MakeEngine) -> None:
    run = make_engine()
    common = run.tokens(2 * run.size)
    run.add(common + run.tokens(1), 3)
    run.finish()
    sharers = [run.add(common + run.tokens(n), 4) for n in (1, run.size, 2)]
    run.finish()
    assert [request.metrics.num_cached_tokens for request in sharers] == [2 * run.size] * 3


def test_forks_of_one_prompt(make_engine: MakeEngine) -> None:
    """Three completions, drawn hot: they share the prompt's blocks and part in the middle of one."""
    run = make_engine()
    run.add(run.tokens(run.size + max(1, run.size // 2)), run.size + 3, n=3, temperature=3.0)
    run.finish()
    drawn = {tuple(request.output_token_ids) for request in run.requests}
    assert len(drawn) == 3, "with three seeds, three texts"


def test_an_abort_leaves_the_others_alone(make_engine: MakeEngine) -> None:
    """Ended in the middle of a step; its blocks serve the next."""
    run = make_engine(num_blocks=14)
    requests = [run.add(run.tokens(run.size + n), 2 * run.size + 2) for n in (1, 2, 3)]
    for _ in range(4):
        run.engine.step()
    run.engine.abort(requests[1].request_id)
    run.add(run.tokens(2 * run.size + 1), run.size)
    run.finish()
    assert requests[1].finish_reason == "abort"


def test_traffic(dtype: str, make_engine: MakeEngine) -> None:
    """Requests that come at random times, with shared prefixes and forks, in a pool that is too small for them."""
    run = make_engine(num_blocks=16, dtype=dtype, budget=3 * 7)
    rng, common = run.driver.rng, run.tokens(2 * run.size)
    for _ in range(14):
        prompt = common[: int(rng.integers(0, len(common) + 1))] + run.tokens(int(rng.integers(1, run.size + 2)))
        num_forks = int(rng.choice([1, 1, 2]))
        run.add(prompt, int(rng.integers(1, run.size + 6)), n=num_forks, temperature=float(rng.choice([0, 2])))
        for _ in range(int(rng.integers(0, 4))):
            run.engine.step()
    run.finish()
