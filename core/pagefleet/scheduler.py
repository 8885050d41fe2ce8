"""Scheduler: which requests run in the next step, and with how many tokens.

There are no phases. A request has tokens whose keys and values are not computed yet, that is all: a whole prompt,
the rest of one, or the one token sampled last. Each step gives every running request one token and what is left
of the budget to the most urgent; then it admits waiting requests. A request that finds no block preempts the
least urgent one, whose tokens are computed again later. The scheduler knows nothing about devices or text.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from pagefleet.blocks import BlockPool, hash_blocks, hash_root
from pagefleet.table import RunningTable, StepPlan, blocks_for

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefleet.request import FinishReason, Request
    from pagefleet.sampler import SampledTokens

Urgency = tuple[float, int, int]
"""Lowest first: when it is due, the family it belongs to, its own number. A family comes before all that came later,
so that the sequences of two beam searches cannot wait for each other's blocks."""


def split_budget(budget: int, wanted: NDArray[np.int32]) -> NDArray[np.int32]:
    """Share `budget` tokens among requests that want `wanted` [R]: one each, then the rest in order. [R]"""
    first = np.minimum(wanted, 1)
    rest = wanted - first
    left = budget - first.sum() - (np.cumsum(rest) - rest)
    grants: NDArray[np.int32] = (first + np.clip(left, 0, rest)).astype(np.int32)
    return grants


class Scheduler:
    """Continuous batching over a running table and a block pool."""

    def __init__(
        self,
        table: RunningTable,
        pool: BlockPool,
        *,
        max_num_batched_tokens: int,
        prefix_caching: bool = True,
        copies_blocks: bool = True,
        ageing: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_num_batched_tokens < table.num_rows:
            raise ValueError(f"max_num_batched_tokens={max_num_batched_tokens} is below max_num_seqs={table.num_rows}")
        self.table, self.pool = table, pool
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefix_caching, self.copies_blocks = prefix_caching, copies_blocks
        self.ageing, self.clock = min(ageing, 1e9), clock  # never is 30 years: 0 times infinity is not a number
        self._waiting: list[tuple[Urgency, Request]] = []  # a heap, most urgent first
        self._urgency: dict[int, Urgency] = {}  # running row -> its key in that heap
        self._running = np.zeros(0, np.int32)  # rows, most urgent first
        self._sequence = count()
        self._num_planned = 0  # steps planned and not committed

    # -- requests come and go --------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. One of priority p is overtaken by one of p - 1 for `ageing` seconds, then no more."""
        heapq.heappush(self._waiting, (self._urgency_of(request), request))

    def fork(self, parent: Request, child: Request) -> bool:
        """Run `child`, whose tokens are the parent's, on the parent's blocks; a later write copies them first.

        Where that cannot be (no row, or a device that copies no blocks) the child is queued instead, to be computed
        from its tokens; then False.
        """
        table = self.table
        child.family = parent.family
        if parent.row < 0 or not table.num_free_rows or not self.copies_blocks:
            self.add(child)
            return False
        blocks = table.block_ids[parent.row, : table.num_blocks[parent.row]]
        self.pool.share(blocks)
        child.block_hashes = list(parent.block_hashes)
        child.metrics.first_scheduled_time = parent.metrics.first_scheduled_time
        row = table.add(child, blocks, int(table.num_computed[parent.row]))
        self._urgency[row] = self._urgency_of(child)
        self._sort_running()
        return True

    def append(self, request: Request, token_id: int) -> None:
        """Give a request the next token, chosen outside (by a beam search)."""
        table, row = self.table, request.row
        if row < 0:
            request.output_token_ids.append(token_id)
        else:
            table.token_ids[row, table.num_known[row]] = token_id
            table.num_known[row] += 1
            table.num_tokens[row] += 1

    def sync(self, request: Request) -> None:
        """Bring the request's output up to what is known."""
        if request.row >= 0:
            self.table.sync(request)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a request now, wherever it is: its blocks are free for the next step."""
        if not request.finished:
            request.finish_reason, request.stop_reason = reason, stop_reason
            if request.row >= 0:
                self._leave(request.row)
            for sibling in request.siblings:  # not forked off yet: they go on without it
                self.add(sibling)
            request.siblings = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return sum(not request.finished for _, request in self._waiting)

    # -- the next step ---------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None if no request has a token to run (they wait for one, or there are none)."""
        rows, grants, copies = self._run()
        rows, grants = self._admit(rows, grants)
        while not len(rows) and self._stuck():
            self._preempt(int(self._running[-1]))
            rows, grants = self._admit(rows, grants)
        return self._plan(rows, grants, copies) if len(rows) else None

    def _run(self) -> tuple[NDArray[np.int32], NDArray[np.int32], list[tuple[int, int]]]:
        """Tokens and blocks for the running requests; while blocks are short, the least urgent one goes."""
        table = self.table
        while True:
            rows = self._running
            computed = table.num_computed[rows]
            # the last token a request may have is never run: nothing is sampled after it
            wanted = np.minimum(table.num_tokens[rows], table.length_limit[rows] - 1) - computed
            grants = split_budget(self.max_num_batched_tokens, np.minimum(wanted, table.max_grant[rows]))
            active = grants > 0
            rows, grants, computed = rows[active], grants[active], computed[active]
            growth = blocks_for(computed + grants, table.block_size) - table.num_blocks[rows]
            shared = self._writes_shared_block(rows, computed)
            if growth.sum() + shared.sum() <= self.pool.num_available:
                break
            self._preempt(int(self._running[-1]))
        copies = [copy for row in rows[shared].tolist() if (copy := self._copy_on_write(row))]
        table.append_blocks(rows, growth, self.pool.allocate(int(growth.sum())))
        table.num_computed[rows] += grants
        self._register_blocks(rows)
        return rows, grants, copies

    def _admit(self, rows: NDArray[np.int32], grants: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The step with the waiting requests that fit added, most urgent first."""
        budget = self.max_num_batched_tokens - int(grants.sum())
        new_rows: list[int] = []
        new_grants: list[int] = []
        while self._waiting and budget > 0 and self.table.num_free_rows:
            urgency, request = self._waiting[0]
            if not request.finished:
                grant = self._start(request, budget, len(rows) + len(new_rows))
                if grant == 0:
                    break
                new_rows.append(request.row)
                new_grants.append(grant)
                budget -= grant
                self._urgency[request.row] = urgency
            heapq.heappop(self._waiting)
        if not new_rows:
            return rows, grants
        self._sort_running()
        return np.append(rows, np.array(new_rows, np.int32)), np.append(grants, np.array(new_grants, np.int32))

    def _start(self, request: Request, budget: int, num_rows: int) -> int:
        """Give a waiting request a row and its first blocks, beside `num_rows` in the step.

        Returns the tokens it may run; 0: it does not fit.
        """
        table, pool, tokens = self.table, self.pool, request.token_ids
        hits = self._cached_prefix(request, tokens)
        computed = len(hits) * table.block_size
        grant = min(len(tokens) - computed, budget, request.max_grant)
        wanted = blocks_for(computed + grant, table.block_size) - len(hits)
        pool.share(hits)
        # leave each request of the step room for its next block, or this one would be preempted at once
        if wanted + num_rows > pool.num_available:
            pool.release(hits)
            return 0
        row = table.add(request, np.append(hits, pool.allocate(wanted)), computed)
        table.num_computed[row] += grant
        self._register_blocks(np.array([row]))  # the next to start, in this very step, shares them
        metrics = request.metrics
        if metrics.first_scheduled_time == 0:
            metrics.first_scheduled_time, metrics.num_cached_tokens = self.clock(), computed
        return grant

    def _plan(self, rows: NDArray[np.int32], grants: NDArray[np.int32], copies: list[tuple[int, int]]) -> StepPlan:
        """Write the step's samples into the table, and describe it."""
        table = self.table
        computed = table.num_computed[rows] - grants
        queries = np.flatnonzero(table.num_computed[rows] == table.num_tokens[rows]).astype(np.int32)
        sample_rows, queries = self._fork_siblings(rows[queries], queries)
        positions, pending = table.num_tokens[sample_rows], table.pending[rows]
        table.pending[sample_rows] = np.arange(len(sample_rows))
        table.num_tokens[sample_rows] += ~table.chosen_outside[sample_rows]
        self._num_planned += 1
        pairs = np.array(copies, np.int32).reshape(-1, 2)
        scored = self._scored_prompts(rows, computed)
        epochs = table.epochs[sample_rows]
        return StepPlan(rows, computed, grants, pending, pairs, sample_rows, queries, positions, epochs, scored)

    def _scored_prompts(self, rows: NDArray[np.int32], computed: NDArray[np.int32]) -> list[tuple[Request, int, int]]:
        scored = []
        for i in np.flatnonzero(self.table.scores_prompt[rows]).tolist():
            request = self.table.request(int(rows[i]))
            end = min(int(self.table.num_computed[rows[i]]), len(request.prompt_token_ids) - 1)
            if end > computed[i]:
                scored.append((request, int(computed[i]), end))
        return scored

    def _fork_siblings(
        self, sample_rows: NDArray[np.int32], queries: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """A prompt that is done forks its n - 1 siblings: all draw their first token from the same logits."""
        rows, sources = sample_rows.tolist(), queries.tolist()
        for i in np.flatnonzero(self.table.has_siblings[sample_rows]).tolist():
            parent = self.table.request(rows[i])
            self.table.has_siblings[rows[i]] = False
            for child in parent.siblings:
                if not child.finished and self.fork(parent, child):
                    rows.append(child.row)
                    sources.append(sources[i])
            parent.siblings = []
        return np.array(rows, np.int32), np.array(sources, np.int32)

    def _stuck(self) -> bool:
        """Nobody can run and no result is under way, yet somebody waits for the blocks of those who hold them."""
        return self._num_planned == 0 and len(self._running) > 0 and self.num_waiting > 0

    # -- the step's results ----------------------------------------------------------------------------

    def commit(self, plan: StepPlan, sampled: SampledTokens) -> list[Request]:
        """Take in the step's tokens. Returns the requests that finished, and those that somebody watches.

        Tokens of a request that finished or was preempted meanwhile are dropped: a draw depends on the request's
        seed and position only, so one that is computed again draws the same token.
        """
        self._num_planned -= 1
        table, rows = self.table, plan.sample_rows
        updated = []
        for i, error in sampled.errors.items():
            if self._awaited(plan, i):
                updated.append(self.fail(table.request(int(rows[i])), error))
        scores = iter(sampled.prompt_logprobs)
        for request, first, end in plan.scored:
            known = len(request.prompt_logprobs)  # beyond `first`, if it was preempted and is computed again
            request.prompt_logprobs += list(islice(scores, end - first))[known - first :]
        for i, row_logprobs in sampled.logprobs.items():
            if self._awaited(plan, i):  # asked anew for each: a beam search that moves on changes other rows
                table.request(int(rows[i])).receive(self, row_logprobs)
        live = self._awaited(plan, slice(None)) & ~table.chosen_outside[rows]
        return updated + self._append_tokens(rows[live], sampled.token_ids[live])

    def _awaited(self, plan: StepPlan, which: int | slice) -> Any:
        """Whether the plan's sample (bool), or each of several [S], is the token its row waits for."""
        rows = plan.sample_rows[which]
        same = self.table.epochs[rows] == plan.sample_epochs[which]
        return same & (self.table.num_known[rows] == plan.sample_positions[which])

    def fail(self, request: Request, error: Exception) -> Request:
        """End a request that cannot go on; the others do not notice."""
        request.error = error
        self.finish(request, "error")
        if request.beam is not None:
            request.beam.fail(self, error)
        return request

    def discard(self, plan: StepPlan, error: Exception) -> list[Request]:
        """The step failed on the device: end its requests, and trust nothing that the cache holds."""
        self._num_planned -= 1
        requests = [self.table.requests[row] for row in {*plan.rows.tolist(), *plan.sample_rows.tolist()}]
        failed = [self.fail(request, error) for request in requests if request is not None]
        self.pool.reset_cache()
        return failed

    def reset(self, requests: list[Request], error: Exception) -> None:
        """End all `requests`, and be as if new: nothing runs, waits or is cached."""
        for running in filter(None, self.table.requests):
            running.row = -1
        for request in requests:
            request.error, request.finish_reason, request.siblings = error, "error", []
        self.table = RunningTable(self.table.num_rows, self.table.max_len, self.table.block_size)
        self.pool = BlockPool(self.pool.num_blocks)
        self._waiting, self._urgency, self._running, self._num_planned = [], {}, np.zeros(0, np.int32), 0
        for request in requests:
            if request.beam is not None:
                request.beam.fail(self, error)

    def _append_tokens(self, rows: NDArray[np.int32], tokens: NDArray[np.int32]) -> list[Request]:
        table, now = self.table, self.clock()
        known = table.num_known[rows]
        table.token_ids[rows, known] = tokens
        table.num_known[rows] = known + 1
        table.first_token_time[rows[table.first_token_time[rows] == 0]] = now
        table.last_token_time[rows] = now
        stopped = (table.stop_ids[rows] == tokens[:, None]).any(1)
        full = known + 1 >= table.length_limit[rows]
        updated = []
        for i in np.flatnonzero(stopped | full | table.watched[rows]).tolist():
            request = table.request(int(rows[i]))
            table.sync(request)
            if stopped[i]:
                token_id = int(tokens[i])
                self.finish(request, "stop", token_id if token_id in request.params.stop_token_ids else None)
            elif full[i]:
                self.finish(request, "length")
            updated.append(request)
        return updated

    # -- rows and blocks -------------------------------------------------------------------------------

    def _urgency_of(self, request: Request) -> Urgency:
        if request.family < 0:
            request.family = next(self._sequence)
        return request.priority * self.ageing + request.metrics.arrival_time, request.family, next(self._sequence)

    def _sort_running(self) -> None:
        self._running = np.array(sorted(self._urgency, key=self._urgency.__getitem__), np.int32)

    def _leave(self, row: int) -> None:
        self._register_blocks(np.array([row]))
        self.pool.release(self.table.remove(row))
        del self._urgency[row]
        self._running = self._running[self._running != row]

    def _preempt(self, row: int) -> None:
        """Take a running request's blocks; it waits where its urgency puts it, to be computed again."""
        request, urgency = self.table.request(row), self._urgency[row]
        self._leave(row)
        request.metrics.num_preemptions += 1
        heapq.heappush(self._waiting, (urgency, request))

    def _writes_shared_block(self, rows: NDArray[np.int32], computed: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which rows [R] would write into a block that others hold too."""
        table = self.table
        partial = computed % table.block_size != 0
        last_blocks = table.block_ids[rows, np.where(partial, computed // table.block_size, 0)]
        shared: NDArray[np.bool_] = partial & (self.pool.ref_counts[last_blocks] > 1)
        return shared

    def _copy_on_write(self, row: int) -> tuple[int, int] | None:
        """Give the row its own copy of the block it writes next, unless the other holders have theirs by now."""
        index = self.table.num_computed[row] // self.table.block_size
        source = self.table.block_ids[row, index : index + 1]
        if self.pool.ref_counts[source] == 1:
            return None
        copy = self.pool.allocate(1)
        pair = int(source[0]), int(copy[0])
        self.pool.release(source)
        self.table.block_ids[row, index] = copy[0]
        return pair

    def _cached_prefix(self, request: Request, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Blocks [k] that hold the request's first tokens already, at least one token being left to run."""
        if not self.prefix_caching or request.params.prompt_logprobs is not None:
            return np.zeros(0, np.int32)
        num_blocks = (len(tokens) - 1) // self.table.block_size
        self._extend_hashes(request, tokens, num_blocks)
        return self.pool.match(request.block_hashes[:num_blocks])

    def _register_blocks(self, rows: NDArray[np.int32]) -> None:
        """Let others find the rows' full blocks whose tokens are known."""
        if not self.prefix_caching:
            return
        table = self.table
        full = np.minimum(table.num_computed[rows], table.num_known[rows]) // table.block_size
        for i in np.flatnonzero(full > table.num_hashed[rows]).tolist():
            row, end = int(rows[i]), int(full[i])
            request = table.request(row)
            self._extend_hashes(request, table.token_ids[row], end)
            for block in range(table.num_hashed[row], end):
                self.pool.register(int(table.block_ids[row, block]), request.block_hashes[block])
            table.num_hashed[row] = end

    def _extend_hashes(self, request: Request, tokens: NDArray[np.int32], num_blocks: int) -> None:
        hashes, size = request.block_hashes, self.table.block_size
        parent = hashes[-1] if hashes else hash_root(request.salt)
        hashes += hash_blocks(tokens[len(hashes) * size : num_blocks * size], size, parent)
