"""A backend that remembers tokens and nothing else, so that paging mistakes become wrong tokens.

A slot of its cache holds the token and position written there. The logits of a token are a hash of all tokens that
its row reads back through the block table, so the right answer is known without the engine: `expected_token`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np

from pagefleet.backend import Backend, ForwardBatch, KVLayout, Traits
from pagefleet.beam import BeamSearch
from pagefleet.blocks import BlockPool
from pagefleet.engine import Engine
from pagefleet.request import Request, RequestMetrics
from pagefleet.sampling_params import BeamSearchParams, SamplingParams
from pagefleet.scheduler import Scheduler
from pagefleet.table import RunningTable

VOCAB = 97
EMPTY = -7


def history_logits(tokens: np.ndarray) -> np.ndarray:
    """Logits [VOCAB] after a history of tokens [n]: noise seeded by all of it."""
    seed = int(np.bitwise_xor.reduce((tokens.astype(np.int64) + 1) * (2 * np.arange(len(tokens)) + 1) * 2654435761))
    return np.random.default_rng(abs(seed)).standard_normal(VOCAB).astype(np.float32) * 3


def expected_token(tokens: list[int]) -> int:
    """What greedy decoding draws after `tokens`."""
    return int(history_logits(np.array(tokens)).argmax())


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    """What greedy decoding generates after `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(expected_token(tokens))
    return tokens[len(prompt) :]


class RecallBackend(Backend):
    """Keeps tokens in slots; raises when a row reads a slot that was not written for it."""

    def __init__(self, traits: Traits = Traits(copies_blocks=True)) -> None:  # noqa: B008
        self.traits = traits
        self.fail_next = False
        self.num_tokens_run = 0

    def load(self, model, weights, dtype):  # type: ignore[no-untyped-def]
        pass

    def allocate_kv(self, layout: KVLayout) -> None:
        self.block_size = layout.block_size
        self.tokens = np.full(layout.num_blocks * layout.block_size, EMPTY, np.int64)
        self.positions = np.full_like(self.tokens, EMPTY)

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is on fire")
        assert (batch.token_ids >= 0).all(), "references must be resolved for this backend"
        written = batch.slots >= 0
        slots = batch.slots[written]
        assert len(np.unique(slots)) == len(slots), "two tokens of a step write one slot"
        self.tokens[slots] = batch.token_ids[written]
        self.positions[slots] = batch.positions[written]
        self.num_tokens_run += int(written.sum())
        row_of_token = np.repeat(np.arange(batch.num_rows), np.diff(batch.query_starts))
        logits = np.zeros((len(batch.logit_rows), VOCAB), np.float32)
        for i, token in enumerate(batch.logit_rows.tolist()):
            if token < len(row_of_token):
                logits[i] = self._logits(batch, int(row_of_token[token]), int(batch.positions[token]) + 1)
        return logits

    def _logits(self, batch: ForwardBatch, row: int, length: int) -> np.ndarray:
        positions = np.arange(length)
        slots = batch.block_tables[row][positions // self.block_size] * self.block_size + positions % self.block_size
        assert (self.positions[slots] == positions).all(), "a row reads a slot that does not hold its token"
        return history_logits(self.tokens[slots])

    def to_host(self, logits: np.ndarray) -> np.ndarray:
        return logits

    def copy_blocks(self, pairs: np.ndarray) -> None:
        for array in (self.tokens, self.positions):
            blocks = array.reshape(-1, self.block_size)
            blocks[pairs[:, 1]] = blocks[pairs[:, 0]]


# -- an engine around it ---------------------------------------------------------------------------------

COPIES = Traits(copies_blocks=True)


def make_engine(
    num_blocks: int = 1000,
    block_size: int = 4,
    num_rows: int = 8,
    budget: int = 32,
    max_len: int = 200,
    *,
    pipeline: bool = True,
    traits: Traits = COPIES,
    backend: RecallBackend | None = None,
    **options: Any,  # of the Scheduler
) -> Engine:
    backend = RecallBackend(traits) if backend is None else backend
    backend.allocate_kv(KVLayout(1, num_blocks, block_size, 1, 1, "float32"))
    table = RunningTable(num_rows, max_len, block_size)
    options.setdefault("copies_blocks", backend.traits.copies_blocks)
    return Engine(
        backend,
        Scheduler(table, BlockPool(num_blocks), max_num_batched_tokens=budget, **options),
        pipeline=pipeline,
    )


def make_request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    n: int = 1,
    arrival: float = 0.0,
    prompt_logprobs: int | None = None,
    **fields: Any,
) -> Request:
    """A greedy request, and its n - 1 siblings."""

    def make(name: str) -> Request:
        return Request(
            request_id=name,
            prompt_token_ids=np.array(prompt, np.int32),
            params=SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs),
            metrics=RequestMetrics(arrival),
            seed=1,
            length_limit=len(prompt) + max_tokens,
            **fields,
        )

    request = make(request_id)
    request.siblings = [make(f"{request_id}/{i}") for i in range(1, n)]
    return request


def make_beam_search(
    request_id: str, prompt: Sequence[int], params: BeamSearchParams, eos_ids: tuple[int, ...] = (), **fields: Any
) -> Request:
    """The root request of a beam search; the search is its `beam`."""
    names = count(1)
    root = make_request(request_id, prompt, params.max_tokens, **fields)

    def child(parent: Request) -> Request:
        return root.child(f"{request_id}/{next(names)}", parent.output_token_ids)

    root.beam = BeamSearch(params, eos_ids, child)
    root.beam.live.append(root)
    return root


def run_to_end(engine: Engine, max_steps: int = 2_000) -> int:
    """Step until no request is left, ending the beam searches that have their answer. Returns the steps taken."""
    for step in range(max_steps):
        for request in list(engine.requests.values()):
            if request.beam is not None and not request.beam.live:
                engine.finish(request, "stop")
        if not engine.has_work:
            return step
        engine.step()
        check_blocks(engine.scheduler)
    raise AssertionError(f"{len(engine.requests)} requests are not done after {max_steps} steps")


def expected_output(request: Request) -> list[int]:
    """What the request has to generate: up to its length limit, or its first stop token."""
    prompt = request.prompt_token_ids.tolist()
    output: list[int] = []
    while len(prompt) + len(output) < request.length_limit and not set(output[-1:]) & set(request.stop_ids):
        output.append(expected_token(prompt + output))
    return output


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64, over [VOCAB]."""
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def expected_beams(
    prompt: Sequence[int], params: BeamSearchParams, eos_ids: tuple[int, ...]
) -> list[tuple[list[int], float, str]]:
    """Beam search by the book, with no way out but the last token: (tokens, score, finish reason), best first."""
    width, eos = params.beam_width, set() if params.ignore_eos else set(eos_ids)
    live: list[tuple[list[int], float]] = [([], 0.0)]
    finished = []

    def finish(tokens: list[int], total: float, reason: str) -> None:
        length = len(prompt) + len(tokens) - (reason == "stop")
        finished.append((tokens, total / length**params.length_penalty, reason))

    for _ in range(params.max_tokens):
        going = []
        for tokens, total in live:
            logprobs = log_softmax(history_logits(np.array([*prompt, *tokens])))
            for token in np.argsort(-logprobs)[: 2 * width].tolist():
                if token in eos:
                    finish([*tokens, token], total + logprobs[token], "stop")
                else:
                    going.append(([*tokens, token], total + logprobs[token]))
        live = sorted(going, key=lambda beam: -beam[1])[:width]
        if params.early_stopping and len(finished) >= width and len(live[0][0]) < params.max_tokens:
            break
    else:
        for tokens, total in live:
            finish(tokens, total, "length")
    return sorted(finished, key=lambda beam: -beam[1])[:width]


def check_blocks(scheduler: Scheduler) -> None:
    """Every block is in one place, and held as often as rows of the running table name it."""
    pool, table = scheduler.pool, scheduler.table
    named = np.zeros(pool.num_blocks, np.int32)
    for row, request in enumerate(table.requests):
        if request is None:
            continue
        assert request.row == row
        assert not request.finished
        blocks = table.block_ids[row, : table.num_blocks[row]]
        assert len(np.unique(blocks)) == len(blocks), "a block twice in a row"
        assert len(blocks) == -(-table.num_computed[row] // table.block_size), "more blocks than its tokens need"
        assert table.num_known[row] <= table.num_tokens[row] <= table.num_known[row] + 1
        assert table.num_computed[row] <= table.num_tokens[row]
        named[blocks] += 1
    np.testing.assert_array_equal(pool.ref_counts, named)
    free, cached = pool._free[: pool._num_free].tolist(), list(pool._cached)
    assert sorted(free + cached + np.flatnonzero(named).tolist()) == list(range(pool.num_blocks))
    assert pool.num_available == len(free) + len(cached)
    assert not set(free) & set(pool._hash_of), "a free block is known by hash"
    assert {block: known for known, block in pool._block_of.items()} == pool._hash_of
    assert sorted(scheduler._running.tolist()) == [r for r, request in enumerate(table.requests) if request is not None]


def check_idle(engine: Engine) -> None:
    """All is done: nothing is held, nothing waits."""
    check_blocks(engine.scheduler)
    assert engine.scheduler.pool.num_held == 0
    assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0
    assert not engine.has_work
