"""safetensors: the header of every shard, checked; no tensor is read.

The safetensors library's numpy interface copies each tensor and has no bfloat16, so the header (8 bytes of length,
then JSON; https://github.com/huggingface/safetensors#format) is read here and tensors are slices of the mapped file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

from pagefleet.weights.files import (
    MAX_JSON_BYTES,
    CheckpointError,
    StoredTensor,
    check_disjoint,
    map_file,
    parse_json,
    read_json,
)

_DTYPES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {"F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
)
_OTHER_SIZES: Mapping[str, int] = MappingProxyType(
    {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
    | {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8}
)


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder's safetensors files, by name; CheckpointError if any file is not sound."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return read_file(single)
    if index.is_file():
        return _read_shards(folder, index)
    found = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if len(found) == 1:
        return read_file(found[0])
    if found:
        raise CheckpointError(f"{folder}: {len(found)} safetensors files but no {index.name} to say what is in them")
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"{folder}: weights only as {', '.join(pickled[:3])}. Such files are pickled: loading them can run any "
            "code, so they are never read. Convert them with save_pretrained(..., safe_serialization=True)"
        )
    raise CheckpointError(f"{folder}: no weights; expected {single.name}, or {index.name} with its shards")


def read_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, every entry checked against the file's size."""
    data = map_file(path)
    size = len(data)
    length = int.from_bytes(data[:8].tobytes(), "little")
    if size < 8 or length > size - 8:
        raise CheckpointError(f"{path}: {size} bytes, too short for its header of {length}; download it again")
    if length > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: its header is {length} bytes; at most {MAX_JSON_BYTES} are read")
    header = parse_json(data[8 : 8 + length].tobytes(), path)
    header.pop("__metadata__", None)
    tensors = {name: _stored(name, entry, path, 8 + length, size) for name, entry in header.items()}
    check_disjoint(tensors.items(), path)
    used = sum(tensor.stop - tensor.start for tensor in tensors.values())
    if used != size - 8 - length:
        raise CheckpointError(f"{path}: tensors take {used} bytes of {size - 8 - length}; the file is corrupt")
    return tensors


def _read_shards(folder: Path, index: Path) -> dict[str, StoredTensor]:
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
    names = sorted(set(placed.values()))
    if outside := [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]:
        raise CheckpointError(f"{index}: {outside[0]!r} is not the name of a safetensors file in this folder")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise CheckpointError(f"{folder}: {len(missing)} of {len(names)} shards are missing, such as {missing[0]}")
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        shard = read_file(folder / name)
        if repeated := tensors.keys() & shard.keys():
            raise CheckpointError(f"{folder / name}: tensor {min(repeated)!r} is in another shard too")
        tensors.update(shard)
    for tensor, name in placed.items():
        if tensor not in tensors or tensors[tensor].path.name != name:
            raise CheckpointError(f"{folder / name}: tensor {tensor!r} is not in it, though {index.name} says so")
    return tensors


def _stored(name: str, entry: Any, path: Path, data_start: int, size: int) -> StoredTensor:
    """One header entry, its numbers checked against each other and against the file."""
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} is described by {entry!r:.60}; an object was expected")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not (dtype in _DTYPES or dtype in _OTHER_SIZES):
        raise CheckpointError(f"{where} has dtype {dtype!r}; known: {', '.join([*_DTYPES, *_OTHER_SIZES])}")
    if not _are_counts(shape) or len(shape) > 8:
        raise CheckpointError(f"{where} has shape {shape!r:.80}; a list of sizes was expected")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where} has data_offsets {offsets!r:.80}; [start, stop] was expected")
    ours, itemsize = _DTYPES.get(dtype) or (dtype, _OTHER_SIZES[dtype])
    start, stop = offsets
    if stop - start != math.prod(shape) * itemsize:
        raise CheckpointError(
            f"{where} has {stop - start} bytes; {dtype} of shape {shape} takes {math.prod(shape) * itemsize}"
        )
    if data_start + stop > size:
        raise CheckpointError(
            f"{where} ends at byte {data_start + stop} of a file of {size}; it is truncated, download it again"
        )
    return StoredTensor(path, ours, tuple(shape), data_start + start, data_start + stop)


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)
