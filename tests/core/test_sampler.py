"""The host sampler against float64 expectations written out naively, and the independence of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagefleet.sampler import (
    NO_LOGPROBS,
    LogitsRules,
    SampledTokens,
    Sampler,
    SamplingBatch,
    draw,
    largest,
    row_logprobs,
    uniform,
)
from pagefleet.sampling_params import SamplingParams

VOCAB = 50
Logits = NDArray[np.float32]


def make_batch(
    num_rows: int,
    *,
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seeds: int | Sequence[int] | NDArray[Any] = 0,
    positions: int | Sequence[int] | NDArray[Any] = 1,
    num_logprobs: int | Sequence[int] = NO_LOGPROBS,
    rules: Mapping[int, LogitsRules] | None = None,
    prompt_targets: Sequence[int] = (),
    prompt_num_logprobs: Sequence[int] = (),
) -> SamplingBatch:
    def column(value: Any, dtype: type) -> NDArray[Any]:
        return np.broadcast_to(np.asarray(value, dtype), num_rows).copy()

    return SamplingBatch(
        temperature=column(temperature, np.float32),
        top_k=column(top_k, np.int32),
        top_p=column(top_p, np.float32),
        min_p=column(min_p, np.float32),
        seeds=column(seeds, np.uint64),
        positions=column(positions, np.int32),
        num_logprobs=column(num_logprobs, np.int32),
        rules=rules or {},
        prompt_targets=np.array(prompt_targets, np.int32),
        prompt_num_logprobs=np.array(prompt_num_logprobs, np.int32),
    )


def expected_probabilities(logits: Logits, temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """What vLLM documents, one token after the other, in Python's floats."""
    values = [float(x) / temperature for x in logits]
    weights = [np.exp(x - max(values)) for x in values]
    kept = [i for i, w in enumerate(weights) if w / sum(weights) >= min_p * max(weights) / sum(weights)]
    kept.sort(key=lambda i: (-weights[i], i))
    if top_k > 0:
        kept = kept[:top_k]
    total = sum(weights[i] for i in kept)
    nucleus, share = [], 0.0
    for i in kept:
        if share >= top_p * total and nucleus:
            break
        nucleus.append(i)
        share += weights[i]
    total = sum(weights[i] for i in nucleus)
    return [float(weights[i] / total) if i in nucleus else 0.0 for i in range(len(weights))]


def draw_evenly(logits: Logits, num_draws: int, *shape: Any) -> NDArray[np.float64]:
    """Shares of the tokens drawn at evenly spaced quantiles: off by less than 1 draw a token, and no more."""
    tokens = [draw(logits, *shape, (i + 0.5) / num_draws) for i in range(num_draws)]
    return np.bincount(tokens, minlength=len(logits)) / num_draws


def chi_square_z(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    """Chi-square statistic in standard deviations from its mean. Cells expected below 5 hits are put together."""
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * counts.sum()
    rare = expected < 5
    if rare.any():
        counts, expected = (
            np.append(counts[~rare], counts[rare].sum()),
            np.append(expected[~rare], expected[rare].sum()),
        )
    counts, expected = counts[expected > 0], expected[expected > 0]
    degrees = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))


def random_logits(seed: int, size: int = VOCAB, spread: float = 2.0) -> Logits:
    return np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)


# -- distributions -------------------------------------------------------------------------------------


SHAPES = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.3, 0, 1.0, 0.0),
    (3.0, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 0.7, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.0, 0, 1.0, 1.0),
    (0.7, 10, 0.9, 0.05),
    (2.0, 10, 0.5, 0.2),
    (2.0, 30, 0.95, 0.01),
    (1.0, VOCAB + 5, 0.999, 0.0),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [3, VOCAB, 1000])
def test_every_token_has_the_share_of_quantiles_that_is_its_probability(shape: tuple[Any, ...], size: int) -> None:
    logits = random_logits(size, size)
    num_draws = 1500
    shares = draw_evenly(logits, num_draws, *shape)
    expected = np.array(expected_probabilities(logits, *shape))
    assert set(np.flatnonzero(shares)) <= set(np.flatnonzero(expected))
    assert np.abs(shares - expected).max() <= 1.01 / num_draws  # 1: the spacing, 0.01: float32 weights


@pytest.mark.parametrize("shape", SHAPES[:3] + SHAPES[9:12], ids=str)
def test_seeds_draw_from_the_distribution(shape: tuple[Any, ...]) -> None:
    logits, num_draws = random_logits(1), 10_000
    temperature, top_k, top_p, min_p = shape
    batch = make_batch(
        num_draws, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seeds=np.arange(num_draws)
    )
    tokens = Sampler().sample(np.broadcast_to(logits, (num_draws, VOCAB)), batch).token_ids
    z = chi_square_z(np.bincount(tokens, minlength=VOCAB), np.array(expected_probabilities(logits, *shape)))
    assert abs(z) < 4  # the seeds are fixed: what passes once passes always


def test_positions_of_one_seed_draw_from_the_distribution() -> None:
    logits, num_draws = random_logits(2), 10_000
    batch = make_batch(num_draws, seeds=7, positions=np.arange(num_draws))
    tokens = Sampler().sample(np.broadcast_to(logits, (num_draws, VOCAB)), batch).token_ids
    z = chi_square_z(np.bincount(tokens, minlength=VOCAB), np.array(expected_probabilities(logits, *SHAPES[0])))
    assert abs(z) < 4


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.floats(-30, 30, width=32) | st.just(-np.inf), min_size=1, max_size=200).filter(
        lambda values: max(values) > -np.inf
    ),
    st.floats(0.05, 10),
    st.integers(0, 210),
    st.floats(1e-6, 1),
    st.floats(0, 1),
    st.floats(0, 1, exclude_max=True),
)
def test_only_a_token_that_the_cuts_leave_is_drawn(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, share: float
) -> None:
    logits = np.array(values, np.float32)
    token_id = draw(logits, temperature, top_k, top_p, min_p, share)
    assert logits[token_id] > -np.inf
    assert top_k == 0 or (logits > logits[token_id]).sum() < top_k
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    rounding = 1 + 1e-4  # of float32 exponents down to -100, below which weights are 0
    assert weights[token_id] * rounding >= min_p
    above = weights[weights > weights[token_id] * rounding].sum()
    assert above <= top_p * weights.sum() * rounding  # of all, which is no less than what top_k and min_p left


def test_top_p_1_cuts_nothing() -> None:
    logits = np.array([0, *[-16] * 9], np.float32)  # 9 tokens of 1e-7 each
    assert draw(logits, 1.0, 0, 1.0, 0.0, 1 - 2.0**-53) == 9
    assert draw(logits, 1.0, 0, 0.9999, 0.0, 1 - 2.0**-53) == 0


def test_the_smallest_top_p_is_greedy() -> None:
    logits = random_logits(3)
    assert {draw(logits, 5.0, 0, 1e-30, 0.0, u) for u in np.linspace(0, 0.999, 50)} == {int(logits.argmax())}


def test_of_equal_tokens_at_a_cut_the_first_stay() -> None:
    logits = np.zeros(200, np.float32)
    logits[100] = 1
    assert set(np.flatnonzero(draw_evenly(logits, 800, 1.0, 4, 1.0, 0.0))) == {0, 1, 2, 100}
    assert set(np.flatnonzero(draw_evenly(np.zeros(10, np.float32), 100, 1.0, 0, 0.35, 0.0))) == {0, 1, 2, 3}
    assert draw(np.zeros(10, np.float32), 1.0, 1, 1.0, 0.0, 0.99) == 0  # as greedy does


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(-3, 3) | st.just(-np.inf), min_size=1, max_size=700),
    st.integers(1, 700),
)
def test_the_largest_values_are_those_a_stable_sort_puts_first(values: list[float], count: int) -> None:
    array, count = np.array(values, np.float32), min(count, len(values))
    assert largest(array, count).tolist() == sorted(np.argsort(-array, kind="stable")[:count].tolist())


def test_a_masked_token_is_never_drawn_not_even_at_the_very_end() -> None:
    rng = np.random.default_rng(0)
    for size in (2, 63, 64, 65, 500):
        logits = rng.normal(0, 1, size).astype(np.float32)
        logits[size // 2 :] = -np.inf
        for share in (0.0, 1 - 2.0**-53, np.nextafter(1, 0)):
            assert draw(logits, 1.0, 0, 1.0, 0.0, float(share)) < max(1, size // 2)


# -- extreme logits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1e-3, 1.0, 1e4])
def test_huge_logits_do_not_overflow(temperature: float) -> None:
    logits = np.full((1, VOCAB), -3e38, np.float32)
    logits[0, 7] = 3e38
    with np.errstate(all="raise", under="ignore"):
        sampled = Sampler().sample(logits, make_batch(1, temperature=temperature, num_logprobs=2))
    assert (sampled.token_ids.tolist(), dict(sampled.errors)) == ([7], {})
    assert sampled.logprobs[0].logprobs[:2].tolist() == [0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [np.nan, np.inf, "all -inf", "one nan"])
def test_logits_that_are_not_finite_are_an_error_of_their_row_only(temperature: float, broken: Any) -> None:
    logits = np.stack([random_logits(i) for i in range(3)])
    alone = [Sampler().sample(logits[i : i + 1], make_batch(1, temperature=temperature, seeds=i)) for i in range(3)]
    if broken == "one nan":
        logits[1, 20] = np.nan
    else:
        logits[1] = -np.inf if broken == "all -inf" else broken
    sampled = Sampler().sample(logits, make_batch(3, temperature=temperature, seeds=[0, 1, 2], num_logprobs=1))
    assert list(sampled.errors) == [1]
    assert "not finite" in str(sampled.errors[1])
    assert sampled.token_ids[[0, 2]].tolist() == [int(alone[0].token_ids[0]), int(alone[2].token_ids[0])]
    assert sorted(sampled.logprobs) == [0, 2]
    assert 0 <= sampled.token_ids[1] < VOCAB  # a pipelined step computes it before the request has ended


def test_tokens_of_minus_infinity_are_left_out() -> None:
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, [3, 5]] = 0
    batch = make_batch(50, seeds=range(50), top_p=0.99, min_p=0.1)
    assert set(Sampler().sample(np.tile(logits, (50, 1)), batch).token_ids.tolist()) == {3, 5}


def test_logits_are_left_as_they_are() -> None:
    logits = np.stack([random_logits(i) for i in range(2)])
    before = logits.copy()
    rules = {0: make_rules(SamplingParams(logit_bias={1: 5.0}, repetition_penalty=2.0, allowed_token_ids=[1, 2, 3]))}
    Sampler().sample(logits, make_batch(2, rules=rules, num_logprobs=3, top_k=3))
    assert (logits == before).all()


# -- log-probabilities ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5, VOCAB - 1, VOCAB, 2**31 - 1])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_logprobs_are_the_log_softmax_with_ranks(count: int, spread: float) -> None:
    logits = random_logits(4, spread=spread)
    exact = logits.astype(np.float64) - logits.max()
    exact -= np.log(np.exp(exact).sum())
    order = np.argsort(-logits, kind="stable")
    for token_id in (0, 17, int(logits.argmax()), int(logits.argmin())):
        row = row_logprobs(logits, token_id, count)
        assert row.token_ids.tolist() == [token_id, *order[:count].tolist()]
        assert row.rank == order.tolist().index(token_id) + 1
        np.testing.assert_allclose(row.logprobs, exact[row.token_ids], rtol=2e-7, atol=2e-7)  # rounding to float32
        assert row.token_ids.dtype == np.int32
        assert row.logprobs.dtype == np.float32


def test_equal_tokens_share_a_rank_and_the_first_is_listed_first() -> None:
    logits = np.array([1, 3, 3, 0, 3], np.float32)
    row = row_logprobs(logits, 4, 2)
    assert (row.token_ids.tolist(), row.rank) == ([4, 1, 2], 1)
    assert row_logprobs(logits, 0, 0).rank == 4


def test_logprobs_are_those_before_penalties_and_temperature() -> None:
    logits = random_logits(5)[None]
    rules = {0: make_rules(SamplingParams(allowed_token_ids=[int(logits[0].argmin())]))}
    batch = make_batch(1, temperature=0.1, num_logprobs=3, rules=rules)
    sampled = Sampler().sample(logits, batch)
    assert sampled.logprobs[0].rank == VOCAB
    assert (
        sampled.logprobs[0].logprobs.tolist() == row_logprobs(logits[0], int(logits[0].argmin()), 3).logprobs.tolist()
    )


def test_only_rows_that_ask_get_logprobs_and_prompt_rows_follow_them() -> None:
    logits = np.stack([random_logits(i) for i in range(6)])  # 3 to sample, 2 of a prompt, 1 of padding
    batch = make_batch(
        3, num_logprobs=[NO_LOGPROBS, 0, 4], prompt_targets=[9, int(logits[4].argmax())], prompt_num_logprobs=[2, 0]
    )
    sampled = Sampler().sample(logits, batch)
    assert {row: len(found.token_ids) for row, found in sampled.logprobs.items()} == {1: 1, 2: 5}
    assert [row.token_ids[0] for row in sampled.prompt_logprobs] == [9, logits[4].argmax()]
    assert [len(row.token_ids) for row in sampled.prompt_logprobs] == [3, 1]
    np.testing.assert_array_equal(sampled.prompt_logprobs[0].logprobs, row_logprobs(logits[3], 9, 2).logprobs)


def test_a_step_may_score_a_prompt_without_sampling() -> None:
    logits = random_logits(6)[None]
    sampled = Sampler().sample(logits, make_batch(0, prompt_targets=[3], prompt_num_logprobs=[1]))
    assert (len(sampled.token_ids), len(sampled.prompt_logprobs)) == (0, 1)


# -- what parameters do to logits ----------------------------------------------------------------------


def make_rules(
    params: SamplingParams,
    prompt: Sequence[int] = (1, 2, 3),
    stop_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> LogitsRules:
    return LogitsRules(params, np.array(prompt, np.int32), stop_ids, bad_words, VOCAB)


def apply_after(rules: LogitsRules, output: Sequence[int], logits: Logits) -> Logits:
    """The logits of the token that follows `output`."""
    rules.output[:] = output
    return rules.apply(logits.copy(), len(rules.prompt_token_ids) + len(output))


@settings(deadline=None)
@given(
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.floats(0.1, 3),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
    st.lists(st.integers(0, VOCAB - 1), max_size=20),
)
def test_penalties_are_those_of_a_naive_loop(
    presence: float, frequency: float, repetition: float, prompt: list[int], output: list[int]
) -> None:
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition)
    logits = random_logits(7)
    expected = logits.astype(np.float64)
    for token_id in range(VOCAB):
        if token_id in prompt or token_id in output:
            expected[token_id] *= 1 / repetition if expected[token_id] > 0 else repetition
        expected[token_id] -= frequency * output.count(token_id) + presence * (token_id in output)
    changed = apply_after(make_rules(params, prompt), output, logits)
    np.testing.assert_allclose(changed, expected, rtol=1e-6, atol=1e-5)  # a few roundings of values up to 40


def test_only_parameters_that_touch_logits_need_rules() -> None:
    plain = SamplingParams(temperature=0.5, top_p=0.5, top_k=3, min_p=0.1, seed=1, stop=["a"], logprobs=3)
    assert not LogitsRules.needed(plain)
    for fields in (
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"min_tokens": 1},
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": [1]},
        {"bad_words": ["a"]},
        {"logits_processors": [lambda output, logits: logits]},
    ):
        assert LogitsRules.needed(SamplingParams(**fields)), fields  # type: ignore[arg-type]


def test_a_bad_word_of_several_tokens_loses_its_last_one_after_the_others() -> None:
    rules = make_rules(SamplingParams(bad_words=["x"]), prompt=[4, 5], bad_words=[[9], [4, 5, 6], [5, 7]])
    logits = np.zeros(VOCAB, np.float32)

    def banned(output: Sequence[int]) -> list[int]:
        return np.flatnonzero(apply_after(rules, output, logits) == -np.inf).tolist()

    assert banned([]) == [9]  # the prompt does not count
    assert banned([5]) == [7, 9]
    assert banned([4, 5]) == [6, 7, 9]
    assert banned([4, 5, 1]) == [9]
    assert banned([1, 4]) == [9]


def test_ends_are_masked_until_min_tokens() -> None:
    rules = make_rules(SamplingParams(min_tokens=2, max_tokens=4), stop_ids=[8, 9])
    logits = np.zeros(VOCAB, np.float32)
    for num_output in range(4):
        masked = np.flatnonzero(apply_after(rules, [1] * num_output, logits) == -np.inf).tolist()
        assert masked == ([8, 9] if num_output < 2 else [])


def test_min_tokens_without_ends_masks_nothing() -> None:
    logits = random_logits(8)
    assert (apply_after(make_rules(SamplingParams(min_tokens=2)), [], logits) == logits).all()


def test_biases_are_added_and_ids_allowed_or_not() -> None:
    logits = random_logits(8)
    biased = apply_after(make_rules(SamplingParams(logit_bias={3: 2.5, 4: -100.0})), [], logits)
    assert biased[3] == logits[3] + np.float32(2.5)
    assert biased[4] == logits[4] - np.float32(100)
    assert np.delete(biased, [3, 4]).tolist() == np.delete(logits, [3, 4]).tolist()
    allowed = apply_after(make_rules(SamplingParams(allowed_token_ids=[5, 6, 5])), [], logits)
    assert allowed[[5, 6]].tolist() == logits[[5, 6]].tolist()
    assert (np.delete(allowed, [5, 6]) == -np.inf).all()


def test_no_bias_brings_back_a_token_that_is_not_allowed() -> None:
    params = SamplingParams(allowed_token_ids=[5], logit_bias={6: 100.0})
    assert apply_after(make_rules(params), [], random_logits(8)).argmax() == 5


def test_a_request_that_allows_no_token_fails_alone() -> None:
    logits = np.stack([random_logits(1)] * 2)
    rules = {0: make_rules(SamplingParams(allowed_token_ids=[5]), bad_words=[[5]])}
    sampled = Sampler().sample(logits, make_batch(2, rules=rules))
    assert "parameters leave none" in str(sampled.errors[0])
    assert 0 <= sampled.token_ids[0] < VOCAB
    assert list(sampled.errors) == [0]


# -- custom logits processors --------------------------------------------------------------------------


def sample_with(processor: Callable[..., Any], *, temperature: float = 0.0, position: int = 3) -> SampledTokens:
    """One row whose logits go through `processor`, and one that is left alone."""
    rules = {0: make_rules(SamplingParams(logits_processors=[processor]))}
    logits = np.stack([random_logits(1), random_logits(2)])
    return Sampler().sample(logits, make_batch(2, temperature=temperature, rules=rules, positions=position))


def test_a_processor_of_two_arguments_gets_the_output_and_one_of_three_the_prompt_too() -> None:
    seen: list[Any] = []

    def two(output: list[int], logits: Logits) -> Logits:
        seen.append(list(output))
        return logits

    def three(prompt: list[int], output: list[int], logits: Logits) -> Logits:
        seen.append((list(prompt), list(output)))
        return logits

    def any_number(*arguments: Any) -> Any:
        seen.append(len(arguments))
        return arguments[-1]

    def two_and_an_option(output: list[int], logits: Logits, scale: float = 1.0) -> Logits:
        seen.append(scale)
        return logits

    processors = [two, three, any_number, two_and_an_option]
    apply_after(make_rules(SamplingParams(logits_processors=processors)), [7, 8], random_logits(1))
    assert seen == [[7, 8], ([1, 2, 3], [7, 8]), 3, 1.0]


def test_processors_run_last_and_in_order() -> None:
    def double(output: list[int], logits: Logits) -> Logits:
        return logits * 2

    def add(output: list[int], logits: Logits) -> Logits:
        logits += 1  # in place is fine too
        return logits

    params = SamplingParams(logit_bias={0: 3.0}, logits_processors=[double, add])
    changed = apply_after(make_rules(params), [], np.zeros(4, np.float32))
    assert changed.tolist() == [7, 1, 1, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_may_make_a_token_certain(temperature: float) -> None:
    def want_9(output: list[int], logits: Logits) -> Logits:
        logits[9] = np.inf
        return logits

    sampled = sample_with(want_9, temperature=temperature)
    assert (int(sampled.token_ids[0]), dict(sampled.errors)) == (9, {})


def test_what_a_processor_keeps_or_changes_of_its_arguments_changes_nothing() -> None:
    def vandal(prompt: list[int], output: list[int], logits: Logits) -> Logits:
        prompt.clear()
        output.append(5)
        return logits

    rules = make_rules(SamplingParams(logits_processors=[vandal]))
    apply_after(rules, [7], random_logits(1))
    assert (rules.output, rules.prompt_token_ids.tolist()) == ([7], [1, 2, 3])


def raises(output: list[int], logits: Logits) -> Logits:
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (raises, "mine"),
        (lambda output, logits: logits[:-1], r"shape \(50,\), got \(49,\)"),
        (lambda output, logits: None, r"shape \(50,\), got \(\)"),
        (lambda output, logits: "text", "could not convert"),
        (lambda output, logits: np.where(np.arange(VOCAB) == 4, np.nan, logits), "NaN"),
        (lambda output, logits: logits - np.inf, "parameters leave none"),
        (lambda one: one, "argument"),
    ],
    ids=["raises", "too short", "none", "text", "nan", "all -inf", "one argument"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_processor_is_an_error_of_its_row_only(
    processor: Callable[..., Any], message: str, temperature: float
) -> None:
    sampled = sample_with(processor, temperature=temperature)
    healthy = sample_with(lambda output, logits: logits, temperature=temperature)
    assert list(sampled.errors) == [0]
    with pytest.raises(Exception, match=message):
        raise sampled.errors[0]
    assert sampled.token_ids[1] == healthy.token_ids[1]


# -- quantiles -----------------------------------------------------------------------------------------


def one_seed(num: int) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    return np.full(num, 12345, np.uint64), np.arange(num, dtype=np.int32)


def many_seeds(num: int) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    return np.arange(num, dtype=np.uint64), np.full(num, 5, np.int32)


def far_seeds(num: int) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    return np.arange(num, dtype=np.uint64) << np.uint64(32), np.full(num, 5, np.int32)


def both(num: int) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    return np.arange(num, dtype=np.uint64) % np.uint64(512), np.arange(num, dtype=np.int32) // 512


@pytest.mark.parametrize("grid", [one_seed, many_seeds, far_seeds, both])
def test_quantiles_are_uniform_and_neighbours_unrelated(grid: Callable[[int], Any]) -> None:
    num = 1 << 18
    values = uniform(*grid(num))
    assert (values.min() >= 0, values.max() < 1) == (True, True)
    cells = 1024
    assert abs(chi_square_z(np.bincount((values * cells).astype(int), minlength=cells), np.full(cells, 1 / cells))) < 4
    low_bits = (values * 2.0**53).astype(np.uint64) & np.uint64(1023)
    assert abs(chi_square_z(np.bincount(low_bits.astype(int), minlength=cells), np.full(cells, 1 / cells))) < 4
    for distance in (1, 2, 512):  # pairs fill the square evenly, which says more than that they do not correlate
        pairs = (values[:-distance] * 32).astype(int) * 32 + (values[distance:] * 32).astype(int)
        assert abs(chi_square_z(np.bincount(pairs, minlength=1024), np.full(1024, 1 / 1024))) < 4
        assert abs(np.corrcoef(values[:-distance], values[distance:])[0, 1]) < 4 / np.sqrt(num)


def test_the_streams_of_seeds_do_not_overlap() -> None:
    step = 0x9E3779B97F4A7C15  # seeds this far apart would, unmixed, be one stream, each a position further on
    seeds = np.array([*range(64), *(i * step % 2**64 for i in range(1, 65))], np.uint64)
    values = uniform(np.repeat(seeds, 4096), np.tile(np.arange(4096, dtype=np.int32), 128))
    assert len(np.unique(values)) == len(values)


def test_quantiles_of_extreme_seeds_are_no_different() -> None:
    seeds = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)
    values = [uniform(seeds, np.full(4, position, np.int32)) for position in (1, 2, 2**31 - 1)]
    assert len(np.unique(values)) == 12


# -- rows are independent ------------------------------------------------------------------------------


def random_rows(num_rows: int, size: int) -> tuple[Logits, dict[str, Any]]:
    rng = np.random.default_rng(9)
    logits = rng.normal(0, 2, (num_rows, size)).astype(np.float32)
    columns = {
        "temperature": rng.choice([0, 0.5, 1, 2], num_rows),
        "top_k": rng.choice([0, 1, 5, 100], num_rows),
        "top_p": rng.choice([1, 0.9, 0.5], num_rows),
        "min_p": rng.choice([0, 0.1], num_rows),
        "seeds": rng.integers(0, 2**63, num_rows),
        "positions": rng.integers(3, 1000, num_rows),
        "num_logprobs": rng.choice([NO_LOGPROBS, 0, 3], num_rows),
    }
    return logits, columns


@pytest.mark.parametrize("size", [VOCAB, 5000])
def test_a_row_draws_the_same_token_in_any_company(size: int) -> None:
    logits, columns = random_rows(60, size)

    def rules(rows: Sequence[int]) -> dict[int, LogitsRules]:
        params = SamplingParams(repetition_penalty=1.5, logit_bias={4: 3.0})
        return {i: make_rules(params) for i, row in enumerate(rows) if row % 5 == 0}

    def sample(rows: Sequence[int]) -> SampledTokens:
        chosen = {name: column[list(rows)] for name, column in columns.items()}
        return Sampler().sample(logits[list(rows)], make_batch(len(rows), rules=rules(rows), **chosen))

    together = sample(range(60))
    assert not together.errors
    rng = np.random.default_rng(1)
    groups = [[i] for i in range(60)] + [rng.permutation(60)[: rng.integers(2, 60)].tolist() for _ in range(10)]
    for rows in groups:
        sampled = sample(rows)
        assert sampled.token_ids.tolist() == together.token_ids[rows].tolist()
        for i, found in sampled.logprobs.items():
            assert found.logprobs.tolist() == together.logprobs[rows[i]].logprobs.tolist()


def test_a_token_drawn_again_after_a_preemption_is_the_same() -> None:
    params = SamplingParams(frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.3)
    logits = np.random.default_rng(3).normal(0, 1, (8, VOCAB)).astype(np.float32)

    def generate(restart_at: Sequence[int]) -> list[int]:
        rules = make_rules(params, prompt=[1, 2, 3], bad_words=[[4, 5]])
        tokens: list[int] = []
        restarts = list(restart_at)
        while len(tokens) < 8:
            step = len(tokens)
            batch = make_batch(1, rules={0: rules}, seeds=11, positions=3 + step)
            tokens.append(int(Sampler().sample(logits[step : step + 1], batch).token_ids[0]))
            if restarts and len(tokens) == restarts[0] + 2:
                del tokens[restarts.pop(0) :]
        return tokens

    assert generate([0, 3, 5]) == generate([])


def test_greedy_takes_the_first_of_equal_tokens() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [7, 30]] = 1
    assert Sampler().sample(logits, make_batch(1, temperature=0)).token_ids.tolist() == [7]
