"""Qwen 3, dense: RMSNorm on every head of q and k, heads of a stated size, no biases unless asked for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pagefleet.model import ModelSpec
from pagefleet.models import ModelFamily
from pagefleet.models.decoder import boolean, check_value, decoder_spec, layer_windows

# transformers.Qwen3Config's own
_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }
)


def spec(config: Mapping[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    check_value(config, "mlp_bias", (None, False))
    bias = boolean(config, "attention_bias")
    return decoder_spec(config, qkv_bias=bias, o_bias=bias, qk_norm=True, windows=layer_windows(config))


FAMILY = ModelFamily("qwen3", spec, gguf_arch="qwen3")
