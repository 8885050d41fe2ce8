"""Llama and what is built like it: Llama 1 to 3.3, SmolLM, TinyLlama, Vicuna."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pagefleet.model import ModelSpec
from pagefleet.models import ModelFamily
from pagefleet.models.decoder import boolean, decoder_spec

# transformers.LlamaConfig's own
_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)


def spec(config: Mapping[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    bias = boolean(config, "attention_bias")
    return decoder_spec(config, qkv_bias=bias, o_bias=bias, mlp_bias=boolean(config, "mlp_bias"))


FAMILY = ModelFamily("llama", spec, gguf_arch="llama", gguf_interleaved_qk=True)
