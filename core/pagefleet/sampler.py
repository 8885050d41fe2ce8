"""The host sampler, on numpy: what every backend gets by default, and the reference for one of its own.

A draw is a pure function of a row's logits, its parameters, its seed and its position in the sequence. So it does
not depend on what shares the batch, and a token drawn twice (after a preemption) comes out the same.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefleet.sampling_params import LogitsProcessor, SamplingParams

NO_LOGPROBS = -1
GROUP = 64  # values looked at together, where looking at all one by one would take longer


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How to treat the logits of one step: S rows to draw a token from, then P rows of prompt tokens to score."""

    temperature: NDArray[np.float32]  # [S] 0: greedy
    top_k: NDArray[np.int32]  # [S] 0: all
    top_p: NDArray[np.float32]  # [S]
    min_p: NDArray[np.float32]  # [S]
    seeds: NDArray[np.uint64]  # [S]
    positions: NDArray[np.int32]  # [S] of the token to draw
    num_logprobs: NDArray[np.int32]  # [S] how many of the most likely to report; NO_LOGPROBS: nothing
    rules: Mapping[int, LogitsRules]  # row -> what its parameters do to its logits; most rows have none
    prompt_targets: NDArray[np.int32]  # [P] the prompt's next token, to be scored
    prompt_num_logprobs: NDArray[np.int32]  # [P]


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities at one position: entry 0 is the token itself, then the most likely ones."""

    token_ids: NDArray[np.int32]  # [1 + k]
    logprobs: NDArray[np.float32]  # [1 + k]
    rank: int  # of the token itself, 1: most likely


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What one step drew."""

    token_ids: NDArray[np.int32]  # [S] in the vocabulary, those of failed rows too
    logprobs: Mapping[int, RowLogprobs] = field(default_factory=dict)  # row -> its log-probabilities, if asked for
    prompt_logprobs: Sequence[RowLogprobs] = ()  # [P]
    errors: Mapping[int, Exception] = field(default_factory=dict)  # row -> why no token could be drawn


class Sampler:
    """Draws tokens from logits on the host. A backend may do `mask` and `draw` its own way, see `Backend.sampler`."""

    @np.errstate(over="ignore")  # what overflows on its way to a weight of 0 is 0
    def sample(self, logits: NDArray[np.float32], batch: SamplingBatch) -> SampledTokens:
        """Draw from logits [>= S + P, vocab_size], which are left as they are."""
        num_samples = len(batch.positions)
        rows, temperature = logits[:num_samples], batch.temperature
        uniforms = uniform(batch.seeds, batch.positions) if temperature.any() else np.zeros(num_samples)
        ruled = sorted(batch.rules, key=lambda row: batch.rules[row].mask is None)  # those with a mask first
        if ruled:
            temperature = temperature.copy()
            temperature[ruled] = 0  # drawn below; only whether they are finite is looked at here
        token_ids = self.draw(rows, temperature, batch.top_k, batch.top_p, batch.min_p, uniforms)
        finite = (token_ids >= 0) & np.isfinite(rows[np.arange(num_samples), token_ids])
        errors: dict[int, Exception] = {
            i: ValueError("no token can be sampled: the model's logits are not finite")
            for i in np.flatnonzero(~finite).tolist()
        }
        if ruled := [row for row in ruled if row not in errors]:
            changed = self._apply_rules(rows[ruled], ruled, batch, errors)
            cuts = batch.top_k[ruled], batch.top_p[ruled], batch.min_p[ruled]
            drawn = self.draw(changed, batch.temperature[ruled], *cuts, uniforms[ruled])
            for row, token_id in zip(ruled, drawn.tolist(), strict=True):
                if row in errors:
                    continue
                if token_id < 0:
                    errors[row] = ValueError("no token can be sampled: the request's parameters leave none")
                    continue
                batch.rules[row].output.append(token_id)
                token_ids[row] = token_id
        token_ids[[*errors]] = 0  # the next step computes it before the request has ended: any token will do
        logprobs = {
            i: row_logprobs(rows[i], int(token_ids[i]), int(batch.num_logprobs[i]))
            for i in np.flatnonzero(batch.num_logprobs != NO_LOGPROBS).tolist()
            if i not in errors
        }
        prompt_logprobs = [
            row_logprobs(logits[num_samples + i], target, int(batch.prompt_num_logprobs[i]))
            for i, target in enumerate(batch.prompt_targets.tolist())
        ]
        return SampledTokens(token_ids, logprobs, prompt_logprobs, errors)

    def mask(self, logits: NDArray[np.float32], masks: NDArray[np.int32]) -> None:
        """Logits [N, V] of tokens whose bit in `masks` [N, ceil(V / 32)] is 0 (see `token_mask`) become -inf."""
        bits = np.unpackbits(masks.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
        logits[bits == 0] = -np.inf

    def draw(
        self,
        logits: NDArray[np.float32],
        temperature: NDArray[np.float32],
        top_k: NDArray[np.int32],
        top_p: NDArray[np.float32],
        min_p: NDArray[np.float32],
        uniforms: NDArray[np.float64],
    ) -> NDArray[np.int32]:
        """A token of each row of logits [N, V], which are left as they are; the other arrays are [N].

        Temperature, top-k, min-p, top-p, as vLLM orders them, then the token at quantile `uniforms`. Where logits are
        inf, one of these tokens is drawn; -1 where one is NaN, or none above -inf.
        """
        highest = logits.max(-1)
        token_ids = np.where(highest > -np.inf, logits.argmax(-1), -1).astype(np.int32)
        for i in np.flatnonzero((temperature > 0) & (token_ids >= 0)).tolist():
            row = logits[i]
            if highest[i] == np.inf:  # what a logits processor makes certain
                row = np.where(row == np.inf, np.float32(0), np.float32(-np.inf))
            shape = float(temperature[i]), int(top_k[i]), float(top_p[i]), float(min_p[i])
            token_ids[i] = draw(row, *shape, float(uniforms[i]))
        return token_ids

    def _apply_rules(
        self, logits: NDArray[np.float32], rows: list[int], batch: SamplingBatch, errors: dict[int, Exception]
    ) -> NDArray[np.float32]:
        """The logits [N, V] of `rows` (those with a mask first), as their rules have them; changed in place."""
        masks = [rules.mask for rules in (batch.rules[row] for row in rows) if rules.mask is not None]
        if masks:
            self.mask(logits[: len(masks)], np.stack(masks))
        for own, row in zip(logits, rows, strict=True):
            try:
                own[:] = batch.rules[row].apply(own, int(batch.positions[row]), masked=True)
            except Exception as error:  # a user's logits processor may raise anything; it concerns this row only
                errors[row] = error
            except (SystemExit, CancelledError) as error:
                errors[row] = RuntimeError(f"a logits processor raised {type(error).__name__}: {error}")
        return logits


def token_mask(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """A mask [ceil(V / 32)] that allows these tokens: bit i % 32 of word i // 32 is token i's."""
    bits = np.zeros((vocab_size + 31) // 32 * 32, np.bool_)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def draw(
    logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """The token at quantile `uniform` in [0, 1) of the distribution of logits [V] cut to min-p, top-k and top-p.

    The highest logit is finite. Of equally likely tokens at a cut the first ones stay.
    """
    kept: NDArray[np.intp] | None = None  # tokens that are left; None: all
    if 0 < top_k < len(logits):  # before min-p, which cuts the same ranking at a place of its own
        kept = largest(logits, top_k)
        logits = logits[kept]
    weights = np.exp((logits - logits.max()) / np.float32(temperature))
    if min_p > 0:
        weights, kept = _cut(weights, kept, np.flatnonzero(weights >= min_p))
    if top_p < 1:
        weights, kept = _cut(weights, kept, _nucleus(weights, top_p))
    index = _quantile(weights, uniform)
    return index if kept is None else int(kept[index])


def _cut(
    weights: NDArray[np.float32], kept: NDArray[np.intp] | None, chosen: NDArray[np.intp]
) -> tuple[NDArray[np.float32], NDArray[np.intp]]:
    return weights[chosen], chosen if kept is None else kept[chosen]


def _nucleus(weights: NDArray[np.float32], top_p: float) -> NDArray[np.intp]:
    """The most likely, as many as it takes to reach a share of `top_p`; at least one. In index order."""
    total = float(weights.sum())
    # all tokens below this weight together are less than the share to be cut: only the others need sorting
    ranked = np.sort(weights[weights >= (1 - top_p) * total / len(weights)])[::-1]
    before = np.cumsum(ranked, dtype=np.float64) - ranked
    count = max(1, int(np.searchsorted(before, top_p * total)))
    return _first_from(weights, ranked[count - 1], count)


def largest(values: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Indices [count] of the largest of values [V], in index order; of equal values the first ones."""
    num_groups = len(values) // GROUP
    found = values
    if count <= num_groups:  # at least `count` values reach what the `count` best groups reach: look at these only
        best = values[: num_groups * GROUP].reshape(num_groups, GROUP).max(1)
        found = values[values >= np.partition(best, -count)[-count]]
    return _first_from(values, np.partition(found, -count)[-count], count)


def _first_from(values: NDArray[np.float32], lowest: np.float32, count: int) -> NDArray[np.intp]:
    """Indices [count] of the values from `lowest` up, without the last of those equal to it if they are too many."""
    kept = np.flatnonzero(values >= lowest)
    if len(kept) > count:
        kept = np.delete(kept, np.flatnonzero(values[kept] == lowest)[count - len(kept) :])
    return kept


def _quantile(weights: NDArray[np.float32], share: float) -> int:
    """The first index up to which weights [V] make up more than `share` of their sum: group by group, then within."""
    groups = np.add.reduceat(weights, np.arange(0, len(weights), GROUP))
    group, rest = _locate(groups, share * float(groups.sum(dtype=np.float64)))
    return group * GROUP + _locate(weights[group * GROUP : (group + 1) * GROUP], rest)[0]


def _locate(weights: NDArray[np.float32], target: float) -> tuple[int, float]:
    """The first index at which the running sum exceeds `target`, never one of weight 0, and what is left there."""
    sums = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(sums, min(target, np.nextafter(sums[-1], 0)), side="right"))
    return index, target - (float(sums[index - 1]) if index else 0.0)


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.float64]:
    """A number in [0, 1) for each seed and position: SplitMix64 (Steele, Lea, Flood 2014), `positions` steps on."""
    with np.errstate(over="ignore"):
        mixed = _mix(seeds) + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return (_mix(mixed) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def row_logprobs(logits: NDArray[np.float32], token_id: int, count: int) -> RowLogprobs:
    """Log-softmax of logits [V] at `token_id` and at the `count` most likely tokens, most likely first."""
    highest = logits.max()
    log_total = highest + np.log(np.exp(logits - highest).sum(dtype=np.float64))
    count = min(count, len(logits))
    top = largest(logits, count) if count else np.zeros(0, np.intp)
    token_ids = np.append(token_id, top[np.argsort(-logits[top], kind="stable")]).astype(np.int32)
    rank = int((logits > logits[token_id]).sum()) + 1
    return RowLogprobs(token_ids, (logits[token_ids] - log_total).astype(np.float32), rank)


class LogitsRules:
    """What one request's parameters do to its logits before temperature: masks, biases, penalties, processors."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: NDArray[np.int32],
        stop_ids: Sequence[int],
        bad_words: Sequence[Sequence[int]],
        vocab_size: int,
    ) -> None:
        self.params, self.prompt_token_ids = params, prompt_token_ids
        self.stop_ids, self.bad_words = np.array(stop_ids, np.intp), [list(word) for word in bad_words]
        allowed = params.allowed_token_ids
        self.mask = None if allowed is None else token_mask(allowed, vocab_size)  # comes before everything else
        self.biased_ids = np.array(list(params.logit_bias), np.intp)
        self.biases = np.array(list(params.logit_bias.values()), np.float32)
        self.output: list[int] = []  # tokens drawn so far: the sampler is ahead of the request
        self.processors = [_with_prompt(processor) for processor in params.logits_processors]

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether the parameters touch the logits at all."""
        penalties = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        masks = params.allowed_token_ids is not None or params.bad_words or params.min_tokens or params.logit_bias
        return bool(penalties or masks or params.logits_processors)

    def apply(self, logits: NDArray[np.float32], position: int, *, masked: bool = False) -> NDArray[np.float32]:
        """The logits [V] of the token at `position`, changed in place where possible; `masked`: `mask` is done."""
        if self.mask is not None and not masked:
            Sampler().mask(logits[None], self.mask[None])
        del self.output[position - len(self.prompt_token_ids) :]  # drawn before a preemption, now drawn again
        params = self.params
        for *prefix, last in self.bad_words:
            if not prefix or self.output[-len(prefix) :] == prefix:
                logits[last] = -np.inf
        if len(self.output) < params.min_tokens:
            logits[self.stop_ids] = -np.inf
        logits[self.biased_ids] += self.biases
        self._penalise(logits)
        for processor in self.processors:
            logits = _checked(processor(self.prompt_token_ids.tolist(), list(self.output), logits), logits)
        return logits

    def _penalise(self, logits: NDArray[np.float32]) -> None:
        params = self.params
        output = np.array(self.output, np.intp)
        if params.repetition_penalty != 1:
            mask = np.zeros(len(logits), np.bool_)
            mask[self.prompt_token_ids] = mask[output] = True
            seen, penalty = np.flatnonzero(mask), np.float32(params.repetition_penalty)
            logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        if params.frequency_penalty or params.presence_penalty:
            drawn, times = np.unique(output, return_counts=True)
            penalties = params.frequency_penalty * times + params.presence_penalty
            logits[drawn] -= penalties.astype(np.float32)


def _with_prompt(processor: LogitsProcessor) -> LogitsProcessor:
    """The processor in its three-argument form; parameters with a default are its own business."""
    try:
        parameters = signature(processor).parameters.values()
    except ValueError:  # some of those written in C do not tell
        parameters = signature(lambda output, logits: None).parameters.values()
    positional = [p for p in parameters if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is Parameter.empty]
    if len(required) >= 3 or any(p.kind is Parameter.VAR_POSITIONAL for p in parameters):
        return processor
    return lambda prompt, output, logits: processor(output, logits)


def _checked(result: Any, logits: NDArray[np.float32]) -> NDArray[np.float32]:
    changed = np.asarray(result, np.float32)
    if changed.shape != logits.shape:
        raise ValueError(f"a logits processor must return logits of shape {logits.shape}, got {changed.shape}")
    if np.isnan(changed).any():
        raise ValueError("a logits processor returned NaN")
    return changed
