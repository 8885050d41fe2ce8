"""llama.cpp, an engine that shares no code with this one, agrees on the same GGUF file.

Two comparisons, teacher-forced over the same texts:

- The file with its weights written out in float32. Both engines compute the same function in float32, so only the
  order of additions differs: 3e-5 of a log-probability was measured at most, 1e-4 is allowed. The strong check: any
  mistake in reading the file, RoPE, norms or attention is far above that.
- The file as it is (Q4_1). llama.cpp rounds activations to 8 bits before each product with a quantised matrix; this
  engine dequantises the weights and leaves activations in float32. The rounding is off by up to 1/254 of the largest of
  32 values, in seven products of each of 30 layers. Measured over these texts: |difference| of a log-probability 0.06
  in the mean and 0.5 at most, divergence 0.004 and 0.03 nats, the same best token at 96 % of positions. The bounds are
  twice that: llama.cpp's rounding differs a little between its kernels for different processors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from pagefleet import LLM, SamplingParams
from pagefleet.bench.variants import gguf_variant
from pagefleet_kernels import cpu as kernels

cyllama = pytest.importorskip(
    "cyllama.llama.llama_cpp", reason="llama.cpp comes with cyllama: pip install --no-deps cyllama==0.2.18"
)

TEXTS = (
    "The capital of France is Paris. The capital of Germany is Berlin, and the capital of Italy is Rome.",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who had never learned to swim. "
    "Every morning he looked at the waves and thought of his brother, who had sailed away forty years ago.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "<|im_start|>user\nHow many days are there in a leap year?<|im_end|>\n<|im_start|>assistant\n"
    "A leap year has 366 days.<|im_end|>\n",
    "12 + 30 = 42, 7 * 8 = 56, 100 / 4 = 25, 2**10 = 1024",
    "Der schnelle braune Fuchs springt über den faulen Hund. Le renard brun saute par-dessus le chien paresseux.",
)

Array = NDArray[np.float32]


class LlamaCpp:
    """A GGUF file in llama.cpp, on the CPU, its KV cache in float32 and its attention written out."""

    def __init__(self, path: Path) -> None:
        cyllama.disable_logging()
        cyllama.llama_backend_init()
        model_params, context_params = cyllama.LlamaModelParams(), cyllama.LlamaContextParams()
        model_params.n_gpu_layers = 0
        for name in ("n_ctx", "n_batch", "n_ubatch"):
            setattr(context_params, name, 256)
        context_params.n_threads = context_params.n_threads_batch = 2
        context_params.type_k = context_params.type_v = gguf.GGMLQuantizationType.F32
        context_params.flash_attn_type = 0
        self.model = _Model(str(path), model_params)
        self.context = cyllama.LlamaContext(self.model, context_params)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.model.get_vocab().tokenize(text, add_special=False, parse_special=True)
        return ids

    def logits(self, token_ids: list[int]) -> Array:
        """Logits [n, vocab_size] after every token."""
        self.context.kv_cache_clear()
        batch = cyllama.LlamaBatch(n_tokens=len(token_ids), embd=0, n_seq_max=1)
        for position, token_id in enumerate(token_ids):
            batch.add(token_id, position, [0], True)
        self.context.decode(batch)
        return np.array([self.context.get_logits_ith(i) for i in range(len(token_ids))], np.float32)


class _Model(cyllama.LlamaModel):
    @property
    def n_vocab(self) -> int:  # which get_logits_ith of cyllama 0.2.18 looks for on the model, and does not find
        size: int = self.get_vocab().n_vocab
        return size


@dataclass
class Agreement:
    """Two engines' next-token distributions over the same positions."""

    num_positions: int
    max_logprob_error: float  # |difference| of the log-probability of the text's own next token
    mean_logprob_error: float
    max_divergence: float  # Kullback-Leibler, nats
    mean_divergence: float
    same_best: float  # share of positions with the same most likely token
    max_api_error: float  # largest |difference| of the API's prompt log-probs from llama.cpp's

    def __str__(self) -> str:
        return (
            f"{self.num_positions} positions: |d logprob| max {self.max_logprob_error:.2e} mean "
            f"{self.mean_logprob_error:.2e} (API {self.max_api_error:.2e}); KL max {self.max_divergence:.2e} mean "
            f"{self.mean_divergence:.2e}; same best token {self.same_best:.4f}"
        )


def agreement(path: Path, raw_logits: Callable[..., Array], dtype: str = "float32") -> Agreement:
    theirs = LlamaCpp(path)
    sequences = [theirs.encode(text) for text in TEXTS]
    with LLM(
        str(path), device="cpu", plugins=(), dtype=dtype, max_model_len=256, kv_cache_memory_bytes=64 << 20
    ) as llm:
        assert sequences == [llm.get_tokenizer().encode(text, add_special_tokens=False) for text in TEXTS]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate(sequences, params, use_tqdm=False)
    errors, api_errors, divergences, same = [], [], [], []
    for token_ids, output in zip(sequences, outputs, strict=True):
        p, q = (
            log_softmax(logits[:-1])
            for logits in (raw_logits(path, token_ids, 256, dtype != "auto"), theirs.logits(token_ids))
        )
        actual = np.arange(len(p)), token_ids[1:]
        scored = zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
        errors.append(np.abs(p[actual] - q[actual]))
        api_errors.append(np.abs([position[token].logprob for position, token in scored] - q[actual]))
        divergences.append((np.exp(p) * (p - q)).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
    error, divergence = np.concatenate(errors), np.concatenate(divergences)
    return Agreement(
        num_positions=len(error),
        max_logprob_error=float(error.max()),
        mean_logprob_error=float(error.mean()),
        max_divergence=float(divergence.max()),
        mean_divergence=float(divergence.mean()),
        same_best=float(np.concatenate(same).mean()),
        max_api_error=float(np.concatenate(api_errors).max()),
    )


def log_softmax(logits: Array) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_log_probs_agree_with_llama_cpp_in_float32(
    smollm2: Path, tmp_path: Path, raw_logits: Callable[..., Array]
) -> None:
    result = agreement(gguf_variant(smollm2, "F32", tmp_path), raw_logits)
    print(result)
    assert result.max_logprob_error <= 1e-4, result
    assert result.max_api_error <= 1e-4, result
    assert result.max_divergence <= 1e-8, result  # of second order in the error
    assert result.same_best == 1, result


@pytest.mark.slow
def test_log_probs_agree_with_llama_cpp_on_the_quantised_file(smollm2: Path, raw_logits: Callable[..., Array]) -> None:
    result = agreement(smollm2, raw_logits)
    print(result)
    assert result.mean_logprob_error <= 0.12, result
    assert result.max_logprob_error <= 1.0, result
    assert result.mean_divergence <= 0.008, result
    assert result.max_divergence <= 0.06, result
    assert result.same_best >= 0.92, result


@pytest.mark.slow
@pytest.mark.skipif(not kernels.LIBRARY.is_file(), reason="without the CPU kernels quantised weights are dequantised")
def test_log_probs_agree_with_llama_cpp_when_both_multiply_the_files_own_bits(
    smollm2: Path, raw_logits: Callable[..., Array]
) -> None:
    result = agreement(smollm2, raw_logits, dtype="auto")
    print(result)
    assert result.max_logprob_error <= 1.0, result
    assert result.mean_logprob_error <= 0.12, result
    assert result.same_best >= 0.92, result
