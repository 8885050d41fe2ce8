"""A request's tokens and log-probs do not depend on what else happens: bit for bit, on the CPU.

A trial is one random request (prompt, sampling parameters, seed). It runs alone, in a batch of 64, in chunks, with
preemptions and on a cached prefix of somebody else's prompt; all must return the same tokens and the same bits of
every log-probability. The engines are made once and stay, side by side in one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pagefleet import LLM, RequestOutput, SamplingParams, loading
from pagefleet.backend import HostTensor, WeightSource
from pagefleet.weights.gguf_file import dequantise
from pagefleet_kernels import cpu as kernels

BATCH = 64
BLOCK = 4
CHUNK = 8  # tokens of a step where prompts are chunked; every prompt is longer
DTYPES = ("float32", "bfloat16", "int8", "Q8_0")

Outcome = list[tuple[list[int], bytes, bytes]]


class Q8Weights:
    """A source whose matrices are Q8_0, as if it were a GGUF file."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source

    def read(self, name: str) -> HostTensor:
        tensor = self.source.read(name)
        if len(tensor.shape) != 2:
            return tensor
        data = gguf.quantize(tensor.numpy(), gguf.GGMLQuantizationType.Q8_0).reshape(-1)
        return replace(tensor, dtype="Q8_0", data=data, dequantise=dequantise)

    def __iter__(self) -> Iterator[str]:
        return iter(self.source)


@dataclass
class Trial:
    prompt: list[int]
    params: SamplingParams
    alone: Outcome = field(default_factory=list, repr=False)


def random_trial(random: np.random.Generator) -> Trial:
    """Prompts of 9 to 150 tokens, outputs of 4 to 24; a third of the requests are greedy."""
    prompt = random.integers(3, 256, int(random.choice([random.integers(CHUNK + 1, 40), random.integers(40, 151)])))
    choose, stops = random.choice, bool(random.integers(2))
    params = SamplingParams(
        temperature=float(choose([0.0, random.uniform(0.1, 2.0), 1.0])),
        top_p=float(choose([1.0, random.uniform(0.2, 1.0)])),
        top_k=int(choose([0, random.integers(1, 60)])),
        min_p=float(choose([0.0, 0.0, random.uniform(0, 0.2)])),
        presence_penalty=float(choose([0.0, 0.0, random.uniform(-2, 2)])),
        frequency_penalty=float(choose([0.0, 0.0, random.uniform(-2, 2)])),
        repetition_penalty=float(choose([1.0, 1.0, random.uniform(0.5, 2)])),
        seed=int(random.integers(2**63)),
        n=int(choose([1, 1, 1, 1, 2, 3])),
        max_tokens=int(random.integers(4, 25)),
        min_tokens=4 if stops else 0,
        ignore_eos=not stops,
        stop_token_ids=random.integers(3, 256, 3).tolist() if stops else (),
        logprobs=1,
        prompt_logprobs=0 if random.random() < 0.2 else None,
    )
    return Trial(prompt.tolist(), params)


class Engines:
    """One engine a way to run requests, all on the same model."""

    num_scarce = 256  # blocks where requests are preempted: 1024 tokens, the longest the model takes

    def __init__(self, model: Path, dtype: str) -> None:
        def engine(**options: Any) -> LLM:
            settings = {"num_blocks": 8192, "block_size": BLOCK, "max_num_seqs": BATCH, **options}
            return LLM(str(model), device="cpu", plugins=(), dtype=dtype, numerics="strict", **settings)

        self.alone = engine(enable_prefix_caching=False, pipeline=False)
        self.batch = engine(enable_prefix_caching=False)
        self.chunked = engine(enable_prefix_caching=False, max_num_batched_tokens=CHUNK, max_num_seqs=CHUNK)
        self.preempted = engine(num_blocks=self.num_scarce, max_num_batched_tokens=512)
        self.prefix = engine(max_num_batched_tokens=100)
        self.rows = _count_rows(self.batch)

    def close(self) -> None:
        for llm in (self.alone, self.batch, self.chunked, self.preempted, self.prefix):
            llm.close()


def _count_rows(llm: LLM) -> list[int]:
    """Filled with the number of requests in each step."""
    rows: list[int] = []
    backend = llm._engine.engine.backend
    forward = backend.forward

    def counting(batch: Any) -> Any:
        rows.append(batch.num_rows)
        return forward(batch)

    backend.forward = counting
    return rows


def outcome(output: RequestOutput) -> Outcome:
    """Tokens and the bits of all log-probs (those of the prompt too) of a request's completions."""
    prompt = [list(position.items()) for position in (output.prompt_logprobs or [])[1:]]
    return [
        (completion.token_ids, _bits([list(position.items()) for position in completion.logprobs]), _bits(prompt))
        for completion in output.outputs
    ]


def _bits(positions: list[list[tuple[int, Any]]]) -> bytes:
    entries = [(token_id, entry.logprob) for position in positions for token_id, entry in position]
    token_ids, logprobs = zip(*entries, strict=True) if entries else ((), ())
    return np.array(token_ids, np.int32).tobytes() + np.array(logprobs, np.float64).tobytes()


def run(llm: LLM, trials: list[Trial]) -> list[RequestOutput]:
    outputs = llm.generate([trial.prompt for trial in trials], [trial.params for trial in trials], use_tqdm=False)
    assert not any(output.error for output in outputs)
    return outputs


def check(how: str, trials: list[Trial], outputs: list[RequestOutput]) -> None:
    for trial, output in zip(trials, outputs, strict=True):
        assert outcome(output) == trial.alone, f"{how}: differs from alone: {trial}"


def check_batch(engines: Engines, trials: list[Trial], company: list[Trial]) -> None:
    engines.rows.clear()
    check("in a batch", trials, run(engines.batch, trials + company)[: len(trials)])
    assert max(engines.rows) == BATCH


def check_chunked(engines: Engines, trials: list[Trial]) -> None:
    """All prompts are longer than what a step may hold."""
    assert min(len(trial.prompt) for trial in trials) > CHUNK
    check("chunked", trials, run(engines.chunked, trials))


def check_preempted(engines: Engines, trials: list[Trial], random: np.random.Generator) -> int:
    """By twos; after some steps an urgent request comes whose prompt takes every block. Returns how often it did."""
    engine, total = engines.preempted._engine, 0
    for pair in zip(trials[::2], trials[1::2], strict=True):
        generations = [engine.prepare(trial.prompt, trial.params) for trial in pair]
        for generation in generations:
            engine.start(generation)
        # the urgent prompt takes three steps, in the last of which both requests still have a token to go
        shortest = min(len(trial.alone[0][0]) for trial in pair)
        for _ in range(random.integers(1, shortest - 2)):
            engine.step()
        urgent = random.integers(3, 256, engines.num_scarce * BLOCK - 1).tolist()
        engine.start(engine.prepare(urgent, SamplingParams(max_tokens=1), priority=-1))
        while engine.has_work:
            engine.step()
        outputs = [generation.output() for generation in generations]
        assert min(output.metrics.num_preemptions for output in outputs) > 0
        check("preempted", list(pair), outputs)
        total += sum(output.metrics.num_preemptions for output in outputs)
    return total


def check_prefix_hit(engines: Engines, trials: list[Trial], random: np.random.Generator) -> None:
    """Somebody else's prompt has begun the same way: at least a block of it is not computed again."""
    # a request that has its prompt scored computes all of it, so here none does
    trials = [
        Trial(trial.prompt, replace(trial.params, prompt_logprobs=None), [(*each[:2], b"") for each in trial.alone])
        for trial in trials
    ]
    shared = [int(random.integers(BLOCK, len(trial.prompt))) for trial in trials]
    donors = [trial.prompt[:n] + random.integers(3, 256, 12).tolist() for trial, n in zip(trials, shared, strict=True)]
    engines.prefix.generate(donors, SamplingParams(max_tokens=2, seed=1), use_tqdm=False)
    outputs = run(engines.prefix, trials)
    for num_shared, output in zip(shared, outputs, strict=True):
        assert output.num_cached_tokens >= num_shared // BLOCK * BLOCK > 0
    check("on a cached prefix", trials, outputs)


def check_trials(engines: Engines, num_batches: int, trials_per_batch: int, seed: int) -> None:
    random, start = np.random.default_rng(seed), time.perf_counter()
    num_tokens = num_preemptions = 0
    for _ in range(num_batches):
        requests = [random_trial(random) for _ in range(BATCH)]
        trials, company = requests[:trials_per_batch], requests[trials_per_batch:]
        for trial in trials:
            (output,) = run(engines.alone, [trial])
            assert output.metrics.num_preemptions == output.num_cached_tokens == 0
            trial.alone = outcome(output)
            num_tokens += sum(len(token_ids) for token_ids, *_ in trial.alone)
        check_batch(engines, trials, company)
        check_chunked(engines, trials)
        num_preemptions += check_preempted(engines, trials, random)
        check_prefix_hit(engines, trials, random)
    seconds = time.perf_counter() - start
    print(
        f"{num_batches * trials_per_batch} requests with {num_tokens} tokens: alone, in a batch of {BATCH}, chunked, "
        f"preempted ({num_preemptions} preemptions), on a cached prefix: all bits equal; {seconds:.0f} s"
    )


@pytest.fixture(scope="module", params=DTYPES)
def engines(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[str], Path]) -> Iterator[Engines]:
    """The model has one layer with a sliding window and one without."""
    if request.param in ("int8", "Q8_0") and not kernels.LIBRARY.is_file():
        pytest.skip("without the CPU kernels quantised weights are dequantised")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "Q8_0":
            patch.setattr(loading, "Int8Weights", Q8Weights)
        dtype = "int8" if request.param == "Q8_0" else request.param
        made = Engines(tiny_checkpoint("qwen2-mixed-windows"), dtype)
    yield made
    made.close()


def test_a_request_returns_the_same_bits_however_it_is_run(engines: Engines) -> None:
    check_trials(engines, 1, BATCH // 2, seed=0)


@pytest.mark.slow
def test_1000_random_requests_return_the_same_bits_however_they_are_run(engines: Engines) -> None:
    check_trials(engines, -(-1000 // BATCH), BATCH, seed=1)
