"""build_batch: a StepPlan and the running table become the arrays a backend runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pagefleet.backend import ForwardBatch
from pagefleet.sampler import SamplingBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefleet.table import RunningTable, StepPlan


def build_batch(plan: StepPlan, table: RunningTable, multiple: int = 1) -> ForwardBatch:
    """The step's tokens, positions, slots and block tables; T and L padded to a multiple of `multiple`."""
    query_starts = np.zeros(len(plan.rows) + 1, np.int32)
    np.cumsum(plan.num_scheduled, out=query_starts[1:])
    row_of_token = np.repeat(plan.rows, plan.num_scheduled)
    offsets = np.repeat(plan.num_computed - query_starts[:-1], plan.num_scheduled)
    positions = np.arange(len(row_of_token), dtype=np.int32) + offsets

    known = positions < table.num_known[row_of_token]
    token_ids = table.token_ids[row_of_token, np.where(known, positions, 0)]
    token_ids = np.where(known, token_ids, -1 - np.repeat(plan.pending, plan.num_scheduled))
    blocks = table.block_ids[row_of_token, positions // table.block_size]
    slots = blocks * table.block_size + positions % table.block_size

    logit_rows = np.append(query_starts[1:][plan.sample_queries] - 1, _scored_tokens(plan, query_starts))
    return ForwardBatch(
        token_ids=_pad(token_ids, multiple, 0),
        positions=_pad(positions, multiple, 0),
        slots=_pad(slots, multiple, -1),
        query_starts=query_starts,
        seq_lens=plan.num_computed + plan.num_scheduled,
        block_tables=table.block_ids[plan.rows, : table.num_blocks[plan.rows].max()],
        logit_rows=_pad(logit_rows.astype(np.int32), multiple, 0),
    )


def build_sampling(plan: StepPlan, table: RunningTable) -> SamplingBatch:
    """What the sampler needs for the step's logits."""
    rows = plan.sample_rows
    rules = {}
    for i in np.flatnonzero(table.has_rules[rows]).tolist():
        if (request_rules := table.request(int(rows[i])).rules) is not None:
            rules[i] = request_rules
    targets = [request.prompt_token_ids[first + 1 : end + 1] for request, first, end in plan.scored]
    counts = [[request.num_prompt_logprobs] * (end - first) for request, first, end in plan.scored]
    return SamplingBatch(
        temperature=table.temperature[rows],
        top_k=table.top_k[rows],
        top_p=table.top_p[rows],
        min_p=table.min_p[rows],
        seeds=table.seeds[rows],
        positions=plan.sample_positions,
        num_logprobs=table.num_logprobs[rows],
        rules=rules,
        prompt_targets=np.concatenate([*targets, np.zeros(0, np.int32)]),
        prompt_num_logprobs=np.concatenate([*counts, np.zeros(0)]).astype(np.int32),
    )


def _scored_tokens(plan: StepPlan, query_starts: NDArray[np.int32]) -> NDArray[np.int32]:
    """Tokens [P] of the batch whose logits score the prompt token that follows them."""
    tokens = [np.zeros(0, np.int32)]
    for request, first, end in plan.scored:
        query = int(np.flatnonzero(plan.rows == request.row)[0])
        start = query_starts[query] + first - plan.num_computed[query]
        tokens.append(np.arange(start, start + end - first, dtype=np.int32))
    return np.concatenate(tokens)


def _pad(array: NDArray[Any], multiple: int, fill: int) -> NDArray[Any]:
    missing = -len(array) % multiple
    return np.concatenate([array, np.full(missing, fill, array.dtype)]) if missing else array
