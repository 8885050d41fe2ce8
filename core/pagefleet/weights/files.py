"""What every weights format needs: the error, memory-mapped files and small JSON files, all with limits."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pagefleet.backend import HostTensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_JSON_BYTES = 32 << 20  # a header of 100,000 tensors is 15 MB; parsed JSON takes many times its size


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names file, tensor, value, what was expected and the way out."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in its file: format, shape and the bytes [start, stop) it occupies."""

    path: Path
    dtype: str  # as in HostTensor
    shape: tuple[int, ...]
    start: int
    stop: int
    dequantise: Callable[[HostTensor], NDArray[np.float32]] | None = None


def map_file(path: Path) -> NDArray[np.uint8]:
    """The file's bytes, memory-mapped read-only: [size]. They are unmapped with the last view of them."""
    if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
        raise CheckpointError(f"{path}: not a regular file; give the path of the file itself")
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:  # an empty file cannot be mapped
        raise CheckpointError(f"{path}: the file is empty; download it again") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    return np.frombuffer(mapped, dtype=np.uint8)


def read_json(path: Path) -> dict[str, Any]:
    """A small JSON file holding one object; CheckpointError for anything else."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size} bytes of JSON; at most {MAX_JSON_BYTES} are read")
        return parse_json(path.read_bytes(), path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
    """One JSON object without repeated keys; CheckpointError naming `path` for anything else."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise CheckpointError(f"{path}: its JSON is nested too deeply to be a checkpoint's") from None
    except ValueError as error:  # also what json and decode raise
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: its JSON is a {type(value).__name__}; an object was expected")
    return value


def check_disjoint(tensors: Iterable[tuple[str, StoredTensor]], path: Path) -> None:
    """CheckpointError if two tensors of a file share bytes: at least one of them is not what it says."""
    stop, previous = 0, ""
    for name, tensor in sorted(tensors, key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start < stop:
            raise CheckpointError(
                f"{path}: tensor {name!r} starts at byte {tensor.start}, inside {previous!r} which ends at {stop}; "
                "the file is corrupt, download it again"
            )
        stop, previous = tensor.stop, name


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {repeated!r} occurs twice")
    return unique
