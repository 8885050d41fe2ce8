"""The suite: engines compared, the machine's ceilings, what each op reaches of them, and static batching."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pagefleet.bench.ceilings import measure_ceilings
from pagefleet.bench.compare import PLAN, Plan, compare
from pagefleet.bench.peers import WEIGHTS, find_peer, ours
from pagefleet.bench.phases import WEIGHT_BYTES, ModelCost, timed_phases
from pagefleet.bench.report import (
    batching_table,
    ceilings_table,
    comparison_table,
    phases_table,
    roofline_table,
    step_summary,
)
from pagefleet.bench.roofline import Ceilings, Profile, profiled
from pagefleet.bench.static_batching import BatchingResult, run_continuous, run_static, slot_bytes
from pagefleet.bench.synthetic import Workload
from pagefleet.bench.workloads import TITLES, describe, load_workload
from pagefleet.plugins import Plugins

if TYPE_CHECKING:
    from rich.console import Console

    from pagefleet.backend import Traits
    from pagefleet.llm import LLM

STREAMS = (1, 32)  # requests that decode together while ops are timed
PROFILED_TOKENS = 128, 48  # in and out, of each
SECTIONS = ("compare", "roofline", "static")


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """What `pagefleet bench` was asked for. Empty `workloads` and `weights`: all."""

    model: str
    sections: tuple[str, ...] = SECTIONS
    workloads: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    against: str | None = None
    peer_python: str | None = None
    repeat: int = 3
    threads: int | None = None
    static_batch: int = 32
    device: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, given, known in (("workload", self.workloads, TITLES), ("dtype", self.weights, WEIGHTS)):
            for name in given:
                if name not in known:
                    raise ValueError(f"no {what} is called {name!r} here; there are {', '.join(known)}")


class Suite:
    """Runs the sections one after another, each printed when it is there. `found` is all of it, for machines."""

    def __init__(self, options: SuiteOptions, console: Console, progress: Callable[[str], None]) -> None:
        self.options, self.console, self.progress = options, console, progress
        self.found: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        sections = self.options.sections
        if "compare" in sections:
            self._compare()
        if "roofline" in sections or "static" in sections:
            weights = next((each for each in self.options.weights if each != "q8_0"), None) or self._dtype()
            with self._load(weights) as llm:
                if "roofline" in sections:
                    self._roofline(llm, weights)
                if "static" in sections:
                    self._static(llm, weights)
        return self.found

    def _compare(self) -> None:
        options = self.options
        contenders = [ours(options.device, options.settings)]
        if options.against is not None:
            contenders.append(find_peer(options.against, options.peer_python, options.threads or usable_cores()))
        rows = compare(contenders, plan(options), self.progress)
        self.console.print(comparison_table(rows, [each.name for each in contenders]))
        self.found["compare"] = [asdict(row) for row in rows]

    def _load(self, weights: str) -> LLM:
        from pagefleet.llm import LLM

        self.progress(f"{weights}: loading")
        settings = ours(self.options.device, self.options.settings).settings
        return LLM(self.options.model, dtype=weights, **settings)

    def _dtype(self) -> str:
        """What is taken unless something is asked for: the usual one, if the device has it, or its own first."""
        dtypes = Plugins().select(self.options.device)[0].traits.dtypes
        return PLAN["w2"][0] if PLAN["w2"][0] in dtypes else dtypes[0]

    def _roofline(self, llm: LLM, weights: str) -> None:
        self.progress("measuring the machine's ceilings")
        backend = llm._engine.engine.backend
        ceilings, found = measure_ceilings(str(getattr(backend, "device", "")))
        self.console.print(ceilings_table(found))
        self.found["ceilings"], self.found["roofline"] = found, {}
        self._phases(llm, weights, ceilings)
        for num_streams in STREAMS:
            self.progress(f"timing the ops of {num_streams} streams")
            try:
                whole, split = (profile_streams(llm, num_streams, ceilings, split=split) for split in (False, True))
            except ValueError as error:
                self.console.print(f"no table of ops: {error}")
                return
            input_len, output_len = PROFILED_TOKENS
            title = f"Ops one by one, {weights}: {num_streams} x ({input_len} tokens in, {output_len} out)"
            self.console.print(roofline_table(title, split))
            self.console.print(step_summary(whole, num_streams), highlight=False)
            self.found["roofline"][num_streams] = {
                "seconds": whole.seconds,
                "host_share": whole.host_share(num_streams),
                "ops": {name: asdict(cost) for name, cost in whole.ops.items()},
                "split_seconds": split.seconds,
                "split_ops": {name: asdict(cost) for name, cost in split.ops.items()},
            }

    def _phases(self, llm: LLM, weights: str, ceilings: Ceilings) -> None:
        """Of any backend: what its steps had to move and compute by the model, beside what they took."""
        engine = llm._engine
        traits = engine.engine.backend.traits
        computed = weights if weights in traits.dtypes else traits.dtypes[0]
        kept = computed if llm.config.kv_cache_dtype == "auto" else llm.config.kv_cache_dtype
        weight_bytes = WEIGHT_BYTES.get(weights) or stored_bytes(self.options.model, traits)
        cost = ModelCost(engine.spec, weight_bytes, WEIGHT_BYTES[kept])
        self.found["phases"] = {}
        for num_streams in STREAMS:
            self.progress(f"timing the steps of {num_streams} streams")
            run = streams(llm, num_streams)
            with timed_phases(engine.engine.backend, cost, ceilings, computed) as phases:
                run()
            input_len, output_len = PROFILED_TOKENS
            title = f"Steps, {weights}: {num_streams} x ({input_len} tokens in, {output_len} out)"
            self.console.print(phases_table(title, phases))
            self.found["phases"][num_streams] = {name: asdict(phase) for name, phase in phases.items()}

    def _static(self, llm: LLM, weights: str) -> None:
        requests, size = load_workload("w2", llm.get_tokenizer().vocab_size), self.options.static_batch
        runs: dict[str, Callable[[], BatchingResult]] = {
            f"static, {size} at a time": lambda: run_static(llm, requests, size),
            "continuous, paged": lambda: run_continuous(llm, requests),
        }
        results: dict[str, BatchingResult] = {}
        for name, run in runs.items():
            self.progress(f"W2, {name}")
            results[name] = run()
        self.console.print(batching_table(f"W2, {weights}: {describe(requests)}", results, slot_bytes(llm)))
        bytes_each = slot_bytes(llm)
        self.found["batching"] = {
            name: {**asdict(result), "tokens": None, "slot_bytes": bytes_each} for name, result in results.items()
        }


def plan(options: SuiteOptions) -> Plan:
    """The workloads and weights that are wanted, ids within the model's vocabulary."""
    from pagefleet.weights import open_checkpoint

    names = options.workloads or tuple(TITLES)
    with open_checkpoint(options.model) as checkpoint:
        vocab_size = checkpoint.spec.vocab_size
    return Plan(
        options.model,
        {name: load_workload(name, vocab_size) for name in names},
        {name: options.weights or PLAN[name] for name in names},
        options.repeat,
        options.threads or usable_cores(),
    )


def usable_cores() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def stored_bytes(model: str, traits: Traits) -> float:
    """Bytes of a parameter of a matrix as it is kept: in the file's own bits, or in the device's first dtype."""
    from pagefleet.weights import open_checkpoint

    with open_checkpoint(model) as checkpoint:
        matrices = [checkpoint.read(name) for name, each in checkpoint.spec.tensors.items() if len(each.shape) > 1]
        plain = WEIGHT_BYTES[traits.dtypes[0]]
        sizes = [(len(m.data) if m.dtype in traits.weight_formats else plain * np.prod(m.shape)) for m in matrices]
        return float(sum(sizes)) / sum(int(np.prod(m.shape)) for m in matrices)


def profile_streams(llm: LLM, num_streams: int, ceilings: Ceilings | None, *, split: bool) -> Profile:
    """Time the ops while requests of equal length run together."""
    run = streams(llm, num_streams)
    with profiled(llm._engine.engine.backend, ceilings, split=split) as profile:
        run()
    return profile


def streams(llm: LLM, num_streams: int) -> Callable[[], Any]:
    """A function that runs requests of equal length together; everything has been used once, nothing is cached."""
    from pagefleet.sampling_params import SamplingParams

    input_len, output_len = PROFILED_TOKENS
    vocab_size = llm.get_tokenizer().vocab_size
    prompts = [{"prompt_token_ids": ids} for ids in Workload(num_streams, input_len, output_len).prompts(vocab_size)]
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
    llm.reset_prefix_cache()
    return partial(llm.generate, prompts, params, use_tqdm=False)
