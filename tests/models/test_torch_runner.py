"""The shared torch runner, driven through `ForwardBatch`: against transformers, and against itself bit for bit."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pagefleet.backend import BackendError, ForwardBatch, HostTensor, KVLayout, Traits
from pagefleet.model import ModelSpec, TensorSpec
from pagefleet.rope import RopeSpec
from pagefleet.torch_runner.backend import TorchBackend
from pagefleet.torch_runner.ops import ReferenceOps
from pagefleet_cpu.backend import CpuBackend
from pagefleet_kernels import cpu as kernels

CpuBackend()  # before any test multiplies: from then on it is too late to ask for strict products
BLOCK_SIZE = 16
MODULES = {
    "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    **{part: f"self_attn.{part}_proj" for part in "qkvo"}, "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
    **{part: f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}  # fmt: skip


def family(
    model_type: str, windows: tuple[int | None, ...] = (None, None), hidden: int = 72, intermediate: int = 100
) -> tuple[ModelSpec, Any]:
    """A random two-layer model of that type and its spec; sizes are odd where they may be."""
    import transformers

    sizes = {
        "vocab_size": 199, "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    if windows[0] is not None:
        sizes["sliding_window"] = windows[0]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.1)
    names = {
        "embed.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    for layer in range(2):
        for ours, theirs in MODULES.items():
            for kind in ("weight", "bias"):
                names[f"layers.{layer}.{ours}.{kind}"] = f"model.layers.{layer}.{theirs}.{kind}"
    state = module.state_dict()
    tensors = {our: TensorSpec(their, tuple(state[their].shape)) for our, their in names.items() if their in state}
    assert len(tensors) == len(state)
    rope = RopeSpec(24, config.rope_parameters["rope_theta"])
    spec = ModelSpec(
        model_type, 199, hidden, intermediate, 2, 6, 2, 24, 512, 1e-5, rope, "silu", 24**-0.5, windows, tensors
    )
    return spec, module


@dataclass(frozen=True)
class DictWeights:
    tensors: Mapping[str, HostTensor]

    def read(self, name: str) -> HostTensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)


def weights_of(spec: ModelSpec, module: Any) -> DictWeights:
    arrays = {name: module.state_dict()[tensor.checkpoint_name].numpy() for name, tensor in spec.tensors.items()}
    return DictWeights({n: HostTensor(n, "float32", a.shape, a.reshape(-1).view(np.uint8)) for n, a in arrays.items()})


@dataclass
class Request:
    tokens: list[int]
    blocks: list[int]
    num_computed: int = 0
    logits: list[NDArray[np.float32]] = field(default_factory=list)  # one row for each token


class Driver:
    """A minimal engine: says how many tokens of which request go into each step."""

    def __init__(self, spec: ModelSpec, weights: DictWeights, dtype: str = "float32") -> None:
        self.backend = CpuBackend()
        self.backend.load(spec, weights, dtype)
        self.layout = KVLayout(spec.num_layers, 256, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim, dtype)
        self.backend.allocate_kv(self.layout)
        self.free = np.random.default_rng(7).permutation(self.layout.num_blocks).tolist()

    def request(self, tokens: list[int]) -> Request:
        count = -(-len(tokens) // BLOCK_SIZE)
        blocks, self.free = self.free[:count], self.free[count:]
        return Request(tokens, blocks)

    def step(self, work: list[tuple[Request, int]]) -> None:
        rows = [(request, np.arange(request.num_computed, request.num_computed + new)) for request, new in work]
        query_starts = np.cumsum([0, *(new for _, new in work)], dtype=np.int32)
        block_tables = np.zeros((len(work), max(len(request.blocks) for request, _ in work)), np.int32)
        for table, (request, _) in zip(block_tables, work, strict=True):
            table[: len(request.blocks)] = request.blocks
        slots = [np.array(r.blocks)[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for r, at in rows]
        batch = ForwardBatch(
            token_ids=_padded([np.array(r.tokens)[at] for r, at in rows], 0),
            positions=_padded([at for _, at in rows], 0),
            slots=_padded(slots, -1),
            query_starts=query_starts,
            seq_lens=np.array([r.num_computed + new for r, new in work], np.int32),
            block_tables=block_tables,
            logit_rows=_padded([np.arange(query_starts[-1])], 0),
        )
        logits = self.backend.to_host(self.backend.forward(batch))
        for (request, new), start in zip(work, query_starts, strict=False):
            request.logits += list(logits[start : start + new])
            request.num_computed += new


def _padded(parts: list[NDArray[Any]], fill: int) -> NDArray[np.int32]:
    array = np.concatenate(parts).astype(np.int32)
    return np.pad(array, (0, -len(array) % 8), constant_values=fill)


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 199, length).tolist() for length in lengths]


def run_alone(driver: Driver, tokens: list[int]) -> NDArray[np.float32]:
    request = driver.request(tokens)
    driver.step([(request, len(tokens))])
    return np.stack(request.logits)


def run_shuffled(driver: Driver, all_tokens: list[list[int]], seed: int) -> list[NDArray[np.float32]]:
    """All requests together: every step takes some of them, in any order, each any number of tokens."""
    rng = np.random.default_rng(seed)
    requests = [driver.request(tokens) for tokens in all_tokens]
    while waiting := [r for r in requests if r.num_computed < len(r.tokens)]:
        chosen = [waiting[i] for i in rng.permutation(len(waiting))[: rng.integers(1, len(waiting) + 1)]]
        sizes = [int(rng.choice([1, 1, 2, 7, 8, 50, 300])) for _ in chosen]
        driver.step([(r, min(n, len(r.tokens) - r.num_computed)) for r, n in zip(chosen, sizes, strict=True)])
    return [np.stack(request.logits) for request in requests]


@pytest.mark.parametrize(
    ("model_type", "windows"),
    [("llama", (None, None)), ("qwen2", (None, None)), ("qwen3", (None, None)), ("mistral", (50, 50))],
)
def test_logits_are_those_of_transformers(model_type: str, windows: tuple[int | None, ...]) -> None:
    spec, module = family(model_type, windows)
    all_tokens = prompts(1, 17, 150, 301)
    for tokens, got in zip(
        all_tokens, run_shuffled(Driver(spec, weights_of(spec, module)), all_tokens, 0), strict=True
    ):
        with torch.inference_mode():
            want = module(torch.tensor([tokens])).logits[0].numpy()
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("num_threads", "seed"), [(1, 0), (1, 1), (2, 2), (2, 3), (3, 4)])
@pytest.mark.parametrize("sizes", [(72, 100), (576, 1536)])
def test_batch_and_chunks_leave_no_trace_in_the_bits(
    dtype: str, num_threads: int, seed: int, sizes: tuple[int, int]
) -> None:
    spec, module = family("qwen3", (None, 40), *sizes)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        driver = Driver(spec, weights_of(spec, module), dtype)
        if dtype not in driver.backend.traits.batch_invariant:
            pytest.skip("this processor's matrix products depend on the number of rows")
        all_tokens = prompts(3, 40, 131, 260, 300)
        for tokens, got in zip(all_tokens, run_shuffled(driver, all_tokens, seed), strict=True):
            np.testing.assert_array_equal(got, run_alone(driver, tokens))
    finally:
        torch.set_num_threads(before)


def test_a_prefix_hit_leaves_no_trace_in_the_bits() -> None:
    spec, module = family("llama")
    driver = Driver(spec, weights_of(spec, module))
    first = driver.request(prompts(200)[0])
    driver.step([(first, 200)])
    second = driver.request([*first.tokens[:160], *prompts(30)[0]])
    second.blocks[:10], second.num_computed = first.blocks[:10], 160
    driver.step([(second, 30)])
    np.testing.assert_array_equal(np.stack(second.logits), run_alone(driver, second.tokens)[160:])


def test_one_request_s_nan_does_not_reach_another() -> None:
    spec, module = family("llama")
    driver = Driver(spec, weights_of(spec, module))
    healthy = driver.request(prompts(20)[0])
    everything = np.arange(driver.layout.num_blocks, dtype=np.int32)
    driver.backend.import_blocks(everything, np.full_like(driver.backend.export_blocks(everything), np.nan))
    driver.step([(healthy, 20)])
    assert np.isfinite(np.stack(healthy.logits)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_blocks_move_in_the_exchange_form(dtype: str) -> None:
    spec, module = family("llama")
    driver = Driver(spec, weights_of(spec, module), dtype)
    backend, request = driver.backend, driver.request(prompts(40)[0])
    driver.step([(request, 39)])
    data = backend.export_blocks(np.array(request.blocks, np.int32))
    assert data.shape == (3, 2, 2, BLOCK_SIZE, 2, 24)
    assert data.dtype == {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}[dtype]
    moved = driver.request(request.tokens)
    moved.num_computed = 39
    backend.import_blocks(np.array(moved.blocks[:2], np.int32), data[:2])
    backend.copy_blocks(np.array([[request.blocks[2], moved.blocks[2]]], np.int32))
    driver.step([(request, 1), (moved, 1)])
    np.testing.assert_array_equal(request.logits[-1], moved.logits[-1])


def test_explain_names_the_implementation_of_every_op() -> None:
    spec, module = family("llama")
    driver = Driver(spec, weights_of(spec, module))
    run_alone(driver, [1, 2, 3])
    served = driver.backend.explain()
    if kernels.LIBRARY.is_file():
        assert {"embed", "layers", "logits"} <= set(served)
        assert served["layers"] == "CpuOps x 1"
        assert all(by.startswith("CpuOps x ") for by in served.values())
    else:
        assert served == {
            "embed": "ReferenceOps x 1", "add_rms_norm": "ReferenceOps x 5", "linear": "PlainOps x 9",
            "rope_and_write": "ReferenceOps x 2", "attention": "ReferenceOps x 2", "gate": "ReferenceOps x 2",
        }  # fmt: skip


def test_a_tied_head_is_the_embedding() -> None:
    spec, module = family("llama")
    tied = {name: tensor for name, tensor in spec.tensors.items() if name != "head.weight"}
    backend = CpuBackend()
    backend.load(replace(spec, tensors=tied), weights_of(spec, module), "float32")
    parameters = backend._decoder.parameters
    assert parameters.head is parameters.embed


def test_what_is_missing_or_unsupported_is_named() -> None:
    spec, module = family("llama")
    weights = weights_of(spec, module)
    with pytest.raises(BackendError, match=r"dtype float8 is not among those of cpu: float32, bfloat16, float16"):
        CpuBackend().load(spec, weights, "float8")
    less = {name: tensor for name, tensor in spec.tensors.items() if name != "layers.1.k.weight"}
    with pytest.raises(BackendError, match=r"the spec of llama lacks layers\.1\.k\.weight"):
        CpuBackend().load(replace(spec, tensors=less), weights, "float32")
    with pytest.raises(BackendError, match="cpu:1: the host's processors are one device"):
        CpuBackend(1)


def test_quantised_tensors_are_loaded_by_value() -> None:
    spec, module = family("llama")
    plain = weights_of(spec, module)

    def values(tensor: HostTensor) -> NDArray[np.float32]:
        return (tensor.data.reshape(tensor.shape).astype(np.float32) - 128) / np.float32(128)

    name = "layers.0.up.weight"
    codes = np.random.default_rng(0).integers(0, 256, plain.tensors[name].data.size // 4).astype(np.uint8)
    quantised = HostTensor(name, "Q8_TOY", plain.tensors[name].shape, codes, values)
    backend = TorchBackend("cpu", ReferenceOps(), Traits())
    backend.load(spec, DictWeights({**plain.tensors, name: quantised}), "float32")
    gate_up = backend._decoder.parameters.layers[0].gate_up
    np.testing.assert_array_equal(gate_up[spec.intermediate_size :].numpy(), values(quantised))


def test_budget_is_some_of_the_memory_and_close_gives_it_back() -> None:
    spec, module = family("llama")
    driver = Driver(spec, weights_of(spec, module))
    budget = driver.backend.kv_budget()
    assert budget is None or budget > 0
    driver.backend.close()
    driver.backend.close()
    assert not hasattr(driver.backend, "_kv")


LOADING = """
    import re, sys
    from dataclasses import replace
    from pathlib import Path
    import numpy as np
    from pagefleet.backend import HostTensor
    from pagefleet.model import ModelSpec, TensorSpec
    from pagefleet.rope import RopeSpec
    from pagefleet_cpu.backend import CpuBackend

    hidden, inner, layers, vocab = 512, 2048, 12, 16384
    shapes = {"embed.weight": (vocab, hidden), "norm.weight": (hidden,)}
    for i in range(layers):
        for name in ("attn_norm", "mlp_norm"):
            shapes[f"layers.{i}.{name}.weight"] = (hidden,)
        for name in "qkvo":
            shapes[f"layers.{i}.{name}.weight"] = (hidden, hidden)
        shapes |= {f"layers.{i}.{name}.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"layers.{i}.down.weight"] = (hidden, inner)
    tensors = {name: TensorSpec(name, shape) for name, shape in shapes.items()}
    spec = ModelSpec("toy", vocab, hidden, inner, layers, 8, 8, 64, 2048, 1e-5, RopeSpec(64, 1e4), "silu", 0.125,
                     (None,) * layers, tensors)
    file = np.memmap(sys.argv[1], np.uint8, "w+", shape=(spec.num_parameters * 2,))
    file[:] = 1
    file.flush()
    file = np.memmap(sys.argv[1], np.uint8, "r")

    def anonymous():  # memory of our own: pages of the file are the system's to drop
        return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

    class Weights:
        offset = peak = 0

        def read(self, name):
            self.peak = max(self.peak, anonymous())
            size = int(np.prod(shapes[name])) * 2
            self.offset += size
            return HostTensor(name, "bfloat16", shapes[name], file[self.offset - size : self.offset])

        def __iter__(self):
            return iter(shapes)

    backend, weights = CpuBackend(), Weights()
    before = anonymous()
    backend.load(spec, weights, sys.argv[2])
    print((max(weights.peak, anonymous()) - before) / (spec.num_parameters * (4 if sys.argv[2] == "float32" else 2)))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of a process's memory")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loading_needs_little_more_than_the_weights(tmp_path: Path, dtype: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(LOADING), str(tmp_path / "weights"), dtype]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert 0.9 < float(result.stdout) < 1.15
