"""Static batching, what continuous batching and paging are measured against: a small driver over the same backend.

Requests are taken in the order they came, B at a time. Prompts are padded to the longest of the batch and the padding
is computed; every row generates until the slowest is done, and only then does the next batch begin. Each row has one
contiguous stretch of the cache, long enough for any request of the workload. Kernels and sampling are the engine's.

It is kind to static batching in two ways: a server cannot know how long its requests will get, and reserves for the
longest it allows; and a row attends to its own tokens only, not to its padding.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pagefleet.backend import ForwardBatch
from pagefleet.sampler import NO_LOGPROBS, SamplingBatch
from pagefleet.table import blocks_for

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefleet.backend import Backend
    from pagefleet.bench.workloads import BenchRequest
    from pagefleet.llm import LLM


@dataclass(frozen=True, slots=True)
class BatchingResult:
    """One way of batching over one workload."""

    seconds: float
    num_computed: int  # tokens that went through the model: prompts, padding, and what was generated
    reserved: int  # KV token slots at the worst moment: held, so that nobody else could have them
    used: int  # of these, those that held a token of a request
    tokens: list[list[int]]  # generated for each request

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return sum(map(len, self.tokens)) / self.seconds


def run_static(llm: LLM, requests: Sequence[BenchRequest], batch_size: int) -> BatchingResult:
    """Generate greedily, `batch_size` requests at a time, in the cache of an `llm` that is at rest.

    Raises ValueError if the cache does not hold that many rows at full length.
    """
    engine = llm._engine.engine
    pool, block_size = engine.scheduler.pool, engine.scheduler.table.block_size
    longest = max(len(each.prompt) for each in requests) + max(each.num_output for each in requests)
    slot_blocks = blocks_for(longest, block_size)
    if batch_size * slot_blocks > pool.num_blocks:
        raise ValueError(
            f"{batch_size} rows of {longest} tokens need {batch_size * slot_blocks} KV blocks, the cache has "
            f"{pool.num_blocks}: raise kv_cache_memory_bytes or lower the batch size"
        )
    llm.reset_prefix_cache()  # its blocks are written over
    tokens: list[list[int]] = []
    computed = used = 0
    start = time.perf_counter()
    for first in range(0, len(requests), batch_size):
        batch = _Batch(engine.backend, requests[first : first + batch_size], slot_blocks, block_size)
        tokens += batch.run()
        computed += batch.num_computed
        used = max(used, batch.num_kept)
    seconds = time.perf_counter() - start
    return BatchingResult(seconds, computed, min(batch_size, len(requests)) * slot_blocks * block_size, used, tokens)


class _Batch:
    """One batch from its prompts to its slowest row's last token."""

    def __init__(self, backend: Backend, requests: Sequence[BenchRequest], slot_blocks: int, block_size: int) -> None:
        self.backend, self.requests, self.block_size = backend, requests, block_size
        rows = len(requests)
        self.tables = np.arange(rows * slot_blocks, dtype=np.int32).reshape(rows, slot_blocks)
        self.num_computed = self.num_kept = 0

    def run(self) -> list[list[int]]:
        """Tokens generated for each request."""
        rows = len(self.requests)
        lengths = np.array([len(each.prompt) for each in self.requests], np.int32)
        prompts = np.zeros((rows, lengths.max()), np.int32)
        for row, request in enumerate(self.requests):
            prompts[row, : len(request.prompt)] = request.prompt
        # padding follows the prompt, whose tokens do not see it; what is generated is written over it
        latest = self._step(prompts, np.zeros(rows, np.int32), lengths - 1)
        generated = [latest]
        for step in range(max(each.num_output for each in self.requests) - 1):
            latest = self._step(latest[:, None], lengths + np.int32(step), np.zeros(rows, np.int32))
            generated.append(latest)
        kept = [each.num_output for each in self.requests]
        self.num_kept = int(lengths.sum()) + sum(kept) - rows  # the last token of each is never run
        return [[int(step[row]) for step in generated[: kept[row]]] for row in range(rows)]

    def _step(
        self, tokens: NDArray[np.int32], first: NDArray[np.int32], wanted: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Run tokens [R, Q], each row's from position `first` [R] on: the token [R] after the `wanted`-th [R]."""
        rows, width = tokens.shape
        positions = first[:, None] + np.arange(width, dtype=np.int32)
        blocks = self.tables[np.arange(rows)[:, None], positions // self.block_size]
        starts = np.arange(rows + 1, dtype=np.int32) * np.int32(width)
        multiple = self.backend.traits.token_multiple
        batch = ForwardBatch(
            token_ids=_pad(tokens, multiple, 0),
            positions=_pad(positions, multiple, 0),
            slots=_pad(blocks * self.block_size + positions % self.block_size, multiple, -1),
            query_starts=starts,
            seq_lens=(positions[:, -1] + 1).astype(np.int32),
            block_tables=self.tables,
            logit_rows=_pad(starts[:-1] + wanted, multiple, 0),
        )
        self.num_computed += tokens.size
        return self.backend.sample(self.backend.forward(batch), _greedy(rows)).result().token_ids


def run_continuous(llm: LLM, requests: Sequence[BenchRequest]) -> BatchingResult:
    """The same by the engine as it is; the block pool is looked at after every step."""
    from pagefleet.sampling_params import SamplingParams

    text_engine = llm._engine
    pool, table = text_engine.engine.scheduler.pool, text_engine.engine.scheduler.table
    llm.reset_prefix_cache()
    start = time.perf_counter()
    generations = []
    for each in requests:
        params = SamplingParams(temperature=0, max_tokens=each.num_output, ignore_eos=True, detokenize=False)
        generations.append(text_engine.prepare({"prompt_token_ids": list(each.prompt)}, params))
    for generation in generations:
        text_engine.start(generation)
    held = used = 0
    while not all(generation.finished for generation in generations):
        text_engine.step()
        if pool.num_held > held:
            held = pool.num_held
            used = int(table.num_computed[[request is not None for request in table.requests]].sum())
    seconds = time.perf_counter() - start
    outputs = [generation.output() for generation in generations]
    computed = sum(len(output.prompt_token_ids) - output.num_cached_tokens for output in outputs)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    computed += sum(len(each) - 1 for each in tokens)
    return BatchingResult(seconds, computed, held * table.block_size, used, tokens)


def slot_bytes(llm: LLM) -> float | None:
    """Bytes of one token's keys and values in the cache; None if the backend cannot say."""
    engine = llm._engine.engine
    if not engine.backend.traits.exchanges_blocks:
        return None
    return float(engine.backend.export_blocks(np.zeros(1, np.int32)).nbytes / engine.scheduler.table.block_size)


def _greedy(rows: int) -> SamplingBatch:
    zeros = np.zeros(rows, np.float32)
    whole = np.zeros(rows, np.int32)
    return SamplingBatch(
        temperature=zeros,
        top_k=whole,
        top_p=zeros + 1,
        min_p=zeros,
        seeds=whole.astype(np.uint64),
        positions=whole,
        num_logprobs=whole + NO_LOGPROBS,
        rules={},
        prompt_targets=whole[:0],
        prompt_num_logprobs=whole[:0],
    )


def _pad(array: NDArray[Any], multiple: int, fill: int) -> NDArray[np.int32]:
    """In one dimension, its length a multiple of `multiple`."""
    flat = array.astype(np.int32).ravel()
    return np.concatenate([flat, np.full(-len(flat) % multiple, fill, np.int32)])
