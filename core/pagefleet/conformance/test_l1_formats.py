"""Weights in the bits they were quantised to, and a KV cache in a dtype of its own: within what the rounding costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pagefleet.backend import Backend, HostTensor, ModelSpec, Traits
from pagefleet.conformance.cases import Case, RandomWeights, case_named, model_spec
from pagefleet.conformance.conftest import check_features
from pagefleet.conformance.driver import Driver
from pagefleet.conformance.reference import DenseDecoder, tolerance
from pagefleet.conformance.target import find_target

if TYPE_CHECKING:
    from numpy.typing import NDArray

pytestmark = pytest.mark.conformance_level("L1")

PLAIN_FORMATS = ("Q4_0", "Q8_0", "Q5_1", "Q6_K")
EIGHT_BITS = 0.04
"""Relative error allowed where 8 bits take part: activations rounded to 8 bits to meet the weights in their own bits,
or keys and values kept in 8. Each rounding is off by about 0.4 %, a dozen of them in a row."""


class QuantisedWeights:
    """A `WeightSource` whose matrices are in one format, the rest as `RandomWeights` has it."""

    def __init__(self, model: ModelSpec, format: str) -> None:
        self.plain = RandomWeights(model, 0)
        rng = np.random.default_rng(1)
        shapes = {name: tensor.shape for name, tensor in model.tensors.items() if len(tensor.shape) == 2}
        self.matrices = {name: _random_matrix(rng, name, shape, format) for name, shape in shapes.items()}

    def read(self, name: str) -> HostTensor:
        return self.matrices[name] if name in self.matrices else self.plain.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.plain)

    def float64(self) -> dict[str, NDArray[np.float64]]:
        """What the bits stand for, for the reference."""
        return self.plain.float64() | {name: each.numpy().astype(np.float64) for name, each in self.matrices.items()}


def _random_matrix(rng: np.random.Generator, name: str, shape: tuple[int, ...], format: str) -> HostTensor:
    num_rows, num_columns = shape
    if format == "int8":
        scale = rng.uniform(0.5, 1.5, (num_rows, 1)).astype(np.float32) / np.float32(127 * num_columns**0.5)
        values = rng.integers(-127, 128, shape).astype(np.int8)
        data = np.concatenate([scale.view(np.uint8), values.view(np.uint8)], axis=1).reshape(-1)
        return HostTensor(name, format, shape, data, _dequantise_int8)
    block_size, _ = GGML_QUANT_SIZES[GGMLQuantizationType[format]]
    blocks = _blocks(format, num_columns**-0.5)
    chosen = rng.integers(0, len(blocks), num_rows * num_columns // block_size)
    return HostTensor(name, format, shape, blocks[chosen].reshape(-1), _dequantise_ggml)


@lru_cache
def _blocks(format: str, size: float) -> NDArray[np.uint8]:
    """Random blocks [n, bytes] that stand for values of about `size`, whatever the format: most are drawn in vain."""
    kind = GGMLQuantizationType[format]
    drawn = np.random.default_rng(0).integers(0, 256, (16384, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        spread = np.sqrt(np.mean(dequantize(drawn, kind) ** 2, axis=1))
    fits: NDArray[np.bool_] = (spread > size / 2) & (spread < size)
    return np.asarray(drawn[fits])


def _dequantise_ggml(tensor: HostTensor) -> NDArray[np.float32]:
    rows = tensor.data.reshape(tensor.shape[0], -1)
    return np.asarray(dequantize(rows, GGMLQuantizationType[tensor.dtype]), np.float32)


def _dequantise_int8(tensor: HostTensor) -> NDArray[np.float32]:
    rows = tensor.data.reshape(tensor.shape[0], -1)
    return np.ascontiguousarray(rows[:, :4]).view(np.float32) * rows[:, 4:].view(np.int8)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Formats and dtypes are those the backend names, and some that any backend must be able to dequantise."""
    traits = find_target(metafunc.config)[0].traits
    if "weight_format" in metafunc.fixturenames:
        metafunc.parametrize("weight_format", dict.fromkeys([*traits.weight_formats, *PLAIN_FORMATS]))
    if "kv_dtype" in metafunc.fixturenames:
        nothing = pytest.param(None, marks=pytest.mark.skip("Traits.kv_dtypes is empty"))
        metafunc.parametrize("kv_dtype", traits.kv_dtypes or [nothing])


def test_quantised_weights(weight_format: str, dtype: str, make_backend: Callable[[], Backend], traits: Traits) -> None:
    """In their own bits where `Traits.weight_formats` names them, else dequantised; prefill and decode."""
    # Blocks of 256 values, and calm attention: the matrices are what is looked at.
    model = model_spec(num_heads=4, num_kv_heads=4, hidden_size=256, intermediate_size=256, attention_scale=0.04)
    weights = QuantisedWeights(model, weight_format)
    reference = DenseDecoder(model, weights.float64())
    block_size = min(traits.block_sizes or (4,))
    driver = Driver(make_backend(), model, weights, reference, dtype, block_size, num_blocks=16 + 64 // block_size)
    if weight_format in traits.weight_formats:
        driver.limit = max(EIGHT_BITS, tolerance(dtype))
    driver.poison()
    prompts = [driver.prompt(n) for n in (17, 9, 33)]
    driver.step([(prompt, 8) for prompt in prompts])
    driver.finish(prompts, chunk=1)


@pytest.mark.parametrize("name", ["gqa-tied", "window", "qk-norm-128", "soft-cap", "alibi"])
def test_kv_cache_of_another_dtype(
    name: str, kv_dtype: str, dtype: str, make_backend: Callable[[], Backend], traits: Traits
) -> None:
    """Chunks, single tokens and a shared prefix: logits as close as the cache's precision lets them be."""
    case: Case = case_named(name)
    check_features(case.model, traits)
    block_size = min(traits.block_sizes or (4,))
    driver = Driver.of_case(make_backend(), case, dtype, block_size, 16 + 64 // block_size, kv_dtype)
    precisions = [EIGHT_BITS if kv_dtype == "int8" else tolerance(kv_dtype), tolerance(dtype)]
    driver.limit = max(precisions)
    driver.poison()
    first = driver.prompt(2 * block_size + 5)
    driver.finish([first, driver.prompt(block_size)], chunk=block_size + 1)
    driver.finish([driver.prompt(3 * block_size, prefix=first, num_shared=2), driver.prompt(7)], chunk=1)
