"""Qwen 2 and 2.5: biases on q, k and v; sliding windows in the upper layers if switched on."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pagefleet.model import ModelSpec
from pagefleet.models import ModelFamily
from pagefleet.models.decoder import check_value, decoder_spec, layer_windows

# transformers.Qwen2Config's own
_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
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
    check_value(config, "attention_bias", (None, True))
    check_value(config, "mlp_bias", (None, False))
    return decoder_spec(config, qkv_bias=True, windows=layer_windows(config))


FAMILY = ModelFamily("qwen2", spec, gguf_arch="qwen2")
