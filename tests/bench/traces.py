"""Prefix hits and wasted KV slots on real traces: `python tests/bench/traces.py --mooncake FILE --azure FILE`.

The scheduler serves a trace in the order and at the times of its arrivals; the device is replaced by ready-made
tokens, and a step takes 50 ms. The pool never runs out. Lengths can be divided by a number: by 32, a block of 512
tokens that the Mooncake trace knows by one hash becomes one KV block of 16. A block's tokens are made from its hash;
what follows the last full block of a prompt is the request's own, and so is its output.

Prefix hits are compared with a trie over hashes that shares no code with the scheduler. It counts three ways:
- all: every hash of a prompt whose whole prefix was seen before, the partial block at the end included;
- full: full blocks only, since only they are paged by hash;
- served: of these, those before the prompt's last token, which must run to give the first logits. A scheduler with
  nothing evicted must hit exactly these, also for prompts that start while the prefix is still being computed.

Wasted slots are those of held blocks that hold no token; the share is that of all steps together.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from pagefleet.blocks import BlockPool
from pagefleet.request import Request, RequestMetrics
from pagefleet.sampler import SampledTokens
from pagefleet.sampling_params import SamplingParams
from pagefleet.scheduler import Scheduler
from pagefleet.table import RunningTable

HASHED = 512  # tokens of a hash in the Mooncake trace
BLOCK_SIZE, NUM_ROWS, BUDGET = 16, 256, 8192
STEP_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace, lengths already divided."""

    time: float  # seconds
    prompt_length: int
    output_length: int
    hashes: tuple[int, ...] = ()  # of each `hashed` tokens of the prompt, the last being partial
    hashed: int = HASHED

    @property
    def num_full(self) -> int:
        return min(len(self.hashes), self.prompt_length // self.hashed)

    def tokens(self, index: int) -> np.ndarray:
        """Prompt tokens [prompt_length]: equal where hashes are equal, else only this request's."""
        blocks = np.array(self.hashes[: self.num_full], np.int32)[:, None] * self.hashed + np.arange(self.hashed)
        rest = self.prompt_length - blocks.size
        return np.append(blocks.ravel(), np.full(rest, 2**30 + index)).astype(np.int32)


def read_mooncake(path: Path, divisor: int = 1) -> list[Arrival]:
    arrivals = []
    for line in path.read_text().splitlines():
        each = json.loads(line)
        prompt, output = (max(1, each[name] // divisor) for name in ("input_length", "output_length"))
        arrivals.append(Arrival(each["timestamp"] / 1000, prompt, output, tuple(each["hash_ids"]), HASHED // divisor))
    return arrivals


def read_azure(path: Path) -> list[Arrival]:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    lengths = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows]
    return [Arrival(at - times[0], max(1, n), max(1, m)) for at, (n, m) in zip(times, lengths, strict=True)]


# -- the oracle ------------------------------------------------------------------------------------------


def trie_hits(arrivals: Iterable[Arrival], rule: str) -> int:
    """Hashes whose whole prefix occurred in an earlier prompt; `rule` is `all`, `full` or `served` (see above)."""
    trie: dict = {}
    hits = 0
    for arrival in arrivals:
        counted = len(arrival.hashes) if rule == "all" else arrival.num_full
        node, known = trie, True
        for depth, name in enumerate(arrival.hashes[:counted]):
            known = known and name in node
            before_last_token = (depth + 1) * arrival.hashed < arrival.prompt_length
            hits += known and (rule != "served" or before_last_token)
            node = node.setdefault(name, {})
    return hits


# -- the scheduler ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replay:
    """What serving a trace took."""

    num_cached_tokens: int
    num_steps: int
    num_running: float  # mean over steps
    wasted: float  # share of allocated slots that hold no token, all steps together
    wasted_p95: float  # of single steps
    seconds: float


def replay(arrivals: Sequence[Arrival], *, budget: int = BUDGET, prefix_caching: bool = True) -> Replay:
    """Serve the trace, and add up."""
    start = time.perf_counter()
    scheduler = _make_scheduler(arrivals, max_num_batched_tokens=budget, prefix_caching=prefix_caching)
    metrics: list[RequestMetrics] = []
    running, free, allocated = [], [], []  # of each step: requests, slots that hold no token, all slots held
    now, previous = 0.0, None
    while len(metrics) < len(arrivals) or scheduler.num_waiting or scheduler.num_running:
        if not scheduler.num_waiting and not scheduler.num_running:
            now = max(now, arrivals[len(metrics)].time)
        while len(metrics) < len(arrivals) and arrivals[len(metrics)].time <= now:
            request = _make_request(arrivals[len(metrics)], len(metrics))
            metrics.append(request.metrics)
            scheduler.add(request)
        plan = scheduler.schedule()
        if previous is not None:
            scheduler.commit(previous, SampledTokens(np.full(len(previous.sample_rows), 7, np.int32)))
        if plan is not None and scheduler.num_running:
            running.append(scheduler.num_running)
            free.append(_num_free_slots(scheduler))
            allocated.append(scheduler.pool.num_held * BLOCK_SIZE)
        previous = plan
        now += STEP_SECONDS
    if any(each.num_preemptions for each in metrics):
        raise RuntimeError("a request was preempted: the pool is too small for this trace")
    return Replay(
        sum(each.num_cached_tokens for each in metrics),
        len(running),
        statistics.fmean(running),
        sum(free) / sum(allocated),
        float(np.quantile(np.divide(free, allocated), 0.95)),
        time.perf_counter() - start,
    )


def _make_scheduler(arrivals: Sequence[Arrival], **options: Any) -> Scheduler:
    """A scheduler whose pool holds the whole trace."""
    lengths = [arrival.prompt_length + arrival.output_length for arrival in arrivals]
    pool = BlockPool(sum(-(-length // BLOCK_SIZE) for length in lengths) + NUM_ROWS)
    return Scheduler(RunningTable(NUM_ROWS, max(lengths), BLOCK_SIZE), pool, clock=lambda: 0.0, **options)


def _make_request(arrival: Arrival, index: int) -> Request:
    tokens = arrival.tokens(index)
    params = SamplingParams(temperature=0, max_tokens=arrival.output_length)
    metrics = RequestMetrics(arrival.time)
    return Request(str(index), tokens, params, metrics, seed=1, length_limit=len(tokens) + arrival.output_length)


def _num_free_slots(scheduler: Scheduler) -> int:
    """Slots of held blocks that hold no token: at the end of each running request, for what is shared is full."""
    table = scheduler.table
    rows = [row for row, request in enumerate(table.requests) if request is not None]
    return int((table.num_blocks[rows] * BLOCK_SIZE - table.num_computed[rows]).sum())


# -- the tables ------------------------------------------------------------------------------------------


def print_hits(arrivals: Sequence[Arrival], budgets: Sequence[int]) -> None:
    num_hashes, num_full = sum(len(each.hashes) for each in arrivals), sum(each.num_full for each in arrivals)

    def row(name: str, hits: int, note: str = "") -> None:
        print(f"  {name:24} {hits:8} {hits / num_hashes:12.2%} {hits / num_full:12.2%}{note}")

    print(f"prefix hits of {len(arrivals)} requests, {num_hashes} blocks, {num_full} of them full")
    print(f"  {'':24} {'hits':>8} {'of all':>12} {'of full':>12}")
    for rule in ("all", "full", "served"):
        row(f"trie, {rule}", trie_hits(arrivals, rule))
    for budget in budgets:
        result = replay(arrivals, budget=budget)
        note = f"   {result.num_running:.1f} running, {result.num_steps} steps, {result.seconds:.0f} s"
        row(f"scheduler, budget {budget}", result.num_cached_tokens // arrivals[0].hashed, note)


def print_waste(name: str, arrivals: Sequence[Arrival], prefix_caching: bool) -> None:
    prompt = statistics.median(arrival.prompt_length for arrival in arrivals)
    output = statistics.median(arrival.output_length for arrival in arrivals)
    result = replay(arrivals, prefix_caching=prefix_caching)
    print(
        f"  {name:15} {prompt:8.0f} {output:8.0f} {'yes' if prefix_caching else 'no':>8} {result.num_running:8.1f}"
        f" {result.wasted:8.2%} {result.wasted_p95:8.2%} {result.num_steps:8} {result.seconds:6.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mooncake", type=Path, help="JSON lines of the Mooncake FAST25 release")
    parser.add_argument("--azure", type=Path, help="CSV of the Azure Public Dataset's LLM traces")
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 8192], help="tokens a step")
    arguments = parser.parse_args()
    if arguments.mooncake:
        print_hits(read_mooncake(arguments.mooncake, 32), arguments.budgets)
    names = ("output", "caching", "running", "share", "p95", "steps")
    print(f"wasted slots:   {'prompt':>8}", *(f"{name:>8}" for name in names))
    if arguments.azure:
        print_waste("Azure code", read_azure(arguments.azure), True)
    if arguments.mooncake:
        print_waste("Mooncake / 32", read_mooncake(arguments.mooncake, 32), True)
        print_waste("Mooncake", read_mooncake(arguments.mooncake), False)


if __name__ == "__main__":
    main()
