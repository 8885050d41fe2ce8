"""Run engines in turn over the fixed workloads, and make rows of what was measured.

A, B, A, B: what the machine does meanwhile hits all alike, and a ratio is that of two runs side by side. While one
runs, the others are paused.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagefleet.bench.peers import OURS, Contender, weights_for
from pagefleet.bench.process import EngineError, EngineProcess, busy_seconds
from pagefleet.bench.workloads import BenchRequest

PLAN: Mapping[str, tuple[str, ...]] = {
    "w1": ("bfloat16", "float32", "q8_0", "auto"),
    "w2": ("bfloat16", "q8_0", "float32"),
    "w3": ("bfloat16",),
}
"""Workload -> the weights it is run with, unless others are asked for."""

# measure -> (factor from seconds, unit)
MEASURES: Mapping[str, tuple[float, str]] = {"itl": (1e3, "ms"), "ttft": (1e3, "ms"), "wall": (1.0, "s")}
OF_WORKLOAD: Mapping[str, tuple[str, ...]] = {"w1": ("itl", "ttft"), "w2": ("wall",), "w3": ("wall",)}


@dataclass(slots=True)
class Series:
    """One measure of one engine, a value a repetition, in the unit of its row; or why there is none."""

    values: list[float] = field(default_factory=list)
    refused: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass(slots=True)
class Row:
    """A line of the table: one measure by every engine."""

    workload: str
    weights: str
    measure: str
    unit: str
    series: dict[str, Series] = field(default_factory=dict)  # engine -> what it did
    others: float = 0.0  # share of the machine that other processes took, at the worst repetition

    def ratio(self, peer: str) -> float | None:
        """How many times less ours takes: the median over neighbouring runs. None: nothing to compare."""
        ours, theirs = self.series.get(OURS), self.series.get(peer)
        pairs = list(zip(ours.values, theirs.values, strict=False)) if ours and theirs else []
        return statistics.median(their / our for our, their in pairs) if pairs else None


@dataclass(slots=True)
class Plan:
    """What to run. `requests`: those of each workload."""

    model: str
    requests: dict[str, list[BenchRequest]]
    weights: dict[str, tuple[str, ...]]  # workload -> WEIGHTS
    repeat: int = 3
    threads: int | None = None


class Runner:
    """One engine with one kind of weights, from its start to its end. Once it has failed, it is `refused`."""

    def __init__(self, contender: Contender, plan: Plan, weights: str) -> None:
        self.name = contender.name
        self.refused: str | None = None
        self.facts: dict[str, Any] = {}
        self.process: EngineProcess | None = None
        try:
            model, dtype = weights_for(contender.name, plan.model, weights)
            self.process = EngineProcess(contender.python, contender.engine, contender.variables)
            self.facts = self.process.ask("load", model=model, dtype=dtype, threads=plan.threads, **contender.settings)
            self.run([BenchRequest((1, 2, 3, 4, 5, 6, 7, 8), 1)])
            self.ready = time.perf_counter() - self.process.started
        except (EngineError, ImportError, OSError, ValueError) as error:
            self.refuse(error)
        except BaseException:
            self.close()
            raise

    def run(self, requests: Sequence[BenchRequest]) -> dict[str, Any]:
        """One repetition. Raises EngineError, also if the engine did not generate what it should."""
        if self.process is None:
            raise EngineError(self.refused or "not started")
        result: dict[str, Any] = self.process.ask("run", requests=[each.message() for each in requests])
        lengths = [len(tokens) for tokens in result["tokens"]]
        if lengths != [each.num_output for each in requests]:
            raise EngineError(f"it generated {sum(lengths)} tokens of {sum(each.num_output for each in requests)}")
        return result

    def refuse(self, error: Exception) -> None:
        self.refused = " ".join(str(error).split())
        self.close()

    def close(self) -> None:
        if self.process is not None:
            self.process.close()
            self.process = None


def compare(
    contenders: Sequence[Contender], plan: Plan, progress: Callable[[str], None] = lambda text: None
) -> list[Row]:
    """Every workload with every kind of weights it wants, by all engines in turn."""
    rows: list[Row] = []
    for weights in dict.fromkeys(each for wanted in plan.weights.values() for each in wanted):
        runners: list[Runner] = []
        try:
            for contender in contenders:
                progress(f"{weights}: starting {contender.name}")
                runners.append(Runner(contender, plan, weights))
                _pause(runners)
            workloads = [name for name in plan.requests if weights in plan.weights[name]]
            for name in workloads:
                rows += _run_workload(name, weights, runners, plan, progress)
            rows += _rows_of_whole(weights, workloads, runners)
        finally:
            for runner in runners:
                runner.close()
    return sorted(rows, key=lambda row: row.workload)  # stable: weights stay in their order


def _run_workload(
    name: str, weights: str, runners: list[Runner], plan: Plan, progress: Callable[[str], None]
) -> list[Row]:
    rows = [Row(name, weights, measure, MEASURES[measure][1]) for measure in OF_WORKLOAD[name]]
    for row in rows:
        row.series = {runner.name: Series() for runner in runners}
    same = Row(name, weights, "same tokens", "%")
    requests = plan.requests[name]
    for repetition in range(plan.repeat):
        one = [requests[repetition % len(requests)]] if name == "w1" else requests
        tokens: dict[str, list[list[int]]] = {}
        for runner in runners:
            progress(f"{weights} {name}, {repetition + 1} of {plan.repeat}: {runner.name}")
            result, others = _run_alone(runner, one)
            if result is not None:
                tokens[runner.name] = result["tokens"]
                _record(rows, runner.name, result, others)
        _compare_tokens(same, tokens)
    for row in rows:
        for runner in runners:
            row.series[runner.name].refused = runner.refused
    return [*rows, same] if same.series else rows


def _run_alone(runner: Runner, requests: Sequence[BenchRequest]) -> tuple[dict[str, Any] | None, float]:
    """A repetition with the processor to itself; and the share of it that others took all the same."""
    if runner.process is None:
        return None, 0.0
    runner.process.resume()
    start, busy, own = time.perf_counter(), busy_seconds(), runner.process.cpu_seconds()
    try:
        result = runner.run(requests)
    except EngineError as error:
        runner.refuse(error)
        return None, 0.0
    busy, own = busy_seconds() - busy, runner.process.cpu_seconds() - own
    wall = time.perf_counter() - start
    runner.process.pause()
    return result, max(0.0, busy - own) / wall / (os.cpu_count() or 1)


def _record(rows: Iterable[Row], name: str, result: dict[str, Any], others: float) -> None:
    for row in rows:
        values = result[row.measure]
        seconds = values if row.measure == "wall" else statistics.median(values)
        row.series[name].values.append(seconds * MEASURES[row.measure][0])
        row.others = max(row.others, others)


def _compare_tokens(row: Row, tokens: dict[str, list[list[int]]]) -> None:
    """Add, for each peer, the share of ours' tokens before the first that differs. In per cent."""
    ours = tokens.pop(OURS, None)
    for name, theirs in tokens.items() if ours is not None else ():
        shares = [_common(one, other) / len(one) for one, other in zip(ours or (), theirs, strict=True)]
        row.series.setdefault(name, Series()).values.append(100 * statistics.mean(shares))


def _common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _rows_of_whole(weights: str, workloads: list[str], runners: list[Runner]) -> list[Row]:
    """What a whole life costs: time to the first token, and memory after all its workloads."""
    ready, memory = Row("whole", weights, "import + ready to first token", "s"), Row("whole", weights, "peak RSS", "GB")
    memory.measure += f" over {', '.join(each.upper() for each in workloads)}"
    for runner in runners:
        alive = runner.process is not None
        ready.series[runner.name] = Series([runner.ready] if alive else [], runner.refused)
        size = runner.process.peak_memory() if runner.process is not None else 0
        memory.series[runner.name] = Series([size / 1e9] if size else [], runner.refused)
    return [ready, memory]


def _pause(runners: Iterable[Runner]) -> None:
    for runner in runners:
        if runner.process is not None:
            runner.process.pause()
