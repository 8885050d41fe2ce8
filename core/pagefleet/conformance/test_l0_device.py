"""The backend is found, says what it can do, comes up, fails in words and goes away with all it held."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pagefleet.backend import Backend, BackendInfo, HostTensor, Traits
from pagefleet.conformance.cases import RandomWeights, case_named
from pagefleet.conformance.driver import Driver

pytestmark = pytest.mark.conformance_level("L0")


def run_child(what: str, target: tuple[BackendInfo, int]) -> Any:
    """What `child.py` prints; the test fails if it does."""
    info, index = target
    command = [sys.executable, "-m", "pagefleet.conformance.child", what, f"{info.name}:{index}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{what} ended with status {done.returncode}: {done.stderr[-2000:]}"
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None


def test_probe_returns_evidence(target: tuple[BackendInfo, int]) -> None:
    probe = target[0].probe()
    assert probe.usable
    assert probe.evidence.strip(), "a probe says what it found"
    assert all(device.name and device.memory >= 0 for device in probe.devices)


def test_probe_is_cheap(target: tuple[BackendInfo, int]) -> None:
    """In a fresh process: finding the backend takes under two seconds and imports no framework."""
    seconds, modules = run_child("probe", target)
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


def test_memory_comes_back(target: tuple[BackendInfo, int]) -> None:
    """Nine times load, step, close, of a model of 20 MB: neither the host's memory nor the device's budget dwindles."""
    growth, lost = run_child("cycles", target)
    assert growth < 60e6, f"the process grew by {growth / 1e6:.0f} MB in 6 cycles"
    assert lost < 60e6, f"the budget for the cache fell by {lost / 1e6:.0f} MB in 6 cycles"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_found_here_used_in_another_process(method: str, target: tuple[BackendInfo, int]) -> None:
    """A probe initialises nothing that a process forked afterwards could not use."""
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this platform does not {method}")
    run_child(method, target)


def test_close_at_any_time(make_backend: Callable[[], Backend], make_driver: Callable[..., Driver]) -> None:
    """Before load, twice, and after work."""
    backend = make_backend()
    backend.close()
    backend.close()
    driver = make_driver()
    driver.finish([driver.prompt(3)], chunk=3)
    driver.backend.close()
    driver.backend.close()
    again = make_driver()
    again.finish([again.prompt(3)], chunk=3)


class Unreadable:
    """A `WeightSource` whose file cannot be read from some tensor on."""

    def __init__(self, weights: RandomWeights, num_good: int) -> None:
        self.weights, self.num_good = weights, num_good

    def read(self, name: str) -> HostTensor:
        self.num_good -= 1
        if self.num_good < 0:
            raise OSError("the disk is gone")
        return self.weights.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)


@pytest.mark.parametrize("num_good", [0, 5])
def test_a_load_that_fails_says_why(
    num_good: int, make_backend: Callable[[], Backend], make_driver: Callable[..., Driver], traits: Traits
) -> None:
    """What went wrong reaches the caller; the backend can be closed, and the next one works."""
    model = case_named("plain").model
    backend = make_backend()
    with pytest.raises(Exception, match="the disk is gone"):
        backend.load(model, Unreadable(RandomWeights(model, 0), num_good), traits.dtypes[0])
    backend.close()
    driver = make_driver()
    driver.finish([driver.prompt(3)], chunk=3)
