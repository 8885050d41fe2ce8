"""Checkpoint: a model's config, spec and tensors, all checked before any memory is taken for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pagefleet.backend import HostTensor
from pagefleet.model import ModelSpec
from pagefleet.models import ModelFamily, builtin_families, find_family
from pagefleet.models.decoder import token_ids
from pagefleet.weights import hub, safetensors_files
from pagefleet.weights.check import match_tensors
from pagefleet.weights.files import CheckpointError, StoredTensor, map_file, read_json

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Checkpoint:
    """An open checkpoint: a `WeightSource` over memory-mapped files.

    Every tensor of `spec.tensors` is present, of the right shape and inside its file. `config` is in the terms of
    Hugging Face's `config.json`, whatever the format. A tensor's bytes are read when they are used, not before.
    """

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        spec: ModelSpec,
        stored: Mapping[str, StoredTensor],
        restore: Callable[[HostTensor], HostTensor] | None = None,
    ) -> None:
        """`stored` is by the names of `spec.tensors`; `restore` undoes what a format does to a tensor."""
        self.path, self.config, self.spec = path, config, spec
        self._stored, self._restore = stored, restore
        self._mapped: dict[Path, NDArray[np.uint8]] = {
            file: map_file(file) for file in sorted({tensor.path for tensor in stored.values()})
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of the model's tensors as stored."""
        return sum(tensor.stop - tensor.start for tensor in self._stored.values())

    @property
    def formats(self) -> tuple[str, ...]:
        """The dtypes and ggml types of its tensors, most bytes first."""
        sizes: Counter[str] = Counter()
        for tensor in self._stored.values():
            sizes[tensor.dtype] += tensor.stop - tensor.start
        return tuple(name for name, _ in sizes.most_common())

    def read(self, name: str) -> HostTensor:
        """The tensor under that name of `spec.tensors`. Raises KeyError for another name."""
        if name not in self._stored:
            raise KeyError(f"no tensor {name!r} in the spec of {self.path}")
        stored = self._stored[name]
        if stored.path not in self._mapped:
            raise CheckpointError(f"{self.path} is closed; open it again to read {name!r}")
        data = self._mapped[stored.path][stored.start : stored.stop]
        tensor = HostTensor(name, stored.dtype, stored.shape, data, stored.dequantise)
        return self._restore(tensor) if self._restore is not None else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def close(self) -> None:
        """Let go of the files; they are unmapped when the last tensor read from them is gone."""
        self._mapped.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_checkpoint(
    model: str | Path, *, revision: str | None = None, families: Iterable[ModelFamily] | None = None
) -> Checkpoint:
    """Open a folder (safetensors, or exactly one .gguf), a .gguf file, or a name on the Hugging Face hub.

    `families` are the model families to look among (None: the built-in ones); `revision` is a branch, tag or commit
    on the hub. Raises CheckpointError, before taking memory, for anything that does not fit together.
    """
    families = builtin_families() if families is None else families
    path = _locate(model, revision)
    try:
        return _open_folder(path, families) if path.is_dir() else _open_gguf(path, families)
    except CheckpointError:
        raise
    except ValueError as error:  # a family or its RoPE does not understand the config
        raise CheckpointError(f"{path}: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # a family did not expect such a value
        raise CheckpointError(
            f"{path}: its config cannot be used: {type(error).__name__}: {error}; check it, or download it again"
        ) from error


def _locate(model: str | Path, revision: str | None) -> Path:
    """The local path of a model, downloaded if need be."""
    path = Path(model).expanduser()
    if path.exists():
        if revision is not None:
            raise CheckpointError(f"{path} is local; revision {revision!r} is for names on the Hugging Face hub")
        return path
    if hub.is_repository(str(model)):
        return hub.download(str(model), revision)
    raise CheckpointError(f"{path}: no such file or folder, and not a name on the Hugging Face hub")


def _open_folder(folder: Path, families: Iterable[ModelFamily]) -> Checkpoint:
    if not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        if len(ggufs) == 1:
            return _open_gguf(ggufs[0], families)
        if ggufs:
            raise CheckpointError(f"{folder}: {len(ggufs)} .gguf files; give the path of one, such as {ggufs[0]}")
        raise CheckpointError(f"{folder}: neither a config.json nor a .gguf file in it")
    config = read_json(folder / "config.json")
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise CheckpointError(
            f"{folder / 'config.json'}: quantization_config says {method!r:.60}; supported: safetensors in float32, "
            "float16 or bfloat16 without quantization_config, and GGUF"
        )
    spec = find_family(str(config.get("model_type")), families).spec(config)
    spec = _sampleable_eos(replace(spec, eos_token_ids=_all_eos(folder, spec.eos_token_ids)))
    stored = safetensors_files.read_folder(folder)
    return Checkpoint(folder, config, spec, match_tensors(folder, spec, stored))


def _all_eos(folder: Path, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The config's end tokens and those of `generation_config.json`: chat models list theirs only there."""
    path = folder / "generation_config.json"
    more = token_ids(read_json(path), "eos_token_id") if path.is_file() else ()
    return tuple(dict.fromkeys((*eos_token_ids, *more)))


def _sampleable_eos(spec: ModelSpec) -> ModelSpec:
    """Without end tokens beyond the vocabulary: the model never samples them."""
    return replace(spec, eos_token_ids=tuple(one for one in spec.eos_token_ids if one < spec.vocab_size))


def _open_gguf(path: Path, families: Iterable[ModelFamily]) -> Checkpoint:
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path}: a model is a folder, a .gguf file or a name on the Hugging Face hub")
    from pagefleet.weights import gguf_config, gguf_file  # imports the gguf library, needed for no other format

    file = gguf_file.read_gguf(path)
    family = gguf_config.find_gguf_family(file, families)
    config = gguf_config.config_from_gguf(file, family)
    spec = _sampleable_eos(family.spec(config))
    tensors = {name: tensor for name, tensor in file.tensors.items() if name != gguf_config.ROPE_FACTORS}
    stored = match_tensors(path, spec, tensors, gguf_config.gguf_names(spec, family))
    for dtype in {tensor.dtype for tensor in stored.values() if tensor.dequantise is not None}:
        if not gguf_file.can_dequantise(dtype):
            raise CheckpointError(f"{path}: has tensors of type {dtype}, which the gguf library cannot dequantise")

    def restore(tensor: HostTensor) -> HostTensor:
        is_qk = tensor.name.endswith((".q.weight", ".k.weight", ".q.bias", ".k.bias"))
        return gguf_config.rotate_half_rows(tensor, spec.head_dim) if is_qk else tensor

    return Checkpoint(path, config, spec, stored, restore if family.gguf_interleaved_qk else None)
