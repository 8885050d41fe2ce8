"""The onnx backend's hook. Neither onnxruntime nor torch is imported before an engine asks for the device."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pagefleet_cpu
from pagefleet.backend import Backend, BackendInfo, DeviceInfo, Probe, Traits
from pagefleet.hookspecs import hookimpl
from pagefleet_onnx.config import environment


def probe() -> Probe:
    """Usable where onnxruntime is installed, onnx or a folder of graphs is there, and the host can do attention.

    Whether that onnxruntime has the wanted provider only its import would tell: load() refuses it if not.
    """
    config = environment()
    needed = ("onnxruntime", "onnx") if config.graphs is None else ("onnxruntime",)
    if missing := [name for name in needed if find_spec(name) is None]:
        return Probe(False, f"{' and '.join(missing)} not installed: pip install 'pagefleet[onnx]'")
    provider, host = config.provider, pagefleet_cpu.probe()
    what = f"{distribution()} with {provider}; attention on the host: {host.evidence}"
    if not host.usable:
        return Probe(False, what)
    devices = tuple(replace(device, detail=f"{provider}, {device.detail}") for device in host.devices)
    return Probe(True, what, devices or (DeviceInfo(provider),))


def distribution() -> str:
    """Which of the distributions that are all imported as `onnxruntime` is here, and its version."""
    spec = find_spec("onnxruntime")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, "capi", "build_and_package_info.py")
        if path.is_file():
            found = re.findall(r"^(?:package_name|__version__) = '([^']+)'", path.read_text(encoding="utf-8"), re.M)
            return " ".join(found) or "onnxruntime"
    return "onnxruntime"


def traits() -> Traits:
    """Of the backend as it would be loaded now: attention and the cache are the CPU's."""
    host = pagefleet_cpu.traits()
    return Traits(
        dtypes=("float32",),
        copies_blocks=True,
        exchanges_blocks=True,
        weight_formats=("Q4_0", "Q8_0"),
        kv_dtypes=host.kv_dtypes,
        model_features=host.model_features,
    )


def load(index: int) -> Backend:
    """There is one device, the wanted provider's: `index` is 0."""
    from pagefleet_onnx.backend import OnnxBackend

    return OnnxBackend(index)


@hookimpl
def pagefleet_backends() -> list[BackendInfo]:
    """Below the CPU's own kernels, which are faster: the automatic choice only where these are not usable."""
    return [BackendInfo("onnx", probe, load, traits(), priority=-5)]
