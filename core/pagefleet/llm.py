"""LLM: prompts in, texts out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

    >>> llm = LLM(model="path/to/model")
    >>> outputs = llm.generate(["Hello, my name is"], SamplingParams(temperature=0.8, top_p=0.95, max_tokens=100))
    >>> outputs[0].prompt, outputs[0].outputs[0].text
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.config = EngineConfig(model=str(model), **options)
        self._engine = load_engine(self.config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
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
        prompts: Prompt | Sequence[Prompt],
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
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several: lists of `{"role": ..., "content": ...}`.

        Other keyword arguments go to the model's chat template.
        """
        return self.generate(self.chat_prompts(messages, **template), sampling_params, use_tqdm=use_tqdm)

    def chat_prompts(self, messages: Messages | Sequence[Messages], **template: Any) -> list[Prompt]:
        """Conversations as prompts, by the model's chat template."""
        one = not messages or isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Messages]", [messages] if one else messages)
        tokenizer = self.get_tokenizer()
        ids = [tokenizer.apply_chat_template(conversation, **template) for conversation in conversations]
        return [{"prompt": tokenizer.decode(each, False), "prompt_token_ids": each} for each in ids]

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The best `beam_width` sequences of each prompt, best first."""
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
                engine.engine.finish(root, "stop")
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
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
        stream: bool,
    ) -> list[Generation]:
        listed = _listed(prompts)
        params = _one_each("sampling_params", sampling_params or SamplingParams(), len(listed))
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


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer)):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


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
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts; give one for all, or one each")
    return list(value)
