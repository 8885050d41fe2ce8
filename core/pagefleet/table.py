"""RunningTable: the running requests as arrays, one row each, so that a step costs no Python per request.

A StepPlan says what a step does with its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pagefleet.request import Request

Count = TypeVar("Count", int, NDArray[np.int32])

NO_TOKEN = -1  # fills unused entries of stop_ids: no token has this id


def blocks_for(num_tokens: Count, block_size: int) -> Count:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class RunningTable:
    """`num_rows` rows for requests of at most `max_len` tokens. A row is valid while `requests[row]` is set.

    Of a row's `num_tokens` tokens the first `num_known` are in `token_ids`; at most one more is still being
    sampled. Keys and values of the first `num_computed` are in its blocks, or will be by the end of the step that
    was planned last.
    """

    def __init__(self, num_rows: int, max_len: int, block_size: int) -> None:
        self.num_rows, self.max_len, self.block_size = num_rows, max_len, block_size
        self.requests: list[Request | None] = [None] * num_rows
        self.epochs = np.zeros(num_rows, np.int64)  # how often the row changed hands: tells late results apart

        def column(dtype: type = np.int32) -> NDArray[Any]:
            return np.zeros(num_rows, dtype)

        self.token_ids = np.zeros((num_rows, max_len), np.int32)
        self.block_ids = np.zeros((num_rows, blocks_for(max_len, block_size)), np.int32)
        self.stop_ids = np.full((num_rows, 1), NO_TOKEN, np.int32)  # widened when a request needs more
        self.num_blocks, self.num_hashed = column(), column()  # blocks held; of these, registered by hash
        self.num_tokens, self.num_known, self.num_computed = column(), column(), column()
        self.length_limit = column()  # num_tokens at which generation ends
        self.max_grant = column()  # tokens it may be given in one step
        self.pending = column()  # which sample of the last planned step is its token, if one is on its way
        self.watched = column(np.bool_)  # somebody wants to see the request after every token
        self.chosen_outside = column(np.bool_)  # its next token is chosen by a beam search, not by the sampler
        self.has_siblings = column(np.bool_)  # requests to fork off once its prompt is done
        self.temperature, self.top_p, self.min_p = column(np.float32), column(np.float32), column(np.float32)
        self.top_k, self.num_logprobs = column(), column()
        self.seeds = column(np.uint64)
        self.has_rules = column(np.bool_)
        self.scores_prompt = column(np.bool_)  # wants log-probabilities of its prompt
        self.first_token_time, self.last_token_time = column(np.float64), column(np.float64)
        self._free_rows = list(range(num_rows))[::-1]

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def add(self, request: Request, blocks: NDArray[np.int32], num_computed: int) -> int:
        """Give the request a row; `blocks` hold its first `num_computed` tokens. Returns the row."""
        row = self._free_rows.pop()
        tokens, params = request.token_ids, request.params
        self.requests[row] = request
        request.row = row
        self.token_ids[row, : len(tokens)] = tokens
        self.num_tokens[row] = self.num_known[row] = len(tokens)
        self.num_computed[row] = num_computed
        self.num_hashed[row] = num_computed // self.block_size
        self.block_ids[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)
        self.length_limit[row], self.max_grant[row] = request.length_limit, request.max_grant
        self.watched[row] = request.stream
        self.chosen_outside[row] = request.beam is not None
        self.has_siblings[row] = bool(request.siblings)
        self.temperature[row] = 0 if params.greedy else params.temperature
        self.top_p[row], self.min_p[row], self.top_k[row] = params.top_p, params.min_p, max(params.top_k, 0)
        self.num_logprobs[row] = request.num_logprobs
        self.scores_prompt[row] = params.prompt_logprobs is not None
        self.seeds[row] = request.seed
        self.has_rules[row] = request.rules is not None
        self.first_token_time[row] = request.metrics.first_token_time
        self.last_token_time[row] = request.metrics.last_token_time
        self._set_stop_ids(row, request.stop_ids)
        return row

    def remove(self, row: int) -> NDArray[np.int32]:
        """Take the row back, its known output going to the request. Returns its blocks [k], still held."""
        request = self.request(row)
        self.sync(request)
        held = self.block_ids[row, : self.num_blocks[row]]
        blocks = held.copy()
        held[:] = 0
        request.row, self.requests[row] = -1, None
        self.epochs[row] += 1
        self._free_rows.append(row)
        return blocks

    def request(self, row: int) -> Request:
        """The request that has the row."""
        request = self.requests[row]
        if request is None:
            raise LookupError(f"row {row} is free")
        return request

    def sync(self, request: Request) -> None:
        """Bring `request.output_token_ids` and its times up to what is known."""
        row, num_output = request.row, len(request.output_token_ids)
        start = len(request.prompt_token_ids) + num_output
        request.output_token_ids.extend(self.token_ids[row, start : self.num_known[row]].tolist())
        metrics = request.metrics
        metrics.num_generated = len(request.output_token_ids)
        metrics.first_token_time = float(self.first_token_time[row])
        metrics.last_token_time = float(self.last_token_time[row])

    def append_blocks(self, rows: NDArray[np.int32], counts: NDArray[np.int32], blocks: NDArray[np.int32]) -> None:
        """Give each of `rows` [R] the next `counts` [R] of `blocks` [sum(counts)]."""
        firsts = self.num_blocks[rows] - (np.cumsum(counts) - counts)  # where a row's blocks go, less where they are
        self.block_ids[np.repeat(rows, counts), np.repeat(firsts, counts) + np.arange(len(blocks))] = blocks
        self.num_blocks[rows] += counts

    def _set_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.stop_ids[row] = NO_TOKEN
        self.stop_ids[row, : len(stop_ids)] = stop_ids


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: R rows of the running table with the tokens each is given, and the S samples to draw."""

    rows: NDArray[np.int32]  # [R] of the running table
    num_computed: NDArray[np.int32]  # [R] tokens in the cache before the step
    num_scheduled: NDArray[np.int32]  # [R] tokens to run
    pending: NDArray[np.int32]  # [R] which sample of the step before is the row's token that is not known yet
    copies: NDArray[np.int32]  # [C, 2] blocks to copy before the step: source, destination
    sample_rows: NDArray[np.int32]  # [S] rows of the running table that draw a token
    sample_queries: NDArray[np.int32]  # [S] whose last token's logits they draw from: an index into `rows`
    sample_positions: NDArray[np.int32]  # [S] where in the sequence the drawn token goes
    sample_epochs: NDArray[np.int64]  # [S] tells whether the row has changed hands meanwhile
    scored: list[tuple[Request, int, int]]  # whose prompt tokens first..end-1 have the next one scored
