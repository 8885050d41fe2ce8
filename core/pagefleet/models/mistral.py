"""Mistral 7B and what is built like it: Llama with a sliding window over every layer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pagefleet.model import ModelSpec
from pagefleet.models import ModelFamily
from pagefleet.models.decoder import check_value, decoder_spec, layer_count, positive_int

# transformers.MistralConfig's own
_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "sliding_window": 4096,
    }
)


def spec(config: Mapping[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    check_value(config, "attention_bias", (None, False))
    check_value(config, "mlp_bias", (None, False))
    check_value(config, "layer_types", (None,))
    window = None if config["sliding_window"] is None else positive_int(config, "sliding_window")
    return decoder_spec(config, windows=(window,) * layer_count(config))


FAMILY = ModelFamily("mistral", spec)  # its GGUF files say "llama"
