"""A tiny random model, for benchmarks whose logic needs one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from pagefleet import LLM

VOCAB_SIZE = 256


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a llama of two layers and a tokenizer of words t0, t1, ..."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    folder = tmp_path_factory.mktemp("tiny")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB_SIZE)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "t0", "bos_token": "t1", "eos_token": "t2"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, device="cpu", plugins=(), dtype="float32", kv_cache_memory_bytes=8 << 20) as llm:
        yield llm
