"""GGUF: metadata and tensor table of a file, every count checked against its size; no tensor is read.

`gguf.GGUFReader` makes several arrays of every one of a vocabulary's 49,000 strings (seconds, and hundreds of MB)
and trusts the counts it reads, so the table is read here; formats and dequantisation stay with the gguf library.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pagefleet.backend import HostTensor
from pagefleet.weights.files import CheckpointError, StoredTensor, check_disjoint, map_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, str] = MappingProxyType(
    {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
)
_PLAIN: Mapping[str, str] = MappingProxyType({"F32": "float32", "F16": "float16", "BF16": "bfloat16"})
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class GGUFArray:
    """An array of the metadata, still in the file: a vocabulary is decoded only by who needs it."""

    data: NDArray[np.uint8]
    kind: int
    count: int
    start: int

    @property
    def is_text(self) -> bool:
        return self.kind == _STRING

    def values(self) -> list[Any]:
        """Its items: str, int, float or bool."""
        if self.kind != _STRING:
            numbers: list[Any] = np.frombuffer(self.data, _SCALARS[self.kind], self.count, self.start).tolist()
            return numbers
        buffer, position, strings = self.data.data, self.start, []
        for _ in range(self.count):
            (length,) = struct.unpack_from("<Q", buffer, position)
            position += 8 + length
            strings.append(str(buffer[position - length : position], "utf-8", "replace"))
        return strings


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """What a GGUF file says of itself."""

    path: Path
    metadata: Mapping[str, Any]  # int, float, bool, str or GGUFArray
    tensors: Mapping[str, StoredTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Metadata and tensor table; CheckpointError for a file that is not sound."""
    cursor = _Cursor(path, map_file(path))
    if len(cursor.data) < 24 or cursor.data[:4].tobytes() != _MAGIC:
        raise CheckpointError(f"{path}: not a GGUF file: it does not start with {_MAGIC.decode()}")
    cursor.position = 4
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise CheckpointError(f"{path}: GGUF version {version}; 2 and 3 (little-endian) are read. Convert it again")
    num_tensors, num_keys = cursor.count("tensors", 24), cursor.count("metadata keys", 13)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise CheckpointError(f"{path}: metadata key {key!r} occurs twice; the file is corrupt")
        metadata[key] = cursor.value(key)
    if metadata.get("split.count", 0) not in (0, 1):
        raise CheckpointError(f"{path}: one of {metadata['split.count']} split files; join them with llama-gguf-split")
    return GGUFFile(path, MappingProxyType(metadata), MappingProxyType(_tensor_table(cursor, num_tensors, metadata)))


def _tensor_table(cursor: _Cursor, num_tensors: int, metadata: Mapping[str, Any]) -> dict[str, StoredTensor]:
    path = cursor.path
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name, num_dims = cursor.string(), cursor.scalar("<I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise CheckpointError(f"{path}: tensor {name!r} has {num_dims} dimensions; 1 to {_MAX_DIMS} were expected")
        shape = tuple(reversed([int(cursor.scalar("<Q")) for _ in range(num_dims)]))
        if name in entries:
            raise CheckpointError(f"{path}: tensor {name!r} occurs twice; the file is corrupt")
        entries[name] = (shape, int(cursor.scalar("<I")), int(cursor.scalar("<Q")))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}; a power of two was expected")
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {
        name: _stored(f"{path}: tensor {name!r}", path, shape, kind, data_start + offset, len(cursor.data))
        for name, (shape, kind, offset) in entries.items()
    }
    check_disjoint(tensors.items(), path)
    return tensors


def _stored(where: str, path: Path, shape: tuple[int, ...], kind: int, start: int, size: int) -> StoredTensor:
    try:
        ggml_type = GGMLQuantizationType(kind)
    except ValueError:
        raise CheckpointError(f"{where} has ggml type {kind}, which the installed gguf library does not know") from None
    block_size, block_bytes = GGML_QUANT_SIZES[ggml_type]
    if not all(0 < length < 1 << 48 for length in shape) or shape[-1] % block_size:
        raise CheckpointError(f"{where} has shape {shape}; rows of {ggml_type.name} are multiples of {block_size}")
    stop = start + math.prod(shape) // block_size * block_bytes
    if stop > size:
        raise CheckpointError(f"{where} ends at byte {stop} of a file of {size}; it is truncated, download it again")
    plain = _PLAIN.get(ggml_type.name)
    return StoredTensor(path, plain or ggml_type.name, shape, start, stop, None if plain else dequantise)


def dequantise(tensor: HostTensor) -> NDArray[np.float32]:
    """A ggml tensor's values, by the gguf library: float32 in `tensor.shape`."""
    ggml_type = GGMLQuantizationType[tensor.dtype]
    block_size, block_bytes = GGML_QUANT_SIZES[ggml_type]
    rows = tensor.data.reshape(-1, tensor.shape[-1] // block_size * block_bytes)
    values: NDArray[np.float32] = dequantize(rows, ggml_type)
    return values.reshape(tensor.shape)


def can_dequantise(dtype: str) -> bool:
    """Whether the gguf library has the formula of a ggml type (tried on one block)."""
    ggml_type = GGMLQuantizationType[dtype]
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[ggml_type][1]), np.uint8), ggml_type)
    except NotImplementedError:
        return False
    return True


class _Cursor:
    """Reads the file's head in order; every read is checked against the file's size."""

    def __init__(self, path: Path, data: NDArray[np.uint8]) -> None:
        self.path, self.data, self.position = path, data, 0
        self._buffer = data.data

    def take(self, num_bytes: int) -> int:
        """Move on by that many bytes and return where they start."""
        start = self.position
        if num_bytes > len(self.data) - start:
            raise CheckpointError(
                f"{self.path}: its head needs {num_bytes} more bytes at {start}, but the file has {len(self.data)}; "
                "it is truncated or corrupt, download it again"
            )
        self.position = start + num_bytes
        return start

    def scalar(self, kind: str) -> Any:
        return struct.unpack_from(kind, self._buffer, self.take(struct.calcsize(kind)))[0]

    def count(self, what: str, item_bytes: int) -> int:
        """A number of items, each at least `item_bytes` long, that the rest of the file can hold."""
        number = int(self.scalar("<Q"))
        if number * item_bytes > len(self.data) - self.position:
            raise CheckpointError(
                f"{self.path}: claims {number} {what}, more than its {len(self.data)} bytes can hold; "
                "it is truncated or corrupt, download it again"
            )
        return number

    def string(self) -> str:
        length = self.count("characters in a name", 1)
        start = self.take(length)
        return str(self._buffer[start : start + length], "utf-8", "replace")

    def value(self, key: str) -> Any:
        kind = self.scalar("<I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.path}: metadata key {key!r} has type {kind}, which GGUF does not define")
        return self.scalar(_SCALARS[kind])

    def array(self, key: str) -> GGUFArray:
        kind = self.scalar("<I")
        if kind != _STRING and kind not in _SCALARS:
            raise CheckpointError(f"{self.path}: metadata array {key!r} has type {kind}; strings and numbers are read")
        width = 8 if kind == _STRING else struct.calcsize(_SCALARS[kind])
        count = self.count(f"items in {key!r}", width)
        start = self.position
        if kind == _STRING:
            self._skip_strings(count)
        else:
            self.take(count * width)
        return GGUFArray(self.data, kind, count, start)

    def _skip_strings(self, count: int) -> None:
        # the one loop over a whole vocabulary, so it is kept to locals; take() reports a string beyond the end
        unpack, buffer, position, size = struct.Struct("<Q").unpack_from, self._buffer, self.position, len(self.data)
        for _ in range(count):
            if position + 8 > size:
                position = size + 8
                break
            position += 8 + unpack(buffer, position)[0]
        self.take(position - self.position)
