"""The same weights for every engine: what is written is what was read, rounded as its type says, and written once."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from pagefleet.bench.variants import _bfloat16, gguf_variant, hugging_face_variant
from pagefleet.weights import open_checkpoint


@pytest.fixture
def gguf_model(tmp_path: Path) -> Path:
    """A file with one matrix of 4 bits and one vector."""
    rng = np.random.default_rng(0)
    path = tmp_path / "model.Q4_1.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_token_list(["a", "b"])
    data = gguf.quants.quantize(rng.normal(size=(4, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("blk.0.attn_q.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("blk.0.attn_norm.weight", rng.normal(size=64).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def values(path: Path) -> dict[str, np.ndarray]:
    tensors = gguf.GGUFReader(path).tensors
    return {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).ravel() for tensor in tensors}


@pytest.mark.parametrize(("kind", "error"), [("F32", 0.0), ("BF16", 2**-8), ("F16", 2**-11), ("Q8_0", 1 / 127)])
def test_matrices_change_their_type_and_nothing_else_does(
    gguf_model: Path, tmp_path: Path, kind: str, error: float
) -> None:
    written = gguf_variant(gguf_model, kind, tmp_path)
    before, after = values(gguf_model), values(written)
    largest = np.abs(before["blk.0.attn_q.weight"]).max()
    np.testing.assert_allclose(after["blk.0.attn_q.weight"], before["blk.0.attn_q.weight"], atol=error * largest)
    np.testing.assert_array_equal(after["blk.0.attn_norm.weight"], before["blk.0.attn_norm.weight"])
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(written).tensors}
    assert types == {"blk.0.attn_q.weight": kind, "blk.0.attn_norm.weight": "F32"}
    assert gguf.GGUFReader(written).fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]


def test_a_variant_is_written_once_and_anew_for_another_file(gguf_model: Path, tmp_path: Path) -> None:
    first = gguf_variant(gguf_model, "F16", tmp_path)
    made = first.stat().st_mtime_ns
    assert gguf_variant(gguf_model, "F16", tmp_path) == first
    assert first.stat().st_mtime_ns == made
    gguf_model.touch()
    assert gguf_variant(gguf_model, "F16", tmp_path) != first


def test_nothing_is_left_of_a_variant_that_could_not_be_written(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    with pytest.raises(Exception, match=r"."):
        gguf_variant(broken, "F16", tmp_path)
    assert list(tmp_path.iterdir()) == [broken]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_holds_the_same_tensors(tiny_model: Path, tmp_path: Path, dtype: str) -> None:
    with open_checkpoint(tiny_model) as checkpoint:
        folder = hugging_face_variant(tiny_model, dtype, tmp_path)
        written = load_file(folder / "model.safetensors")
        for name in checkpoint:
            expected = torch.tensor(checkpoint.read(name).numpy()).to(getattr(torch, dtype))
            assert torch.equal(written[checkpoint.spec.tensors[name].checkpoint_name], expected)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.architectures) == ("llama", ["LlamaForCausalLM"])


def test_bfloat16_rounds_to_nearest_even_as_torch_does() -> None:
    rng = np.random.default_rng(0)
    floats = (rng.normal(size=10_000) * 10.0 ** rng.integers(-30, 30, 10_000)).astype(np.float32)
    floats[:4] = [1 + 2**-8, 1 + 3 * 2**-8, -0.0, 0.0]
    expected = torch.from_numpy(floats).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(_bfloat16(floats), expected)
