"""How many threads the kernels get: what this process may really use.

Counted are the processors in its affinity mask, one a core (two threads of a core share its vector units), those of
one NUMA node (memory of another is half as fast, and every op would wait for the slowest thread), and no more than
the control group's quota (whoever is over it is stopped for the rest of the period, in the middle of an op).

This module reads files below a root and knows no kernels.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from pagefleet_cpu.config import CpuConfig


@dataclass(frozen=True, slots=True)
class Threads:
    """So many, and why."""

    count: int
    evidence: str  # "8 threads: 16 processors on 8 cores"


def choose_num_threads(
    config: CpuConfig, *, affinity: Collection[int] | None = None, root: Path = Path("/")
) -> Threads:
    """What is best for kernels that work on one op together; `config.threads` wins."""
    visible = sorted(_affinity() if affinity is None else affinity)
    cores = _one_a_core(visible, root)
    steps = [f"{_count(len(visible), 'processor')} on {_count(len(cores), 'core')}"]
    if config.threads is not None:
        steps.append(f"{config.threads_variable} is {config.threads}")
        return Threads(config.threads, _say(config.threads, steps))
    nodes = {node: on_it for node, cpus in _nodes(root).items() if (on_it := sum(cpu in cpus for cpu in cores))}
    count = len(cores)
    if len(nodes) > 1:
        node = max(nodes, key=lambda node: nodes[node])  # the first of the largest
        count = nodes[node]
        steps.append(
            f"{count} of them on one of {len(nodes)} NUMA nodes (numactl --cpunodebind={node} --membind={node} keeps "
            "threads and memory there)"
        )
    quota = cpu_quota(root)
    if quota is not None and quota < count:
        count = max(1, int(quota))
        steps.append(f"a quota of {quota:g}")
    return Threads(count, _say(count, steps))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Processors' worth of time that the control groups of this process leave it; None: no limit."""
    limits = [*_quotas_v2(root), *_quotas_v1(root)]
    return min(limits, default=None)


def _affinity() -> Collection[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _one_a_core(cpus: list[int], root: Path) -> list[int]:
    """The first of each core's processors that are in `cpus`."""
    seen: set[int] = set()
    first = []
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _read_list(topology / "core_cpus_list") or _read_list(topology / "thread_siblings_list") or {cpu}
        if not siblings & seen:
            first.append(cpu)
        seen |= siblings & set(cpus)
    return first


def _nodes(root: Path) -> dict[int, set[int]]:
    """Processors of each NUMA node. Memory may be a node of its own, without any."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    cpus = {int(folder.name[4:]): _read_list(folder / "cpulist") for folder in folders}
    return dict(sorted(cpus.items()))


def _quotas_v2(root: Path) -> Iterator[float]:
    """Of the group and each above it: the lowest holds. In a container the path may be that of the host."""
    mount = root / "sys/fs/cgroup"
    for path in _group_paths(root, ""):
        words = _read(mount / path / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            yield int(words[0]) / int(words[1])


def _quotas_v1(root: Path) -> Iterator[float]:
    for controllers in ("cpu,cpuacct", "cpu"):
        mount = root / "sys/fs/cgroup" / controllers
        for path in _group_paths(root, controllers):
            quota, period = _read(mount / path / "cpu.cfs_quota_us"), _read(mount / path / "cpu.cfs_period_us")
            if quota and period and int(quota) > 0:
                yield int(quota) / int(period)


def _group_paths(root: Path, controllers: str) -> Iterator[Path]:
    """The process's group in the hierarchy of `controllers` ("": the unified one), and those above it."""
    path = Path()
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, group = line.split(":", 2)
        if names == controllers or (controllers and set(controllers.split(",")) & set(names.split(","))):
            path = Path(*(part for part in Path(group).parts if part not in ("/", "..")))
    yield path
    yield from path.parents


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _read_list(path: Path) -> set[int]:
    """The kernel's "0-3,8": {0, 1, 2, 3, 8}."""
    numbers: set[int] = set()
    for part in filter(None, _read(path).split(",")):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def _say(count: int, steps: list[str]) -> str:
    return f"{_count(count, 'thread')}: {', '.join(steps)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
