"""The CPU backend's hook. Nothing heavy is imported before an engine asks for the device."""

from __future__ import annotations

from dataclasses import replace

from pagefleet.backend import Backend, BackendError, BackendInfo, DeviceInfo, Probe, Traits
from pagefleet.hookspecs import hookimpl
from pagefleet_cpu.config import environment
from pagefleet_cpu.evidence import describe_kernels, model_name, read_manifest, total_memory
from pagefleet_cpu.threads import choose_num_threads

DTYPES = ("float32", "bfloat16", "float16")
TRAITS = Traits(  # with the compiled kernels
    dtypes=DTYPES,
    copies_blocks=True,
    exchanges_blocks=True,
    batch_invariant=DTYPES,
    weight_formats=("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "int8"),
    kv_dtypes=(*DTYPES, "int8"),
)
PLAIN_TRAITS = Traits(  # without them
    dtypes=DTYPES, copies_blocks=True, exchanges_blocks=True, batch_invariant=DTYPES, token_multiple=8
)


def probe() -> Probe:
    """Usable unless a variable has a wrong value; the evidence: processor, memory, kernels and threads."""
    try:
        config = environment()
    except BackendError as error:
        return Probe(False, str(error))
    threads = choose_num_threads(config)
    device = DeviceInfo(model_name(), total_memory(), f"{threads.count} thread{'s' if threads.count > 1 else ''}")
    facts = (
        f"{device.name}, {device.memory / 2**30:.1f} GiB of memory",
        describe_kernels(config, read_manifest(config)),
    )
    return Probe(True, "; ".join((*facts, threads.evidence)), (device,))


def load(index: int) -> Backend:
    """The host's processors are one device: `index` is 0."""
    from pagefleet_cpu.backend import CpuBackend

    return CpuBackend(index)


@hookimpl
def pagefleet_backends() -> list[BackendInfo]:
    return [BackendInfo(name="cpu", probe=probe, load=load, traits=traits())]


def traits() -> Traits:
    """Of the backend as it would be loaded now."""
    try:
        config = environment()
    except BackendError:  # the probe says it
        return PLAIN_TRAITS
    if config.attention == "ipex":
        return replace(PLAIN_TRAITS, batch_invariant=())
    manifest = read_manifest(config)
    if manifest is None:
        return PLAIN_TRAITS
    return TRAITS if manifest.get("batch_invariant", True) else replace(TRAITS, batch_invariant=())
