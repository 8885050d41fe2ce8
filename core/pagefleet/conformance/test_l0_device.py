"""L0: the backend is found, says what it can do, comes up and goes away."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from pagefleet.backend import Backend, BackendInfo, Traits
from pagefleet.conformance.cases import case_named
from pagefleet.conformance.driver import Driver

pytestmark = pytest.mark.conformance_level("L0")

PROBE = """
import json, sys, time
from pagefleet.plugins import Plugins
start = time.perf_counter()
info, index = Plugins().select(sys.argv[1])
print(json.dumps([time.perf_counter() - start, sorted(sys.modules)]))
"""


def test_probe_returns_evidence(target: tuple[BackendInfo, int]) -> None:
    probe = target[0].probe()
    assert probe.usable
    assert probe.evidence.strip(), "a probe says what it found"
    assert all(device.name and device.memory >= 0 for device in probe.devices)


def test_probe_is_cheap(target: tuple[BackendInfo, int]) -> None:
    """In a fresh process: finding the backend takes under two seconds and imports no framework."""
    info, index = target
    command = [sys.executable, "-c", PROBE, f"{info.name}:{index}"]
    seconds, modules = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert seconds < 2.0
    assert not {"torch", "tensorflow", "jax", "onnxruntime", "triton"} & set(modules), "heavy imports belong in load"


def test_traits_are_the_same_before_and_after_loading(
    target: tuple[BackendInfo, int], make_backend: Callable[[], Backend]
) -> None:
    assert make_backend().traits == target[0].traits


def test_traits_make_sense(traits: Traits) -> None:
    assert traits.dtypes
    assert set(traits.dtypes) <= {"float32", "bfloat16", "float16"}
    assert set(traits.batch_invariant) <= set(traits.dtypes)
    assert traits.block_sizes is None or (traits.block_sizes and min(traits.block_sizes) > 0)
    assert traits.token_multiple >= 1


def test_warm_up_then_step(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver()
    driver.backend.warm_up()
    driver.poison()  # warming up may write anywhere: the cache holds nothing yet
    driver.finish([driver.prompt(5)], chunk=3)
    driver.backend.synchronize()


def test_budget_and_explanation(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver()
    budget = driver.backend.kv_budget()
    assert budget is None or budget > 0
    driver.finish([driver.prompt(3)], chunk=3)
    explanation = driver.backend.explain()
    assert all(isinstance(text, str) for item in explanation.items() for text in item)


def test_a_closed_backend_leaves_room_for_the_next(target: tuple[BackendInfo, int], traits: Traits) -> None:
    info, index = target
    for _ in range(2):
        backend = info.load(index)
        driver = Driver.of_case(
            backend, case_named("plain"), traits.dtypes[0], min(traits.block_sizes or (4,)), num_blocks=4
        )
        driver.finish([driver.prompt(3)], chunk=3)
        backend.close()
