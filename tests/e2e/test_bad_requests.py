"""What is wrong with a request is said to whoever made it, and to nobody else."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagefleet import LLM, AsyncLLM, BackendError, SamplingParams
from pagefleet.sampling_params import InvalidRequest

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(tiny_checkpoint("llama"), device="cpu", num_blocks=128, max_num_seqs=16) as llm:
        yield llm


def tokens(llm: LLM, prompts: Any, params: Any = GREEDY, **options: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, **options)]


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ({"prompt": "t3", "cache_salt": "\ud800"}, "cache_salt"),
        ({"prompt": 5, "prompt_token_ids": [3]}, "prompt"),
        ([True, False], "token ids"),
        (bytearray(b"t3"), "prompt"),
        (b"t3", "prompt"),
        (None, "prompt"),
        (7, "prompt"),
        (np.array(3), "prompt"),
        (np.ones((2, 2, 2), int), "prompt"),
    ],
    ids=repr,
)
def test_an_odd_prompt_is_refused_in_words(llm: LLM, prompt: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        llm.generate(prompt, GREEDY)
    assert "0 held" in llm.explain()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"priority": "high"}, "priority"),
        ({"priority": float("nan")}, "priority"),
        ({"priority": 10**400}, "priority"),
        ({"priority": True}, "priority"),
        ({"sampling_params": {"temperature": 0}}, "sampling_params"),
        ({"sampling_params": []}, "sampling_params"),
        ({"sampling_params": SamplingParams(logprobs=21)}, "max_logprobs"),
        ({"sampling_params": SamplingParams(prompt_logprobs=-1)}, "max_logprobs"),
    ],
    ids=str,
)
def test_odd_arguments_are_refused_in_words(llm: LLM, options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        llm.generate(["t3", "t4"], **options)
    assert len(tokens(llm, ["t3", "t4"])) == 2


def test_prompts_and_priorities_may_be_any_iterable_or_array(llm: LLM) -> None:
    expected = tokens(llm, ["t3 t4", "t5"])
    assert tokens(llm, (text for text in ("t3 t4", "t5"))) == expected
    assert tokens(llm, ["t3 t4", "t5"], priority=np.array([1, 2])) == expected
    ids = np.array(llm.get_tokenizer().encode("t5"))
    assert tokens(llm, ids) == expected[1:]


def test_beam_search_refuses_parameters_of_another_kind(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="BeamSearchParams"):
        llm.beam_search("t3", SamplingParams())  # type: ignore[arg-type]


def test_a_logits_processor_that_exits_ends_its_own_request(llm: LLM) -> None:
    def leave(output: list[int], logits: np.ndarray) -> np.ndarray:
        sys.exit("enough")

    leaving = SamplingParams(max_tokens=8, logits_processors=[leave])
    bad, good = llm.generate(["t3", "t4"], [leaving, GREEDY])
    assert bad.outputs[0].finish_reason == "error"
    assert "SystemExit" in str(bad.error)
    assert good.outputs[0].token_ids == tokens(llm, "t4")[0]


def test_threads_take_turns_and_get_their_own_tokens(llm: LLM) -> None:
    prompts = [f"t{i} t{i + 1} t{i + 2}" for i in range(3, 15)]
    expected = {prompt: tokens(llm, prompt)[0] for prompt in prompts}
    found: dict[str, list[int]] = {}
    threads = [
        threading.Thread(target=lambda own=prompt: found.__setitem__(own, tokens(llm, own)[0])) for prompt in prompts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_the_metrics_of_an_output_stay_as_they_were(llm: LLM) -> None:
    outputs = list(llm.stream("t3", GREEDY))
    assert [output.metrics.num_generated for output in outputs] == list(range(1, 9))


def test_a_closed_llm_says_so(tiny_checkpoint: Callable[[str], Path]) -> None:
    llm = LLM(tiny_checkpoint("llama"), device="cpu", num_blocks=32)
    llm.close()
    with pytest.raises(BackendError, match="closed"):
        llm.generate("t3", GREEDY)


@pytest.mark.parametrize(
    "attack",
    [
        {"prompt": {"prompt": "t3", "cache_salt": "\ud800"}, "request_id": "x"},
        {"prompt": "t3", "request_id": ["unhashable"]},
        {"prompt": "t3", "request_id": "x", "priority": "high"},
        {"prompt": "t3", "request_id": "x", "priority": np.array([1, 2])},
        {"prompt": "t3", "request_id": "x", "sampling_params": {"n": 3}},
    ],
    ids=str,
)
def test_one_bad_request_leaves_a_server_s_others_alone(
    attack: dict[str, Any], tiny_checkpoint: Callable[[str], Path]
) -> None:
    async def run(llm: AsyncLLM, **request: Any) -> list[int]:
        async for output in llm.generate(**request):
            final = output
        return final.outputs[0].token_ids

    async def both() -> tuple[Any, Any]:
        with AsyncLLM(tiny_checkpoint("llama"), device="cpu", num_blocks=64, max_num_seqs=4) as llm:
            long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
            good = asyncio.create_task(run(llm, prompt="t4", sampling_params=long, request_id="good"))
            bad = asyncio.create_task(run(llm, **attack))
            results = await asyncio.wait_for(asyncio.gather(bad, good, return_exceptions=True), 30)
            assert not llm._engine.has_work
            return results[0], results[1]

    bad, good = asyncio.run(both())
    assert isinstance(bad, InvalidRequest)
    assert len(good) == 40
