"""Does a checkpoint hold what its model needs? Answered from headers alone, before any memory is taken."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pagefleet.model import ModelSpec
from pagefleet.weights.files import CheckpointError, StoredTensor

_FLOATS = ("float32", "float16", "bfloat16", "float64")
_LISTED = 5  # names an error spells out
_HARMLESS = re.compile(r".*rotary_emb\.inv_freq")  # buffers that old versions of transformers saved


def match_tensors(
    path: Path, spec: ModelSpec, stored: Mapping[str, StoredTensor], names: Mapping[str, str] | None = None
) -> dict[str, StoredTensor]:
    """The stored tensor of every parameter of `spec`, by the engine's name.

    `names` translates `checkpoint_name` to what `stored` calls it (None: the same). Raises CheckpointError for
    tensors that are missing, unexpected, of another shape or of a format that has no values.
    """
    wanted = {
        ours: tensor.checkpoint_name if names is None else names[tensor.checkpoint_name]
        for ours, tensor in spec.tensors.items()
    }
    if missing := [name for name in wanted.values() if name not in stored]:
        hint = "; set tie_word_embeddings if the embedding is the head" if missing == ["lm_head.weight"] else ""
        raise CheckpointError(
            f"{path}: {len(missing)} of {len(wanted)} tensors are missing: {_listed(missing)}. A {spec.model_type} "
            f"of {spec.num_layers} layers needs them{hint}"
        )
    tied = () if "head.weight" in spec.tensors else ("lm_head.weight",)  # tied wins, as in transformers
    known = {*wanted.values(), *tied}
    if extra := [name for name in stored if name not in known and not _HARMLESS.fullmatch(name)]:
        raise CheckpointError(
            f"{path}: {len(extra)} unexpected tensors: {_listed(extra)}. A {spec.model_type} with this config does not "
            "use them, so its results would be wrong; check model_type and biases in the config"
        )
    for ours, name in wanted.items():
        _check_tensor(stored[name], name, spec.tensors[ours].shape)
    return {ours: stored[name] for ours, name in wanted.items()}


def _check_tensor(tensor: StoredTensor, name: str, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.path}: tensor {name!r} has shape {list(tensor.shape)}; the config asks for {list(shape)}"
        )
    if tensor.dtype not in _FLOATS and tensor.dequantise is None:
        raise CheckpointError(
            f"{tensor.path}: tensor {name!r} is stored as {tensor.dtype}; supported: {', '.join(_FLOATS)}, and GGUF's "
            "quantised types"
        )


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _LISTED} more" if len(every) > _LISTED else ""
    return ", ".join(every[:_LISTED]) + more
