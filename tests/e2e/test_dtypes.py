"""What a narrower dtype costs: log-probabilities of SmolLM2's own text, against float32 on the same weights.

Bounds are about twice what was measured (AVX2): the mean of |difference| over 90 positions, and how often the best
token is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagefleet import LLM, BackendError, SamplingParams
from pagefleet_kernels import cpu as kernels

needs_kernels = pytest.mark.skipif(not kernels.LIBRARY.is_file(), reason="the CPU kernels are not built here")
TEXTS = (
    "Once upon a time, in a small village by the sea, there lived an old fisherman who had never learned to swim. "
    "Every morning he looked at the waves and thought of his brother, who had sailed away forty years ago.",
    "The capital of France is Paris. The capital of Germany is Berlin, and the capital of Italy is Rome.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
)


def score(path: Path, **options: Any) -> tuple[NDArray[np.float64], list[int]]:
    """Log-probabilities of the texts' tokens, and the most likely token at each position."""
    options = {"device": "cpu", "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20, **options}
    with LLM(str(path), plugins=(), **options) as llm:
        outputs = llm.generate(list(TEXTS), SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    actual, best = [], []
    for output in outputs:
        assert output.error is None
        for token, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            actual.append(position[token].logprob)
            best.append(max(position, key=lambda one: position[one].logprob))
    return np.array(actual), best


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> tuple[NDArray[np.float64], list[int]]:
    return score(smollm2, dtype="float32")


@needs_kernels
@pytest.mark.parametrize(
    ("options", "mean", "same"),
    [
        pytest.param({"dtype": "bfloat16"}, 0.045, 0.95, id="bfloat16"),
        pytest.param({"dtype": "float16"}, 0.008, 0.98, id="float16"),
        pytest.param({"dtype": "auto"}, 0.1, 0.95, id="the file's own bits"),
        pytest.param({"dtype": "int8"}, 0.14, 0.93, id="int8"),
        pytest.param({"dtype": "int4"}, 1.2, 0.6, id="int4"),
        pytest.param({"dtype": "int4", "device": "onnx"}, 1.2, 0.6, id="int4 by onnxruntime"),
        pytest.param({"dtype": "auto", "device": "onnx"}, 0.1, 0.95, id="the file's own bits by onnxruntime"),
        pytest.param({"dtype": "float32", "kv_cache_dtype": "int8"}, 0.045, 0.95, id="int8 keys and values"),
        pytest.param({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, 0.008, 0.97, id="bfloat16 keys and values"),
    ],
)
def test_log_probs_stay_near_those_of_float32(
    options: dict[str, Any], mean: float, same: float, smollm2: Path, reference: tuple[NDArray[np.float64], list[int]]
) -> None:
    actual, best = score(smollm2, **options)
    error = np.abs(actual - reference[0])
    agreement = np.mean(np.array(best) == reference[1])
    print(f"{options}: |d logprob| mean {error.mean():.4f} max {error.max():.3f}; same best token {agreement:.3f}")
    assert 0 < error.mean() <= mean
    assert agreement >= same


@needs_kernels
def test_explain_says_how_weights_and_keys_are_kept(smollm2: Path) -> None:
    with LLM(str(smollm2), device="cpu", plugins=(), num_blocks=64, kv_cache_dtype="int8") as llm:
        facts = str(llm.explain())
    assert "weights in Q4_1 and Q8_0" in facts
    assert "in int8" in facts


def test_a_kv_dtype_that_the_backend_does_not_have_is_refused(tiny_checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(
        BackendError, match="kv_cache_dtype is 'int8'; with dtype float32 this backend can keep KV in: "
    ):
        LLM(str(tiny_checkpoint("llama")), device="numpy", plugins=("numpy",), kv_cache_dtype="int8", num_blocks=64)


def test_every_backend_runs_int8_weights(tiny_checkpoint: Callable[[str], Path]) -> None:
    outcomes = []
    for device in ("cpu", "numpy"):
        with LLM(str(tiny_checkpoint("llama")), device=device, plugins=("numpy",), dtype="int8", num_blocks=64) as llm:
            (output,) = llm.generate(
                [{"prompt_token_ids": [5, 6, 7, 8]}], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False
            )
        outcomes.append([next(iter(position.values())).logprob for position in output.prompt_logprobs[1:]])
    assert np.abs(np.subtract(*outcomes)).max() < 0.3  # one quantises activations, too
