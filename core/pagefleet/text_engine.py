"""TextEngine: an Engine with text on both ends. What LLM and AsyncLLM have in common."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from pagefleet.beam import BeamSearch
from pagefleet.outputs import Completion, Generation
from pagefleet.request import BeamSearchOutput, BeamSearchSequence, Request, RequestMetrics
from pagefleet.sampler import LogitsRules
from pagefleet.sampling_params import InvalidRequest, SamplingParams, check_number

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefleet.config import EngineConfig
    from pagefleet.engine import Engine
    from pagefleet.model import ModelSpec
    from pagefleet.sampling_params import BeamSearchParams
    from pagefleet.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids`, and `cache_salt` if wanted."""
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


class TextEngine:
    """Makes requests of prompts, and text of what they generate. Threads that call it take turns."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        spec: ModelSpec,
        config: EngineConfig,
        max_model_len: int,
        facts: Mapping[str, str],
    ) -> None:
        self.engine, self.tokenizer, self.spec = engine, tokenizer, spec
        self.max_logprobs, self.max_model_len, self.facts = config.max_logprobs, max_model_len, facts
        self._turn = threading.RLock()
        eos_ids = [*spec.eos_token_ids, tokenizer.eos_token_id]
        known = [token_id for token_id in eos_ids if token_id is not None and 0 <= token_id < spec.vocab_size]
        self.eos_ids = tuple(dict.fromkeys(known))
        self._seeds = np.random.default_rng(config.seed)
        self._ids = count()
        self._owners: dict[str, tuple[Generation, Completion]] = {}

    # -- requests --------------------------------------------------------------------------------------

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        stream: bool = False,
    ) -> Generation:
        """Check a prompt and make its requests, without starting them. Raises InvalidRequest."""
        self._check(params, request_id, priority)
        text, token_ids, salt = self._encode(prompt)
        bad_words = self._bad_words(params)
        with self._turn:
            request_id = str(next(self._ids)) if request_id is None else request_id
            seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed
        requests = []
        for i in range(params.n):
            name = request_id if i == 0 else f"{request_id}/{i}"
            request = self._request(name, token_ids, params, seed + i, bad_words)
            request.priority, request.salt = priority, salt
            request.stream = stream or bool(params.stop)
            requests.append(request)
        requests[0].siblings = requests[1:]
        return Generation(text, requests, self.tokenizer)

    def start(self, generation: Generation) -> None:
        """Run what `prepare` made. Raises InvalidRequest if it does not fit the engine."""
        with self._turn:
            self.engine.add(generation.requests[0])
            for completion in generation.completions:
                self._owners[completion.request.request_id] = generation, completion

    def start_beam_search(self, prompt: Prompt, params: BeamSearchParams) -> tuple[BeamSearch, Request]:
        """Run a beam search over one prompt. The request is its root: `Engine.finish` ends the search."""
        _, token_ids, salt = self._encode(prompt)
        names = count(1)

        def child(parent: Request) -> Request:
            return root.child(f"{root.request_id}/{next(names)}", parent.output_token_ids)

        sampling = SamplingParams(temperature=0, max_tokens=params.max_tokens, ignore_eos=True)
        root = self._request(str(next(self._ids)), token_ids, sampling, 0, [])
        search = BeamSearch(params, self.eos_ids, child)
        root.salt, root.beam = salt, search
        search.live.append(root)
        with self._turn:
            self.engine.add(root)
        return search, root

    def end_beam_search(self, root: Request) -> None:
        """Forget a search; what still runs of it ends."""
        with self._turn:
            self.engine.finish(root, "stop")

    def beam_output(self, search: BeamSearch, root: Request) -> BeamSearchOutput:
        """What a search found."""
        sequences = []
        for beam in search.best():
            ends = beam.finish_reason == "stop" and not search.params.include_stop_str_in_output
            tokens = root.prompt_token_ids.tolist() + (beam.token_ids[:-1] if ends else beam.token_ids)
            text = self.tokenizer.decode(tokens)
            sequences.append(
                BeamSearchSequence(
                    tokens, text, beam.cumulative_logprob, beam.score, beam.finish_reason, beam.stop_reason
                )
            )
        return BeamSearchOutput(sequences)

    def abort(self, generation: Generation) -> None:
        """End a generation now; what it has so far stays readable."""
        with self._turn:
            for completion in generation.completions:
                request = completion.request
                self.engine.abort(request.request_id)
                if self._owners.pop(request.request_id, None) is not None:
                    completion.update()

    def explain(self) -> dict[str, str]:
        """What runs where, and which implementation served each op."""
        scheduler = self.engine.scheduler
        pool = scheduler.pool
        state = {
            "requests": f"{scheduler.num_running} running, {scheduler.num_waiting} waiting",
            "KV blocks": f"{pool.num_held} held, {pool.num_available} available",
        }
        ops = {f"op {op}": served for op, served in self.engine.backend.explain().items()}
        return {**self.facts, **state, **ops}

    # -- steps -----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def step(self) -> list[Generation]:
        """One step of the engine. Returns the generations that have news for their callers."""
        changed: dict[str, Generation] = {}
        with self._turn:
            for request in self.engine.step():
                if request.request_id not in self._owners:
                    continue
                generation, completion = self._owners[request.request_id]
                if completion.update():
                    self.engine.finish(request, "stop", completion.stop_string)
                if request.finished:
                    del self._owners[request.request_id]
                changed[generation.request_id] = generation
        return list(changed.values())

    # -- making requests -------------------------------------------------------------------------------

    def _check(self, params: SamplingParams, request_id: str | None, priority: int) -> None:
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"sampling_params must be SamplingParams, got {params!r:.80}")
        if not isinstance(request_id, str | None):
            raise InvalidRequest(f"request_id must be a string, got {request_id!r:.80}")
        check_number("priority", priority, -(2**31), 2**31, integer=True)
        params.check_vocabulary(self.spec.vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name) or 0
            if self.max_logprobs != -1 and not 0 <= wanted <= self.max_logprobs:
                raise InvalidRequest(
                    f"{name} must be at most max_logprobs={self.max_logprobs}, got {wanted}; raise max_logprobs "
                    "(-1: no limit, the whole vocabulary at every token)"
                )

    def _encode(self, prompt: Prompt) -> tuple[str | None, NDArray[np.int32], str | None]:
        """The prompt's text (if it has one), token ids [P] and cache salt."""
        text: str | None = None
        ids: Any = None
        salt: str | None = None
        if isinstance(prompt, Mapping):
            if unknown := sorted(map(str, prompt.keys() - PROMPT_KEYS)):
                raise InvalidRequest(f"a prompt has the keys {', '.join(PROMPT_KEYS)}, got {', '.join(unknown)}")
            text, ids, salt = (prompt.get(key) for key in PROMPT_KEYS)
        elif isinstance(prompt, str):
            text = prompt
        else:
            ids = prompt
        if ids is None and isinstance(text, str):
            ids = self.tokenizer.encode(text)
        if not _are_token_ids(ids) or not isinstance(text, str | None):
            raise InvalidRequest(f"a prompt must be text or a list of token ids, got {repr(prompt)[:80]}")
        if not isinstance(salt, str | None):
            raise InvalidRequest(f"cache_salt must be a string, got {salt!r:.80}")
        if not _is_unicode(salt or ""):
            raise InvalidRequest(f"cache_salt must have no lone surrogates, got {salt!r:.80}")
        if len(ids) == 0:
            raise InvalidRequest("the prompt is empty: it must have at least one token")
        if len(ids) >= self.max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(ids)} tokens; max_model_len={self.max_model_len} leaves room for "
                f"{self.max_model_len - 1}: shorten it or raise max_model_len"
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.spec.vocab_size:
            raise InvalidRequest(f"token ids must be in [0, {self.spec.vocab_size}), got {low if low < 0 else high}")
        return text, np.array(ids, np.int32), salt

    def _request(
        self,
        request_id: str,
        token_ids: NDArray[np.int32],
        params: SamplingParams,
        seed: int,
        bad_words: list[list[int]],
    ) -> Request:
        stop_ids = tuple(dict.fromkeys([*(() if params.ignore_eos else self.eos_ids), *params.stop_token_ids]))
        room = self.max_model_len - len(token_ids)
        rules = None
        if LogitsRules.needed(params):
            rules = LogitsRules(params, token_ids, stop_ids, bad_words, self.spec.vocab_size)
        return Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            metrics=RequestMetrics(time.monotonic()),
            seed=seed % 2**64,
            stop_ids=stop_ids,
            length_limit=len(token_ids) + min(room, params.max_tokens or room),
            rules=rules,
        )

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Token ids of every bad word, as it stands at the start of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            spellings = [self.tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word.lstrip()}")]
            if not any(spellings):
                raise InvalidRequest(f"bad_words must hold words that have tokens, got {word!r}")
            found |= dict.fromkeys(tuple(ids) for ids in spellings if ids)
        return [list(ids) for ids in found]


def _are_token_ids(ids: Any) -> bool:
    if not isinstance(ids, Sequence | np.ndarray) or isinstance(ids, str | bytes | bytearray):
        return False
    if isinstance(ids, np.ndarray) and ids.ndim != 1:
        return False
    return all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in ids)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True
