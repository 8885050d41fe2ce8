"""Several engines and backends live in one process; the engine runs in forked and in spawned processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pagefleet import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def prompts() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(3, 256, length).tolist() for length in (1, 7, 16, 40)]


@pytest.mark.parametrize("variant", ["llama", "qwen2-mixed-windows", "qwen3"])
def test_two_engines_on_two_backends_take_turns_and_return_the_same_tokens(
    variant: str, tiny_checkpoint: Callable[[str], Path]
) -> None:
    pytest.importorskip("pagefleet_numpy", reason="needs the plugin: pip install -e tests/plugins/pagefleet-numpy")
    options = {"num_blocks": 256, "dtype": "float32"}
    model = str(tiny_checkpoint(variant))
    with LLM(model, device="cpu", **options) as cpu, LLM(model, device="numpy", plugins=("numpy",), **options) as other:
        assert "backend: cpu: " in cpu.explain(), "which device"
        assert "backend: numpy: numpy runs on any host" in other.explain(), "and why"
        results: dict[str, dict[str, list[int]]] = {"cpu": {}, "numpy": {}}
        streams = {"cpu": cpu.stream(prompts(), PARAMS), "numpy": other.stream(prompts(), PARAMS)}
        turns = 0
        while streams:
            turns += len(streams) == 2
            for name in list(streams):
                output = next(streams[name], None)
                if output is None:
                    del streams[name]
                else:
                    results[name][output.request_id] = output.outputs[0].token_ids
        assert turns >= PARAMS.max_tokens  # both were at work all the while
        assert {len(token_ids) for token_ids in results["cpu"].values()} == {PARAMS.max_tokens}
        assert results["cpu"] == results["numpy"]


def test_an_engine_is_not_disturbed_by_another_that_closes(tiny_checkpoint: Callable[[str], Path]) -> None:
    model = str(tiny_checkpoint("llama"))
    with LLM(model, device="cpu", plugins=(), num_blocks=256) as kept:
        before = [output.outputs[0].token_ids for output in kept.generate(prompts(), PARAMS, use_tqdm=False)]
        with LLM(model, device="cpu", plugins=(), num_blocks=64, dtype="bfloat16") as closed:
            closed.generate(prompts(), PARAMS, use_tqdm=False)
        kept.reset_prefix_cache()
        after = [output.outputs[0].token_ids for output in kept.generate(prompts(), PARAMS, use_tqdm=False)]
        assert before == after


GENERATE = f"""
import pagefleet

def generate(model):
    params = pagefleet.SamplingParams(temperature=0, max_tokens={PARAMS.max_tokens}, ignore_eos=True)
    with pagefleet.LLM(model, device="cpu", plugins=(), num_blocks=256) as llm:
        return [output.outputs[0].token_ids for output in llm.generate({prompts()}, params, use_tqdm=False)]
"""

FORK = """
import os, sys
pagefleet.LLM  # imported, as a server's main process would have it
child = os.fork()
tokens = generate(sys.argv[1])  # both at once
if child == 0:
    with open(sys.argv[2], "w") as file:
        print(tokens, file=file, end="")
    os._exit(0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
print(tokens, end="")
"""

SPAWN = """
import multiprocessing, sys

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(generate, (sys.argv[1],)), end="")
"""


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_started_process_generates_the_same_tokens(
    start: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    if start == "fork" and not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    model, script, written = str(tiny_checkpoint("llama")), tmp_path / "script.py", tmp_path / "child"
    script.write_text(GENERATE + {"fork": FORK, "spawn": SPAWN}[start])
    done = subprocess.run(
        [sys.executable, str(script), model, str(written)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    with LLM(model, device="cpu", plugins=(), num_blocks=256) as llm:
        expected = str([output.outputs[0].token_ids for output in llm.generate(prompts(), PARAMS, use_tqdm=False)])
    assert done.stdout == expected
    if start == "fork":
        assert written.read_text() == expected
