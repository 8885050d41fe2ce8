"""What the environment says about the onnx backend. The only file of this package that reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SUFFIX = "ExecutionProvider"
CPU = f"CPU{SUFFIX}"


@dataclass(frozen=True, slots=True)
class OnnxConfig:
    provider: str = CPU  # PAGEFLEET_ONNX_PROVIDER, with or without the suffix
    graphs: Path | None = None  # PAGEFLEET_ONNX_GRAPHS: a folder of graphs, see `graph_files`; None: none is kept


def environment(variables: Mapping[str, str] | None = None) -> OnnxConfig:
    """Read the variables of the onnx backend (of the process, unless others are given)."""
    variables = os.environ if variables is None else variables
    provider = variables.get("PAGEFLEET_ONNX_PROVIDER", "").strip() or CPU
    graphs = variables.get("PAGEFLEET_ONNX_GRAPHS", "").strip()
    return OnnxConfig(
        CPU if provider == "cpu" else provider.removesuffix(SUFFIX) + SUFFIX, Path(graphs) if graphs else None
    )
