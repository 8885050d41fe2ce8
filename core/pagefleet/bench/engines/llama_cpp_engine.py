"""llama.cpp in process, through cyllama's binding of its C API, with a plain loop of continuous batching.

No server, no HTTP: what is compared is engine against engine. A loop step gives every running sequence one token and
what is left of the batch to waiting prompts, as llama.cpp's own server does. A prefix that all prompts share is
computed once and copied to the others, which llama.cpp's server does not do by itself.
"""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

BATCH = 2048  # tokens of a step: llama.cpp's default
SLOTS = 32  # sequences at once
MIN_PREFIX = 32  # tokens worth sharing


class Sequence:
    """A request in a slot. Its `tokens` are what it has generated, `times` when."""

    def __init__(self, index: int, request: dict[str, Any]) -> None:
        self.index, self.prompt, self.num_output = index, request["prompt"], request["out"]
        self.slot, self.num_computed = -1, 0
        self.tokens: list[int] = []
        self.times: list[float] = []


class Engine:
    _api: Any
    _model: Any

    def load(self, model: str, dtype: str, threads: int | None = None, **settings: Any) -> dict[str, Any]:
        """`dtype` is that of the file: llama.cpp computes in what it finds. `settings`: fields of its context."""
        cyllama = importlib.import_module("cyllama")
        self._api = api = importlib.import_module("cyllama.llama.llama_cpp")
        api.disable_logging()
        api.llama_backend_init()
        self._model = api.LlamaModel(model, api.LlamaModelParams())
        self._threads, self._settings = threads or os.cpu_count() or 1, settings
        self._contexts: dict[tuple[int, int, bool], Any] = {}
        self._sampler = api.LlamaSampler(api.LlamaSamplerChainParams())
        self._sampler.add_greedy()
        self._batch = api.LlamaBatch(n_tokens=BATCH, embd=0, n_seq_max=1)
        return {"version": f"cyllama {cyllama.__version__}"}

    def run(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        sequences = [Sequence(i, request) for i, request in enumerate(requests)]
        prefix = _shared_prefix([each.prompt for each in sequences])
        longest = max(len(each.prompt) + each.num_output for each in sequences)
        context = self._context(min(len(sequences), SLOTS), longest, unified=prefix > 0)
        context.kv_cache_clear()
        start = time.perf_counter()
        if prefix:
            self._share(context, sequences[0].prompt[:prefix])
        self._loop(context, sequences, prefix)
        wall = time.perf_counter() - start
        return {
            "wall": wall,
            "ttft": [each.times[0] - start for each in sequences],
            "itl": [(each.times[-1] - each.times[0]) / max(1, len(each.times) - 1) for each in sequences],
            "tokens": [each.tokens for each in sequences],
        }

    def close(self) -> None:
        self._contexts.clear()

    def _context(self, slots: int, longest: int, unified: bool) -> Any:
        """A context with room for `slots` sequences of `longest` tokens, made once; not part of what is timed.

        Prefixes are shared in a unified cache, where sharing costs nothing; it was slower for sequences apart.
        """
        key = slots, longest, unified
        if key not in self._contexts:
            self._contexts.clear()
            params = self._api.LlamaContextParams()
            params.n_seq_max, params.kv_unified = slots + unified, unified  # the prefix is a sequence too
            params.n_ctx = params.n_seq_max * -(-longest // 256) * 256
            params.n_batch = BATCH
            params.n_threads = params.n_threads_batch = self._threads
            for name, value in self._settings.items():
                setattr(params, name, value)
            self._contexts[key] = self._api.LlamaContext(self._model, params)
        return self._contexts[key]

    def _share(self, context: Any, prefix: list[int]) -> None:
        """Compute the prefix in the slot after the last one."""
        self._batch.reset()
        slot = context.n_seq_max - 1
        for position, token in enumerate(prefix):
            self._batch.add(token, position, [slot], False)
        context.decode(self._batch)

    def _loop(self, context: Any, sequences: list[Sequence], prefix: int) -> None:
        waiting = list(reversed(sequences))
        running: list[Sequence] = []
        free = list(range(context.n_seq_max - (prefix > 0)))
        while waiting or running:
            while waiting and free:
                sequence = waiting.pop()
                sequence.slot = free.pop()
                if prefix:
                    context.memory_seq_cp(context.n_seq_max - 1, sequence.slot, 0, prefix)
                    sequence.num_computed = prefix
                running.append(sequence)
            self._step(context, running)
            for sequence in [each for each in running if len(each.tokens) == each.num_output]:
                running.remove(sequence)
                context.memory_seq_rm(sequence.slot, -1, -1)
                free.append(sequence.slot)

    def _step(self, context: Any, running: list[Sequence]) -> None:
        batch, budget, sampled = self._batch, BATCH, []
        batch.reset()
        for sequence in sorted(running, key=lambda each: not each.tokens):  # decodes first, then prompts
            new = sequence.tokens[-1:] or sequence.prompt[sequence.num_computed :][:budget]
            last = len(sequence.prompt) + len(sequence.tokens) - 1
            for token in new:
                batch.add(token, sequence.num_computed, [sequence.slot], sequence.num_computed == last)
                sequence.num_computed += 1
            budget -= len(new)
            if sequence.num_computed == last + 1:
                sampled.append((sequence, BATCH - budget - 1))
            if budget == 0:
                break
        context.decode(batch)
        for sequence, row in sampled:
            sequence.tokens.append(int(self._sampler.sample(context, row)))
        now = time.perf_counter()
        for sequence, _ in sampled:
            sequence.times.append(now)


def _shared_prefix(prompts: list[list[int]]) -> int:
    """Tokens that several prompts begin with, at least one being left to each; 0 if they are few."""
    if len(prompts) < 2:
        return 0
    length = min(map(len, prompts)) - 1
    while length and any(prompt[:length] != prompts[0][:length] for prompt in prompts):
        length -= 1
    return length if length >= MIN_PREFIX else 0
