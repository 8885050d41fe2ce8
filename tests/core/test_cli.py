"""The command line, with a stand-in for the engine: what is read, what is printed, and how errors look."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import pagefleet.llm
from pagefleet import __version__
from pagefleet.bench import Workload
from pagefleet.cli import app
from pagefleet.config import EngineConfig
from pagefleet.request import CompletionOutput, RequestMetrics, RequestOutput
from pagefleet.sampling_params import SamplingParams


class FakeLLM:
    """Answers every prompt with its text in capitals, a letter at a time."""

    created: list[dict[str, Any]]
    params: list[SamplingParams]
    vocab_size = 1000
    highest_id = 0
    failing = False

    def __init__(self, model: str, **options: Any) -> None:
        if model == "missing":
            raise FileNotFoundError("missing: no such file")
        self.created.append({"model": model, **options})

    def generate(self, prompts: list[Any], params: SamplingParams, use_tqdm: bool = True) -> list[RequestOutput]:
        self.params.append(params)
        return [self._output(i, prompt, params, None) for i, prompt in enumerate(prompts)]

    def stream(self, prompts: list[str], params: SamplingParams) -> Iterator[RequestOutput]:
        self.params.append(params)
        for length in range(max(map(len, prompts)) + 1):
            for i, prompt in enumerate(prompts):
                if length <= len(prompt):
                    if length and prompt[length - 1] == "^":
                        raise KeyboardInterrupt
                    yield self._output(i, prompt, params, length)

    def chat_prompts(self, messages: list[dict[str, str]]) -> list[str]:
        if messages[-1]["content"] == "too long":
            raise ValueError("the prompt has 9 tokens")
        if not messages[-1]["content"].isprintable():
            raise ValueError("not text")
        return ["|".join(message["content"] for message in messages)]

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(vocab_size=self.vocab_size)

    def _output(self, i: int, prompt: Any, params: SamplingParams, length: int | None) -> RequestOutput:
        ids = prompt["prompt_token_ids"] if isinstance(prompt, dict) else [1, 2]
        text = "" if isinstance(prompt, dict) else prompt.upper()[:length]
        type(self).highest_id = max(self.highest_id, *ids)
        metrics = RequestMetrics(0.0, first_token_time=0.5, last_token_time=1.5, num_generated=3)
        completions: list[Any] = [
            SimpleNamespace(index=k, text=text, token_ids=[7, 8, 9], finish_reason="length", stop_reason=None)
            for k in range(params.n)
        ]
        finished = length in (None, len(prompt))
        error = "OSError: device lost" if finished and (self.failing or "fail" in prompt) else None
        if error is not None and not self.failing and prompt == "fail":  # at its first token
            completions[0].text = ""
        return RequestOutput(str(i), prompt, ids, completions, finished, metrics, error=error)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    fake = type("LLM", (FakeLLM,), {"created": [], "params": []})
    monkeypatch.setattr(pagefleet.llm, "LLM", fake)
    return fake


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin, env={"COLUMNS": "100", "PAGEFLEET_PLUGINS": ""})


def test_the_stand_in_speaks_as_the_engine_does() -> None:
    for name in ("generate", "stream", "chat_prompts"):
        assert hasattr(pagefleet.llm.LLM, name)
    assert {"text", "token_ids", "finish_reason", "stop_reason"} <= set(CompletionOutput.__slots__)


# -- help ----------------------------------------------------------------------------------------------------


def test_help_names_every_command_and_how_to_begin() -> None:
    for result in (run(), run("--help")):
        for word in ("devices", "generate", "chat", "bench", "--version", "TARGET_DEVICE", "Begin with"):
            assert word in result.output


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("devices", ["usable, or why not", "--json"]),
        (
            "generate",
            ["--temperature", "--device", "--dtype", "--stream", "--json", "--file", "FIELD=VALUE", "Example"],
        ),
        ("chat", ["/reset", "/exit", "Ctrl-C", "--system"]),
        ("bench", ["first token", "--num-prompts", "--input-len", "--output-len", "--seed"]),
    ],
)
def test_each_command_explains_itself(command: str, words: list[str]) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert [word for word in words if word not in result.output] == []


def test_version() -> None:
    assert run("--version").output == f"pagefleet {__version__}\n"


# -- devices -------------------------------------------------------------------------------------------------


def test_devices_lists_the_built_in_backends() -> None:
    result = run("devices")
    assert result.exit_code == 0
    assert "cpu: usable\n  why " in result.stdout
    assert result.stdout.endswith("auto: cpu\n")


def test_devices_for_machines() -> None:
    found = json.loads(run("devices", "--json").stdout)
    (row,) = [row for row in found["backends"] if row["name"] == "cpu"]
    assert row["usable"]
    assert row["distribution"] == "pagefleet"
    assert "float32" in row["traits"]["dtypes"]
    assert found["chosen"] == "cpu"


def test_devices_says_when_the_named_one_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TARGET_DEVICE", "no_such_device")
    assert run("devices").stdout.endswith("TARGET_DEVICE=no_such_device: no such usable backend\n")


# -- generate ------------------------------------------------------------------------------------------------


def test_one_prompt_prints_its_text_alone(llm: type[FakeLLM]) -> None:
    assert run("generate", "m", "hello").output == "HELLO\n"
    assert llm.created == [{"model": "m", "device": None, "dtype": "auto"}]


def test_several_prompts_are_told_apart(llm: type[FakeLLM]) -> None:
    assert run("generate", "m", "a", "b").output == "--- a\nA\n--- b\nB\n"


def test_options_reach_the_engine_and_the_request(llm: type[FakeLLM]) -> None:
    options = "--device cpu:0 --dtype float32 --set max_num_seqs=4 --set numerics=strict --set pipeline=false"
    sampling = "--temperature 0 --top-p 0.5 --top-k 3 --min-p 0.1 --max-tokens 7 --seed 5 --stop x --stop y -n 2"
    result = run("generate", "m", "a", *options.split(), *sampling.split())
    assert result.output == "--- a\nA\n--- a\nA\n"
    expected = {"device": "cpu:0", "dtype": "float32", "max_num_seqs": 4, "numerics": "strict", "pipeline": False}
    assert llm.created == [{"model": "m"} | expected]
    assert llm.params == [
        SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1, max_tokens=7, seed=5, stop=["x", "y"], n=2)
    ]


def test_prompts_come_from_stdin_or_a_file(llm: type[FakeLLM], tmp_path: Any) -> None:
    assert run("generate", "m", stdin="a\n\nb\n").output == "--- a\nA\n--- b\nB\n"
    file = tmp_path / "prompts.txt"
    file.write_text("c\n")
    assert run("generate", "m", "--file", str(file)).output == "C\n"


def test_json_output_is_an_object_a_line(llm: type[FakeLLM]) -> None:
    lines = run("generate", "m", "a", "b", "--json").output.splitlines()
    completion = {"text": "A", "token_ids": [7, 8, 9], "finish_reason": "length", "stop_reason": None}
    assert json.loads(lines[0]) == {"prompt": "a", "outputs": [completion], "error": None}
    assert len(lines) == 2


def test_streams_do_not_interleave(llm: type[FakeLLM]) -> None:
    assert run("generate", "m", "long prompt", "b", "--stream").output == "LONG PROMPT\nB\n"


def test_a_failed_request_is_an_error(llm: type[FakeLLM]) -> None:
    result = run("generate", "m", "fail")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: 1 of 1 requests failed, the first with OSError: device lost\n"
    result = run("generate", "m", "a", "it fails")  # what there is, is printed
    assert (result.exit_code, result.stdout) == (1, "--- a\nA\n--- it fails\nIT FAILS\n")
    assert result.stderr == "error: 1 of 2 requests failed, the first with OSError: device lost\n"


def test_a_failed_request_is_an_error_for_machines_too(llm: type[FakeLLM]) -> None:
    result = run("generate", "m", "a", "fail", "--json")
    assert [json.loads(line)["error"] for line in result.stdout.splitlines()] == [None, "OSError: device lost"]
    assert result.exit_code == 1
    assert "1 of 2 requests failed" in result.stderr


def test_a_failed_stream_is_an_error(llm: type[FakeLLM]) -> None:
    result = run("generate", "m", "it fails", "a", "--stream")
    assert (result.exit_code, result.stdout) == (1, "IT FAILS\nA\n")
    assert result.stderr == "error: 1 of 2 requests failed, the first with OSError: device lost\n"


@pytest.mark.parametrize("command", [("generate", "m", "one\ntwo", "--stream"), ("generate", "m", "one")])
def test_a_closed_pipe_is_left_quietly(
    llm: type[FakeLLM], command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("pagefleet.cli.typer.echo", broken)
    result = run(*command)
    assert (result.exit_code, result.output) == (1, "")


def test_closed_stdin_is_no_prompt_and_no_conversation(llm: type[FakeLLM]) -> None:
    for arguments, message in (
        (["generate", "m"], "error: no prompt: give some as arguments"),
        (["chat", "m"], "error: stdin is closed"),
    ):
        command = f"{sys.executable} -m pagefleet {' '.join(arguments)} <&-"
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert done.stderr.startswith(message)


def test_text_settings_are_taken_as_they_are_and_names_as_a_list(llm: type[FakeLLM]) -> None:
    settings = "--set revision=123 --set tokenizer=true --set plugins=a,b --set seed=4"
    assert run("generate", "m", "a", *settings.split()).exit_code == 0
    assert run("generate", "m", "a", "--set", "plugins=").exit_code == 0
    common = {"model": "m", "device": None, "dtype": "auto"}
    assert llm.created == [
        common | {"revision": "123", "tokenizer": "true", "plugins": ("a", "b"), "seed": 4},
        common | {"plugins": ()},
    ]
    for made in llm.created:
        EngineConfig(**made)


# -- chat ----------------------------------------------------------------------------------------------------


def test_chat_remembers_resets_and_leaves(llm: type[FakeLLM]) -> None:
    result = run("chat", "m", "--system", "s", stdin="one\ntwo\n/reset\nthree\n/exit\nnever\n")
    assert result.output.splitlines() == ["S|ONE", "S|ONE|S|ONE|TWO", "S|THREE"]


def test_an_interrupt_stops_the_answer_not_the_program(llm: type[FakeLLM]) -> None:
    assert run("chat", "m", stdin="wa^it\n/reset\nok\n").output == "WA [stopped]\nOK\n"


def test_a_refused_turn_leaves_the_conversation_as_it_was(llm: type[FakeLLM]) -> None:
    result = run("chat", "m", stdin="one\ntoo long\ntwo\n")
    assert result.stderr == "error: the prompt has 9 tokens\n"
    assert result.stdout.splitlines()[-1] == "ONE|ONE|TWO"
    assert result.exit_code == 1  # nobody was there to see it


@pytest.mark.parametrize("line", [b"no text \xff", b"fail"])
def test_a_turn_that_fails_is_said_and_the_next_one_goes_on(llm: type[FakeLLM], line: bytes) -> None:
    result = run("chat", "m", "--system", "s", stdin=b"one\n" + line + b"\n/reset\nthree\n")
    assert result.stderr in ("error: not text\n", "error: OSError: device lost\n")
    assert result.stdout.splitlines()[0] == "S|ONE"
    assert result.stdout.splitlines()[-1] == "S|THREE"
    assert result.exit_code == 1


# -- bench ---------------------------------------------------------------------------------------------------


def test_bench_prints_rates_and_latencies(llm: type[FakeLLM]) -> None:
    result = run("bench", "m", "--num-prompts", "4", "--input-len", "8", "--output-len", "3")
    assert "4 requests, 8 tokens in, 3 tokens out" in result.output
    assert all(word in result.output for word in ("throughput out", "time to first token, median", "500.0", "ms"))


def test_bench_for_machines(llm: type[FakeLLM]) -> None:
    found = json.loads(run("bench", "m", "--num-prompts", "4", "--input-len", "8", "--json").output)
    assert (found["num_prompts"], found["ttft_median"], found["itl_p99"]) == (4, 0.5, 0.5)
    assert found["input_throughput"] == pytest.approx(32 / found["duration"])


def test_bench_refuses_to_count_failed_requests(llm: type[FakeLLM]) -> None:
    llm.failing = True
    result = run("bench", "m", "--num-prompts", "4")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: 1 of 1 requests failed, the first with OSError: device lost\n"


def test_bench_draws_prompts_from_a_small_vocabulary(llm: type[FakeLLM]) -> None:
    prompts = Workload(num_prompts=4, input_len=64, output_len=1).prompts(vocab_size=10)
    assert {token_id for prompt in prompts for token_id in prompt} == set(range(10))
    llm.vocab_size = 10
    assert run("bench", "m").exit_code == 0
    assert llm.highest_id < 10


# -- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "missing", "a"], "error: missing: no such file\n"),
        (["generate", "m", "a", "--temperature", "nan"], "error: temperature must be in [0, 10000], got nan\n"),
        (
            ["generate", "m", "a", "--set", "max_seqs=4"],
            "error: --set 'max_seqs=4': must be FIELD=VALUE with FIELD one of",
        ),
        (["generate", "m", "a", "--stream", "--json"], "error: --stream prints the text of one completion a prompt"),
        (["generate", "m"], "error: no prompt: give some as arguments"),
    ],
)
def test_an_error_is_one_message_and_exit_code_1(llm: type[FakeLLM], arguments: list[str], message: str) -> None:
    result = run(*arguments, stdin="")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(message)
    assert "Traceback" not in result.stderr


def test_an_unknown_device_lists_the_known_ones() -> None:
    result = run("generate", "no-such-model", "a", "--device", "cpx")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: no backend is called 'cpx'; did you mean 'cpu'?\n  cpu: usable: ")


def test_debug_keeps_the_traceback(llm: type[FakeLLM]) -> None:
    result = run("--debug", "generate", "missing", "a")
    assert isinstance(result.exception, FileNotFoundError)


def test_a_mistyped_option_is_explained() -> None:
    result = run("generate", "m", "--temprature", "1")
    assert result.exit_code == 2
    assert "--temperature" in result.stderr
