"""Beam search: the sequences of one search are requests that share blocks; each step picks their next tokens.

The search waits for the log-probabilities of all its live sequences, keeps the best continuations, forks sequences
that have several and ends those that have none. The engine does not treat them specially: a sequence whose next
token is not chosen yet has nothing to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefleet.request import FinishReason, Request, Sequences
    from pagefleet.sampler import RowLogprobs
    from pagefleet.sampling_params import BeamSearchParams


@dataclass(frozen=True, slots=True)
class Beam:
    """A finished sequence."""

    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason
    stop_reason: int | None


class BeamSearch:
    """One prompt's search. `child` makes the request of a new sequence from the one it continues."""

    def __init__(self, params: BeamSearchParams, eos_ids: tuple[int, ...], child: Callable[[Request], Request]) -> None:
        self.params, self.eos_ids, self._child = params, () if params.ignore_eos else eos_ids, child
        self.live: list[Request] = []  # [<= beam_width]
        self.finished: list[Beam] = []
        self.error: Exception | None = None
        self._received: dict[str, RowLogprobs] = {}

    @property
    def width(self) -> int:
        return self.params.beam_width

    def best(self) -> list[Beam]:
        """The finished sequences [<= beam_width], best first."""
        return sorted(self.finished, key=lambda beam: -beam.score)[: self.width]

    def receive(self, sequences: Sequences, request: Request, logprobs: RowLogprobs) -> None:
        """The log-probabilities of a sequence's next token; the last one to come moves the search on."""
        self._received[request.request_id] = logprobs
        if len(self._received) == len(self.live):
            received, self._received = self._received, {}
            self._advance(sequences, received)

    def fail(self, sequences: Sequences, error: Exception) -> None:
        """One sequence cannot go on, so none does."""
        self.error = error
        self.end(sequences, "error")

    def end(self, sequences: Sequences, reason: FinishReason) -> None:
        """Nothing more is generated; what finished stays readable."""
        live, self.live = self.live, []
        for request in live:
            sequences.finish(request, reason)

    def _advance(self, sequences: Sequences, received: dict[str, RowLogprobs]) -> None:
        """Complete the continuations that end, go on with the best that do not."""
        for request in self.live:
            sequences.sync(request)
        open_ended: list[tuple[float, Request, int]] = []
        for request in self.live:
            logprobs = received[request.request_id]
            for token_id, logprob in zip(logprobs.token_ids[1:].tolist(), logprobs.logprobs[1:].tolist(), strict=True):
                total = request.cumulative_logprob + logprob
                if token_id in self.eos_ids:
                    self._complete(request, [*request.output_token_ids, token_id], total, "stop", token_id)
                else:
                    open_ended.append((total, request, token_id))
        open_ended.sort(key=lambda continuation: -continuation[0])
        chosen = open_ended[: self.width]
        length, limit = len(self.live[0].token_ids) + 1, self.live[0].length_limit
        if length >= limit:
            for total, request, token_id in chosen:
                self._complete(request, [*request.output_token_ids, token_id], total, "length")
        if length >= limit or self._settled([total for total, _, _ in chosen], length, limit):
            self.end(sequences, "length")
        else:
            self._continue(sequences, chosen)

    def _continue(self, sequences: Sequences, chosen: list[tuple[float, Request, int]]) -> None:
        """Fork, end and extend sequences: a sequence goes on as its best continuation, the others fork off it."""
        for request in self.live:
            if not any(request is parent for _, parent, _ in chosen):
                sequences.finish(request, "stop")  # first of all: the others may want its row and blocks
        following: list[tuple[float, Request, int]] = []
        for total, request, token_id in chosen:
            if any(request is taken for _, taken, _ in following):
                parent, request = request, self._child(request)
                sequences.fork(parent, request)  # before any token is appended: it starts where its parent is
            following.append((total, request, token_id))
        self.live = [request for _, request, _ in following]
        for total, request, token_id in following:
            request.cumulative_logprob = total
            sequences.append(request, token_id)

    def _complete(
        self, request: Request, output: list[int], total: float, reason: FinishReason, stop_reason: int | None = None
    ) -> None:
        length = len(request.prompt_token_ids) + len(output) - (reason == "stop")
        self.finished.append(Beam(output, total, self._score(total, length), reason, stop_reason))

    def _settled(self, totals: list[float], length: int, limit: int) -> bool:
        """Whether no sequence of `length` tokens can change the answer any more: its sum can only fall."""
        if len(self.finished) < self.width:
            return False
        if self.params.early_stopping:
            return True
        worst = self.best()[-1].score
        return all(self._score(total, n) <= worst for total in totals for n in (length, limit))

    def _score(self, total: float, length: int) -> float:
        return float(total / max(1, length) ** self.params.length_penalty)
