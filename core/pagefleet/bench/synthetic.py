"""A synthetic workload and what it measures: the quick look of `pagefleet bench`, not a comparison of engines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rich.table import Table

    from pagefleet.llm import LLM
    from pagefleet.request import RequestOutput

NUM_TOKEN_IDS = 256  # prompts are drawn from at most as many: a larger vocabulary costs the same


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with random tokens, all waiting at the start."""

    num_prompts: int
    input_len: int
    output_len: int
    seed: int = 0

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Token ids [num_prompts][input_len]; random, so that no two share a prefix block."""
        rng = np.random.default_rng(self.seed)
        shape = self.num_prompts, self.input_len
        ids: list[list[int]] = rng.integers(0, min(NUM_TOKEN_IDS, vocab_size), shape).tolist()
        return ids


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Times in seconds, rates in tokens per second."""

    duration: float
    input_throughput: float
    output_throughput: float
    ttft_median: float  # time to first token, waiting for the batch included
    ttft_p99: float
    itl_median: float  # inter-token latency, the mean of each request
    itl_p99: float


def run(llm: LLM, workload: Workload) -> BenchResult:
    """Warm up with one request, then run the workload. Raises RuntimeError if a request of either fails."""
    from pagefleet.sampling_params import SamplingParams

    prompts = [{"prompt_token_ids": ids} for ids in workload.prompts(llm.get_tokenizer().vocab_size)]
    params = SamplingParams(temperature=0, max_tokens=workload.output_len, ignore_eos=True, detokenize=False)
    first = SamplingParams(max_tokens=2, ignore_eos=True)
    raise_failures(llm.generate([{"prompt_token_ids": [0, 0]}], first, use_tqdm=False))
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    duration = time.perf_counter() - start
    raise_failures(outputs)
    return summarise(outputs, duration)


def raise_failures(outputs: Sequence[RequestOutput]) -> None:
    """Raise RuntimeError if a request failed."""
    errors = [output.error for output in outputs if output.error is not None]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(outputs)} requests failed, the first with {errors[0]}")


def summarise(outputs: Sequence[RequestOutput], duration: float) -> BenchResult:
    """Rates over the whole run, medians and tails over the requests."""
    ttft = [output.metrics.time_to_first_token for output in outputs]
    itl = [output.metrics.inter_token_latency for output in outputs]
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return BenchResult(
        duration=duration,
        input_throughput=num_input / duration,
        output_throughput=num_output / duration,
        ttft_median=float(np.median(ttft)),
        ttft_p99=float(np.percentile(ttft, 99)),
        itl_median=float(np.median(itl)),
        itl_p99=float(np.percentile(itl, 99)),
    )


def table(workload: Workload, result: BenchResult) -> Table:
    """The result for people."""
    from rich.table import Table

    title = f"{workload.num_prompts} requests, {workload.input_len} tokens in, {workload.output_len} tokens out"
    shown = Table(title=title)
    shown.add_column("measure")
    shown.add_column("value", justify="right")
    shown.add_column("unit")
    for measure, value, unit in (
        ("duration", f"{result.duration:.2f}", "s"),
        ("throughput in", f"{result.input_throughput:.1f}", "tokens/s"),
        ("throughput out", f"{result.output_throughput:.1f}", "tokens/s"),
        ("time to first token, median", f"{result.ttft_median * 1e3:.1f}", "ms"),
        ("time to first token, p99", f"{result.ttft_p99 * 1e3:.1f}", "ms"),
        ("inter-token latency, median", f"{result.itl_median * 1e3:.2f}", "ms"),
        ("inter-token latency, p99", f"{result.itl_p99 * 1e3:.2f}", "ms"),
    ):
        shown.add_row(measure, value, unit)
    return shown
