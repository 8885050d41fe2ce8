"""What the engine works on and a caller gets back: Request and RequestOutput. Field names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefleet.sampler import LogitsRules, RowLogprobs
    from pagefleet.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
PROMPT_LOGPROBS_CHUNK = 128


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of `time.monotonic()`; 0 where it has not happened yet."""

    arrival_time: float
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_generated: int = 0

    @property
    def queue_time(self) -> float:
        return max(0.0, self.first_scheduled_time - self.arrival_time)

    @property
    def time_to_first_token(self) -> float:
        return max(0.0, self.first_token_time - self.arrival_time)

    @property
    def inter_token_latency(self) -> float:
        """Mean seconds between two tokens; 0 for fewer than two."""
        return (self.last_token_time - self.first_token_time) / max(1, self.num_generated - 1)


class Sequences(Protocol):
    """What may be done from outside to requests that run: the scheduler."""

    def fork(self, parent: Request, child: Request) -> bool: ...
    def append(self, request: Request, token_id: int) -> None: ...
    def sync(self, request: Request) -> None: ...
    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None: ...


class Chooser(Protocol):
    """Who chooses the tokens of the requests that share it, in the sampler's place: a beam search."""

    @property
    def width(self) -> int:
        """Requests it may have running at once."""
        ...

    def receive(self, sequences: Sequences, request: Request, logprobs: RowLogprobs) -> None:
        """The log-probabilities of a request's next token."""
        ...

    def fail(self, sequences: Sequences, error: Exception) -> None:
        """One of its requests cannot go on."""
        ...

    def end(self, sequences: Sequences, reason: FinishReason) -> None:
        """None of its requests goes on."""
        ...


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being generated. The scheduler owns it from `Engine.add` until it is finished."""

    request_id: str
    prompt_token_ids: NDArray[np.int32]  # [P]
    params: SamplingParams
    metrics: RequestMetrics
    seed: int  # of its draws; random unless the user gave one
    stop_ids: tuple[int, ...] = ()  # token ids that end it: the model's and the user's
    length_limit: int = 2**31 - 1  # tokens at which it ends, prompt included
    priority: int = 0  # lower is more urgent
    salt: str | None = None  # of the prefix cache
    family: int = -1  # number given by the scheduler, shared by what was forked off one request
    stream: bool = False  # the caller wants to see it after every token
    rules: LogitsRules | None = None  # what its parameters do to the logits
    beam: Chooser | None = None  # who chooses its tokens, if not the sampler
    siblings: list[Request] = field(default_factory=list)  # n - 1 requests to fork off once the prompt is done
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)
    prompt_logprobs: list[RowLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    block_hashes: list[bytes] = field(default_factory=list)
    row: int = -1  # in the running table; -1: waiting or finished
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None

    def child(self, request_id: str, output_token_ids: list[int]) -> Request:
        """A request like this one that has not run yet, with these tokens generated already."""
        return replace(
            self,
            request_id=request_id,
            output_token_ids=list(output_token_ids),
            metrics=replace(self.metrics),
            block_hashes=[],
            row=-1,
            finish_reason=None,
            stop_reason=None,
        )

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def max_grant(self) -> int:
        """Tokens it may run in one step: few where the logits of every one are wanted, to bound their memory."""
        return 2**31 - 1 if self.params.prompt_logprobs is None else PROMPT_LOGPROBS_CHUNK

    @property
    def num_logprobs(self) -> int:
        """How many to report of each token; -1: none."""
        if self.beam is not None:
            return 2 * self.beam.width
        return _num_logprobs(self.params.logprobs)

    @property
    def num_prompt_logprobs(self) -> int:
        return _num_logprobs(self.params.prompt_logprobs)

    def receive(self, sequences: Sequences, logprobs: RowLogprobs) -> None:
        """The log-probabilities of its next token."""
        if self.beam is not None:
            self.beam.receive(sequences, self, logprobs)
        else:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += float(logprobs.logprobs[0])

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Prompt and output so far, int32."""
        return np.concatenate([self.prompt_token_ids, np.array(self.output_token_ids, np.int32)])


def _num_logprobs(value: int | None) -> int:
    """From what the user says (None: nothing, -1: the whole vocabulary) to what the sampler takes (-1: nothing)."""
    if value is None:
        return -1
    return 2**31 - 1 if value == -1 else value


@dataclass(slots=True)
class Logprob:
    """vLLM's shape of one token's log-probability."""

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` completions."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """What has been generated for one prompt so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None

    @property
    def num_cached_tokens(self) -> int:
        return self.metrics.num_cached_tokens


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One of a beam search's sequences."""

    tokens: list[int]  # the prompt's included; the end-of-sequence token only if asked for
    text: str  # of all these tokens
    cum_logprob: float  # of the generated tokens
    score: float  # what they are ranked by, see `BeamSearchParams`
    finish_reason: FinishReason
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """What a beam search found for one prompt, best first."""

    sequences: list[BeamSearchSequence]
