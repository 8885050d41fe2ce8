"""The onnx backend's own: providers, quantised weights, files of graphs. What it shares with others the kit tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pagefleet import LLM, BackendError, SamplingParams
from pagefleet.conformance.cases import RandomWeights, case_named
from pagefleet.plugins import Plugins
from pagefleet.weights import DenseWeights, Int4Weights
from pagefleet_onnx.config import environment
from pagefleet_onnx.graph_files import graph_bytes
from pagefleet_onnx.graphs import Weight
from pagefleet_onnx.segments import make_session
from pagefleet_onnx.weights import SegmentSource, initialisers

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
CPU = "CPUExecutionProvider"
WITHOUT_ONNX = """
import sys
sys.modules["onnx"] = None
from pagefleet import LLM, SamplingParams
llm = LLM(sys.argv[1], device="onnx", plugins=(), num_blocks=64, dtype=sys.argv[2])
(output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
print(output.outputs[0].token_ids)
"""


def test_an_absent_provider_is_refused_and_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEFLEET_ONNX_PROVIDER", "QNN")
    info, index = Plugins(()).select("onnx")
    with pytest.raises(
        BackendError, match=f"'QNNExecutionProvider', which onnxruntime .* does not have; it has .*{CPU}"
    ):
        info.load(index)


@pytest.mark.parametrize("name", ["cpu", "CPU", CPU, ""])
def test_a_provider_has_its_name_with_or_without_the_suffix(name: str) -> None:
    assert environment({"PAGEFLEET_ONNX_PROVIDER": name}).provider == CPU


def test_a_graph_that_is_none_is_refused_with_the_providers_words() -> None:
    with pytest.raises(BackendError, match=f"{CPU} does not take a segment of this model: .*rotobuf"):
        make_session(b"no graph", {}, CPU, 1)


@pytest.mark.parametrize("dtype", ["Q4_0", "Q8_0"])
def test_blocks_become_matmulnbits_quants_without_loss(dtype: str) -> None:
    """Unpacked as onnxruntime documents MatMulNBits: values of a block in order, less the middle, times its scale."""
    model = case_named("gqa-tied").model
    source = Int4Weights(RandomWeights(model, 3))
    names = ("layers.0.q.weight", "layers.0.k.weight") if dtype == "Q4_0" else ("embed.weight",)
    tensors = [source.read(name) for name in names]
    assert {tensor.dtype for tensor in tensors} == {dtype}
    want = np.concatenate([tensor.numpy() for tensor in tensors])
    made = initialisers(Weight("w", names, want.shape, dtype), tensors)
    quants, scales = made["w.quants"].numpy(), made["w.scales"].numpy().reshape(len(want), -1, 1)
    if dtype == "Q4_0":
        quants = np.stack([quants & 15, quants >> 4], -1).reshape(*quants.shape[:2], -1)
    middle = 8 if dtype == "Q4_0" else 128
    got = ((quants.astype(np.float32) - middle) * scales).reshape(want.shape)
    np.testing.assert_array_equal(got, want)


def test_a_segment_of_quantised_weights_is_that_of_the_dequantised_ones() -> None:
    """But for activations in 8 bits: an error of half a step of the largest of 32, on each."""
    model = case_named("plain").model
    x = np.random.default_rng(0).standard_normal((7, model.hidden_size)).astype(np.float32)
    weights = Int4Weights(RandomWeights(model, 3))
    quantised, plain = (SegmentSource(model, form, 0) for form in (weights, DenseWeights(weights)))
    got, want = (
        make_session(source.graph.model_bytes(), source.initialisers(), CPU, 1).run(["qkv"], {"hidden": x})[0]
        for source in (quantised, plain)
    )
    error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    assert 0 < error.max() < 0.02


def test_explain_names_the_provider_and_the_ops_of_the_host(tiny_checkpoint: Callable[[str], Path]) -> None:
    with LLM(str(tiny_checkpoint("llama")), device="onnx", plugins=(), num_blocks=64) as llm:
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], GREEDY, use_tqdm=False)
        facts = str(llm.explain())
    assert f"onnxruntime, {CPU}" in facts
    assert "attention" in facts


# -- graphs as files -----------------------------------------------------------------------------------


def _run_without_onnx(checkpoint: Path, graphs: Path, dtype: str = "float32") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PAGEFLEET_ONNX_GRAPHS": str(graphs)}
    command = [sys.executable, "-c", WITHOUT_ONNX, str(checkpoint), dtype]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_graphs_written_ahead_serve_a_host_without_onnx(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    root = Path(__file__).parent.parent.parent
    checkpoint = tiny_checkpoint("qwen3")
    command = [sys.executable, root / "build_scripts/onnx.py", checkpoint, "--graphs", tmp_path]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 segments' graphs are in" in done.stdout
    served = _run_without_onnx(checkpoint, tmp_path)
    assert served.returncode == 0, served.stderr
    with LLM(str(checkpoint), device="cpu", plugins=(), num_blocks=64) as llm:
        (output,) = llm.generate(
            [{"prompt_token_ids": [5, 6, 7]}], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False
        )
    assert served.stdout.strip() == str(output.outputs[0].token_ids)
    refused = _run_without_onnx(checkpoint, tmp_path, "int4")  # whose graphs are others
    assert refused.returncode != 0
    assert "has no graph for segment 0 of this model" in refused.stderr


def test_layers_of_one_shape_share_a_file_and_other_models_have_their_own(tmp_path: Path) -> None:
    for name, num_files in (("plain", 3), ("plain", 3), ("gqa-tied", 6), ("all-windows", 9)):
        model = case_named(name).model
        for index in range(model.num_layers + 1):
            graph = SegmentSource(model, RandomWeights(model, 0), index).graph
            assert graph_bytes(graph, tmp_path) == graph.model_bytes()
        assert len(list(tmp_path.iterdir())) == num_files


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = case_named("plain").model
    graph = SegmentSource(model, RandomWeights(model, 0), 0).graph
    with pytest.raises(BackendError, match=r"PAGEFLEET_ONNX_GRAPHS: .*file"):
        graph_bytes(graph, tmp_path / "file" / "graphs")
