"""What each of SamplingParams does to what comes out of a real model, and how requests share an engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pagefleet import LLM, CompletionOutput, RequestOutput, SamplingParams
from pagefleet.sampling_params import BeamSearchParams, InvalidRequest

PROMPT = "Hello my name is Robert and I"
WORDS = "t5 t6 t7 t8 t9"  # a prompt of the tiny model


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(str(smollm2), device="cpu", dtype="float32", kv_cache_memory_bytes=64 << 20, max_model_len=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Callable[[str], Path]) -> Iterator[LLM]:
    """A model of two layers, in steps of at most 16 tokens: most prompts here are run in chunks."""
    sizes = {"num_blocks": 128, "max_model_len": 200, "max_num_batched_tokens": 16, "block_size": 8}
    with LLM(str(tiny_checkpoint("llama")), device="cpu", max_logprobs=-1, **sizes) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_stays_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"llm", "tiny"} & set(request.fixturenames):
        assert_idle(request.getfixturevalue(name))


def assert_idle(llm: LLM) -> None:
    facts = llm.explain()
    assert "0 running, 0 waiting" in facts
    assert "0 held" in facts


def one(llm: LLM, prompt: Any = PROMPT, **fields: Any) -> CompletionOutput:
    """The only completion of one prompt."""
    (output,) = llm.generate(prompt, SamplingParams(**fields))
    return output.outputs[0]


def greedy(llm: LLM, prompt: Any = PROMPT, **fields: Any) -> CompletionOutput:
    return one(llm, prompt, **{"temperature": 0, "max_tokens": 12, **fields})


@pytest.fixture(scope="module")
def plain(llm: LLM) -> CompletionOutput:
    """The greedy completion of PROMPT, to compare with."""
    completion = greedy(llm)
    assert (len(completion.token_ids), completion.finish_reason) == (12, "length")
    assert len(completion.text.split()) > 5
    return completion


# -- SmolLM2: the cases vLLM tests end to end ----------------------------------------------------------


def test_n_completions_come_back_in_order(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(n=3, max_tokens=4))
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert [len(completion.token_ids) for completion in output.outputs] == [4, 4, 4]
    assert output.finished


def test_all_penalties_and_cuts_at_once_generate(llm: LLM) -> None:
    completion = one(
        llm,
        max_tokens=8,
        temperature=1.2,
        presence_penalty=1.2,
        frequency_penalty=1.2,
        repetition_penalty=1.2,
        min_p=0.5,
        top_p=0.5,
        top_k=3,
    )
    assert len(completion.token_ids) == 8
    assert completion.text


def test_a_stop_string_ends_the_text_before_or_after_it(llm: LLM, plain: CompletionOutput) -> None:
    words = plain.text.split()
    stop = next(word for i, word in enumerate(words) if i > 3 and plain.text.find(word) >= len(" ".join(words[:i])))
    without, included = (
        output.outputs[0]
        for output in llm.generate(
            [PROMPT, PROMPT],
            [
                SamplingParams(temperature=0, max_tokens=12, stop=stop),
                SamplingParams(temperature=0, max_tokens=12, stop=[stop], include_stop_str_in_output=True),
            ],
        )
    )
    at = plain.text.index(stop)
    assert (without.text, included.text) == (plain.text[:at], plain.text[: at + len(stop)])
    for completion in (without, included):
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.token_ids == plain.token_ids[: len(completion.token_ids)]
        assert len(completion.token_ids) < len(plain.token_ids)


def test_the_first_stop_token_to_come_ends_it_whatever_their_order(llm: LLM, plain: CompletionOutput) -> None:
    first, second = plain.token_ids[5:7]
    end = plain.token_ids.index(first)
    orders = [[first, second], [second, first]]
    params = [SamplingParams(temperature=0, max_tokens=12, stop_token_ids=ids) for ids in orders]
    for output in llm.generate([PROMPT] * 2, params):
        completion = output.outputs[0]
        assert completion.token_ids == plain.token_ids[: end + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", first)
        assert plain.text.startswith(completion.text)


def test_without_detokenising_there_is_no_text_anywhere(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(detokenize=False, logprobs=3, prompt_logprobs=3, max_tokens=4))
    completion = output.outputs[0]
    assert (len(completion.token_ids), completion.text) == (4, "")
    assert output.prompt_logprobs is not None
    assert completion.logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for position in [*output.prompt_logprobs[1:], *completion.logprobs]:
        assert position is not None
        assert 3 <= len(position) <= 4
        assert all(logprob.decoded_token is None for logprob in position.values())


def has_words(text: str, words: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None


def test_bad_words_do_not_appear(llm: LLM, plain: CompletionOutput) -> None:
    first = " ".join(plain.text.split()[:2])
    assert has_words(plain.text, first)
    text = greedy(llm, bad_words=[first]).text
    assert not has_words(text, first)
    second = text.split()[-1]
    text = greedy(llm, bad_words=[first, second]).text
    assert not has_words(text, first)
    assert not has_words(text, second)


def test_a_logits_processor_has_the_last_word(llm: LLM) -> None:
    def count_up(output_token_ids: list[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        logits[100 + len(output_token_ids)] = np.inf
        return logits

    params = [SamplingParams(temperature=t, max_tokens=5, logits_processors=[count_up]) for t in (0, 1)]
    for output in llm.generate([PROMPT] * 2, params):
        assert output.outputs[0].token_ids == [100, 101, 102, 103, 104]


def test_only_allowed_tokens_come_out(llm: LLM) -> None:
    assert one(llm, allowed_token_ids=[10], max_tokens=4).token_ids == [10] * 4
    for wrong in ([], [-1], [10_000_000]):
        with pytest.raises(ValueError, match="allowed_token_ids"):
            one(llm, allowed_token_ids=wrong)


def test_the_seed_decides_what_is_drawn(llm: LLM) -> None:
    seeds = [42, 42, 43]
    params = [SamplingParams(seed=seed, max_tokens=8) for seed in seeds]
    first, again, other = (output.outputs[0] for output in llm.generate([PROMPT] * 3, params))
    assert (first.token_ids, first.text) == (again.token_ids, again.text)
    assert first.text != other.text


def test_the_first_token_is_drawn_with_its_probability(llm: LLM) -> None:
    (asked,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1, logprobs=4))
    assert asked.outputs[0].logprobs is not None
    top = asked.outputs[0].logprobs[0]
    num_draws = 256
    (output,) = llm.generate(PROMPT, SamplingParams(n=num_draws, seed=1, max_tokens=1, top_k=4))
    drawn = [completion.token_ids[0] for completion in output.outputs]
    total = sum(np.exp(logprob.logprob) for logprob in top.values())
    for token_id, logprob in top.items():
        share = np.exp(logprob.logprob) / total
        assert abs(drawn.count(token_id) - share * num_draws) < 4 * np.sqrt(share * (1 - share) * num_draws)


# -- SmolLM2: text, ends and special tokens ------------------------------------------------------------


def test_a_model_that_ends_its_turn_stops_and_goes_on_if_told_to(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=24)
    (answer,) = llm.chat(messages, params)
    completion = answer.outputs[0]
    assert "Paris" in completion.text
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    eos = completion.token_ids[-1]
    assert eos == llm.get_tokenizer().eos_token_id
    prompt = {"prompt_token_ids": answer.prompt_token_ids}
    on, late, spelled, kept = (
        output.outputs[0]
        for output in llm.generate(
            [prompt] * 4,
            [
                SamplingParams(temperature=0, max_tokens=11, ignore_eos=True),
                SamplingParams(temperature=0, max_tokens=11, min_tokens=len(completion.token_ids)),
                SamplingParams(temperature=0, max_tokens=11, ignore_eos=True, skip_special_tokens=False),
                SamplingParams(
                    temperature=0, max_tokens=11, include_stop_str_in_output=True, skip_special_tokens=False
                ),
            ],
        )
    )
    assert (len(on.token_ids), on.finish_reason) == (11, "length")
    assert on.token_ids[: len(completion.token_ids)] == completion.token_ids
    assert eos not in late.token_ids[: len(completion.token_ids)]
    name = llm.get_tokenizer().decode([eos], skip_special_tokens=False)
    assert name not in on.text
    assert spelled.text.startswith(completion.text + name)
    assert kept.text == completion.text + name


def test_streamed_text_grows_to_the_text_of_generate(llm: LLM, plain: CompletionOutput) -> None:
    outputs = list(llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=12)))
    texts = [output.outputs[0].text for output in outputs]
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert texts[-1] == plain.text
    assert [output.finished for output in outputs] == [False] * 11 + [True]
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 13))


def test_metrics_tell_when_things_happened(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))
    metrics = output.metrics
    assert 0 < metrics.arrival_time <= metrics.first_scheduled_time < metrics.first_token_time < metrics.last_token_time
    assert metrics.num_generated == 4
    assert metrics.time_to_first_token > metrics.queue_time >= 0
    assert metrics.inter_token_latency > 0


# -- log-probabilities against transformers ------------------------------------------------------------

# float32 sums of the same terms in another order: about 1e-6 of the logits' size of 20 to 30
TOLERANCE = 1e-4


def exact_logprobs(model: Any, token_ids: list[int]) -> NDArray[np.float64]:
    """transformers' log-probabilities [n, vocab_size] of what follows each token, in one pass."""
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids]), use_cache=False).logits[0].double()
    result: NDArray[np.float64] = torch.log_softmax(logits, -1).numpy()
    return result


@pytest.mark.parametrize("count", [0, 3, -1])
def test_logprobs_of_prompt_and_output_are_those_of_transformers(
    tiny: LLM, reference: Callable[[Path], Any], tiny_checkpoint: Callable[[str], Path], count: int
) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 256, n).tolist() for n in (1, 2, 15, 16, 17, 40, 150)]  # steps run 16 tokens
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=6, logprobs=count, prompt_logprobs=count)
    model = reference(tiny_checkpoint("llama"))
    for prompt, output in zip(prompts, tiny.generate(prompts, params), strict=True):
        completion = output.outputs[0]
        sequence = prompt + completion.token_ids
        exact = exact_logprobs(model, sequence)
        assert completion.logprobs is not None
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        found = [*output.prompt_logprobs[1:], *completion.logprobs]
        assert len(found) == len(sequence) - 1
        for token_id, position, row in zip(sequence[1:], found, exact, strict=False):
            assert position is not None
            assert next(iter(position)) == token_id
            assert len(position) in ({256} if count == -1 else {count, count + 1} - {0})
            for other, logprob in position.items():
                assert abs(logprob.logprob - row[other]) < TOLERANCE
                assert logprob.rank is not None
                better = (row > row[other] + TOLERANCE).sum(), (row > row[other] - TOLERANCE).sum()
                assert better[0] < logprob.rank <= max(better[1], 1)
        total = sum(logprobs[i].logprob for i, logprobs in zip(completion.token_ids, completion.logprobs, strict=True))
        assert completion.cumulative_logprob == pytest.approx(total, rel=1e-6)


def test_prompt_logprobs_are_the_same_after_a_prefix_was_cached(tiny: LLM) -> None:
    prompt = list(range(20, 80))
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
    tiny.generate([prompt], SamplingParams(max_tokens=1))
    first, again = (tiny.generate([prompt], params)[0] for _ in range(2))
    assert first.prompt_logprobs == again.prompt_logprobs
    assert first.outputs[0].token_ids == again.outputs[0].token_ids


# -- who shares the batch ------------------------------------------------------------------------------


def test_a_seeded_request_draws_the_same_tokens_alone_and_among_others(tiny: LLM) -> None:
    prompts = [[3 + i, 9, 27, 81, *range(3, 3 + 5 * i)] for i in range(12)]
    params = [
        SamplingParams(
            seed=i,
            max_tokens=20,
            ignore_eos=True,
            temperature=0.8,
            top_p=0.9 if i % 2 else 1,
            top_k=20 if i % 3 else 0,
            frequency_penalty=0.5 if i % 4 else 0,
        )
        for i in range(12)
    ]
    together = [output.outputs[0].token_ids for output in tiny.generate(prompts, params)]
    alone = [
        tiny.generate([prompt], each)[0].outputs[0].token_ids for prompt, each in zip(prompts, params, strict=True)
    ]
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) == 12


def test_each_of_n_completions_is_that_of_the_next_seed(tiny: LLM) -> None:
    (output,) = tiny.generate(WORDS, SamplingParams(n=3, seed=5, max_tokens=10, repetition_penalty=1.2))
    tokens = [completion.token_ids for completion in output.outputs]
    assert len({tuple(each) for each in tokens}) == 3
    for i, each in enumerate(tokens):
        assert one(tiny, WORDS, seed=5 + i, max_tokens=10, repetition_penalty=1.2).token_ids == each


def test_requests_without_a_seed_differ(tiny: LLM) -> None:
    outputs = tiny.generate([WORDS] * 4, SamplingParams(max_tokens=10))
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 4


def test_more_completions_than_rows_are_all_completed(tiny: LLM) -> None:
    (output,) = tiny.generate(WORDS, SamplingParams(n=40, seed=0, max_tokens=3, ignore_eos=True))
    assert [len(completion.token_ids) for completion in output.outputs] == [3] * 40


def break_here(output_token_ids: list[int], logits: Any) -> Any:
    if len(output_token_ids) == 2:
        raise KeyError("mine")
    return logits


def test_a_request_whose_processor_raises_fails_alone(tiny: LLM) -> None:
    good = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    bad = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logits_processors=[break_here])
    expected = one(tiny, WORDS, temperature=0, max_tokens=8, ignore_eos=True)
    outputs = tiny.generate([WORDS] * 3, [good, bad, good])
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert [output.error for output in outputs] == [None, "KeyError: 'mine'", None]
    assert outputs[1].outputs[0].token_ids == expected.token_ids[:2]
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids == expected.token_ids


def test_a_device_that_fails_within_a_prompt_leaves_no_completion_waiting(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_engine = tiny._engine
    backend, num_steps = text_engine.engine.backend, 0
    forward = backend.forward

    def fail_once(batch: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 2:
            raise RuntimeError("device lost")
        return forward(batch)

    monkeypatch.setattr(backend, "forward", fail_once)
    tiny.reset_prefix_cache()
    params = SamplingParams(n=3, max_tokens=2, ignore_eos=True)
    generation = text_engine.prepare(list(range(3, 60)), params)  # 4 steps of prompt, before the others fork off
    text_engine.start(generation)
    for _ in range(30):
        text_engine.step()
    assert [request.finish_reason for request in generation.requests] == ["error", "length", "length"]
    assert generation.output().error == "RuntimeError: device lost"
    assert not text_engine.has_work
    assert len(one(tiny, WORDS, max_tokens=3, ignore_eos=True).token_ids) == 3  # the engine goes on


# -- prompts -------------------------------------------------------------------------------------------


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_a_prompt_may_be_text_or_ids_or_a_mapping(tiny: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5)
    ids = tiny.get_tokenizer().encode(WORDS)
    prompts: list[Any] = [WORDS, ids, tuple(ids), np.array(ids), {"prompt": WORDS}, {"prompt_token_ids": ids}]
    prompts += [{"prompt": "shown", "prompt_token_ids": ids}, {"prompt": WORDS, "cache_salt": "mine"}]
    outputs = tiny.generate(prompts, params)
    assert tokens_of(outputs) == [tokens_of(outputs)[0]] * len(prompts)
    assert [output.prompt for output in outputs] == [WORDS, None, None, None, WORDS, None, "shown", WORDS]
    assert all(output.prompt_token_ids == ids for output in outputs)
    for alone in (WORDS, ids, np.array(ids), {"prompt": WORDS}):
        assert tokens_of(tiny.generate(alone, params)) == [tokens_of(outputs)[0]]


def test_a_salt_keeps_cached_prefixes_apart(tiny: LLM) -> None:
    tiny.reset_prefix_cache()
    params, ids = SamplingParams(max_tokens=1), list(range(3, 60))

    def cached(**salt: str) -> int:
        return tiny.generate([{"prompt_token_ids": ids, **salt}], params)[0].num_cached_tokens

    assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="a"), cached(cache_salt="b")] == [
        0,
        56,
        0,
        56,
        0,
    ]


def test_no_prompts_give_no_outputs(tiny: LLM) -> None:
    assert tiny.generate([]) == []
    assert list(tiny.stream([])) == []


def test_parameters_are_one_for_all_or_one_each(tiny: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 4, 2)]
    assert [len(ids) for ids in tokens_of(tiny.generate([WORDS] * 3, params))] == [1, 4, 2]
    assert [len(ids) for ids in tokens_of(tiny.generate([WORDS] * 2, params[1]))] == [4, 4]
    with pytest.raises(InvalidRequest, match="sampling_params has 3 entries for 2 prompts"):
        tiny.generate([WORDS] * 2, params)
    with pytest.raises(InvalidRequest, match="priority has 1 entries for 2 prompts"):
        tiny.generate([WORDS] * 2, priority=[1])


def test_without_max_tokens_the_models_length_is_the_limit(tiny: LLM) -> None:
    completion = one(tiny, list(range(3, 190)), max_tokens=None, ignore_eos=True)
    assert (len(completion.token_ids), completion.finish_reason) == (13, "length")
    completion = one(tiny, list(range(3, 190)), max_tokens=100, ignore_eos=True)
    assert (len(completion.token_ids), completion.finish_reason) == (13, "length")


WRONG_PROMPTS = [
    ("", "the prompt is empty"),
    ([], "the prompt is empty"),
    ({"prompt_token_ids": []}, "the prompt is empty"),
    ([3] * 200, "the prompt has 200 tokens; max_model_len=200 leaves room for 199"),
    ([3, 256], r"token ids must be in \[0, 256\), got 256"),
    ([3, -1], r"token ids must be in \[0, 256\), got -1"),
    ([3, 10**30], r"token ids must be in \[0, 256\)"),
    ([3, 1.5], "a prompt must be text or a list of token ids"),
    ([3, "t4"], "a prompt must be text or a list of token ids"),
    ({"text": "t4"}, "a prompt has the keys prompt, prompt_token_ids, cache_salt, got text"),
    ({}, "a prompt must be text or a list of token ids"),
    ({"prompt": WORDS, "cache_salt": 5}, "cache_salt must be a string, got 5"),
    (None, "a prompt must be text or a list of token ids"),
    (1.5, "a prompt must be text or a list of token ids"),
]


@pytest.mark.parametrize(("prompt", "message"), WRONG_PROMPTS)
def test_a_wrong_prompt_is_refused_by_its_index_before_anything_runs(tiny: LLM, prompt: Any, message: str) -> None:
    for call in (tiny.generate, tiny.stream):
        with pytest.raises(InvalidRequest, match=rf"^prompts\[2\]: .*{message}"):
            call([WORDS, "t7", prompt, WORDS])
        assert_idle(tiny)
    with pytest.raises(InvalidRequest, match=rf"^prompts\[2\]: .*{message}"):
        tiny.beam_search([WORDS, "t7", prompt, WORDS], BeamSearchParams(beam_width=2, max_tokens=3))
    assert_idle(tiny)
    assert len(one(tiny, WORDS, max_tokens=3, ignore_eos=True).token_ids) == 3


@pytest.mark.parametrize("prompt", ["", {"prompt_token_ids": [256]}, [-1]])
def test_a_wrong_prompt_alone_is_refused_without_an_index(tiny: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^(the prompt is empty|token ids must)"):
        tiny.generate(prompt)


def test_parameters_the_model_cannot_serve_are_refused_by_index(tiny: LLM) -> None:
    for wrong in (
        SamplingParams(stop_token_ids=[256]),
        SamplingParams(logit_bias={256: 1.0}),
        SamplingParams(allowed_token_ids=[1, 300]),
    ):
        with pytest.raises(InvalidRequest, match=r"^prompts\[1\]: .* must hold ids below the vocabulary's size 256"):
            tiny.generate([WORDS] * 2, [SamplingParams(), wrong])


# -- streams share the engine --------------------------------------------------------------------------


def test_a_stream_left_early_leaves_nothing_running(tiny: LLM) -> None:
    for output in tiny.stream([WORDS] * 3, SamplingParams(max_tokens=50, ignore_eos=True)):
        if len(output.outputs[0].token_ids) == 3:
            break
    del output
    assert_idle(tiny)


def test_streams_and_calls_within_a_stream_do_not_take_each_others_outputs(tiny: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = tokens_of(tiny.generate([WORDS, "t9 t8"], params))
    first, second = tiny.stream([WORDS], params), tiny.stream(["t9 t8"], params)
    seen: list[list[RequestOutput]] = [[next(first)], [next(second)]]
    assert tokens_of(tiny.generate(["t30 t31"] * 2, SamplingParams(max_tokens=30, ignore_eos=True)))
    seen[0] += list(first)
    seen[1] += list(second)
    for outputs, tokens in zip(seen, expected, strict=True):
        assert len({output.request_id for output in outputs}) == 1
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs[0].token_ids == tokens


def test_n_completions_stream_together(tiny: LLM) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=5, ignore_eos=True)
    outputs = list(tiny.stream(WORDS, params))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    (expected,) = tiny.generate(WORDS, params)
    assert [each.text for each in outputs[-1].outputs] == [each.text for each in expected.outputs]
