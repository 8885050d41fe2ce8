"""LLM: prompts in, texts out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pagefleet.config import EngineConfig
from pagefleet.loading import load_engine
from pagefleet.request import RequestOutput
from pagefleet.sampling_params import BeamSearchParams, InvalidRequest, SamplingParams

if TYPE_CHECKING:
    from types import TracebackType

    from pagefleet.beam import BeamSearch
    from pagefleet.outputs import Generation
    from pagefleet.progress import Progress
    from pagefleet.request import BeamSearchOutput, Request
    from pagefleet.text_engine import Prompt
    from pagefleet.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model on a device. Keyword arguments are the fields of `EngineConfig`.

    Calls from several threads take turns, step by step; `AsyncLLM` is made for many callers at once.

    >>> llm = LLM(model="path/to/model")
    >>> outputs = llm.generate(["Hello, my name is"], SamplingParams(temperature=0.8, top_p=0.95, max_tokens=100))
    >>> outputs[0].prompt, outputs[0].outputs[0].text
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        self.config = EngineConfig(model=os.fspath(model), **options)
        self._engine = load_engine(self.config)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs come in the order of the prompts.

        A prompt is text, token ids or a mapping (see `Prompt`). Parameters and priorities are one for all or one
        each. Raises InvalidRequest, before anything runs, if a prompt or parameter is wrong.
        """
        generations = self._prepare(prompts, sampling_params, priority, stream=False)
        with self._running(generations), self._progress(generations, shown=use_tqdm) as progress:
            while not all(generation.finished for generation in generations):
                progress.advance(self._engine.step())
        return [generation.output() for generation in generations]

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> Iterator[RequestOutput]:
        """Complete each prompt, yielding what it has so far whenever it has more; the last of each is `finished`.

        Raises InvalidRequest as `generate` does. Leaving the loop early aborts the rest.
        """
        return self._stream(self._prepare(prompts, sampling_params, priority, stream=True))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several: lists of `{"role": ..., "content": ...}`.

        `chat_template` stands in for the model's own; `chat_template_kwargs` are what that template knows by name.
        """
        template = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        prompts = self.chat_prompts(messages, **template)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority)

    def chat_prompts(self, messages: Messages | Sequence[Messages], **template: Any) -> list[Prompt]:
        """Conversations as prompts, by the model's chat template, which gets the keyword arguments."""
        one = not messages or isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Messages]", [messages] if one else messages)
        tokenizer = self.get_tokenizer()
        ids = [tokenizer.apply_chat_template(conversation, **template) for conversation in conversations]
        return [{"prompt": tokenizer.decode(each, False), "prompt_token_ids": each} for each in ids]

    def beam_search(self, prompts: Prompt | Iterable[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The best `beam_width` sequences of each prompt, best first."""
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequest(f"params must be BeamSearchParams, got {params!r:.80}")
        engine, listed = self._engine, _listed(prompts)
        searches: list[tuple[BeamSearch, Request]] = []
        try:
            for i, prompt in enumerate(listed):
                with _naming_prompt(i, len(listed)):
                    searches.append(engine.start_beam_search(prompt, params))
            while any(search.live for search, _ in searches):
                engine.step()
        finally:
            for _, root in searches:
                engine.end_beam_search(root)
        for search, _ in searches:
            if search.error is not None:
                raise search.error
        return [engine.beam_output(search, root) for search, root in searches]

    def explain(self) -> str:
        """What runs where: the device and why, sizes, and which implementation served each op."""
        lines = [f"{name}: {value}" for name, value in self._engine.explain().items()]
        return "\n".join(lines)

    def get_tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._engine.engine.scheduler.pool.reset_cache()

    def close(self) -> None:
        """Give the device back."""
        self._engine.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- one call ------------------------------------------------------------------------------------------

    def _prepare(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
        stream: bool,
    ) -> list[Generation]:
        listed = _listed(prompts)
        params = _one_each(
            "sampling_params", SamplingParams() if sampling_params is None else sampling_params, len(listed)
        )
        priorities = _one_each("priority", priority, len(listed))
        generations = []
        for i, prompt in enumerate(listed):
            with _naming_prompt(i, len(listed)):
                generations.append(self._engine.prepare(prompt, params[i], priority=priorities[i], stream=stream))
        return generations

    def _stream(self, generations: list[Generation]) -> Iterator[RequestOutput]:
        left = list(generations)
        with self._running(generations):
            while left:
                changed = self._engine.step()
                # a call made between two outputs drives the same engine: what that one finished is not in `changed`
                for generation in [each for each in left if each.finished or each in changed]:
                    output = generation.output()
                    if output.finished:
                        left.remove(generation)
                    yield output

    @contextmanager
    def _running(self, generations: list[Generation]) -> Iterator[None]:
        """Start the generations; however the block is left, none of them stays behind."""
        try:
            for generation in generations:
                self._engine.start(generation)
            yield
        finally:
            for generation in generations:
                self._engine.abort(generation)

    def _progress(self, generations: list[Generation], shown: bool) -> Progress:
        from pagefleet.progress import Progress

        return Progress(generations, shown=shown)


def _listed(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise InvalidRequest(f"prompts must be a prompt or several of them, got {prompts!r:.80}")
    listed = list(prompts)
    one = len(listed) > 0 and isinstance(listed[0], int | np.integer)
    return [cast("Prompt", listed)] if one else cast("list[Prompt]", listed)


@contextmanager
def _naming_prompt(index: int, count: int) -> Iterator[None]:
    """Let an InvalidRequest say which of several prompts it is about."""
    try:
        yield
    except InvalidRequest as error:
        if count > 1:
            raise InvalidRequest(f"prompts[{index}]: {error}") from error
        raise


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    """One value for all, or a list with one each."""
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts; give one for all, or one each")
    return list(value)
