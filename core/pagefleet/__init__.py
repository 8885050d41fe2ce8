"""pagefleet: one LLM inference engine, any device.

The public names are imported on first use (PEP 562): `import pagefleet` costs milliseconds, and opens no device.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from pagefleet._version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagefleet.async_llm import AsyncLLM
    from pagefleet.backend import Backend, BackendError, BackendInfo
    from pagefleet.config import EngineConfig
    from pagefleet.llm import LLM
    from pagefleet.request import BeamSearchOutput, CompletionOutput, RequestOutput
    from pagefleet.sampling_params import BeamSearchParams, SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "Backend",
    "BackendError",
    "BackendInfo",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_HOMES: Mapping[str, str] = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "Backend": "backend",
    "BackendError": "backend",
    "BackendInfo": "backend",
    "BeamSearchOutput": "request",
    "BeamSearchParams": "sampling_params",
    "CompletionOutput": "request",
    "EngineConfig": "config",
    "RequestOutput": "request",
    "SamplingParams": "sampling_params",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # found directly from now on
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
