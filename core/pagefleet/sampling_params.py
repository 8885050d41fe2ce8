"""How to choose tokens and when to stop: SamplingParams and BeamSearchParams, checked when they are made.

Field names and meanings are vLLM's, so that programs move over unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LogitsProcessor = Callable[..., Any]
"""`f(output_token_ids, logits)` or `f(prompt_token_ids, output_token_ids, logits)` -> logits, float32 [vocab_size]."""

MAX_N = 256
MAX_LOGPROBS = 1000
MAX_ENTRIES = 4096  # of a list of strings or stop tokens: each is looked at after every token
MAX_CHARACTERS = 4096  # of a string in such a list


class InvalidRequest(ValueError):
    """A request that cannot be served as written; the message names the field, the value and the limit."""


def check_number(
    name: str, value: Any, low: int, high: int | None = None, *, integer: bool = False, open_low: bool = False
) -> None:
    """Raise unless `value` is a finite number in [low, high] (in (low, high] if `open_low`); no `high`: no limit."""
    kind, types = ("an integer", (int, np.integer)) if integer else ("a number", (int, float, np.integer, np.floating))
    if isinstance(value, bool) or not isinstance(value, types):
        raise InvalidRequest(f"{name} must be {kind}, got {value!r}")
    if not ((value > low if open_low else value >= low) and (high is None or value <= high)):  # so is NaN caught
        limits = f"at least {low}" if high is None else f"in {'(' if open_low else '['}{low}, {high}]"
        raise InvalidRequest(f"{name} must be {limits}, got {value!r}")


def _check_flags(params: Any, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(params, name), bool):
            raise InvalidRequest(f"{name} must be True or False, got {getattr(params, name)!r}")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    """The field as a tuple; None is an empty one."""
    if value is not None and not (_is_list(value) and all(isinstance(text, str) and text for text in value)):
        raise InvalidRequest(f"{name} must be a list of non-empty strings, got {value!r}")
    _check_size(name, value or ())
    longest = max(map(len, value or ()), default=0)
    if longest > MAX_CHARACTERS:
        raise InvalidRequest(f"{name} must hold strings of at most {MAX_CHARACTERS} characters, got one of {longest}")
    return tuple(value or ())


def _check_size(name: str, value: Sequence[Any]) -> None:
    if len(value) > MAX_ENTRIES:
        raise InvalidRequest(f"{name} must have at most {MAX_ENTRIES} entries, got {len(value)}")


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    """The field as a tuple; None is an empty one."""
    ids = () if value is None else value
    if not _is_list(ids) or not all(isinstance(i, int | np.integer) and type(i) is not bool and i >= 0 for i in ids):
        raise InvalidRequest(f"{name} must be a list of token ids (integers from 0), got {value!r}")
    return tuple(int(i) for i in ids)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the next token, and when to stop. Validated on construction (InvalidRequest).

    Meaning and defaults are vLLM's; None is also an empty list. `temperature` 0 is greedy. `top_k` 0 or -1 keeps
    all. `logprobs` k returns the k most likely tokens' log-probabilities and the chosen one's, before penalties and
    temperature; -1 returns the whole vocabulary. The same `seed` draws the same tokens, whatever shares the batch;
    None or -1 is a random one, and of `n` completions each has the seed after the one before.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    logits_processors: Sequence[LogitsProcessor] = ()

    def __post_init__(self) -> None:
        check_number("n", self.n, 1, MAX_N, integer=True)
        check_number("presence_penalty", self.presence_penalty, -2, 2)
        check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        check_number("repetition_penalty", self.repetition_penalty, 0, 10_000, open_low=True)
        check_number("temperature", self.temperature, 0, 10_000)
        check_number("top_p", self.top_p, 0, 1, open_low=True)
        check_number("top_k", self.top_k, -1, 2**31 - 1, integer=True)
        check_number("min_p", self.min_p, 0, 1)
        check_number("min_tokens", self.min_tokens, 0, integer=True)
        for name, low, high in (
            ("max_tokens", 1, None),
            ("seed", -(2**63), 2**64 - 1),
            ("logprobs", -1, MAX_LOGPROBS),
            ("prompt_logprobs", -1, MAX_LOGPROBS),
        ):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), low, high, integer=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}")
        _check_flags(self, "ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")
        self._normalise()

    def _normalise(self) -> None:
        """Check the lists and keep copies of them, which nobody can change any more."""
        bias, processors = self.logit_bias, self.logits_processors
        if bias is not None and not isinstance(bias, Mapping):
            raise InvalidRequest(f"logit_bias must map token ids to numbers, got {bias!r}")
        if processors is not None and not (_is_list(processors) and all(map(callable, processors))):
            raise InvalidRequest(f"logits_processors must be a list of callables, got {processors!r}")
        keys = _token_ids("logit_bias", list(bias or ()))
        values = list((bias or {}).values())
        for token_id, value in zip(keys, values, strict=True):
            check_number(f"logit_bias[{token_id}]", value, -100, 100)
        allowed = None
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InvalidRequest("allowed_token_ids must not be empty, got []; use None to allow all tokens")
        fields: dict[str, Any] = {
            "seed": None if self.seed == -1 else self.seed,
            "stop": _strings("stop", [self.stop] if isinstance(self.stop, str) else self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "logit_bias": dict(zip(keys, values, strict=True)),
            "allowed_token_ids": allowed,
            "bad_words": _strings("bad_words", self.bad_words),
            "logits_processors": tuple(processors or ()),
        }
        _check_size("stop_token_ids", fields["stop_token_ids"])
        for name, field_value in fields.items():
            object.__setattr__(self, name, field_value)
        if self.stop and not self.detokenize:
            raise InvalidRequest(f"stop needs detokenize=True, got {self.stop!r}; use stop_token_ids otherwise")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequest for a token id that the model does not have."""
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            wrong = [i for i in getattr(self, name) or () if i >= vocab_size]
            if wrong:
                raise InvalidRequest(f"{name} must hold ids below the vocabulary's size {vocab_size}, got {wrong}")

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Beam search: keep the `beam_width` best continuations by length-penalised log-probability.

    A finished beam scores its log-probability sum divided by (number of tokens)**`length_penalty`, tokens counted
    as vLLM does: prompt included, end-of-sequence not. `early_stopping` ends as soon as `beam_width` beams finished.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        check_number("beam_width", self.beam_width, 1, MAX_N // 2, integer=True)
        check_number("max_tokens", self.max_tokens, 1, integer=True)
        check_number("length_penalty", self.length_penalty, -10, 10)
        _check_flags(self, "ignore_eos", "early_stopping", "include_stop_str_in_output")
