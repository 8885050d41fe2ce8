"""What users ask for, through `LLM` and `AsyncLLM`: parameters, log-probabilities, beams, streaming, aborts, load.

Each token is checked against the reference's logits, teacher-forced with what was generated, after the parameter in
question was applied to them here, in a few lines of numpy.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pagefleet.async_llm import AsyncLLM
from pagefleet.conformance.checkpoints import EOS, VOCAB_SIZE, variants, word, write_checkpoint
from pagefleet.conformance.reference import DenseDecoder, log_softmax, tolerance
from pagefleet.llm import LLM
from pagefleet.models import builtin_families
from pagefleet.sampling_params import BeamSearchParams, InvalidRequest, SamplingParams

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefleet.backend import BackendInfo
    from pagefleet.request import RequestOutput

    Floats = NDArray[np.float64]

pytestmark = pytest.mark.conformance_level("L4")

PROMPT = (7, 41, 3, 99, 12, 5, 60)
PROMPTS: Sequence[list[int]] = [[*PROMPT[: 1 + i % 7], i, 3 * i + 1] for i in range(10)]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A tiny model on disk, how to load it on the backend, and the reference."""

    folder: str
    options: dict[str, Any]
    reference: DenseDecoder
    dtype: str

    def logits(self, output: RequestOutput, index: int = 0) -> Floats:
        """The reference's [N, vocab_size], of which a completion's N tokens were chosen."""
        tokens = output.prompt_token_ids + output.outputs[index].token_ids
        return self.reference.run(tokens).logits[len(output.prompt_token_ids) - 1 : -1]

    def margins(self, logits: Floats) -> Floats:
        """How far a log-probability may be off the reference's [N]."""
        return np.asarray(2 * tolerance(self.dtype) * np.linalg.norm(logits, axis=-1))

    def check_greedy(self, output: RequestOutput, change: Callable[[Floats, list[int]], Any] | None = None) -> None:
        """Each token is the best of the reference's logits, after `change(logits, tokens so far)`, or as good."""
        logits, tokens = self.logits(output), output.outputs[0].token_ids
        for i, margin in enumerate(2 * self.margins(logits)):
            if change is not None:
                change(logits[i], tokens[:i])
            behind = logits[i].max() - logits[i, tokens[i]]
            assert behind <= margin, f"token {i} is {tokens[i]}, {behind:.2e} below the reference's best"


@pytest.fixture(scope="module")
def checkpoint(target: tuple[BackendInfo, int], tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    info, index = target
    dtype = min(info.traits.dtypes, key=tolerance)
    size = min(info.traits.block_sizes or (4,))
    folder = tmp_path_factory.mktemp("checkpoint")
    reference = write_checkpoint(next(variants(builtin_families())), folder)
    device = f"{info.name}:{index}"
    options = {"device": device, "dtype": dtype, "block_size": size, "num_blocks": 16 + 256 // size}
    return Checkpoint(str(folder), options, reference, dtype)


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint) -> Iterator[LLM]:
    with LLM(checkpoint.folder, **checkpoint.options, max_num_seqs=8) as made:
        yield made


def complete(llm: LLM, prompt: Sequence[int] = PROMPT, **params: Any) -> RequestOutput:
    """One completion, greedy and of 12 tokens unless asked otherwise."""
    asked = SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **params})
    return llm.generate(prompt, asked, use_tqdm=False)[0]


# -- parameters ------------------------------------------------------------------------------------------


def test_greedy_tokens(llm: LLM, checkpoint: Checkpoint) -> None:
    checkpoint.check_greedy(complete(llm, max_tokens=30))


def test_penalties(llm: LLM, checkpoint: Checkpoint) -> None:
    """Repetition counts the prompt, presence and frequency the output only."""

    def change(logits: Floats, output: list[int]) -> None:
        seen = np.array(sorted({*PROMPT, *output}))
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.4, logits[seen] * 1.4)
        counts = np.bincount(np.array(output, np.int64), minlength=VOCAB_SIZE)
        logits -= 0.7 * counts + 0.9 * (counts > 0)

    output = complete(llm, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.9, max_tokens=30)
    checkpoint.check_greedy(output, change)


def test_logit_bias(llm: LLM, checkpoint: Checkpoint) -> None:
    first, second, *_ = complete(llm).outputs[0].token_ids
    bias = {first: -100.0, second: -3.0, 17: 4.0}

    def change(logits: Floats, output: list[int]) -> None:
        logits[list(bias)] += list(bias.values())

    output = complete(llm, logit_bias=bias)
    assert output.outputs[0].token_ids[0] != first
    checkpoint.check_greedy(output, change)


def test_allowed_tokens(llm: LLM, checkpoint: Checkpoint) -> None:
    allowed = [4, 8, 15, 16, 23, 42]

    def change(logits: Floats, output: list[int]) -> None:
        logits[np.setdiff1d(np.arange(VOCAB_SIZE), allowed)] = -np.inf

    checkpoint.check_greedy(complete(llm, allowed_token_ids=allowed), change)


def test_bad_words(llm: LLM, checkpoint: Checkpoint) -> None:
    """A pair of tokens that greedy decoding would write, and a single one."""
    first, second, third, *_ = complete(llm).outputs[0].token_ids

    def change(logits: Floats, output: list[int]) -> None:
        logits[third] = -np.inf
        if output[-1:] == [first]:
            logits[second] = -np.inf

    output = complete(llm, bad_words=[f"{word(first)} {word(second)}", word(third)])
    assert output.outputs[0].token_ids[:2] != [first, second]
    checkpoint.check_greedy(output, change)


def test_stop_tokens_and_min_tokens(llm: LLM, checkpoint: Checkpoint) -> None:
    tokens = complete(llm).outputs[0].token_ids
    stop = tokens[3]
    first = tokens.index(stop)
    stopped = complete(llm, stop_token_ids=[stop]).outputs[0]
    assert (stopped.token_ids, stopped.finish_reason) == (tokens[: first + 1], "stop")
    assert stopped.stop_reason == stop

    def change(logits: Floats, output: list[int]) -> None:
        if len(output) < 6:
            logits[stop] = -np.inf

    later = complete(llm, stop_token_ids=[stop], min_tokens=6)
    assert len(later.outputs[0].token_ids) > 6
    checkpoint.check_greedy(later, change)


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.8}], ids=str)
def test_draws_come_from_what_is_left(cut: dict[str, Any], llm: LLM, checkpoint: Checkpoint) -> None:
    """With temperature 2, of four seeds: no token that the reference would have cut off, and not always the best."""
    outputs = [complete(llm, temperature=2.0, seed=seed, max_tokens=20, **cut) for seed in range(4)]
    not_best = 0
    for output in outputs:
        logits = checkpoint.logits(output)
        for row, margin, token in zip(logits, checkpoint.margins(logits), output.outputs[0].token_ids, strict=True):
            chances = np.exp(log_softmax(row / 2.0))
            above = row > row[token] + margin
            assert above.sum() < cut.get("top_k", VOCAB_SIZE), f"{token} is not among the top_k"
            kept = chances[np.argsort(-chances)[: cut.get("top_k", VOCAB_SIZE)]].sum()
            assert chances[above].sum() < cut.get("top_p", 1.0) * kept + 1e-3, f"{token} is outside of top_p"
            assert chances[token] >= cut.get("min_p", 0.0) * chances.max() * np.exp(-margin), f"{token} is below min_p"
            not_best += bool(above.any())
    assert not_best > 5


def test_a_seed_draws_the_same_again(llm: LLM) -> None:
    drawn = [complete(llm, temperature=1.5, seed=seed).outputs[0].token_ids for seed in (5, 6, 5)]
    assert drawn[0] == drawn[2] != drawn[1]


def test_several_completions_of_one_prompt(llm: LLM, checkpoint: Checkpoint) -> None:
    output = complete(llm, n=3, temperature=1.5, seed=3, logprobs=0)
    assert [each.index for each in output.outputs] == [0, 1, 2]
    assert len({tuple(each.token_ids) for each in output.outputs}) == 3
    for index in range(3):
        check_logprobs(checkpoint, output, 0, index)


# -- log-probabilities -----------------------------------------------------------------------------------


def check_logprobs(checkpoint: Checkpoint, output: RequestOutput, count: int, index: int = 0) -> None:
    """Of each token and of the `count` best, by value; and their sum."""
    completion, logits = output.outputs[index], checkpoint.logits(output, index)
    want, margins = log_softmax(logits), checkpoint.margins(logits)
    assert completion.logprobs is not None
    for row, margin, token, told in zip(want, margins, completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(told)) == token
        assert count <= len(told) <= count + 1
        for each, logprob in told.items():
            assert abs(logprob.logprob - row[each]) <= margin, f"log-probability of token {each}"
        lowest = np.sort(row)[-count] if count else -np.inf
        assert all(row[each] >= lowest - margin for each in told if each != token), "not the most likely ones"
    total = float(np.take_along_axis(want, np.array(completion.token_ids)[:, None], 1).sum())
    assert completion.cumulative_logprob == pytest.approx(total, abs=float(margins.sum()))


def test_logprobs(llm: LLM, checkpoint: Checkpoint) -> None:
    """Those of the model: before temperature, biases and penalties."""
    check_logprobs(checkpoint, complete(llm, logprobs=5), 5)
    check_logprobs(checkpoint, complete(llm, logprobs=3, temperature=1.7, seed=1, logit_bias={9: 20.0}), 3)


def test_prompt_logprobs(llm: LLM, checkpoint: Checkpoint) -> None:
    prompt = [*PROMPT, *range(20, 50)]
    output = complete(llm, prompt, prompt_logprobs=2, max_tokens=1)
    logits = checkpoint.reference.run(prompt).logits
    want, margins = log_softmax(logits), checkpoint.margins(logits)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for i, told in enumerate(output.prompt_logprobs[1:]):
        assert told is not None
        assert prompt[i + 1] in told
        assert all(abs(logprob.logprob - want[i, token]) <= margins[i] for token, logprob in told.items())


# -- beams, streams, aborts ------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 4])
def test_beam_search(width: int, llm: LLM, checkpoint: Checkpoint) -> None:
    """As good as by the book, where every prefix is scored from nothing."""
    num_tokens = 5
    params = BeamSearchParams(beam_width=width, max_tokens=num_tokens, ignore_eos=True)
    found = llm.beam_search(list(PROMPT), params)[0].sequences
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    margin = 0.0
    for _ in range(num_tokens):
        grown = []
        for total, tokens in live:
            logits = checkpoint.reference.run([*PROMPT, *tokens]).logits[-1]
            margin = max(margin, float(checkpoint.margins(logits)))
            best = np.argsort(-logits)[: 2 * width]
            grown += [(total + log_softmax(logits)[token], [*tokens, int(token)]) for token in best]
        live = sorted(grown, reverse=True)[:width]
    assert len(found) == width
    for sequence, (total, _) in zip(found, live, strict=True):
        own = log_softmax(checkpoint.reference.run(sequence.tokens).logits[len(PROMPT) - 1 : -1])
        scored = float(np.take_along_axis(own, np.array(sequence.tokens[len(PROMPT) :])[:, None], 1).sum())
        assert sequence.cum_logprob == pytest.approx(scored, abs=num_tokens * margin)
        assert scored >= total - num_tokens * margin, "a better sequence was lost"


def test_a_stream_grows_to_the_whole(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    whole = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    last: dict[str, list[RequestOutput]] = {}
    for output in llm.stream(PROMPTS, params):
        last.setdefault(output.request_id, []).append(output)
    for outputs, want in zip((last[name] for name in sorted(last, key=int)), whole, strict=True):
        texts = [output.outputs[0].text for output in outputs]
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        assert len(outputs) > 1, "more than one piece"
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs[0].text == want.text
        assert len(outputs[-1].outputs[0].token_ids) == len(want.token_ids)


def test_aborts_under_load(checkpoint: Checkpoint) -> None:
    """Twenty requests in a pool for half of them; every third is left or aborted, the others get their tokens."""

    async def one(llm: AsyncLLM, number: int) -> RequestOutput | None:
        params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
        output = None
        async for output in llm.generate(PROMPTS[number % 10], params, request_id=str(number)):
            if number % 6 == 0 and len(output.outputs[0].token_ids) > 3:
                return output  # the reader leaves
            if number % 6 == 3 and not output.finished:
                await llm.abort(str(number))
        return output

    async def all_of_them() -> list[RequestOutput | None]:
        size = checkpoint.options["block_size"]
        options = {**checkpoint.options, "num_blocks": max(2, -(-24 // size)) * 5}
        with AsyncLLM(checkpoint.folder, **options, max_num_seqs=8) as llm:
            return await asyncio.wait_for(asyncio.gather(*(one(llm, number) for number in range(20))), 120)

    outputs = asyncio.run(all_of_them())
    for number, output in enumerate(outputs):
        assert output is not None
        if number % 3 != 0:
            assert output.outputs[0].finish_reason == "length"
        checkpoint.check_greedy(output)


def test_one_bad_request_harms_no_other(llm: LLM, checkpoint: Checkpoint) -> None:
    """One that is refused, and one whose own function fails in the middle of a step that it shares."""

    def fails(token_ids: list[int], logits: Any) -> Any:
        if len(token_ids) == 3:
            raise RuntimeError("the user's own mistake")
        return logits

    with pytest.raises(InvalidRequest, match="113"):
        llm.generate([list(PROMPT), [VOCAB_SIZE]], use_tqdm=False)
    good = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    bad = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logits_processors=[fails])
    outputs = llm.generate(PROMPTS[:5], [good, bad, good, good, bad], use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length", "length", "error"]
    assert "the user's own mistake" in str(outputs[1].error)
    for output in outputs:
        checkpoint.check_greedy(output)


def test_the_end_of_text_ends_it(llm: LLM, checkpoint: Checkpoint) -> None:
    output = complete(llm, ignore_eos=False, logit_bias={EOS: 100.0})
    assert output.outputs[0].token_ids == [EOS]
    assert output.outputs[0].finish_reason == "stop"


@pytest.mark.conformance_level("L5")
def test_the_same_tokens_alone_and_under_load(checkpoint: Checkpoint, target: tuple[BackendInfo, int]) -> None:
    """With numerics="strict": drawn at random and greedy, in steps that are mixed otherwise each time."""
    able = target[0].traits.batch_invariant
    if not able:
        pytest.skip("Traits.batch_invariant names no dtype")
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=12, ignore_eos=True, logprobs=1)
        for seed, temperature in enumerate([0.0, 1.0] * 5)
    ]
    options = {**checkpoint.options, "dtype": able[0], "numerics": "strict"}
    with LLM(checkpoint.folder, **options, max_num_seqs=7, max_num_batched_tokens=13) as llm:
        together = llm.generate(PROMPTS, params, use_tqdm=False)
        alone = [llm.generate(prompt, each, use_tqdm=False)[0] for prompt, each in zip(PROMPTS, params, strict=True)]
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].cumulative_logprob == other.outputs[0].cumulative_logprob
