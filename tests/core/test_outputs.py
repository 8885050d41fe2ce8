"""Completions: text grown token by token, stop strings that never leak, and the shapes a caller sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefleet.outputs import Completion, Generation, logprob_dict
from pagefleet.request import Request, RequestMetrics, RequestOutput
from pagefleet.sampler import RowLogprobs
from pagefleet.sampling_params import SamplingParams

EOS = 0


class Pieces:
    """A tokenizer whose tokens are given pieces of text, `pieces[i]` being that of token i; token 0 is special."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = ["<eos>", *pieces]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.pieces[i] for i in token_ids if not (skip_special_tokens and i == EOS))

    def stream(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> PieceStream:
        return PieceStream(self, skip_special_tokens)


class PieceStream:
    """Holds a piece that ends in `~` back until the next token, as half a character is."""

    def __init__(self, pieces: Pieces, skip_special_tokens: bool) -> None:
        self.pieces, self.skip, self.held = pieces, skip_special_tokens, ""

    def push(self, token_id: int) -> str:
        text = self.held + self.pieces.decode([token_id], self.skip)
        self.held = text if text.endswith("~") else ""
        return "" if self.held else text

    def flush(self) -> str:
        text, self.held = self.held, ""
        return text


def make_request(params: SamplingParams, request_id: str = "r") -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=np.array([1], np.int32),
        params=params,
        metrics=RequestMetrics(0.0),
        seed=0,
        stop_ids=(EOS, *params.stop_token_ids),
    )


class Run:
    """What the engine does to a completion: a token at a time, until the request ends or a stop string ends it."""

    def __init__(self, pieces: Sequence[str], **fields: Any) -> None:
        self.params = SamplingParams(max_tokens=None, **fields)
        self.request = make_request(self.params)
        self.completion = Completion(self.request, Pieces(pieces))  # type: ignore[arg-type]
        self.num_pieces = len(pieces)

    def texts(self, token_ids: Sequence[int] | None = None) -> Iterator[str]:
        """The text after each token; those of all pieces by default, the last one ending at the limit."""
        token_ids = range(1, self.num_pieces + 1) if token_ids is None else token_ids
        for i, token_id in enumerate(token_ids):
            self.request.output_token_ids.append(token_id)
            if token_id in self.request.stop_ids and i >= self.params.min_tokens:
                self.request.finish_reason = "stop"
                self.request.stop_reason = token_id if token_id in self.params.stop_token_ids else None
            elif i == len(token_ids) - 1:
                self.request.finish_reason = "length"
            if self.completion.update():
                self.request.finish_reason, self.request.stop_reason = "stop", self.completion.stop_string
            yield self.completion.output(0).text
            if self.request.finished:
                break

    def final(self, token_ids: Sequence[int] | None = None) -> str:
        return list(self.texts(token_ids))[-1]


# -- stop strings --------------------------------------------------------------------------------------


def test_a_stop_string_across_tokens_ends_the_text_before_it() -> None:
    run = Run(["one t", "w", "o thr", "ee"], stop="two")
    assert list(run.texts()) == ["one ", "one ", "one "]
    assert (run.request.finish_reason, run.request.stop_reason) == ("stop", "two")
    assert run.completion.output(0).token_ids == [1, 2, 3]  # those that made the stop string are kept


def test_text_that_only_looked_like_a_stop_string_is_delivered() -> None:
    run = Run(["ab", "a", "b", "x", "aba"], stop=["abac", "bb"])
    assert list(run.texts()) == ["", "", "ab", "ababx", "ababxaba"]
    assert run.request.finish_reason == "length"


def test_an_included_stop_string_ends_the_text() -> None:
    run = Run(["one t", "w", "o thr"], stop="two", include_stop_str_in_output=True)
    assert list(run.texts()) == ["one t", "one tw", "one two"]


def test_a_stop_string_and_text_after_it_may_come_in_one_token() -> None:
    assert Run(["a STOP b", "c"], stop="STOP").final() == "a "
    assert Run(["a STOP b", "c"], stop="STOP", include_stop_str_in_output=True).final() == "a STOP"


def test_of_several_stop_strings_the_one_that_ends_first_counts() -> None:
    run = Run(["x abcd"], stop=["abcd", "bc", "x y"])
    assert (run.final(), run.request.stop_reason) == ("x a", "bc")


def test_of_stop_strings_that_end_together_the_one_named_first_counts() -> None:
    run = Run(["x ab"], stop=["b", "ab"])
    assert (run.final(), run.request.stop_reason) == ("x a", "b")
    run = Run(["x ab"], stop=["ab", "b"])
    assert (run.final(), run.request.stop_reason) == ("x ", "ab")


def test_a_stop_string_may_be_the_whole_text() -> None:
    assert Run(["ab", "c"], stop="ab").final() == ""


def test_a_stop_string_that_overlaps_itself_is_found() -> None:
    assert Run(["a", "a", "a", "b"], stop="aab").final() == "a"


def test_stop_strings_that_end_within_min_tokens_do_not_count() -> None:
    run = Run(["a ", "STOP", " b", " STOP", " c"], stop="STOP", min_tokens=2)
    assert list(run.texts()) == ["a ", "a STOP", "a STOP b", "a STOP b "]
    assert len(run.request.output_token_ids) == 4


def test_a_stop_string_that_begins_within_min_tokens_and_ends_after_counts() -> None:
    run = Run(["a ST", "OP b"], stop=["STOP", "a S"], min_tokens=1)
    assert list(run.texts()) == ["a ", "a "]
    assert run.request.stop_reason == "STOP"


def test_a_stop_string_at_the_last_token_is_the_reason_not_the_limit() -> None:
    run = Run(["a", " STOP"], stop="STOP")
    assert run.final() == "a "
    assert (run.request.finish_reason, run.request.stop_reason) == ("stop", "STOP")


def test_what_is_held_back_for_half_a_character_is_searched_at_the_end() -> None:
    run = Run(["a", "S~"], stop="S~")
    assert run.final() == "a"
    assert run.request.stop_reason == "S~"
    assert Run(["a", "S~"]).final() == "aS~"


def test_a_piece_of_a_stop_string_at_the_end_is_delivered() -> None:
    assert list(Run(["a ST", "O"], stop="STOP").texts()) == ["a ", "a STO"]


ALPHABET = "ab "
stop_strings = st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=3)


@settings(deadline=None, max_examples=500)
@given(st.lists(st.text(ALPHABET, max_size=5), min_size=1, max_size=12), stop_strings, st.booleans(), st.integers(0, 3))
def test_streaming_leaks_no_stop_string(pieces: list[str], stops: list[str], include: bool, min_tokens: int) -> None:
    run = Run(pieces, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens)
    texts = list(run.texts())
    final = texts[-1]
    assert all(final.startswith(text) for text in texts)  # nothing delivered is ever taken back
    assert [len(text) for text in texts] == sorted(len(text) for text in texts)

    ignored = len("".join(pieces[:min_tokens]))  # a stop string that ends in these does not count
    whole = "".join(pieces)
    ends = [end for end in range(ignored + 1, len(whole) + 1) for stop in stops if whole[:end].endswith(stop)]
    if not ends:
        assert (final, run.request.finish_reason) == (whole, "length")
        return
    stop = next(stop for stop in stops if whole[: ends[0]].endswith(stop))
    assert (run.request.finish_reason, run.request.stop_reason) == ("stop", stop)
    assert final == whole[: ends[0] if include else ends[0] - len(stop)]
    num_tokens = len(run.request.output_token_ids)  # none after the one that completed it
    assert len("".join(pieces[: num_tokens - 1])) < ends[0] <= len("".join(pieces[:num_tokens]))


@settings(deadline=None)
@given(st.text(ALPHABET, min_size=1, max_size=30), stop_strings, st.data())
def test_how_the_text_is_cut_into_tokens_does_not_matter(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=10)) | {0, len(text)})
    pieces = [text[a:b] for a, b in pairwise(cuts)]
    assert Run(pieces, stop=stops).final() == Run(list(text), stop=stops).final()


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "é~", "~", ""]), min_size=1, max_size=8), st.integers(1, 8))
def test_tokens_that_come_all_at_once_make_the_same_text(pieces: list[str], chunk: int) -> None:
    one_by_one = Run(pieces).final()
    run = Run(pieces)
    run.request.output_token_ids = list(range(1, len(pieces) + 1))[:chunk]
    run.completion.update()
    run.request.output_token_ids = list(range(1, len(pieces) + 1))
    run.request.finish_reason = "length"
    run.completion.update()
    assert run.completion.output(0).text == one_by_one == "".join(pieces)


# -- tokens that end it --------------------------------------------------------------------------------


def test_the_token_that_ends_it_is_in_the_ids_and_not_in_the_text() -> None:
    run = Run(["a", "b", "c"], stop_token_ids=[2])
    assert list(run.texts([1, 2, 3])) == ["a", "a"]
    output = run.completion.output(0)
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([1, 2], "stop", 2)


def test_the_token_that_ends_it_is_in_the_text_if_asked_for() -> None:
    assert Run(["a", "b"], stop_token_ids=[2], include_stop_str_in_output=True).final([1, 2]) == "ab"
    assert Run(["a"], include_stop_str_in_output=True).final([1, EOS]) == "a"  # special: skipped all the same
    assert Run(["a"], include_stop_str_in_output=True, skip_special_tokens=False).final([1, EOS]) == "a<eos>"
    assert Run(["a"], skip_special_tokens=False).final([1, EOS]) == "a"


def test_a_first_token_that_ends_it_leaves_no_text() -> None:
    run = Run(["a"])
    assert run.final([EOS]) == ""
    assert (run.request.finish_reason, run.request.stop_reason) == ("stop", None)


def test_special_tokens_on_the_way_are_skipped_or_not() -> None:
    assert Run(["a", "b"], min_tokens=3).final([1, EOS, 2]) == "ab"
    assert Run(["a", "b"], min_tokens=3, skip_special_tokens=False).final([1, EOS, 2]) == "a<eos>b"


def test_without_detokenising_there_are_ids_and_no_text() -> None:
    run = Run(["a", "b"], detokenize=False)
    assert list(run.texts()) == ["", ""]
    assert run.completion.output(0).token_ids == [1, 2]


def test_an_output_is_a_snapshot() -> None:
    run = Run(["a", "b"], logprobs=0)
    texts = run.texts()
    run.request.logprobs.append(row([1], [-0.5]))
    next(texts)
    output = run.completion.output(0)
    run.request.logprobs.append(row([2], [-0.25]))
    next(texts)
    assert output.logprobs is not None
    assert (output.text, output.token_ids, len(output.logprobs), output.finished) == ("a", [1], 1, False)
    assert run.completion.output(0).finished


# -- log-probabilities ---------------------------------------------------------------------------------


def row(token_ids: Sequence[int], logprobs: Sequence[float], rank: int = 1) -> RowLogprobs:
    return RowLogprobs(np.array(token_ids, np.int32), np.array(logprobs, np.float32), rank)


def test_logprobs_map_ids_the_token_itself_first() -> None:
    found = logprob_dict(row([3, 1, 2], [-3.0, -0.5, -1.0], rank=7), Pieces(["one", "two", "three"]))  # type: ignore[arg-type]
    assert list(found) == [3, 1, 2]
    assert [(each.logprob, each.rank, each.decoded_token) for each in found.values()] == [
        (-3.0, 7, "three"),
        (-0.5, 1, "one"),
        (-1.0, 2, "two"),
    ]


def test_a_token_among_the_most_likely_is_listed_once() -> None:
    found = logprob_dict(row([2, 1, 2], [-1.0, -0.5, -1.0], rank=2), None)
    assert {token_id: each.rank for token_id, each in found.items()} == {2: 2, 1: 1}
    assert all(each.decoded_token is None for each in found.values())


def test_special_tokens_are_spelled_out_in_logprobs() -> None:
    assert logprob_dict(row([EOS], [-1.0]), Pieces([]))[EOS].decoded_token == "<eos>"  # type: ignore[arg-type]


@pytest.mark.parametrize("detokenize", [True, False])
def test_outputs_carry_logprobs_only_if_asked_for(detokenize: bool) -> None:
    run = Run(["a", "b"], logprobs=1, detokenize=detokenize)
    run.request.logprobs += [row([1, 2], [-0.5, -1.0]), row([2, 1], [-0.25, -2.0])]
    run.request.cumulative_logprob = -0.75
    list(run.texts())
    output = run.completion.output(0)
    assert output.cumulative_logprob == -0.75
    assert output.logprobs is not None
    assert [list(each) for each in output.logprobs] == [[1, 2], [2, 1]]
    assert output.logprobs[0][1].decoded_token == ("a" if detokenize else None)

    run = Run(["a", "b"])
    list(run.texts())
    output = run.completion.output(0)
    assert (output.logprobs, output.cumulative_logprob) == (None, None)


def generation(num: int, **fields: Any) -> Generation:
    params = SamplingParams(n=num, **fields)
    requests = [make_request(params, f"r{i}") for i in range(num)]
    return Generation("text", requests, Pieces(["a", "b"]))  # type: ignore[arg-type]


def finish(request: Request) -> None:
    request.finish_reason = "length"


def test_a_generation_is_finished_when_all_its_completions_are() -> None:
    both = generation(2)
    finish(both.requests[1])
    output = both.output()
    assert isinstance(output, RequestOutput)
    assert (output.finished, [each.finished for each in output.outputs]) == (False, [False, True])
    assert [each.index for each in output.outputs] == [0, 1]
    finish(both.requests[0])
    assert both.output().finished
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r0", "text", [1])


def test_an_error_of_one_completion_is_shown() -> None:
    both = generation(2)
    both.requests[1].error = KeyError("mine")
    assert both.output().error == "KeyError: 'mine'"
    assert generation(1).output().error is None


@pytest.mark.parametrize("detokenize", [True, False])
def test_prompt_logprobs_have_none_for_the_first_token(detokenize: bool) -> None:
    scored = generation(1, prompt_logprobs=0, detokenize=detokenize)
    request = scored.requests[0]
    request.prompt_token_ids = np.array([1, 2, 1], np.int32)
    request.prompt_logprobs += [row([2], [-1.0])]
    assert len(scored.output().prompt_logprobs or ()) == 2  # the prompt is not done
    request.prompt_logprobs += [row([1], [-2.0])]
    found = scored.output().prompt_logprobs
    assert found is not None
    assert [None if each is None else {i: x.logprob for i, x in each.items()} for each in found] == [
        None,
        {2: -1.0},
        {1: -2.0},
    ]
    assert found[1] is not None
    assert found[1][2].decoded_token == ("b" if detokenize else None)
    assert generation(1).output().prompt_logprobs is None
