"""The engines that can be measured: where each runs, how it is installed, and which file it takes a model from."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagefleet.bench.process import ENGINES
from pagefleet.bench.variants import gguf_variant, hugging_face_variant

OURS = "pagefleet"
KV_BYTES = 2 << 30  # of every engine that lets it be said
WEIGHTS = ("bfloat16", "float32", "float16", "int8", "int4", "q8_0", "auto")
"""What the weights are: a dtype; int8, quantised on load; q8_0, a GGUF file of that type; auto, the file as it is."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another engine."""

    name: str
    module: str  # which its Python can import
    engine: str  # its file in engines/
    install: str  # what to do in a fresh environment


PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("llama.cpp", "cyllama", "llama_cpp_engine.py", "pip install --no-deps cyllama==0.2.18"),
        Peer("vllm", "vllm", "vllm_engine.py", "pip install vllm, or the package that has it for your device"),
        Peer("openvino", "openvino_genai", "openvino_engine.py", "pip install openvino-genai==2026.4.1.0"),
    )
}


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine as it will be started."""

    name: str
    python: str
    engine: Path
    settings: Mapping[str, Any]  # what its `load` is given beside model, dtype and threads
    variables: tuple[str, ...] = ()  # NAME=VALUE, of its environment


def ours(device: str | None, settings: dict[str, Any]) -> Contender:
    """This engine, with `settings` of `EngineConfig`."""
    sized = {"num_blocks", "kv_cache_memory_bytes"} & settings.keys()
    cache = {} if sized else {"kv_cache_memory_bytes": KV_BYTES}
    return Contender(OURS, sys.executable, ENGINES / "pagefleet_engine.py", {"device": device, **cache, **settings})


def find_peer(name: str, python: str | None = None, threads: int = 1) -> Contender:
    """A peer in `python`'s environment (None: this one). Raises ValueError, with what to do, if it is not there."""
    if name not in PEERS:
        raise ValueError(f"no peer is called {name!r}; there are {', '.join(PEERS)}")
    peer, python = PEERS[name], python or sys.executable
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({peer.module!r}) is None)"
    try:
        missing = subprocess.run([python, "-c", look], capture_output=True).returncode != 0
    except OSError as error:
        raise ValueError(f"--peer-python {python}: {error.strerror}") from error
    if missing:
        raise ValueError(
            f"{name} is not installed for {python}; in an environment for it: {peer.install}; then "
            "--peer-python ENVIRONMENT/bin/python"
        )
    variables = (f"VLLM_CPU_OMP_THREADS_BIND=0-{threads - 1}", f"VLLM_CPU_KVCACHE_SPACE={KV_BYTES >> 30}")
    return Contender(name, python, ENGINES / peer.engine, {}, variables if name == "vllm" else ())


def weights_for(contender: str, model: str, weights: str) -> tuple[str, str]:
    """The model and dtype by which an engine gets `weights`, one of `WEIGHTS`. Raises ValueError: it cannot."""
    path = Path(model)
    if contender == OURS:
        return (str(gguf_variant(path, "Q8_0")), "auto") if weights == "q8_0" else (model, weights)
    if contender == "vllm":
        return _for_vllm(path, model, weights)
    if weights == "auto":
        return model, weights
    kinds = {"bfloat16": "BF16", "float32": "F32", "float16": "F16", "int8": "Q8_0", "q8_0": "Q8_0"}
    if contender == "openvino":  # which reads no other type of these, and computes in the dtype it is told
        kinds |= {"bfloat16": "F16", "float32": "F16"}
    return str(gguf_variant(path, kinds[weights])), weights


def _for_vllm(path: Path, model: str, weights: str) -> tuple[str, str]:
    if weights in ("int8", "q8_0", "auto") and (weights != "auto" or path.suffix == ".gguf"):
        raise ValueError("it reads no GGUF file, and its 8-bit schemes want a checkpoint made for them")
    return (str(hugging_face_variant(path, weights)), weights) if path.suffix == ".gguf" else (model, weights)
