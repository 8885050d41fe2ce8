"""AsyncLLM: many readers of one engine, each of which may leave, fail or be slow without the others noticing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagefleet import LLM, AsyncLLM, RequestOutput, SamplingParams
from pagefleet.async_llm import Mailbox
from pagefleet.sampling_params import InvalidRequest

SIZES: dict[str, Any] = {"device": "cpu", "num_blocks": 256, "max_model_len": 400, "block_size": 8}
PROMPT = "t5 t6 t7 t8 t9"
LONG = SamplingParams(max_tokens=None, ignore_eos=True)  # some seconds, if nobody ends it
SECONDS = 60  # after which a test that waits has failed


@pytest.fixture(scope="module")
def path(tiny_checkpoint: Callable[[str], Path]) -> str:
    return str(tiny_checkpoint("llama"))


@pytest.fixture
def llm(path: str) -> Iterator[AsyncLLM]:
    with AsyncLLM(path, **SIZES) as llm:
        yield llm


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, SECONDS))


async def read(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    return (await read(outputs))[-1]


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


async def until_idle(llm: AsyncLLM) -> None:
    """Return when nothing runs and no block is held."""
    scheduler = llm._engine.engine.scheduler
    while llm._generations or llm._engine.has_work or scheduler.num_running or scheduler.pool.num_held:
        await asyncio.sleep(0.002)


def test_many_requests_at_once_get_what_each_gets_alone(path: str, llm: AsyncLLM) -> None:
    prompts = [[3 + i, 9, *range(5, 5 + i)] for i in range(16)]
    params = [SamplingParams(seed=i, max_tokens=5 + i, ignore_eos=True) for i in range(16)]

    async def main() -> None:
        readers = [
            last(llm.generate(prompt, each, request_id=f"r{i}"))
            for i, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        ]
        outputs = await asyncio.gather(*readers)
        assert [output.request_id for output in outputs] == [f"r{i}" for i in range(16)]
        assert all(output.finished for output in outputs)
        with LLM(path, **SIZES) as alone:
            for prompt, each, output in zip(prompts, params, outputs, strict=True):
                assert tokens(alone.generate([prompt], each)[0]) == tokens(output)

    run(main())


def test_outputs_grow_and_the_last_one_is_finished(llm: AsyncLLM) -> None:
    async def main() -> None:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        outputs = await read(llm.generate(PROMPT, params, request_id="a"))
        lengths = [len(tokens(output)) for output in outputs]
        assert lengths == sorted(set(lengths))
        assert lengths[-1] == 30
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        final = outputs[-1].outputs[0].text
        assert all(final.startswith(output.outputs[0].text) for output in outputs)

    run(main())


def test_a_slow_reader_skips_outputs_and_misses_nothing(llm: AsyncLLM) -> None:
    async def main() -> None:
        params = SamplingParams(seed=1, max_tokens=40, ignore_eos=True)
        expected = tokens(await last(llm.generate(PROMPT, params, request_id="quick")))
        outputs = []
        async for output in llm.generate(PROMPT, params, request_id="slow"):
            outputs.append(output)
            await until_idle(llm)  # all of it is generated before the second output is read
        assert len(outputs) <= 3
        assert tokens(outputs[-1]) == expected
        assert outputs[-1].finished

    run(main())


def test_parameters_default_to_sampling_params(llm: AsyncLLM) -> None:
    async def main() -> None:
        output = await last(llm.generate(PROMPT, request_id="a"))
        assert 1 <= len(tokens(output)) <= SamplingParams().max_tokens

    run(main())


def test_an_aborted_request_ends_with_what_there_is_and_frees_its_blocks(llm: AsyncLLM) -> None:
    async def main() -> None:
        outputs = []
        async for output in llm.generate(PROMPT, LONG, request_id="a"):
            outputs.append(output)
            if len(outputs) == 3:
                await llm.abort("a")
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "abort"
        assert 0 < len(tokens(outputs[-1])) < 390
        assert outputs[-1].outputs[0].text == "".join(f" t{i}" for i in tokens(outputs[-1]) if i > 2)
        await until_idle(llm)

    run(main())


def test_all_completions_of_an_aborted_request_end(llm: AsyncLLM) -> None:
    async def main() -> None:
        params = SamplingParams(n=3, max_tokens=None, ignore_eos=True)
        outputs = llm.generate(PROMPT, params, request_id="a")
        await anext(outputs)
        await llm.abort("a")
        final = await last(outputs)
        assert [completion.finish_reason for completion in final.outputs] == ["abort"] * 3
        await until_idle(llm)

    run(main())


def test_to_abort_what_is_not_there_does_nothing(llm: AsyncLLM) -> None:
    async def main() -> None:
        await llm.abort("nobody")
        output = await last(llm.generate(PROMPT, SamplingParams(max_tokens=2), request_id="a"))
        await llm.abort("a")
        assert output.finished

    run(main())


def test_leaving_the_loop_early_aborts(llm: AsyncLLM) -> None:
    async def main() -> None:
        outputs = llm.generate(PROMPT, LONG, request_id="a")
        async for _ in outputs:
            break
        await outputs.aclose()  # type: ignore[attr-defined]  # as Python does when the generator is collected
        await until_idle(llm)

    run(main())


def test_a_cancelled_reader_aborts(llm: AsyncLLM) -> None:
    async def main() -> None:
        task = asyncio.create_task(read(llm.generate(PROMPT, LONG, request_id="a")))
        while not llm._engine.has_work:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(llm)
        assert (await last(llm.generate(PROMPT, SamplingParams(max_tokens=2), request_id="a"))).finished

    run(main())


def test_an_id_in_use_is_refused_to_the_second_and_the_first_goes_on(llm: AsyncLLM) -> None:
    async def main() -> None:
        params = SamplingParams(n=2, max_tokens=60, ignore_eos=True)
        first = llm.generate(PROMPT, params, request_id="a")
        await anext(first)
        for taken in ("a", "a/1"):  # the second completion of "a" has an id too
            with pytest.raises(InvalidRequest, match=f"request id '{taken}' is in use"):
                await last(llm.generate(PROMPT, params, request_id=taken))
        output = await last(first)
        assert [len(completion.token_ids) for completion in output.outputs] == [60, 60]
        again = await last(llm.generate(PROMPT, SamplingParams(max_tokens=2), request_id="a"))
        assert again.finished

    run(main())


def test_a_completions_id_in_use_is_refused_too(llm: AsyncLLM) -> None:
    async def main() -> None:
        first = llm.generate(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True), request_id="a/1")
        await anext(first)
        with pytest.raises(InvalidRequest, match="request id 'a/1' is in use"):
            await last(llm.generate(PROMPT, SamplingParams(n=2), request_id="a"))
        assert len(tokens(await last(first))) == 60
        await until_idle(llm)

    run(main())


@pytest.mark.parametrize("wrong", ["", [256], [3] * 400, None, {"prompt": PROMPT, "other": 1}])
def test_a_wrong_prompt_is_its_callers_problem_only(llm: AsyncLLM, wrong: Any) -> None:
    async def main() -> None:
        good = asyncio.create_task(
            last(llm.generate(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True), request_id="good"))
        )
        with pytest.raises(InvalidRequest):
            await last(llm.generate(wrong, request_id="bad"))
        assert len(tokens(await good)) == 30

    run(main())


def test_wrong_parameters_are_their_callers_problem_only(llm: AsyncLLM) -> None:
    async def main() -> None:
        good = asyncio.create_task(
            last(llm.generate(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True), request_id="good"))
        )
        with pytest.raises(InvalidRequest, match="stop_token_ids"):
            await last(llm.generate(PROMPT, SamplingParams(stop_token_ids=[256]), request_id="bad"))

        def broken(output: list[int], logits: Any) -> Any:
            raise KeyError("mine")

        output = await last(llm.generate(PROMPT, SamplingParams(logits_processors=[broken]), request_id="worse"))
        assert (output.outputs[0].finish_reason, output.error) == ("error", "KeyError: 'mine'")
        assert len(tokens(await good)) == 30

    run(main())


def test_close_ends_every_reader(path: str) -> None:
    llm = AsyncLLM(path, **SIZES)

    async def main() -> None:
        readers = [asyncio.create_task(last(llm.generate(PROMPT, LONG, request_id=str(i)))) for i in range(4)]
        while llm._engine.engine.scheduler.num_running < 4:
            await asyncio.sleep(0.001)
        late = asyncio.create_task(last(llm.generate(PROMPT, LONG, request_id="late")))
        await asyncio.sleep(0)  # its command is given, and closing comes right after it
        llm.close()
        for output in await asyncio.gather(*readers, late):
            assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")

    run(main())


def test_after_close_new_requests_are_refused_and_nothing_else_complains(path: str) -> None:
    llm = AsyncLLM(path, **SIZES)

    async def main() -> None:
        outputs = llm.generate(PROMPT, LONG, request_id="a")
        await anext(outputs)
        llm.close()
        llm.close()
        await llm.abort("a")
        await outputs.aclose()  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="closed"):
            await last(llm.generate(PROMPT, request_id="b"))

    run(main())


def test_close_from_another_thread_while_requests_arrive_leaves_no_reader_waiting(path: str) -> None:
    llm = AsyncLLM(path, **SIZES)

    async def main() -> None:
        async def reader(i: int) -> str:
            try:
                return str((await last(llm.generate(PROMPT, LONG, request_id=str(i)))).outputs[0].finish_reason)
            except RuntimeError as error:
                return str(error)

        closing = threading.Timer(0.05, llm.close)
        closing.start()
        tasks = []
        while not llm._closed or len(tasks) < 20:
            tasks.append(asyncio.create_task(reader(len(tasks))))
            await asyncio.sleep(0.001)
        ends = await asyncio.gather(*tasks)
        assert set(ends) <= {"abort", "this AsyncLLM is closed; make a new one"}
        closing.join()

    run(main())


def test_an_engine_that_breaks_down_tells_every_reader(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = AsyncLLM(path, **SIZES)
    step, broken = llm._engine.step, threading.Event()

    def break_down() -> Any:
        if broken.is_set():
            raise IndexError("lost count")
        return step()

    monkeypatch.setattr(llm._engine, "step", break_down)

    async def main() -> None:
        readers = [asyncio.create_task(last(llm.generate(PROMPT, LONG, request_id=str(i)))) for i in range(3)]
        while llm._engine.engine.scheduler.num_running < 3:
            await asyncio.sleep(0.001)
        broken.set()
        for error in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(error, RuntimeError)
            assert "IndexError: lost count" in str(error)
        with pytest.raises(RuntimeError, match="lost count"):
            await last(llm.generate(PROMPT, request_id="new"))

    run(main())
    llm.close()
    assert not llm._thread.is_alive()


def test_the_event_loop_is_free_while_the_engine_steps(llm: AsyncLLM) -> None:
    async def main() -> None:
        task = asyncio.create_task(last(llm.generate(PROMPT, LONG, request_id="a")))
        turns = 0
        while not task.done() and turns < 20:
            await asyncio.sleep(0.001)
            turns += 1
        assert turns == 20
        await llm.abort("a")
        await task

    run(main())


def test_a_reader_whose_loop_is_gone_does_not_stop_the_engine(llm: AsyncLLM) -> None:
    async def leave() -> None:
        await anext(llm.generate(PROMPT, LONG, request_id="a"))

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()  # without shutting its generators down
    time.sleep(0.05)

    async def main() -> None:
        assert (await last(llm.generate(PROMPT, SamplingParams(max_tokens=2), request_id="b"))).finished

    run(main())


def test_a_mailbox_keeps_the_latest() -> None:
    async def main() -> None:
        mailbox = Mailbox()
        mailbox.put(RuntimeError("first"))
        mailbox.put(KeyError("second"))
        with pytest.raises(KeyError, match="second"):
            await mailbox.get()
        waiting = asyncio.create_task(mailbox.get())
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()

    run(main())
