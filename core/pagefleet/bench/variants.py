"""The same weights for every engine: a model written out as another GGUF type, or as a Hugging Face folder.

What is written lies in a cache folder under a name that tells the source's path, size and time, so it is made once.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

GGUF_TYPES = ("F32", "BF16", "F16", "Q8_0")


def cache_folder() -> Path:
    """Where variants are kept: one folder a user, below the system's for temporary files."""
    folder = Path(tempfile.gettempdir()) / f"pagefleet-bench-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def gguf_variant(model: Path, kind: str, folder: Path | None = None) -> Path:
    """`model`, a GGUF file, with its matrices in `kind` (of `GGUF_TYPES`) and the rest in float32.

    The values are those of the file: what was 4 bits stays as coarse, and Q8_0 rounds it once more.
    """
    if model.suffix != ".gguf":
        raise ValueError(f"{model} is no GGUF file; only such a file can be written as {kind}")
    return _made(model, f"{kind}.gguf", lambda target: _write_gguf(model, kind, target), folder)


def hugging_face_variant(model: Path, dtype: str, folder: Path | None = None) -> Path:
    """A folder with `config.json` and the weights of `model` in `dtype`; no tokenizer: benchmarks speak token ids."""
    return _made(model, f"{dtype}-hf", lambda target: _write_folder(model, dtype, target), folder)


def _made(model: Path, name: str, write: Callable[[Path], None], folder: Path | None) -> Path:
    stat = model.stat()
    key = hashlib.sha256(f"{model.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    target = (folder or cache_folder()) / f"{model.stem}-{key}-{name}"
    if not target.exists():
        unfinished = target.with_name(f"{target.name}.{os.getpid()}")
        try:
            write(unfinished)
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
            if unfinished.is_file():
                unfinished.unlink()
    return target


def _write_gguf(model: Path, kind: str, target: Path) -> None:
    import gguf

    quantised = gguf.GGMLQuantizationType[kind]
    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            array = field.types[0] is gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if array else None)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    for tensor in reader.tensors:
        shape = tensor.shape[::-1].tolist()
        values = np.ascontiguousarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)
        if len(shape) < 2 or kind == "F32":
            writer.add_tensor(tensor.name, values)
        else:
            data = gguf.quants.quantize(values, quantised)
            writer.add_tensor(tensor.name, data, raw_shape=data.shape, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_folder(model: Path, dtype: str, target: Path) -> None:
    from pagefleet.plugins import Plugins
    from pagefleet.weights import open_checkpoint

    target.mkdir()
    with open_checkpoint(model, families=Plugins(()).models()) as checkpoint:
        spec = checkpoint.spec
        names = {tensor.checkpoint_name: name for name, tensor in spec.tensors.items()}
        _write_safetensors(
            target / "model.safetensors",
            dtype,
            {stored: spec.tensors[name].shape for stored, name in names.items()},
            lambda stored: checkpoint.read(names[stored]).numpy(),
        )
        architecture = {"qwen2": "Qwen2", "qwen3": "Qwen3"}.get(spec.model_type, spec.model_type.capitalize())
        config = {**checkpoint.config, "torch_dtype": dtype, "architectures": [f"{architecture}ForCausalLM"]}
    (target / "config.json").write_text(json.dumps(config, indent=1, default=str))


def _write_safetensors(
    path: Path, dtype: str, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], NDArray[np.float32]]
) -> None:
    """A safetensors file, one tensor in memory at a time: its length of head, head in JSON, and the bytes."""
    code, width = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}[dtype]
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + width * math.prod(shape)
        head[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(head).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in shapes:
            values = read(name)
            file.write((_bfloat16(values) if dtype == "bfloat16" else values.astype(dtype)).tobytes())


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of float32 values, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
