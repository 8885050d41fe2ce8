"""`LLM.beam_search` against transformers' `generate(num_beams=...)`, where both mean the same.

They do while no beam ends early, so here no token is an end of sequence. Then all beams are of one length, and a
length penalty changes scores but not their order. With an end of sequence they differ on purpose: transformers counts
generated tokens only, drops a candidate that ends unless it is among the `num_beams` best, and stops by its own rule;
here prompt tokens count too and every candidate that ends is kept, as in vLLM. tests/core/test_beam.py covers that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagefleet import LLM
from pagefleet.sampling_params import BeamSearchParams

PROMPTS = [[1, 17, 33, 99, 250, 7], [5], list(range(40, 75))]
MAX_TOKENS = 12


def expected(model: Any, prompt: list[int], width: int) -> list[tuple[list[int], float]]:
    """transformers' beams: (tokens, sum of their log-probabilities), best first."""
    with torch.inference_mode():
        result = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            length_penalty=0.0,
            early_stopping=False,
            eos_token_id=-1,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    tokens = [sequence[len(prompt) :] for sequence in result.sequences.tolist()]
    if width == 1:  # then generate() is greedy and scores nothing
        return [(tokens[0], float("nan"))]
    return list(zip(tokens, result.sequences_scores.tolist(), strict=True))


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Callable[[str], Path]) -> Any:
    with LLM(model=str(tiny_checkpoint("llama")), device="cpu", num_blocks=200, max_num_seqs=32) as llm:
        yield llm


@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_beams_are_those_of_transformers(
    width: int, llm: LLM, tiny_checkpoint: Callable[[str], Path], reference: Callable[[Path], Any]
) -> None:
    model = reference(tiny_checkpoint("llama"))
    params = BeamSearchParams(beam_width=width, max_tokens=MAX_TOKENS, ignore_eos=True, length_penalty=0.0)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        theirs, beams = expected(model, prompt, width), output.sequences
        assert [beam.tokens for beam in beams] == [prompt + tokens for tokens, _ in theirs]
        if width > 1:
            assert [beam.cum_logprob for beam in beams] == pytest.approx([s for _, s in theirs], abs=1e-3)
            assert [beam.score for beam in beams] == pytest.approx([s for _, s in theirs], abs=1e-3)


def test_a_length_penalty_does_not_reorder_beams_of_one_length(llm: LLM) -> None:
    one, other = (
        llm.beam_search(PROMPTS, BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True, length_penalty=penalty))
        for penalty in (0.0, 2.0)
    )
    for beams, penalised, prompt in zip(one, other, PROMPTS, strict=True):
        assert [beam.tokens for beam in beams.sequences] == [beam.tokens for beam in penalised.sequences]
        scores = [beam.cum_logprob / (len(prompt) + 6) ** 2 for beam in penalised.sequences]
        assert [beam.score for beam in penalised.sequences] == pytest.approx(scores)


def test_searches_leave_nothing_behind(llm: LLM) -> None:
    llm.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=5))
    assert "KV blocks: 0 held, 200 available" in llm.explain()
    assert "requests: 0 running, 0 waiting" in llm.explain()


def test_text_prompts_are_searched_too(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    tokens = llm.get_tokenizer().encode("t17 t33")
    assert llm.beam_search("t17 t33", params) == llm.beam_search(tokens, params)


def test_the_end_of_a_sequence_is_in_its_tokens_only_if_asked_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def search(**options: bool) -> list[list[int]]:
        params = BeamSearchParams(beam_width=4, max_tokens=4, **options)
        return [sequence.tokens for sequence in llm.beam_search([PROMPTS[0]], params)[0].sequences]

    eos = search(ignore_eos=True)[0][-1]  # a token that does come
    monkeypatch.setattr(llm._engine, "eos_ids", (eos,))
    with_end, without = search(include_stop_str_in_output=True), search()
    assert any(tokens[-1] == eos for tokens in with_end)
    assert without == [tokens[:-1] if tokens[-1] == eos else tokens for tokens in with_end]


def test_a_sequence_has_the_text_of_its_tokens(llm: LLM) -> None:
    sequence = llm.beam_search("t17 t33", BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True))[0].sequences[0]
    special = (0, 1, 2)
    assert sequence.text.split() == [f"t{token_id}" for token_id in sequence.tokens if token_id not in special]
