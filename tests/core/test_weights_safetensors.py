"""A folder of safetensors: what is read, and the one clear error for every way it can be broken. No torch."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pagefleet.models import ModelFamily
from pagefleet.weights import CheckpointError, open_checkpoint

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
LAYER = "model.layers.0."
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (8, 4),
    LAYER + "input_layernorm.weight": (4,),
    LAYER + "post_attention_layernorm.weight": (4,),
    LAYER + "self_attn.q_proj.weight": (4, 4),
    LAYER + "self_attn.k_proj.weight": (2, 4),
    LAYER + "self_attn.v_proj.weight": (2, 4),
    LAYER + "self_attn.o_proj.weight": (4, 4),
    LAYER + "mlp.gate_proj.weight": (6, 4),
    LAYER + "mlp.up_proj.weight": (6, 4),
    LAYER + "mlp.down_proj.weight": (4, 6),
    "model.norm.weight": (4,),
}


def tensors() -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), tmp_path / "model.safetensors")
    return tmp_path


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_raw(path: Path, header: bytes, body: bytes, length: int | None = None) -> None:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + body)


def change_header(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    header, body = header_of(folder / "model.safetensors")
    change(header)
    write_raw(folder / "model.safetensors", json.dumps(header).encode(), body)


def set_entry(name: str, **fields: Any) -> Callable[[Path], None]:
    return lambda folder: change_header(folder, lambda header: header[name].update(fields))


def set_config(**fields: Any) -> Callable[[Path], Any]:
    return lambda folder: (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}))


def save_changed(folder: Path, drop: tuple[str, ...] = (), **more: Any) -> None:
    kept = {name: value for name, value in tensors().items() if name not in drop}
    save_file({**kept, **more}, folder / "model.safetensors")


def truncate(folder: Path, num_bytes: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])


def rename(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)


def shard(folder: Path, weight_map: dict[str, str] | None = None, **files: dict[str, Any]) -> None:
    (folder / "model.safetensors").unlink()
    for name, part in files.items():
        save_file(part, folder / f"{name}.safetensors")
    placed = {tensor: f"{name}.safetensors" for name, part in files.items() for tensor in part}
    index = {"weight_map": placed if weight_map is None else weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def in_two(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    every = list(tensors().items())
    return dict(every[:5]), dict(every[5:])


def test_tensors_are_views_of_the_file(folder: Path) -> None:
    expected = tensors()
    with open_checkpoint(str(folder)) as checkpoint:
        assert checkpoint.path == folder
        assert checkpoint.config["model_type"] == "llama"
        assert sorted(checkpoint) == sorted(checkpoint.spec.tensors)
        assert checkpoint.num_bytes == sum(value.nbytes for value in expected.values())
        for name in checkpoint:
            tensor = checkpoint.read(name)
            np.testing.assert_array_equal(tensor.numpy(), expected[checkpoint.spec.tensors[name].checkpoint_name])
            assert not tensor.data.flags.writeable
            assert not tensor.data.flags.owndata


def test_a_tensor_outlives_its_checkpoint_and_a_closed_one_says_so(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    embedding = checkpoint.read("embed.weight")
    checkpoint.close()
    np.testing.assert_array_equal(embedding.numpy(), tensors()["model.embed_tokens.weight"])
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.read("embed.weight")
    with pytest.raises(KeyError, match="no tensor 'nonsense'"):
        checkpoint.read("nonsense")


def test_harmless_extras_are_ignored(folder: Path) -> None:
    extras = {LAYER + "self_attn.rotary_emb.inv_freq": np.ones(1, np.float32), "lm_head.weight": np.ones((8, 4))}
    save_changed(folder, **extras)
    with open_checkpoint(folder) as checkpoint:
        assert len(list(checkpoint)) == len(SHAPES)


def test_shards_and_a_single_file_of_another_name_are_found(folder: Path) -> None:
    rename(folder, "weights.safetensors")
    open_checkpoint(folder).close()
    rename_back = folder / "weights.safetensors"
    rename_back.rename(folder / "model.safetensors")
    first, second = in_two(folder)
    shard(folder, one=first, two=second)
    with open_checkpoint(folder) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("norm.weight").numpy(), second["model.norm.weight"])


NORM, DOWN = "model.norm.weight", LAYER + "mlp.down_proj.weight"
BROKEN: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "truncated": (lambda folder: truncate(folder, -7), ["model.safetensors", "truncated", "download"]),
    "truncated in the header": (lambda folder: truncate(folder, 40), ["model.safetensors", "too short"]),
    "truncated in the length": (lambda folder: truncate(folder, 5), ["model.safetensors", "5 bytes"]),
    "empty": (lambda folder: truncate(folder, 0), ["model.safetensors", "empty"]),
    "100 GB header": (
        lambda folder: write_raw(folder / "model.safetensors", b"{}", b"", length=100 << 30),
        ["too short", str(100 << 30)],
    ),
    "a header longer than the limit": (
        lambda folder: write_raw(folder / "model.safetensors", b" " * (33 << 20), b""),
        ["at most", str(33 << 20)],
    ),
    "header is no JSON": (lambda folder: write_raw(folder / "model.safetensors", b"{nonsense", b""), ["JSON"]),
    "header is no UTF-8": (lambda folder: write_raw(folder / "model.safetensors", b'{"\xff": 1}', b""), ["JSON"]),
    "header is a list": (lambda folder: write_raw(folder / "model.safetensors", b"[1]", b""), ["list", "object"]),
    "deeply nested header": (
        lambda folder: write_raw(folder / "model.safetensors", b'{"a":' * 200000 + b"1" + b"}" * 200000, b""),
        ["nested"],
    ),
    "a tensor twice": (
        lambda folder: write_raw(folder / "model.safetensors", b'{"a": {}, "a": {}}', b""),
        ["'a'", "twice"],
    ),
    "entry is a number": (lambda folder: change_header(folder, lambda h: h.update({NORM: 3})), [NORM, "3", "object"]),
    "unknown dtype": (set_entry(NORM, dtype="F7"), [NORM, "F7", "BF16"]),
    "unsupported dtype": (set_entry(NORM, dtype="I32"), [NORM, "I32", "bfloat16"]),
    "negative size": (set_entry(NORM, shape=[-4]), [NORM, "-4"]),
    "size is a float": (set_entry(NORM, shape=[4.0]), [NORM, "4.0"]),
    "huge size": (set_entry(NORM, shape=[1 << 62, 1 << 62]), [NORM, str(1 << 62)]),
    "negative offset": (set_entry(NORM, data_offsets=[-16, 0]), [NORM, "-16"]),
    "offsets beyond the file": (set_entry(NORM, data_offsets=[1 << 40, (1 << 40) + 16]), [NORM, "truncated"]),
    "offsets and shape disagree": (set_entry(NORM, shape=[5]), [NORM, "16 bytes", "20"]),
    "three offsets": (set_entry(NORM, data_offsets=[0, 8, 16]), [NORM, "start, stop"]),
    "overlap": (set_entry(NORM, data_offsets=[0, 16]), ["inside", "corrupt"]),
    "bytes of no tensor": (
        lambda folder: change_header(folder, lambda header: header.pop(NORM)),
        ["bytes of", "corrupt"],
    ),
    "missing tensor": (lambda folder: save_changed(folder, (NORM, DOWN)), ["2 of 11", NORM, DOWN]),
    "missing head": (set_config(tie_word_embeddings=False), ["lm_head.weight", "tie_word_embeddings"]),
    "a bias the model does not use": (
        lambda folder: save_changed(folder, **{LAYER + "self_attn.q_proj.bias": np.ones(4, np.float32)}),
        ["unexpected", "self_attn.q_proj.bias"],
    ),
    "another shape": (set_config(vocab_size=9), ["embed_tokens", "[8, 4]", "[9, 4]"]),
    "quantization_config": (set_config(quantization_config={"quant_method": "gptq"}), ["gptq", "supported"]),
    "unknown model_type": (set_config(model_type="mamba"), ["mamba", "known: llama"]),
    "no model_type": (set_config(model_type=None), ["None", "known: llama"]),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{"), ["config.json", "JSON"]),
    "config is a list": (lambda folder: (folder / "config.json").write_text("[]"), ["config.json", "object"]),
    "generation config is no JSON": (
        lambda folder: (folder / "generation_config.json").write_text("nonsense"),
        ["generation_config.json", "JSON"],
    ),
    "an end token below 0": (set_config(eos_token_id=-1), ["eos_token_id", "-1"]),
    "an end token beyond int32": (
        lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": [2, 2147483648]}'),
        ["eos_token_id", "2147483648"],
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), ["config.json", ".gguf"]),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ["no weights", "model.safetensors"]),
    "pickled weights": (lambda folder: rename(folder, "pytorch_model.bin"), ["pickled", "save_pretrained"]),
    "several files without an index": (
        lambda folder: (rename(folder, "a.safetensors"), save_file(tensors(), folder / "b.safetensors")),
        ["2 safetensors files", "index.json"],
    ),
    "missing shard": (
        lambda folder: (
            shard(folder, one=in_two(folder)[0], two=in_two(folder)[1]),
            (folder / "two.safetensors").unlink(),
        ),
        ["1 of 2 shards", "two.safetensors"],
    ),
    "tensor not in its shard": (
        lambda folder: shard(folder, dict.fromkeys(SHAPES, "one.safetensors"), one=in_two(folder)[0]),
        ["one.safetensors", "is not in it"],
    ),
    "tensor in two shards": (
        lambda folder: shard(folder, one=tensors(), two={NORM: np.ones(4, np.float32)}),
        [NORM, "another shard"],
    ),
    "index leads out of the folder": (
        lambda folder: shard(folder, dict.fromkeys(SHAPES, "../secret.safetensors"), one=tensors()),
        ["../secret.safetensors"],
    ),
    "index has no map": (lambda folder: shard(folder, {"a": 1}, one=tensors()), ["weight_map"]),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_refused_with_the_reason(case: str, folder: Path) -> None:
    breaks, words = BROKEN[case]
    breaks(folder)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert str(folder) in message
    for word in words:
        assert word in message


def test_end_tokens_beyond_the_vocabulary_are_dropped(folder: Path) -> None:
    set_config(eos_token_id=[2, 8])(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 300]}))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.spec.eos_token_ids == (2, 7)


ODD = (10**400, 10**15, 2**31, math.nan, math.inf, -1, 0, 1.5, "a", [], {}, [[]], [{}], True, "\ud800", 1e-320)
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 2.0, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 512},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 512, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0},
    "longrope": {"original_max_position_embeddings": 512, "short_factor": [1.0], "long_factor": [1.0]},
}


def opens_or_is_refused(folder: Path, **config: Any) -> None:
    set_config(**config)(folder)
    with contextlib.suppress(CheckpointError), open_checkpoint(folder) as checkpoint:
        assert all(np.isfinite(part).all() for part in checkpoint.spec.rope.table(100))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_an_odd_value_in_the_config_never_escapes_as_another_error(model_type: str, folder: Path) -> None:
    keys = {*CONFIG, "head_dim", "hidden_act", "rope_theta", "rope_scaling", "partial_rotary_factor", "rms_norm_eps"}
    keys |= {"sliding_window", "layer_types", "use_sliding_window", "max_window_layers", "quantization_config"}
    for key in keys | {"max_position_embeddings", "eos_token_id", "bos_token_id", "attention_bias", "mlp_bias"}:
        for value in ODD:
            opens_or_is_refused(folder, **{"model_type": model_type, key: value})


@pytest.mark.parametrize("rope_type", ROPES)
def test_an_odd_number_of_the_rope_never_gives_a_table_that_is_not_finite(rope_type: str, folder: Path) -> None:
    scaling = {"rope_type": rope_type, **ROPES[rope_type]}
    for key in ROPES[rope_type]:
        for value in (*ODD, 1, 1e300, 1e-300, 1e-18):
            opens_or_is_refused(folder, rope_scaling={**scaling, key: value})
    for theta in (1, 1.0, 1e-300, 1e-18, 1e18, 1e300):
        opens_or_is_refused(folder, rope_scaling=scaling, rope_theta=theta)


def test_what_a_familys_code_raises_names_the_checkpoint(folder: Path) -> None:
    def spec(config: Any) -> Any:
        return config["hidden_size"] + "1"

    with pytest.raises(CheckpointError, match=r"its config cannot be used: TypeError") as caught:
        open_checkpoint(folder, families=[ModelFamily("llama", spec)])
    assert str(folder) in str(caught.value)


def test_no_memory_is_taken_for_a_header_that_lies(folder: Path) -> None:
    import tracemalloc

    write_raw(folder / "model.safetensors", b"{}", b"\0" * 1000, length=(1 << 63) - 1)
    tracemalloc.start()
    with pytest.raises(CheckpointError):
        open_checkpoint(folder)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


def test_what_is_no_model_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint("./nowhere.gguf")
    with pytest.raises(CheckpointError, match="a model is a folder"):
        open_checkpoint(folder / "config.json")
    with pytest.raises(CheckpointError, match=r"revision 'main'"):
        open_checkpoint(folder, revision="main")


def test_a_hub_name_without_a_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def offline(repository: str, **kwargs: Any) -> str:
        asked.update(kwargs, repository=repository)
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError, match=r"some/model.*revision 'v2'.*no route to host.*path of a folder"):
        open_checkpoint("some/model", revision="v2")
    assert asked["repository"] == "some/model"
    assert asked["revision"] == "v2"
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in asked["allow_patterns"])


def test_a_hub_name_is_opened_from_its_snapshot(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: str(folder))
    with open_checkpoint("some/model") as checkpoint:
        assert checkpoint.path == folder
