"""Graphs as files, for hosts without the onnx package and for tools that look at graphs or compile them ahead.

A folder has a file `HASH.onnx` for each segment, named after all that its graph depends on: folders can be shared by
models, and a file is never the graph of something else. Layers of one shape share a file: a graph has no weights in it.
"""

from __future__ import annotations

import hashlib
import os
from importlib.util import find_spec
from pathlib import Path

from pagefleet.backend import BackendError
from pagefleet_onnx.graphs import SegmentGraph


def graph_bytes(graph: SegmentGraph, folder: Path | None) -> bytes:
    """The graph from `folder`, and into it if it is not there yet; BackendError if there is no way to make it."""
    if folder is None:
        return graph.model_bytes()
    path = folder / f"{hashlib.sha256(graph.describe().encode()).hexdigest()[:32]}.onnx"
    if path.is_file():
        return path.read_bytes()
    if find_spec("onnx") is None:
        raise BackendError(
            f"{folder} has no graph for segment {graph.index} of this model, and without the onnx package none can be "
            "made: pip install onnx, or run build_scripts/onnx.py for the model where it is installed"
        )
    data = graph.model_bytes()
    _write(path, data)
    return data


def _write(path: Path, data: bytes) -> None:
    """All or nothing: processes that start together write the same files."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        raise BackendError(f"PAGEFLEET_ONNX_GRAPHS: {error}") from error
