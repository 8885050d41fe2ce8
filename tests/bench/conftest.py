"""A tiny random model, for benchmarks whose logic needs one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import TINY, save

from pagefleet import LLM


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a llama of two layers and a tokenizer of words t0, t1, ..."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, initializer_range=0.3))
    return save(model, tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny_llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, device="cpu", plugins=(), dtype="float32", kv_cache_memory_bytes=8 << 20) as llm:
        yield llm
