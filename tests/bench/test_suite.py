"""The suite from end to end with a tiny model: every section is there, for people and for machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pagefleet.bench import suite
from pagefleet.bench.roofline import Ceilings
from pagefleet.bench.workloads import load_workload
from pagefleet.cli import app


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {"threads": 2, "bandwidth": {"1": 1e9, "2": 2e9}, "rates": {"float32": 3e9}}
    monkeypatch.setattr(suite, "measure_ceilings", lambda device: (Ceilings(2e9, found["rates"]), found))
    monkeypatch.setattr(suite, "STREAMS", (1, 2))
    monkeypatch.setattr(suite, "PROFILED_TOKENS", (8, 4))


def run(*arguments: str) -> Result:
    environment = {"PAGEFLEET_PLUGINS": "", "TARGET_DEVICE": "cpu"}
    return CliRunner().invoke(app, ["bench", *arguments], env=environment)


def test_all_sections_are_printed(tiny_model: Path) -> None:
    small = ["--set", "kv_cache_memory_bytes=33554432"]
    result = run(str(tiny_model), "--suite", "--workload", "w1", "--dtype", "float32", "--repeat", "1", *small)
    assert result.exit_code == 0, result.output
    for text in ("W1 one stream", "itl, ms", "peak RSS over W1, GB", "read bandwidth, 2 threads", "Host share"):
        assert text in result.output
    for text in ("linear", "attention", "everything else", "static, 32 at a time", "continuous, paged", "1.00 x"):
        assert text in result.output
    assert "refused" not in result.output


def test_a_section_alone_is_for_machines_too(tiny_model: Path) -> None:
    small = ["--set", "kv_cache_memory_bytes=33554432"]
    result = run(str(tiny_model), "--static-batching", "--batch-size", "8", "--dtype", "float32", "--json", *small)
    found = json.loads(result.stdout)
    assert list(found) == ["batching"]
    static, continuous = found["batching"].values()
    requests = load_workload("w2")
    longest = max(len(each.prompt) for each in requests) + max(each.num_output for each in requests)
    assert static["reserved"] == 8 * -(-longest // 16) * 16
    assert static["num_computed"] > continuous["num_computed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "w9"], "error: no workload is called 'w9' here; there are w1, w2, w3\n"),
        (["--suite", "--dtype", "int3"], "error: no dtype is called 'int3' here; there are bfloat16"),
        (["--against", "other"], "error: no peer is called 'other'; there are llama.cpp, vllm, openvino\n"),
    ],
)
def test_what_is_not_known_is_refused_before_anything_runs(arguments: list[str], message: str) -> None:
    result = run("no-such-model", *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith(message)
