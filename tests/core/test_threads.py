"""How many threads the CPU backend takes on hosts of many shapes, made of files; what its variables mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagefleet.backend import BackendError
from pagefleet_cpu.config import CpuConfig, environment
from pagefleet_cpu.threads import choose_num_threads, cpu_quota

UNSET = CpuConfig()


def host(root: Path, nodes: dict[int, str] | None = None, siblings: dict[int, str] | None = None, **files: str) -> Path:
    """A root folder with the topology given, and files named like proc__self__cgroup."""
    everything = {f"sys/devices/system/node/node{node}/cpulist": cpus for node, cpus in (nodes or {}).items()}
    for cpu, shared in (siblings or {}).items():
        everything[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = shared
    everything |= {name.replace("__", "/"): text for name, text in files.items()}
    for name, text in everything.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_a_host_that_says_nothing_gets_a_thread_for_each_processor_in_the_mask(tmp_path: Path) -> None:
    threads = choose_num_threads(UNSET, affinity={2, 5, 7}, root=tmp_path)
    assert threads.count == 3
    assert threads.evidence == "3 threads: 3 processors on 3 cores"


def test_two_processors_of_a_core_get_one_thread(tmp_path: Path) -> None:
    root = host(tmp_path, siblings={0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2,6"})
    threads = choose_num_threads(UNSET, affinity={0, 1, 2, 4, 5}, root=root)
    assert threads.count == 3
    assert threads.evidence == "3 threads: 5 processors on 3 cores"


def test_the_second_processor_of_a_core_is_used_if_only_it_is_in_the_mask(tmp_path: Path) -> None:
    root = host(tmp_path, siblings={4: "0,4", 5: "1,5"})
    assert choose_num_threads(UNSET, affinity={4, 5}, root=root).count == 2


def test_of_several_numa_nodes_the_largest_is_taken(tmp_path: Path) -> None:
    root = host(tmp_path, nodes={0: "0-3", 1: "4-11", 10: "12-19", 2: ""})
    threads = choose_num_threads(UNSET, affinity=range(20), root=root)
    assert threads.count == 8
    assert threads.evidence == (
        "8 threads: 20 processors on 20 cores, 8 of them on one of 3 NUMA nodes "
        "(numactl --cpunodebind=1 --membind=1 keeps threads and memory there)"
    )


def test_a_mask_within_a_numa_node_says_nothing_of_nodes(tmp_path: Path) -> None:
    root = host(tmp_path, nodes={0: "0-3", 1: "4-7"})
    threads = choose_num_threads(UNSET, affinity={4, 5, 6}, root=root)
    assert threads.evidence == "3 threads: 3 processors on 3 cores"


@pytest.mark.parametrize(("quota", "count"), [("50000", 1), ("150000", 1), ("250000", 2), ("900000", 4), ("max", 4)])
def test_a_quota_is_not_exceeded(tmp_path: Path, quota: str, count: int) -> None:
    root = host(tmp_path, proc__self__cgroup="0::/", **{"sys__fs__cgroup__cpu.max": f"{quota} 100000"})
    threads = choose_num_threads(UNSET, affinity=range(4), root=root)
    assert threads.count == count
    assert ("a quota of" in threads.evidence) == (count < 4)


def test_the_quota_of_a_group_above_holds(tmp_path: Path) -> None:
    limits = {
        "sys__fs__cgroup__a.slice__cpu.max": "200000 100000",
        "sys__fs__cgroup__a.slice__b.scope__cpu.max": "max 100000",
    }
    assert cpu_quota(host(tmp_path, proc__self__cgroup="0::/a.slice/b.scope", **limits)) == 2


def test_a_container_finds_its_quota_at_the_top_though_its_path_is_the_hosts(tmp_path: Path) -> None:
    files = {"proc__self__cgroup": "0::/../../docker/abc", "sys__fs__cgroup__cpu.max": "300000 100000"}
    assert cpu_quota(host(tmp_path, **files)) == 3


@pytest.mark.parametrize("folder", ["", "/docker/abc"])
def test_quotas_of_control_groups_version_1(tmp_path: Path, folder: str) -> None:
    mount = f"sys/fs/cgroup/cpu,cpuacct{folder}"
    files = {
        "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc",
        f"{mount}/cpu.cfs_quota_us": "150000",
        f"{mount}/cpu.cfs_period_us": "50000",
    }
    assert cpu_quota(host(tmp_path, **files)) == 3


def test_no_quota_in_version_1_is_minus_one(tmp_path: Path) -> None:
    files = {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}
    root = host(
        tmp_path, proc__self__cgroup="4:cpu:/", **{f"sys__fs__cgroup__cpu__{name}": v for name, v in files.items()}
    )
    assert cpu_quota(root) is None


@pytest.mark.parametrize("threads", [2, 3, 99])
def test_a_setting_wins(tmp_path: Path, threads: int) -> None:
    siblings = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    root = host(tmp_path, nodes={0: "0-1,4-5", 1: "2-3,6-7"}, siblings=siblings)
    chosen = choose_num_threads(environment({"PAGEFLEET_CPU_THREADS": str(threads)}), affinity=range(8), root=root)
    assert chosen.count == threads
    assert f"PAGEFLEET_CPU_THREADS is {threads}" in chosen.evidence


def test_this_host_has_at_least_one_thread() -> None:
    assert choose_num_threads(UNSET).count >= 1


# -- the variables -------------------------------------------------------------------------------------


def test_the_backends_own_variable_comes_before_openmps() -> None:
    both = environment({"PAGEFLEET_CPU_THREADS": "3", "OMP_NUM_THREADS": "5"})
    assert (both.threads, both.threads_variable) == (3, "PAGEFLEET_CPU_THREADS")
    assert environment({"OMP_NUM_THREADS": " 5,2"}).threads == 5
    assert environment({"OMP_NUM_THREADS": "lots"}).threads is None  # OpenMP ignores it as well
    assert environment({}) == environment({"PAGEFLEET_CPU_ISA": "", "PAGEFLEET_CPU_LIBRARY": " "}) == UNSET


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PAGEFLEET_CPU_THREADS", "0", "'0'; it must be an integer of at least 1"),
        ("PAGEFLEET_CPU_ISA", "sse2", "'sse2'; it must be one of scalar, avx2, avx512, avx512bf16"),
        ("PAGEFLEET_CPU_ATTENTION", "flash", "'flash'; it must be one of native, ipex"),
    ],
)
def test_a_wrong_value_names_the_variable_and_the_way_out(name: str, value: str, message: str) -> None:
    with pytest.raises(BackendError, match=f"{name} is {message}"):
        environment({name: value})
