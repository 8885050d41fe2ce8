"""Every family's spec against a tiny model of transformers: names, shapes, windows and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagefleet.model import ModelSpec
from pagefleet.models import ModelFamily, builtin_families, find_family
from pagefleet.weights import CheckpointError, open_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# one row a variant: model_type, what differs from TINY
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 16}),
    "llama-one-kv-head-each": ("llama", {"num_key_value_heads": 4}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-biases": ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
}


def tiny_model(model_type: str, changes: dict[str, Any], dtype: Any = None) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**TINY, **changes})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32)


def spec_of(model_type: str, config: dict[str, Any]) -> ModelSpec:
    return find_family(model_type).spec({"model_type": model_type, **config})


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    def save(model: Any, **kwargs: Any) -> Path:
        model.save_pretrained(tmp_path / "model", **kwargs)
        return tmp_path / "model"

    return save


@pytest.mark.parametrize("variant", VARIANTS)
def test_spec_names_every_tensor_of_the_model(variant: str, save: Callable[..., Path]) -> None:
    model_type, changes = VARIANTS[variant]
    model = tiny_model(model_type, changes)
    state = dict(model.state_dict())
    if changes.get("tie_word_embeddings"):
        state.pop("lm_head.weight")
    with open_checkpoint(save(model)) as checkpoint:
        named = {tensor.checkpoint_name: tensor.shape for tensor in checkpoint.spec.tensors.values()}
        assert named == {name: tuple(tensor.shape) for name, tensor in state.items()}
        assert checkpoint.spec.num_parameters == sum(tensor.numel() for tensor in state.values())
        for name in checkpoint:
            expected = state[checkpoint.spec.tensors[name].checkpoint_name].numpy()
            np.testing.assert_array_equal(checkpoint.read(name).numpy(), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_windows_are_those_of_the_layers(variant: str) -> None:
    model_type, changes = VARIANTS[variant]
    model = tiny_model(model_type, changes)
    spec = spec_of(model_type, model.config.to_dict())
    if model_type == "mistral":
        assert spec.windows == (model.config.sliding_window,) * 3
    else:
        layers = model.model.layers
        assert spec.windows == tuple(getattr(layer.self_attn, "sliding_window", None) for layer in layers)
    assert spec.attention_scale == pytest.approx(model.model.layers[0].self_attn.scaling)
    assert spec.head_dim == model.model.layers[0].self_attn.head_dim


@pytest.mark.parametrize("family", builtin_families(), ids=lambda family: family.model_type)
def test_defaults_are_those_of_transformers(family: ModelFamily) -> None:
    theirs = transformers.AutoConfig.for_model(family.model_type)
    spec, expected = family.spec({"model_type": family.model_type}), family.spec(theirs.to_dict())
    assert spec == expected
    assert spec.num_layers == theirs.num_hidden_layers
    assert spec.norm_eps == theirs.rms_norm_eps
    assert spec.vocab_size == theirs.vocab_size


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_read_exactly(dtype: str, save: Callable[..., Path]) -> None:
    model = tiny_model("qwen3", {"head_dim": 16}, getattr(torch, dtype))
    with open_checkpoint(save(model)) as checkpoint:
        for name in checkpoint:
            tensor = checkpoint.read(name)
            expected = model.state_dict()[checkpoint.spec.tensors[name].checkpoint_name].float().numpy()
            assert tensor.dtype == dtype
            np.testing.assert_array_equal(tensor.numpy(), expected)


def test_shards_are_read_as_one_checkpoint(save: Callable[..., Path]) -> None:
    model = tiny_model("llama", {})
    folder = save(model, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.num_bytes == 4 * checkpoint.spec.num_parameters
        for name in checkpoint:
            expected = model.state_dict()[checkpoint.spec.tensors[name].checkpoint_name].numpy()
            np.testing.assert_array_equal(checkpoint.read(name).numpy(), expected)


def test_end_tokens_of_the_generation_config_are_added(save: Callable[..., Path]) -> None:
    folder = save(tiny_model("llama", {}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7, 9]}))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.spec.eos_token_ids == (2, 7, 9)
        assert checkpoint.spec.bos_token_id == 1


def test_a_tied_head_that_is_stored_anyway_is_not_used(save: Callable[..., Path]) -> None:
    folder = save(tiny_model("llama", {"tie_word_embeddings": False}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with open_checkpoint(folder) as checkpoint:
        assert "head.weight" not in set(checkpoint)


def test_families_of_a_plugin_are_found_and_the_first_one_wins() -> None:
    stranger = ModelFamily("stranger", lambda config: spec_of("llama", dict(config)))
    assert find_family("stranger", [stranger, *builtin_families()]) is stranger
    with pytest.raises(ValueError, match=r"stranger.*known: llama, mistral, qwen2, qwen3"):
        find_family("stranger")


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("llama", {"hidden_act": "relu"}, ["hidden_act", "relu", "silu"]),
        ("llama", {"pretraining_tp": 2}, ["pretraining_tp", "2"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, ["RoPE", "4 of 8"]),
        ("llama", {"final_logit_softcapping": 30.0}, ["final_logit_softcapping"]),
        ("llama", {"num_local_experts": 8}, ["num_local_experts"]),
        ("llama", {"hidden_size": 33}, ["hidden_size", "33", "head_dim"]),
        ("llama", {"hidden_size": "32"}, ["hidden_size", "'32'"]),
        ("llama", {"num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
        ("llama", {"num_hidden_layers": 10**9}, ["num_hidden_layers", "4096"]),
        ("llama", {"num_hidden_layers": 0}, ["num_hidden_layers"]),
        ("llama", {"attention_bias": "yes"}, ["attention_bias", "yes"]),
        ("llama", {"eos_token_id": "</s>"}, ["eos_token_id"]),
        ("llama", {"rms_norm_eps": None}, ["rms_norm_eps"]),
        ("llama", {"hidden_act": []}, ["hidden_act", "[]"]),
        ("llama", {"head_dim": 10**400}, ["head_dim", "2**31"]),
        ("llama", {"head_dim": 1 << 20}, ["rotary_dim", str(1 << 20), "65536"]),
        ("llama", {"max_position_embeddings": 1 << 28}, ["max_position_embeddings", str(1 << 28), str(1 << 27)]),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 1e7}}, ["max_position_embeddings", str(1 << 27)]),
        ("llama", {"eos_token_id": -1}, ["eos_token_id", "-1"]),
        ("llama", {"eos_token_id": [2, 1 << 31]}, ["eos_token_id", str(1 << 31)]),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": "a"}, ["max_window_layers", "'a'"]),
        ("qwen3", {"max_window_layers": -1}, ["max_window_layers", "-1"]),
        ("mistral", {"attention_bias": True}, ["attention_bias"]),
        ("mistral", {"layer_types": ["full_attention"] * 3}, ["layer_types"]),
        ("mistral", {"sliding_window": 0}, ["sliding_window"]),
        ("qwen2", {"layer_types": ["full_attention"]}, ["layer_types", "3"]),
        ("qwen2", {"layer_types": ["linear_attention"] * 3}, ["linear_attention", "known"]),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, ["use_sliding_window"]),
        ("qwen2", {"attention_bias": False}, ["attention_bias"]),
        ("qwen3", {"mlp_bias": True}, ["mlp_bias"]),
    ],
)
def test_a_config_that_asks_for_other_maths_is_refused(
    model_type: str, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are checked
        spec_of(model_type, {**TINY, **changes})
    for word in words:
        assert word in str(caught.value)


def test_an_error_in_the_config_names_the_folder(save: Callable[..., Path]) -> None:
    folder = save(tiny_model("llama", {}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    with pytest.raises(CheckpointError, match=r"model: unknown hidden_act 'relu'"):
        open_checkpoint(folder)
