"""From token ids to text: detokenising, stop strings, and the RequestOutput a caller sees."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagefleet.request import CompletionOutput, Logprob, RequestOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefleet.request import Request
    from pagefleet.sampler import RowLogprobs
    from pagefleet.tokenizer import Tokenizer


class Completion:
    """The text of one request, grown token by token.

    Text that may turn out to be the beginning of a stop string is held back until it is certain.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request, params = request, request.params
        self.text = ""
        self.stop_string: str | None = None
        self._tokenizer = tokenizer if params.detokenize else None
        self._stream = None
        if self._tokenizer is not None:
            self._stream = self._tokenizer.stream(request.prompt_token_ids.tolist(), params.skip_special_tokens)
        self._num_tokens = 0  # detokenised so far
        self._searched = 0  # characters in which no stop string ends, or one that does not count
        self._logprobs: list[dict[int, Logprob]] = []

    def update(self) -> bool:
        """Take in the request's new tokens. True when a stop string ends it here."""
        request, params = self.request, self.request.params
        if self._stream is None or self.stop_string is not None:
            return False
        start, self._num_tokens = self._num_tokens, len(request.output_token_ids)
        silent = self._ends_with_stop_token() and not params.include_stop_str_in_output
        for i in range(start, self._num_tokens - silent):
            self.text += self._stream.push(request.output_token_ids[i])
            if i < params.min_tokens:
                self._searched = len(self.text)
            elif self._find_stop():
                return True
        if request.finished:
            self.text += self._stream.flush()
            return self._find_stop()
        return False

    def output(self, index: int) -> CompletionOutput:
        """The completion so far."""
        request, wants_logprobs = self.request, self.request.params.logprobs is not None
        text = self.text if request.finished else self.text[: len(self.text) - self._held_back()]
        while wants_logprobs and len(self._logprobs) < len(request.logprobs):
            self._logprobs.append(logprob_dict(request.logprobs[len(self._logprobs)], self._tokenizer))
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=list(request.output_token_ids),
            cumulative_logprob=request.cumulative_logprob if wants_logprobs else None,
            logprobs=self._logprobs[: len(request.output_token_ids)] if wants_logprobs else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )

    def _ends_with_stop_token(self) -> bool:
        request = self.request
        return (
            request.finish_reason == "stop"
            and request.output_token_ids[-1:] != []
            and (request.output_token_ids[-1] in request.stop_ids)
        )

    def _find_stop(self) -> bool:
        """Cut the text at the stop string that ends first, if there is one; of those the one named first."""
        stops: Sequence[str] = self.request.params.stop
        ends = [(at + len(stop), stop) for stop in stops if (at := self._find(stop)) >= 0]
        self._searched = len(self.text)
        if not ends:
            return False
        end, self.stop_string = min(ends, key=lambda hit: hit[0])
        self.text = self.text[: end if self.request.params.include_stop_str_in_output else end - len(self.stop_string)]
        return True

    def _find(self, stop: str) -> int:
        return self.text.find(stop, max(0, self._searched - len(stop) + 1))

    def _held_back(self) -> int:
        """Characters at the end of the text that could be the beginning of a stop string, and so not be delivered."""
        if self.stop_string is not None or self.request.params.include_stop_str_in_output:
            return 0
        sizes = [
            size
            for stop in self.request.params.stop
            for size in range(1, min(len(stop), len(self.text) + 1))
            if self.text.endswith(stop[:size])
        ]
        return max(sizes, default=0)


class Generation:
    """One prompt and its `n` completions."""

    def __init__(self, prompt: str | None, requests: list[Request], tokenizer: Tokenizer | None) -> None:
        self.prompt, self.requests = prompt, requests
        self._tokenizer = tokenizer if requests[0].params.detokenize else None
        self._prompt_logprobs: list[dict[int, Logprob] | None] = [None]  # nothing precedes the first token
        self.completions = [Completion(request, tokenizer) for request in requests]

    @property
    def request_id(self) -> str:
        return self.requests[0].request_id

    @property
    def finished(self) -> bool:
        return all(request.finished for request in self.requests)

    def output(self) -> RequestOutput:
        """A snapshot."""
        first = self.requests[0]
        error = next((request.error for request in self.requests if request.error is not None), None)
        return RequestOutput(
            request_id=first.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.prompt_token_ids.tolist(),
            outputs=[completion.output(i) for i, completion in enumerate(self.completions)],
            finished=self.finished,
            metrics=replace(first.metrics),
            prompt_logprobs=self._scored_prompt(),
            error=None if error is None else f"{type(error).__name__}: {error}",
        )

    def _scored_prompt(self) -> list[dict[int, Logprob] | None] | None:
        """One entry a prompt token, the first None. Complete once the first token is there."""
        first, scored = self.requests[0], self._prompt_logprobs
        if first.params.prompt_logprobs is None:
            return None
        if len(scored) < len(first.prompt_token_ids):
            scored[1:] = [logprob_dict(row, self._tokenizer) for row in first.prompt_logprobs]
        return list(scored)


def logprob_dict(row: RowLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """vLLM's shape of one position: token id -> Logprob, the token itself first."""
    token_ids, values = row.token_ids.tolist(), row.logprobs.tolist()
    ranks = [row.rank, *range(1, len(token_ids))]
    result: dict[int, Logprob] = {}
    for token_id, value, rank in zip(token_ids, values, ranks, strict=True):
        if token_id not in result:
            text = None if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)
            result[token_id] = Logprob(value, rank, text)
    return result
