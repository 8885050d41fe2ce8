"""The benchmark suite's logic: workloads, the protocol with an engine's process, rows and ratios, refusals, tables."""

from __future__ import annotations

import io
import json
import os
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pagefleet.bench.compare import Plan, Row, Series, compare
from pagefleet.bench.engines.llama_cpp_engine import _shared_prefix
from pagefleet.bench.engines.serve import serve
from pagefleet.bench.peers import OURS, Contender, find_peer, ours, weights_for
from pagefleet.bench.process import EngineError, EngineProcess, busy_seconds
from pagefleet.bench.report import comparison_table
from pagefleet.bench.suite import SuiteOptions
from pagefleet.bench.workloads import BenchRequest, describe, load_workload

ENGINE = """
import os, subprocess, sys, time

class Engine:
    def load(self, model, dtype, threads=None, **settings):
        print("loading", model)  # not a reply
        if dtype == "int8":
            raise ValueError("no int8 here")
        self.first = settings.get("first", 7)
        return {"version": "1"}

    def run(self, requests):
        if requests[0]["prompt"][0] == 66:
            os._exit(3)
        if requests[0]["prompt"][0] == 67:
            return {"wall": 1.0, "tokens": [[] for _ in requests]}
        tokens = [list(range(self.first, self.first + each["out"])) for each in requests]
        ttft, itl = [0.5] * len(requests), [0.25] * len(requests)
        return {"wall": 2.0 * self.first, "ttft": ttft, "itl": itl, "tokens": tokens}

    def close(self):
        pass
"""


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = tmp_path / "fake_engine.py"
    path.write_text(ENGINE)
    return path


def contender(name: str, engine: Path, **settings: Any) -> Contender:
    return Contender(name, sys.executable, engine, settings)


def plan(*prompts: int, weights: tuple[str, ...] = ("auto",), workload: str = "w2") -> Plan:
    requests = [BenchRequest((first, 1, 2), 4) for first in prompts]
    return Plan("model.gguf", {workload: requests}, {workload: weights}, repeat=2)


# -- workloads -----------------------------------------------------------------------------------------------


def test_the_fixed_workloads_are_those_of_the_anchors() -> None:
    assert describe(load_workload("w1")) == "5 requests, 640 tokens in, 640 out"
    assert describe(load_workload("w2")) == "64 requests, 11,550 tokens in, 5,978 out"
    shared = load_workload("w3")
    assert describe(shared) == "32 requests, 17,408 tokens in, 1,024 out"
    assert len({each.prompt[:512] for each in shared}) == 1
    assert len({each.prompt[:528] for each in shared}) > 1


def test_ids_stay_within_a_smaller_vocabulary() -> None:
    requests = load_workload("w2", vocab_size=256)
    assert max(token for each in requests for token in each.prompt) < 256
    assert [len(each.prompt) for each in requests] == [len(each.prompt) for each in load_workload("w2")]


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no workload is called 'w4'; there are w1, w2, w3"):
        load_workload("w4")
    with pytest.raises(ValueError, match=r"no dtype is called 'int3' here; there are bfloat16"):
        SuiteOptions("m", weights=("int3",))
    with pytest.raises(ValueError, match=r"no peer is called 'other'; there are llama.cpp, vllm, openvino"):
        find_peer("other")


# -- the protocol --------------------------------------------------------------------------------------------


def test_an_engine_answers_line_by_line_and_survives_its_errors() -> None:
    class Engine:
        def run(self, requests: list[Any]) -> int:
            return len(requests)

        def close(self) -> None:
            pass

    asked = [{"do": "run", "requests": [1, 2]}, {"do": "run"}, {"do": "__init__"}, {"do": "close"}, {"do": "run"}]
    replies = io.StringIO()
    serve(Engine(), io.StringIO("".join(json.dumps(each) + "\n" for each in asked)), replies)
    answers = [json.loads(line) for line in replies.getvalue().splitlines()]
    assert answers[0] == {"result": 2}
    assert "TypeError" in answers[1]["error"]
    assert answers[2]["error"].startswith("ValueError: no command is called '__init__'")
    assert answers[3:] == [{"result": None}]  # and nothing after it


def test_a_process_is_asked_paused_and_closed(engine: Path) -> None:
    process = EngineProcess(sys.executable, engine)
    try:
        assert process.ask("load", model="m", dtype="auto") == {"version": "1"}  # what it prints is no reply
        assert process.last_words() == "loading m"
        process.pause()
        if sys.platform == "linux":
            assert _state(process) == "T"
            assert process.peak_memory() > 1 << 20
            assert 0 < process.cpu_seconds() < busy_seconds()
        process.resume()
        with pytest.raises(EngineError, match="no int8 here"):
            process.ask("load", model="m", dtype="int8")
        assert process.ask("run", requests=[{"prompt": [1], "out": 2}])["tokens"] == [[7, 8]]
    finally:
        process.close()
    assert process._process.returncode == 0


def _state(process: EngineProcess) -> str:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        state = Path(f"/proc/{process._process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            break
    return state


def test_an_engine_that_ends_is_reported_with_its_last_words(engine: Path) -> None:
    process = EngineProcess(sys.executable, engine)
    process.ask("load", model="m", dtype="auto")
    with pytest.raises(EngineError, match="the engine ended; it said last: loading m"):
        process.ask("run", requests=[{"prompt": [66], "out": 1}])
    process.close()


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_a_paused_engine_is_closed_with_what_it_started(tmp_path: Path) -> None:
    path = tmp_path / "parent_engine.py"
    path.write_text(
        textwrap.dedent("""
        import subprocess
        class Engine:
            def load(self, **given):
                self.child = subprocess.Popen(["sleep", "1000"])
                return self.child.pid
            def close(self):
                pass
        """)
    )
    process = EngineProcess(sys.executable, path)
    child = process.ask("load")
    process.pause()
    process.close()
    deadline = time.monotonic() + 10
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- comparing -----------------------------------------------------------------------------------------------


def test_engines_run_in_turn_and_the_ratio_is_the_peers_time_over_ours(engine: Path) -> None:
    said: list[str] = []
    contenders = [contender(OURS, engine, first=7), contender("peer", engine, first=14)]
    rows = compare(contenders, plan(1, 2), said.append)
    wall = next(row for row in rows if row.measure == "wall")
    assert wall.series[OURS].values == [14, 14]
    assert wall.series["peer"].values == [28, 28]
    assert wall.ratio("peer") == 2
    assert [text.rpartition(" ")[2] for text in said[2:]] == [OURS, "peer", OURS, "peer"]
    same = next(row for row in rows if row.measure == "same tokens")
    assert same.series["peer"].values == [0, 0]
    assert {row.measure for row in rows if row.workload == "whole"} == {
        "import + ready to first token",
        "peak RSS over W2",
    }


def test_one_stream_takes_another_request_each_time_and_is_told_in_milliseconds(engine: Path) -> None:
    rows = compare([contender(OURS, engine)], plan(1, 2, workload="w1"))
    values = {row.measure: (row.series[OURS].values, row.unit) for row in rows if row.workload == "w1"}
    assert values == {"itl": ([250, 250], "ms"), "ttft": ([500, 500], "ms")}


def test_a_refusal_is_a_row_and_the_others_go_on(engine: Path) -> None:
    rows = compare([contender(OURS, engine), contender("peer", engine)], plan(1, weights=("int8", "auto")))
    refused, ran = (row for row in rows if row.measure == "wall")
    assert refused.series[OURS] == Series([], "ValueError: no int8 here")
    assert ran.series[OURS].values == [14, 14]
    assert refused.ratio("peer") is None
    console = Console(file=io.StringIO(), width=160)
    console.print(comparison_table(rows, [OURS, "peer"]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "refused (1)" in shown
    assert "refused (1): ValueError: no int8 here" in shown
    assert "14.00 (14.00 to 14.00)" in shown
    assert "1.00 x" in shown


@pytest.mark.parametrize(("prompt", "reason"), [(66, "the engine ended"), (67, "it generated 0 tokens of 4")])
def test_an_engine_that_fails_amid_a_workload_is_refused(engine: Path, prompt: int, reason: str) -> None:
    rows = compare([contender("peer", engine)], plan(prompt))
    assert rows[0].series["peer"].values == []
    assert str(rows[0].series["peer"].refused).startswith(reason)


def test_a_row_without_a_peer_has_no_ratio() -> None:
    assert Row("w1", "auto", "itl", "ms", {OURS: Series([1.0])}).ratio("peer") is None


# -- peers ---------------------------------------------------------------------------------------------------


def test_a_peer_that_is_not_there_is_refused_with_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        find_peer("vllm", str(tmp_path / "python"))
    if find_spec_fails("vllm"):
        with pytest.raises(ValueError, match=r"vllm is not installed for .*; in an environment for it: pip install"):
            find_peer("vllm")


def find_spec_fails(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is None


def test_ours_gets_a_cache_of_known_size_unless_it_is_set() -> None:
    assert ours(None, {}).settings == {"device": None, "kv_cache_memory_bytes": 2 << 30}
    assert ours("cpu", {"num_blocks": 9}).settings == {"device": "cpu", "num_blocks": 9}


def test_each_engine_is_given_the_weights_in_a_form_it_reads() -> None:
    assert weights_for(OURS, "m.gguf", "int8") == ("m.gguf", "int8")
    assert weights_for("llama.cpp", "m.gguf", "auto") == ("m.gguf", "auto")
    assert weights_for("vllm", "folder", "bfloat16") == ("folder", "bfloat16")
    with pytest.raises(ValueError, match="it reads no GGUF file"):
        weights_for("vllm", "m.gguf", "q8_0")
    with pytest.raises(ValueError, match="folder is no GGUF file"):
        weights_for("llama.cpp", "folder", "bfloat16")


def test_llama_cpp_is_given_a_prefix_only_if_all_prompts_share_it() -> None:
    shared = list(range(40))
    assert _shared_prefix([[*shared, 1], [*shared, 2]]) == 40
    assert _shared_prefix([shared, shared]) == 39  # one token is left to sample after
    assert _shared_prefix([[*shared, 1], [9, *shared]]) == 0
    assert _shared_prefix([shared]) == 0
