"""What the decoder families have in common: from config keys to a `ModelSpec`, every key checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from pagefleet.model import ModelSpec, TensorSpec
from pagefleet.rope import RopeSpec, rope_from_config

_MAX_LAYERS = 4096
_MAX_POSITIONS = 1 << 27  # as the batch's int32 positions, with room to spare
_INT32 = 1 << 31

_ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
    }
)

# Keys of other architectures that would change the maths of this one, with the values that do not.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "attn_logit_softcapping": (None,),
        "attention_multiplier": (None,),
        "attention_sinks": (None, False),
        "embedding_multiplier": (None, 1),
        "final_logit_softcapping": (None,),
        "is_encoder_decoder": (None, False),
        "logit_scale": (None, 1),
        "logits_scaling": (None, 1),
        "no_rope_layers": (None,),
        "num_experts": (None, 0),
        "num_local_experts": (None, 0, 1),
        "partial_rotary_factor": (None, 1),
        "pretraining_tp": (None, 1),
        "query_pre_attn_scalar": (None,),
        "residual_multiplier": (None, 1),
        "use_bidirectional_attention": (None, False),
    }
)


def decoder_spec(
    config: Mapping[str, Any],
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    windows: tuple[int | None, ...] | None = None,
) -> ModelSpec:
    """The spec of a pre-norm decoder in Hugging Face's names, rotate-half RoPE, RMSNorm and a gated MLP.

    `config` must have every key (a family fills in its defaults first); `windows` is full attention by default.
    Raises ValueError for a missing key, a value out of range, or one that asks for other maths.
    """
    for key, neutral in _NEUTRAL.items():
        check_value(config, key, neutral)
    hidden_size, num_heads = positive_int(config, "hidden_size"), positive_int(config, "num_attention_heads")
    num_layers = layer_count(config)
    grouped = config.get("num_key_value_heads") is not None
    num_kv_heads = positive_int(config, "num_key_value_heads") if grouped else num_heads
    if num_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    head_dim = _head_dim(config, hidden_size, num_heads)
    rope = rope_from_config(config, head_dim)
    if rope.rotary_dim != head_dim:
        raise ValueError(f"RoPE on {rope.rotary_dim} of {head_dim} dimensions is not part of this architecture")
    sizes: dict[str, Any] = {
        "vocab_size": positive_int(config, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": positive_int(config, "intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }
    tensors = _tensors(sizes, qkv_bias, o_bias, mlp_bias, qk_norm, tied=boolean(config, "tie_word_embeddings"))
    return ModelSpec(
        model_type=str(config["model_type"]),
        **sizes,
        max_position_embeddings=_max_positions(config, rope),
        norm_eps=_norm_eps(config),
        rope=rope,
        activation=_activation(config),
        attention_scale=head_dim**-0.5,
        windows=windows if windows is not None else (None,) * num_layers,
        tensors=MappingProxyType(dict(tensors)),
        bos_token_id=next(iter(token_ids(config, "bos_token_id")), None),
        eos_token_ids=token_ids(config, "eos_token_id"),
    )


def layer_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The sliding windows of a config with `layer_types`, or with `use_sliding_window` and `max_window_layers`."""
    num_layers = layer_count(config)
    used = boolean(config, "use_sliding_window") and config.get("sliding_window") is not None
    window = positive_int(config, "sliding_window") if used else None
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers")
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise ValueError(f"config max_window_layers is {first!r:.80}; it must be a whole number from 0")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers:
        raise ValueError(f"layer_types must name each of the {num_layers} layers, not {kinds!r:.80}")
    if unknown := set(map(str, kinds)) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"unknown layer_types {sorted(unknown)}; known: full_attention, sliding_attention")
    if "sliding_attention" in kinds and window is None:
        raise ValueError("layer_types has sliding_attention, but use_sliding_window or sliding_window is off")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _tensors(
    sizes: Mapping[str, int], qkv_bias: bool, o_bias: bool, mlp_bias: bool, qk_norm: bool, *, tied: bool
) -> Iterator[tuple[str, TensorSpec]]:
    """The engine's name of every parameter, with its checkpoint name and shape."""
    hidden, inner, head_dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    q_size, kv_size = sizes["num_heads"] * head_dim, sizes["num_kv_heads"] * head_dim
    linears = (
        ("q", "self_attn.q_proj", q_size, hidden, qkv_bias),
        ("k", "self_attn.k_proj", kv_size, hidden, qkv_bias),
        ("v", "self_attn.v_proj", kv_size, hidden, qkv_bias),
        ("o", "self_attn.o_proj", hidden, q_size, o_bias),
        ("gate", "mlp.gate_proj", inner, hidden, mlp_bias),
        ("up", "mlp.up_proj", inner, hidden, mlp_bias),
        ("down", "mlp.down_proj", hidden, inner, mlp_bias),
    )
    norms = [("attn_norm", "input_layernorm", hidden), ("mlp_norm", "post_attention_layernorm", hidden)]
    if qk_norm:
        norms += [("q_norm", "self_attn.q_norm", head_dim), ("k_norm", "self_attn.k_norm", head_dim)]
    yield "embed.weight", TensorSpec("model.embed_tokens.weight", (sizes["vocab_size"], hidden))
    for layer in range(sizes["num_layers"]):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        for name, stored, size in norms:
            yield f"{ours}.{name}.weight", TensorSpec(f"{theirs}.{stored}.weight", (size,))
        for name, stored, rows, columns, bias in linears:
            yield f"{ours}.{name}.weight", TensorSpec(f"{theirs}.{stored}.weight", (rows, columns))
            if bias:
                yield f"{ours}.{name}.bias", TensorSpec(f"{theirs}.{stored}.bias", (rows,))
    yield "norm.weight", TensorSpec("model.norm.weight", (hidden,))
    if not tied:
        yield "head.weight", TensorSpec("lm_head.weight", (sizes["vocab_size"], hidden))


# -- reading one key ------------------------------------------------------------------------------------


def positive_int(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _INT32:
        raise ValueError(f"config {key} is {value!r:.80}; it must be a whole number above 0 and below 2**31")
    return value


def layer_count(config: Mapping[str, Any]) -> int:
    count = positive_int(config, "num_hidden_layers")
    if count > _MAX_LAYERS:  # a corrupt number must not become a billion tensor names
        raise ValueError(f"config num_hidden_layers is {count}; at most {_MAX_LAYERS} are supported")
    return count


def boolean(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"config {key} is {value!r}; it must be true or false")
    return bool(value)


def check_value(config: Mapping[str, Any], key: str, allowed: tuple[Any, ...]) -> None:
    """Raise ValueError when a key asks for something this architecture does not do."""
    value = config.get(key)
    if value not in allowed:
        raise ValueError(f"config {key} is {value!r}, which this architecture does not support; allowed: {allowed}")


def token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """A token id, a list of them or none, as a tuple. Ids are int32, as everywhere; a vocabulary may be smaller."""
    value = config.get(key)
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < _INT32 for one in ids):
        raise ValueError(
            f"config {key} is {value!r:.80}; it must be a token id, from 0 and below 2**31, or a list of them"
        )
    return tuple(ids)


def _head_dim(config: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        return positive_int(config, "head_dim")
    if hidden_size % num_heads:
        raise ValueError(f"hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}; set head_dim")
    return hidden_size // num_heads


def _max_positions(config: Mapping[str, Any], rope: RopeSpec) -> int:
    count = rope.max_positions(positive_int(config, "max_position_embeddings"))
    if not 0 < count <= _MAX_POSITIONS:
        raise ValueError(
            f"config max_position_embeddings, with its RoPE scaling, is {count}; 1 to {_MAX_POSITIONS} are supported"
        )
    return count


def _norm_eps(config: Mapping[str, Any]) -> float:
    value = config.get("rms_norm_eps")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise ValueError(f"config rms_norm_eps is {value!r}; it must be a number from 0 to 1")
    return float(value)


def _activation(config: Mapping[str, Any]) -> str:
    name = config.get("hidden_act")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ValueError(f"unknown hidden_act {name!r:.80}; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]
