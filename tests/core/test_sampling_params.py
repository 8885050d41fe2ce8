"""SamplingParams and BeamSearchParams: wrong values are refused by name, right ones are kept safe from change."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefleet.sampling_params import BeamSearchParams, InvalidRequest, SamplingParams

FLOATS = {  # field -> its lowest and highest value, and whether the lowest itself is wrong
    "presence_penalty": (-2, 2, False),
    "frequency_penalty": (-2, 2, False),
    "repetition_penalty": (0, 10_000, True),
    "temperature": (0, 10_000, False),
    "top_p": (0, 1, True),
    "min_p": (0, 1, False),
}
INTEGERS = {  # field -> its lowest and highest value; None: no limit
    "n": (1, 256),
    "top_k": (-1, 2**31 - 1),
    "min_tokens": (0, None),
    "max_tokens": (1, None),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (-1, 1000),
    "prompt_logprobs": (-1, 1000),
}
OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
FLAGS = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")
IDS = ("stop_token_ids", "allowed_token_ids")


def refused(**fields: Any) -> str:
    """The message with which the parameters are refused."""
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**fields)
    return str(caught.value)


def test_an_invalid_request_is_a_value_error() -> None:
    assert issubclass(InvalidRequest, ValueError)


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert (params.logprobs, params.prompt_logprobs, params.allowed_token_ids) == (None, None, None)
    assert (params.detokenize, params.skip_special_tokens) == (True, True)
    assert (params.ignore_eos, params.include_stop_str_in_output) == (False, False)


@pytest.mark.parametrize("field", [*FLOATS, *INTEGERS])
def test_limits_themselves_are_accepted(field: str) -> None:
    low, high, *open_low = FLOATS[field] if field in FLOATS else (*INTEGERS[field], False)
    values = [value for value in (None if open_low[0] else low, high) if value is not None]
    for value in values:
        SamplingParams(**{"max_tokens": None, field: value})


@pytest.mark.parametrize("field", [*FLOATS, *INTEGERS])
def test_a_value_beyond_a_limit_is_refused_with_field_value_and_limit(field: str) -> None:
    low, high = (FLOATS[field] if field in FLOATS else INTEGERS[field])[:2]
    step = 1 if field in INTEGERS else 0.5
    message = refused(**{field: low - step})
    assert field in message
    assert str(low) in message
    assert repr(low - step) in message
    if high is not None:
        message = refused(**{field: high + step})
        assert field in message
        assert str(high) in message
        assert repr(high + step) in message


@pytest.mark.parametrize("field", [field for field, (_, _, open_low) in FLOATS.items() if open_low])
def test_an_open_limit_is_refused(field: str) -> None:
    assert refused(**{field: 0}).startswith(f"{field} must be in (0, ")


@pytest.mark.parametrize("field", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), np.float64("inf")])
def test_a_number_that_is_not_finite_is_refused(field: str, value: float) -> None:
    message = refused(**{field: value})
    assert field in message
    assert repr(value) in message


@pytest.mark.parametrize("field", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize("value", [True, False, "1", [1], {}, 1j])
def test_a_number_of_the_wrong_type_is_refused(field: str, value: Any) -> None:
    message = refused(**{field: value})
    assert message.startswith(f"{field} must be {'a number' if field in FLOATS else 'an integer'}")
    assert repr(value) in message


@pytest.mark.parametrize("field", INTEGERS)
@pytest.mark.parametrize("value", [1.0, 1.5, math.nan, math.inf])
def test_a_float_is_no_integer(field: str, value: float) -> None:
    assert refused(**{field: value}) == f"{field} must be an integer, got {value!r}"


@pytest.mark.parametrize("field", [*FLOATS, *INTEGERS])
def test_none_is_a_value_only_where_it_means_something(field: str) -> None:
    if field in OPTIONAL:
        assert getattr(SamplingParams(**{field: None}), field) is None
    else:
        assert field in refused(**{field: None})


@pytest.mark.parametrize("field", [*FLOATS, "n", "top_k", "logprobs", "seed"])
def test_an_integer_too_large_for_a_float_is_refused_like_any_other(field: str) -> None:
    assert field in refused(**{field: 10**400})


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(2**64 - 1))
    assert (params.temperature, params.top_k, params.seed) == (0.5, 3, 2**64 - 1)


@pytest.mark.parametrize("field", FLAGS)
@pytest.mark.parametrize("value", [None, 0, 1, "true"])
def test_a_flag_is_true_or_false(field: str, value: Any) -> None:
    assert refused(**{field: value}) == f"{field} must be True or False, got {value!r}"


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    assert refused(min_tokens=5, max_tokens=4) == "min_tokens must be at most max_tokens=4, got 5"
    SamplingParams(min_tokens=4, max_tokens=4)
    SamplingParams(min_tokens=10**6, max_tokens=None)


@pytest.mark.parametrize("field", ["stop", "bad_words"])
@pytest.mark.parametrize("value", [5, [""], ["a", ""], ["a", 1], [None], b"ab", {"a": 1}, {"a"}])
def test_a_list_of_strings_holds_non_empty_strings(field: str, value: Any) -> None:
    message = refused(**{field: value})
    assert message.startswith(f"{field} must be a list of non-empty strings")


def test_one_stop_string_may_stand_alone_but_no_empty_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert "stop" in refused(stop="")


def test_a_word_alone_is_not_taken_for_a_list_of_letters() -> None:
    assert refused(bad_words="abc") == "bad_words must be a list of non-empty strings, got 'abc'"


def test_stop_strings_need_text() -> None:
    assert "detokenize" in refused(stop="end", detokenize=False)
    SamplingParams(stop_token_ids=[1], detokenize=False)


@pytest.mark.parametrize("field", IDS)
@pytest.mark.parametrize("value", [5, "12", b"12", [1.0], ["1"], [-1], [None], [True], {1, 2}, np.array([1.5])])
def test_token_ids_are_a_list_of_integers_from_0(field: str, value: Any) -> None:
    message = refused(**{field: value})
    assert message.startswith(f"{field} must be a list of token ids")
    assert repr(value) in message


def test_token_ids_may_come_from_numpy() -> None:
    params = SamplingParams(stop_token_ids=np.array([3, 1]), allowed_token_ids=[np.int32(7)])
    assert (params.stop_token_ids, params.allowed_token_ids) == ((3, 1), (7,))
    assert all(type(i) is int for i in (*params.stop_token_ids, *(params.allowed_token_ids or ())))


def test_to_allow_no_token_is_refused() -> None:
    assert refused(allowed_token_ids=[]).startswith("allowed_token_ids must not be empty")


@pytest.mark.parametrize("value", [5, [1], "1", [(1, 2.0)]])
def test_logit_bias_is_a_mapping(value: Any) -> None:
    assert refused(logit_bias=value) == f"logit_bias must map token ids to numbers, got {value!r}"


@pytest.mark.parametrize("key", ["1", 1.0, -1, True, None])
def test_logit_bias_maps_from_token_ids(key: Any) -> None:
    assert refused(logit_bias={key: 1.0}).startswith("logit_bias must be a list of token ids")


@pytest.mark.parametrize("value", [100.5, -101, math.nan, math.inf, -math.inf])
def test_a_bias_beyond_100_is_refused(value: float) -> None:
    assert refused(logit_bias={3: value}) == f"logit_bias[3] must be in [-100, 100], got {value!r}"


def test_a_bias_is_a_number() -> None:
    assert refused(logit_bias={3: "1"}) == "logit_bias[3] must be a number, got '1'"
    assert SamplingParams(logit_bias={3: 1, 4: -100.0}).logit_bias == {3: 1, 4: -100.0}


@pytest.mark.parametrize("value", [5, "f", [5], [None], max])
def test_logits_processors_are_a_list_of_callables(value: Any) -> None:
    assert refused(logits_processors=value).startswith("logits_processors must be a list of callables")


def test_none_is_an_empty_list_as_in_vllm() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, bad_words=None, logit_bias=None, logits_processors=None)  # type: ignore[arg-type]
    assert params == SamplingParams()


def test_a_seed_of_minus_1_is_none_as_in_vllm() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=-2).seed == -2


def test_lists_are_copied_so_that_a_checked_request_stays_as_it_was() -> None:
    stop, ids, bias = ["a"], [1], {1: 2.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, allowed_token_ids=ids, bad_words=stop, logit_bias=bias)
    stop.append("")
    ids.append(-1)
    bias[2] = math.nan
    assert params == SamplingParams(
        stop=["a"], stop_token_ids=[1], allowed_token_ids=[1], bad_words=["a"], logit_bias={1: 2.0}
    )
    with pytest.raises(FrozenInstanceError):
        params.top_p = 2  # type: ignore[misc]


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_ids_the_model_does_not_have_are_refused(field: str) -> None:
    value = {10: 1.0, 9: 1.0} if field == "logit_bias" else [9, 10]
    params = SamplingParams(**{field: value})
    params.check_vocabulary(11)
    with pytest.raises(InvalidRequest, match=rf"{field} must hold ids below the vocabulary's size 10, got \[10\]"):
        params.check_vocabulary(10)


def test_what_was_removed_from_vllm_is_no_field() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(n=2, best_of=3)  # type: ignore[call-arg]


@given(st.sampled_from([*FLOATS, *INTEGERS]), st.one_of(st.floats(), st.integers(), st.none(), st.booleans()))
def test_any_value_is_kept_or_refused_by_name(field: str, value: Any) -> None:
    try:
        params = SamplingParams(**{"max_tokens": None, field: value})
    except InvalidRequest as error:
        assert field in str(error)  # noqa: PT017
        assert repr(value) in str(error)  # noqa: PT017
    else:
        kept = getattr(params, field)
        assert kept == value or (field, value) == ("seed", -1)
        assert kept is None or math.isfinite(kept)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, "beam_width must be in [1, 128], got 0"),
        ({"beam_width": 129}, "beam_width must be in [1, 128], got 129"),
        ({"beam_width": 2.0}, "beam_width must be an integer, got 2.0"),
        ({"beam_width": True}, "beam_width must be an integer, got True"),
        ({"beam_width": None}, "beam_width must be an integer, got None"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": None}, "max_tokens must be an integer, got None"),
        ({"max_tokens": math.inf}, "max_tokens must be an integer, got inf"),
        ({"length_penalty": math.nan}, "length_penalty must be in [-10, 10], got nan"),
        ({"length_penalty": -math.inf}, "length_penalty must be in [-10, 10], got -inf"),
        ({"length_penalty": "1"}, "length_penalty must be a number, got '1'"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"early_stopping": "never"}, "early_stopping must be True or False, got 'never'"),
        ({"include_stop_str_in_output": None}, "include_stop_str_in_output must be True or False, got None"),
    ],
)
def test_beam_search_refuses_wrong_values(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **fields})
    assert str(caught.value) == message
