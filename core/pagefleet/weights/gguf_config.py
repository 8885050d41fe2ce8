"""GGUF in Hugging Face's terms: config, tensor names, and the order of q and k rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from pagefleet.backend import HostTensor
from pagefleet.models import ModelFamily
from pagefleet.weights.files import CheckpointError, StoredTensor, map_file
from pagefleet.weights.gguf_file import GGUFArray, GGUFFile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefleet.model import ModelSpec

# metadata key (after "{arch}.") -> config key
_SIZES: Mapping[str, str] = MappingProxyType(
    {
        "context_length": "max_position_embeddings",
        "block_count": "num_hidden_layers",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.freq_base": "rope_theta",
        "vocab_size": "vocab_size",
    }
)
_NUMBERS = ("attention.layer_norm_rms_epsilon", "rope.freq_base")  # of _SIZES; the others are whole
# keys that say nothing about the maths, or do so elsewhere here; with the values that are understood (None: any)
_OTHER: Mapping[str, tuple[Any, ...] | None] = MappingProxyType(
    {
        "attention.value_length": None,
        "rope.dimension_count": None,
        "rope.scaling.type": None,
        "rope.scaling.factor": None,
        "rope.scaling.original_context_length": None,
        "rope.scaling.attn_factor": (1.0,),
        "rope.scaling.finetuned": None,
        "rope.scaling.yarn_beta_fast": None,
        "rope.scaling.yarn_beta_slow": None,
        "rope.scaling.yarn_ext_factor": (1.0,),
        "rope.scaling.yarn_attn_factor": (1.0,),
        "rope.scaling.yarn_log_multiplier": (0.0,),
        "attention.causal": (True,),
        "attention.sliding_window": (0,),
        "expert_count": (0,),
        "expert_used_count": (0,),
        "tensor_data_layout": None,
        "use_parallel_residual": (False,),
    }
)
ROPE_FACTORS = "rope_freqs.weight"


def find_gguf_family(file: GGUFFile, families: Iterable[ModelFamily]) -> ModelFamily:
    """The family whose GGUF files have this file's `general.architecture`."""
    arch = file.metadata.get("general.architecture")
    known = []
    for family in families:  # the rest may cost imports: stop when found
        if family.gguf_arch is not None and family.gguf_arch == arch:
            return family
        known.append(family.gguf_arch)
    names = ", ".join(sorted({name for name in known if name is not None}))
    raise CheckpointError(f"{file.path}: architecture {arch!r}; known in GGUF: {names}")


def config_from_gguf(file: GGUFFile, family: ModelFamily) -> dict[str, Any]:
    """The file's metadata as a `config.json` of the family would say it."""
    arch = str(file.metadata["general.architecture"])
    stated = {key.removeprefix(f"{arch}."): value for key, value in file.metadata.items() if key.startswith(f"{arch}.")}
    for key, value in stated.items():
        allowed = None if key in _SIZES else _OTHER.get(key, ())
        if allowed is not None and value not in allowed:
            raise CheckpointError(f"{file.path}: {arch}.{key} is {value!r:.80}, which is not supported here")
        if isinstance(value, GGUFArray):
            raise CheckpointError(f"{file.path}: {arch}.{key} differs by layer; one value for all layers is supported")
        if key in _SIZES and key not in _NUMBERS and (type(value) is not int or not 0 < value < 1 << 31):
            raise CheckpointError(
                f"{file.path}: {arch}.{key} is {value!r:.80}; it must be a whole number above 0 and below 2**31"
            )
    config = {ours: stated[theirs] for theirs, ours in _SIZES.items() if theirs in stated}
    needed = ("context_length", "block_count", "embedding_length", "feed_forward_length", "attention.head_count")
    if missing := [key for key in (*needed, "attention.layer_norm_rms_epsilon") if key not in stated]:
        raise CheckpointError(f"{file.path}: metadata lacks {', '.join(f'{arch}.{key}' for key in missing)}")
    if config["num_hidden_layers"] > len(file.tensors):  # a corrupt number must not become a million tensor names
        raise CheckpointError(
            f"{file.path}: {arch}.block_count is {config['num_hidden_layers']}, but the file holds only "
            f"{len(file.tensors)} tensors; it is corrupt, download it again"
        )
    config["model_type"] = family.model_type
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    if isinstance(tokens := file.metadata.get("tokenizer.ggml.tokens"), GGUFArray):
        config.setdefault("vocab_size", tokens.count)
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    _check_head(file, arch, stated, config["head_dim"])
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["bos_token_id"] = _token_id(file, "bos")
    ends = [_token_id(file, name) for name in ("eos", "eot")]
    config["eos_token_id"] = list(dict.fromkeys(token for token in ends if token is not None))
    if scaling := _rope_scaling(file, stated):
        config["rope_scaling"] = scaling
    return config


def gguf_names(spec: ModelSpec, family: ModelFamily) -> dict[str, str]:
    """Hugging Face tensor name -> GGUF tensor name, by the gguf library's own table."""
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == family.gguf_arch)
    table = get_tensor_name_map(arch, spec.num_layers)
    names: dict[str, str] = {}
    for tensor in spec.tensors.values():
        stored = table.get_name(tensor.checkpoint_name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise CheckpointError(f"the gguf library has no name for {tensor.checkpoint_name} in {family.gguf_arch!r}")
        names[tensor.checkpoint_name] = stored
    return names


def rotate_half_rows(tensor: HostTensor, head_dim: int) -> HostTensor:
    """Put the rows of a q or k projection back into rotate-half order.

    llama.cpp turns neighbouring pairs, so its converter stores row (i, half) of each head at 2 i + half. Rows are
    output dimensions and quantised on their own, so whole rows of bytes move: a copy in the tensor's own format.
    """
    rows = tensor.shape[0]
    heads = tensor.data.reshape(rows // head_dim, head_dim // 2, 2, len(tensor.data) // rows)
    data = np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(-1)
    data.flags.writeable = False
    return replace(tensor, data=data)


def _token_id(file: GGUFFile, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = file.metadata.get(key)
    if token_id is not None and (type(token_id) is not int or not 0 <= token_id < 1 << 31):
        raise CheckpointError(f"{file.path}: {key} is {token_id!r:.80}; it must be a token id, from 0 and below 2**31")
    return token_id


def _check_head(file: GGUFFile, arch: str, stated: Mapping[str, Any], head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        if stated.get(key, head_dim) != head_dim:
            raise CheckpointError(f"{file.path}: {arch}.{key} is {stated[key]}; heads of {head_dim} need {head_dim}")


def _rope_scaling(file: GGUFFile, stated: Mapping[str, Any]) -> dict[str, Any] | None:
    """`rope_scaling` from the keys `rope.scaling.*`, or from the tensor of per-pair factors."""
    kind = stated.get("rope.scaling.type", "none")
    factor, original = stated.get("rope.scaling.factor"), stated.get("rope.scaling.original_context_length")
    if factors := file.tensors.get(ROPE_FACTORS):
        if kind != "none":
            raise CheckpointError(f"{file.path}: has both {ROPE_FACTORS} and rope.scaling.type {kind!r}")
        # llama3's scaling, worked out by the converter: every frequency divided by its own factor, at any length,
        # which is longrope with one set of factors
        values = _read_factors(factors).tolist()
        return {"rope_type": "longrope", "short_factor": values, "long_factor": values, "attention_factor": 1.0}
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        betas = {f"beta_{end}": stated.get(f"rope.scaling.yarn_beta_{end}") for end in ("fast", "slow")}
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **betas}
    raise CheckpointError(f"{file.path}: rope.scaling.type is {kind!r}; known: none, linear, yarn")


def _read_factors(stored: StoredTensor) -> NDArray[np.float32]:
    if stored.dtype != "float32" or len(stored.shape) != 1:
        raise CheckpointError(f"{stored.path}: {ROPE_FACTORS} is {stored.dtype} {stored.shape}, not float32 [n]")
    return map_file(stored.path)[stored.start : stored.stop].view(np.float32)
