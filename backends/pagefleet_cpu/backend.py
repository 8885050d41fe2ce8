"""The CPU backend: `TorchBackend` on the host."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from pagefleet.backend import BackendError, Traits
from pagefleet.torch_runner.backend import TorchBackend
from pagefleet.torch_runner.ops import Ops
from pagefleet_cpu import PLAIN_TRAITS, traits
from pagefleet_cpu.config import environment
from pagefleet_cpu.ipex import IpexAttention, load_paged_attention
from pagefleet_cpu.ops import CpuOps
from pagefleet_cpu.plain import PlainOps
from pagefleet_cpu.sampler import CpuSampler
from pagefleet_cpu.threads import choose_num_threads
from pagefleet_kernels import cpu as kernels

MAX_KV_BYTES = 4 << 30  # more is taken only if asked for: a host has other work


class CpuBackend(TorchBackend):
    def __init__(self, index: int = 0) -> None:
        if index:
            raise BackendError(f"cpu:{index}: the host's processors are one device; use cpu or cpu:0")
        super().__init__("cpu", *choose_ops())
        if isinstance(self.ops, CpuOps):
            self.sampler = CpuSampler(self.ops.kernels)

    def kv_budget(self) -> int | None:
        """Half of the memory that is free and within the control group's limit, at most `MAX_KV_BYTES`."""
        free = [size for size in (_available_memory(), _control_group_memory()) if size is not None]
        return min(*free, 2 * MAX_KV_BYTES) // 2 if free else None


def choose_ops() -> tuple[Ops, Traits]:
    """The compiled kernels where they were built; else torch's products, as invariant as this processor has them."""
    config = environment()
    threads = choose_num_threads(config).count
    path = config.library or kernels.LIBRARY
    if config.attention == "native" and path.is_file():
        library = kernels.load(path)
        library.force_isa(config.isa)
        library.set_num_threads(threads)
        return CpuOps(library), traits()
    torch.set_num_threads(threads)
    if config.attention == "ipex":
        return IpexAttention(load_paged_attention()), traits()
    _ask_for_strict_products()
    return PlainOps(), PLAIN_TRAITS if _products_are_invariant() else replace(PLAIN_TRAITS, batch_invariant=())


def _ask_for_strict_products() -> None:
    """Have MKL order a product's additions alike for every number of rows; without it, Intel processors do not.

    Measured on AVX-512 it costs nothing. MKL looks at this variable once, when the process first multiplies.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if capability in ("AVX2", "AVX512"):
        os.putenv("MKL_CBWR", f"{capability},STRICT")  # for MKL alone: the program's own environment stays as it is


def _products_are_invariant() -> bool:
    """Whether a row's product has the same bits among 8 rows and among more: a sample, taken in milliseconds."""
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in ((576, 960), (1536, 576)):
        x = torch.randn(256, inputs, generator=generator)
        weight = torch.randn(outputs, inputs, generator=generator)
        alone = torch.nn.functional.linear(x[:8], weight)
        batched = (torch.nn.functional.linear(x[:rows], weight)[:8] for rows in (16, 24, 64, 136, 256))
        if not all(torch.equal(alone, other) for other in batched):
            return False
    return True


def _available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


def _control_group_memory(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container may still take (cgroup v2); of the page cache, what is idle is given up under pressure."""
    try:
        limit, used = int((root / "memory.max").read_text()), int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such file, or the limit is "max"
        return None
    return max(0, limit - used + int(stat.get("inactive_file", 0)))
