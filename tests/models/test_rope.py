"""cos and sin against transformers' LlamaRotaryEmbedding, for every scaling and at long positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagefleet.rope import RopeSpec, rope_from_config

torch = pytest.importorskip("torch")
from transformers import LlamaConfig  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # noqa: E402

HEAD_DIM = 64
SCALINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "attention_factor": 1.25,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + i / 64 for i in range(HEAD_DIM // 2)],
        "long_factor": [1.0 + i for i in range(HEAD_DIM // 2)],
        "original_max_position_embeddings": 1024,
    },
    "longrope-attention-factor": {
        "rope_type": "longrope",
        "short_factor": [1.0] * (HEAD_DIM // 2),
        "long_factor": [2.0] * (HEAD_DIM // 2),
        "original_max_position_embeddings": 1024,
        "factor": 4.0,
        "attention_factor": 1.1,
    },
}


def config_of(scaling: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "hidden_size": 4 * HEAD_DIM,
        "num_attention_heads": 4,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
        "rope_theta": 500000.0,
        "rope_scaling": dict(scaling) or None,
        **changes,
    }


def theirs(config: dict[str, Any], positions: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    rope = LlamaRotaryEmbedding(LlamaConfig(**config))
    cos, sin = rope(torch.zeros(1), torch.from_numpy(positions)[None])
    return cos[0, :, : HEAD_DIM // 2].numpy(), sin[0, :, : HEAD_DIM // 2].numpy()


def assert_close(ours: NDArray[np.float32], expected: NDArray[np.float32], positions: NDArray[np.int64]) -> None:
    """torch's vectorised pow may differ by one unit in the last place of a frequency: that much of an angle."""
    bound = 1e-6 + positions[:, None] * 2.0**-22
    assert (np.abs(ours - expected) <= bound).all()


@pytest.mark.parametrize("name", SCALINGS)
def test_table_equals_transformers(name: str) -> None:
    config = config_of(SCALINGS[name])
    positions = np.array([0, 1, 2, 63, 1000, 1023, 1024, 4095, 8191, 65535, 131071])
    cos, sin = rope_from_config(config, HEAD_DIM).table(131072)
    expected_cos, expected_sin = theirs(config, positions)
    assert cos.shape == sin.shape == (131072, HEAD_DIM // 2)
    assert cos.dtype == sin.dtype == np.float32
    assert_close(cos[positions], expected_cos, positions)
    assert_close(sin[positions], expected_sin, positions)


@pytest.mark.parametrize("theta", [10000.0, 100000.0, 1000000.0, 123456.7])
def test_table_equals_transformers_for_any_base(theta: float) -> None:
    positions = np.arange(0, 8192, 97)
    cos, sin = rope_from_config(config_of({}, rope_theta=theta), HEAD_DIM).table(8192)
    expected_cos, expected_sin = theirs(config_of({}, rope_theta=theta), positions)
    assert_close(cos[positions], expected_cos, positions)
    assert_close(sin[positions], expected_sin, positions)


@pytest.mark.parametrize("theta", [10000.0, 100000.0, 1000000.0, 123456.7])
def test_frequencies_are_rounded_as_the_formula_is_written(theta: float) -> None:
    """1 / theta^(2i / d) in float32 steps, each correctly rounded: how the models were trained, on any processor."""
    powers = [float(np.float32(theta)) ** float(np.float32(2 * i / HEAD_DIM)) for i in range(HEAD_DIM // 2)]
    frequencies = np.float32(1) / np.array(powers).astype(np.float32)
    positions = np.arange(0, 8192, 97)
    angles = positions[:, None].astype(np.float32) * frequencies
    cos, sin = rope_from_config(config_of({}, rope_theta=theta), HEAD_DIM).table(8192)
    np.testing.assert_allclose(cos[positions], np.cos(angles.astype(np.float64)), rtol=0, atol=1e-7)
    np.testing.assert_allclose(sin[positions], np.sin(angles.astype(np.float64)), rtol=0, atol=1e-7)


def test_longrope_takes_the_short_factors_for_short_sequences() -> None:
    config = config_of(SCALINGS["longrope"])
    positions = np.arange(1024)
    cos, _ = rope_from_config(config, HEAD_DIM).table(1024)
    expected, _ = theirs(config, positions)
    assert_close(cos, expected, positions)
    longer, _ = rope_from_config(config, HEAD_DIM).table(1025)
    assert not np.allclose(longer[:1024], cos)


def test_dynamic_equals_decoding_token_by_token() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    config = config_of(scaling, max_position_embeddings=64)
    rope = LlamaRotaryEmbedding(LlamaConfig(**config))
    cos, sin = rope_from_config(config, HEAD_DIM).table(200)
    for position in range(200):
        expected_cos, expected_sin = rope(torch.zeros(1), torch.tensor([[position]]))
        np.testing.assert_allclose(cos[position], expected_cos[0, 0, :32].numpy(), atol=2e-4)
        np.testing.assert_allclose(sin[position], expected_sin[0, 0, :32].numpy(), atol=2e-4)
    plain, _ = RopeSpec(HEAD_DIM, 500000.0).table(200)
    assert (cos[:64] == plain[:64]).all()
    assert not np.allclose(cos[150], plain[150], atol=1e-3)


def test_dynamic_angles_do_not_depend_on_the_table_length() -> None:
    spec = rope_from_config(config_of({"type": "dynamic", "factor": 4.0}, max_position_embeddings=32), HEAD_DIM)
    assert (spec.table(300)[0][:100] == spec.table(100)[0]).all()


@pytest.mark.parametrize("name", SCALINGS)
def test_old_and_new_config_say_the_same(name: str) -> None:
    old = config_of(SCALINGS[name])
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": old["rope_theta"], **SCALINGS[name]}
    typed = {**old, "rope_scaling": {("type" if k == "rope_type" else k): v for k, v in SCALINGS[name].items()}}
    assert rope_from_config(new, HEAD_DIM) == rope_from_config(old, HEAD_DIM) == rope_from_config(typed, HEAD_DIM)


def test_partial_rotary_turns_only_the_first_dimensions() -> None:
    spec = rope_from_config(config_of({}, partial_rotary_factor=0.25), HEAD_DIM)
    assert spec.rotary_dim == 16
    cos, _ = spec.table(10)
    np.testing.assert_allclose(cos[7], np.cos(7 * 500000.0 ** (-np.arange(0, 16, 2) / 16)), rtol=1e-5)


@pytest.mark.parametrize(
    ("scaling", "longest", "expected"),
    [
        ({}, 4096, 4096),
        (SCALINGS["llama3"], 131072, 131072),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 4096, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096, 4096),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096, 8192),
    ],
)
def test_max_positions(scaling: dict[str, Any], longest: int, expected: int) -> None:
    spec = rope_from_config(config_of(scaling, max_position_embeddings=longest), HEAD_DIM)
    assert spec.max_positions(longest) == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"rope_type": "spiral"}}, ["spiral", "known", "yarn"]),
        ({"rope_scaling": {"type": "linear"}}, ["linear", "factor"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "low_freq_factor": 1}}, ["low_freq_factor"]),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, ["factor", "'2'"]),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, ["factor", "-2"]),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, ["low_freq_factor", "high_freq_factor"]),
        ({"rope_scaling": {**SCALINGS["llama3"], "high_freq_factor": 1.0}}, ["high_freq_factor", "low_freq_factor"]),
        ({"rope_scaling": {"factor": 8.0}}, ["factor", "rope_type"]),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, ["mrope"]),
        ({"rope_scaling": {**SCALINGS["longrope"], "short_factor": [1.0]}}, ["short_factor", "32"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 1}}, ["truncate"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["full_attention"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e4}}, ["keep one"]),
        ({"rope_theta": "1e4"}, ["rope_theta", "'1e4'"]),
        ({"rope_theta": 0}, ["rope_theta"]),
        ({"rope_theta": 10**400}, ["rope_theta", "1e+18"]),
        ({"rope_theta": 1e-300}, ["rope_theta", "1e-300"]),
        ({"rope_scaling": {"type": "linear", "factor": 10**400}}, ["factor", "1e+18"]),
        ({"rope_scaling": {"type": "linear", "factor": 1e-300}}, ["factor", "1e-300"]),
        ({"rope_scaling": {"type": "linear", "factor": 1e-10}, "rope_theta": 1e-18}, ["frequencies above 1e+18"]),
        ({"rope_scaling": SCALINGS["yarn"], "rope_theta": 1}, ["rope_theta", "yarn", "above 1"]),
        (
            {"rope_scaling": {**SCALINGS["longrope"], "original_max_position_embeddings": 1}},
            ["original_max_position_embeddings", "above 1"],
        ),
        ({"rope_scaling": {**SCALINGS["longrope"], "long_factor": [0.0] * 32}}, ["long_factor", "above 0"]),
        ({"partial_rotary_factor": 1.5}, ["partial_rotary_factor", "1.5"]),
        ({"rope_scaling": "linear"}, ["linear"]),
    ],
)
def test_what_is_not_understood_is_refused(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are checked
        rope_from_config(config_of({}, **changes), HEAD_DIM)
    for word in words:
        assert word in str(caught.value)
