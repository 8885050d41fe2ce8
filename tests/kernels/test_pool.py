"""The thread pool under strain: more threads than processors, jobs of all sizes back to back, several callers, forks.

A worker that is late for a job must take nothing of the next one: it would compute on arguments that are gone, or
leave a chunk undone. So every result is compared bit for bit with that of one thread.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pagefleet_kernels import cpu

Job = tuple[Tensor, cpu.PackedWeight, Tensor]  # x, weight, x @ weight^T as one thread has it

NUM_JOBS = 1500


@pytest.fixture(params=[2, 3, 8])
def strained(lib: cpu.CpuKernels, request: pytest.FixtureRequest) -> Iterator[cpu.CpuKernels]:
    threads = lib.num_threads
    lib.set_num_threads(request.param)
    yield lib
    lib.set_num_threads(threads)


@pytest.fixture
def jobs(lib: cpu.CpuKernels) -> list[Job]:
    generator = torch.Generator().manual_seed(0)
    threads, made = lib.num_threads, []
    lib.set_num_threads(1)
    for rows, outputs, inputs in ((1, 96, 64), (1, 3072, 64), (5, 200, 48), (64, 128, 96), (130, 80, 32)):
        weight = lib.pack("float32", torch.randn(outputs, inputs, generator=generator), outputs, inputs)
        x = torch.randn(rows, inputs, generator=generator)
        made.append((x, weight, lib.linear(x, weight)))
    lib.set_num_threads(threads)
    return made


def run(lib: cpu.CpuKernels, jobs: list[Job], count: int, seed: int) -> int:
    """How many of `count` jobs went wrong."""
    order = torch.randint(len(jobs), (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return sum(not torch.equal(lib.linear(jobs[i][0], jobs[i][1]), jobs[i][2]) for i in order)


def test_jobs_back_to_back(strained: cpu.CpuKernels, jobs: list[Job]) -> None:
    assert run(strained, jobs, NUM_JOBS, 0) == 0


def test_callers_take_turns(strained: cpu.CpuKernels, jobs: list[Job]) -> None:
    wrong: list[int] = []
    callers = [
        threading.Thread(target=lambda i=i: wrong.append(run(strained, jobs, NUM_JOBS // 4, i))) for i in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == [0] * 4


def test_the_number_of_threads_may_change_between_jobs(strained: cpu.CpuKernels, jobs: list[Job]) -> None:
    for count in (1, 4, 2, 6, 1, 3):
        strained.set_num_threads(count)
        assert run(strained, jobs, 60, count) == 0


def _in_a_child(jobs: list[Job], results: multiprocessing.SimpleQueue[int]) -> None:
    results.put(run(cpu.load(), jobs, 100, 1))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # that is what is tested
def test_a_forked_child_has_threads_of_its_own(strained: cpu.CpuKernels, jobs: list[Job]) -> None:
    assert run(strained, jobs, 20, 0) == 0  # the parent's workers are there
    context = multiprocessing.get_context("fork")
    results: multiprocessing.SimpleQueue[int] = context.SimpleQueue()
    child = context.Process(target=_in_a_child, args=(jobs, results))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert results.get() == 0
    assert run(strained, jobs, 20, 2) == 0
