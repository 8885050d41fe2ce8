"""What the host spends on a step, device excluded: `python tests/bench/host_cost.py`.

Prints the median microseconds of schedule, build_batch (with build_sampling) and commit for several numbers of
running decode requests and pool sizes. The device is replaced by ready-made tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from pagefleet.batch import build_batch, build_sampling
from pagefleet.blocks import BlockPool
from pagefleet.request import Request, RequestMetrics
from pagefleet.sampler import SampledTokens
from pagefleet.sampling_params import SamplingParams
from pagefleet.scheduler import Scheduler
from pagefleet.table import RunningTable

PROMPT, BLOCK_SIZE = 100, 16


def measure(num_requests: int, num_blocks: int, num_steps: int) -> dict[str, float]:
    """Median microseconds of each part, over steps in which every request decodes one token."""
    max_len = PROMPT + num_steps + 40
    table = RunningTable(num_requests, max_len, BLOCK_SIZE)
    scheduler = Scheduler(table, BlockPool(num_blocks), max_num_batched_tokens=max(8192, num_requests))
    for i in range(num_requests):
        prompt = np.full(PROMPT - i % BLOCK_SIZE, i % 1000, np.int32)  # each step, 1 in 16 needs a block
        metrics = RequestMetrics(time.monotonic())
        scheduler.add(
            Request(str(i), prompt, SamplingParams(max_tokens=max_len), metrics, 1, (2,), length_limit=max_len)
        )
    times: dict[str, list[float]] = {"schedule": [], "build_batch": [], "commit": [], "step": []}
    previous = None
    for _ in range(num_steps):
        start = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        build_batch(plan, table)
        build_sampling(plan, table)
        built = time.perf_counter()
        if previous is not None:
            scheduler.commit(previous, SampledTokens(np.full(len(previous.sample_rows), 7, np.int32)))
        end = time.perf_counter()
        if plan.num_scheduled.sum() == num_requests:
            for name, seconds in zip(times, (planned - start, built - planned, end - built, end - start), strict=True):
                times[name].append(seconds * 1e6)
        previous = plan
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--requests", type=int, nargs="+", default=[32, 64, 128, 256, 512, 1024])
    arguments = parser.parse_args()
    print(f"{'requests':>8} {'blocks':>9} {'schedule':>9} {'build':>9} {'commit':>9} {'step us':>9}")
    cases = [(n, max(1000, n * 40)) for n in arguments.requests] + [(32, 1000), (32, 1_000_000), (256, 1_000_000)]
    for num_requests, num_blocks in cases:
        result = measure(num_requests, num_blocks, arguments.steps)
        print(f"{num_requests:8} {num_blocks:9}", *(f"{value:9.0f}" for value in result.values()))


if __name__ == "__main__":
    main()
