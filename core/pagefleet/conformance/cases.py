"""Tiny random models, one for each thing a `ModelSpec` can say, with weights made on the spot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pagefleet.backend import HostTensor
from pagefleet.model import ModelSpec, TensorSpec
from pagefleet.rope import RopeSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_POSITIONS = 1024


@dataclass(frozen=True, slots=True)
class Case:
    """A model worth testing, and the seed of its weights."""

    name: str
    model: ModelSpec
    seed: int = 0


def cases() -> tuple[Case, ...]:
    """Every case; the first is the plainest."""
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return (
        Case("plain", model_spec()),
        Case("gqa-tied", model_spec(num_heads=8, num_kv_heads=2, vocab_size=131, tied=True, norm_eps=1e-2)),
        Case("multi-query", model_spec(num_heads=6, num_kv_heads=1, head_dim=32)),
        Case("window", model_spec(num_heads=4, num_kv_heads=2, windows=(5, None, 7))),
        Case("all-windows", model_spec(head_dim=32, windows=(4, 4))),
        Case("biases-80", model_spec(head_dim=80, biases=("q", "k", "v", "o", "gate", "up", "down"))),
        Case("qkv-bias", model_spec(num_heads=4, num_kv_heads=2, biases=("q", "k", "v"), tied=True)),
        Case("qk-norm-128", model_spec(num_heads=4, head_dim=128, qk_norm=True, activation="gelu")),
        Case("partial-rope", model_spec(rotary_dim=24, activation="gelu_tanh", attention_scale=0.2)),
        Case("scaled-rope", model_spec(scaling={**llama3, "original_max_position_embeddings": 32})),
        Case("soft-cap", model_spec(num_heads=4, soft_cap=1.5, windows=(None, 5))),
        Case("alibi", model_spec(num_heads=4, alibi_slopes=(0.25, 0.0625, 0.5, 1.0), windows=(None, 5))),
        Case(
            "alibi-soft-cap", model_spec(num_heads=4, num_kv_heads=4, soft_cap=2.0, alibi_slopes=(1.0, 0.5, 0.1, 0.0))
        ),
    )


def case_named(name: str) -> Case:
    """The case of that name."""
    return next(case for case in cases() if case.name == name)


def model_spec(
    *,
    num_heads: int = 2,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    hidden_size: int = 64,
    intermediate_size: int = 96,
    vocab_size: int = 97,
    rotary_dim: int | None = None,
    windows: tuple[int | None, ...] = (None, None),
    biases: tuple[str, ...] = (),
    qk_norm: bool = False,
    tied: bool = False,
    activation: str = "silu",
    attention_scale: float | None = None,
    norm_eps: float = 1e-5,
    scaling: Mapping[str, Any] | None = None,
    soft_cap: float | None = None,
    alibi_slopes: tuple[float, ...] | None = None,
) -> ModelSpec:
    """A small decoder with the given oddities; it has as many layers as `windows`."""
    q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
    sizes = _matrix_sizes(hidden_size, intermediate_size, q_size, kv_size)
    shapes = {"embed.weight": (vocab_size, hidden_size), "norm.weight": (hidden_size,)}
    if not tied:
        shapes["head.weight"] = (vocab_size, hidden_size)
    for layer in range(len(windows)):
        prefix = f"layers.{layer}."
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in sizes.items()}
        shapes |= {f"{prefix}{name}.bias": sizes[name][:1] for name in biases}
        shapes |= {f"{prefix}{name}.weight": (hidden_size,) for name in ("attn_norm", "mlp_norm")}
        shapes |= {f"{prefix}{name}.weight": (head_dim,) for name in ("q_norm", "k_norm") if qk_norm}
    return ModelSpec(
        model_type="conformance",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=len(windows),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITIONS,
        norm_eps=norm_eps,
        rope=RopeSpec(rotary_dim or head_dim, 10000.0, scaling or {}),
        activation=activation,
        attention_scale=head_dim**-0.5 if attention_scale is None else attention_scale,
        windows=windows,
        tensors={name: TensorSpec(name, shape) for name, shape in shapes.items()},
        attention_soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
    )


def _matrix_sizes(hidden: int, intermediate: int, q_size: int, kv_size: int) -> dict[str, tuple[int, ...]]:
    """The matrices of one layer, [out, in]."""
    attention = {"q": (q_size, hidden), "k": (kv_size, hidden), "v": (kv_size, hidden), "o": (hidden, q_size)}
    return {**attention, "gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}


class RandomWeights:
    """A `WeightSource` of random tensors, stored by turns as float32, bfloat16 and float16.

    Every value is one that all three dtypes hold exactly, so the reference and a backend of any dtype start from the
    same numbers.
    """

    def __init__(self, model: ModelSpec, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.arrays = {name: _exact(_draw(rng, name, tensor.shape)) for name, tensor in model.tensors.items()}

    def read(self, name: str) -> HostTensor:
        array = self.arrays[name]
        dtype = ("float32", "bfloat16", "float16")[list(self.arrays).index(name) % 3]
        data = _encode(array, dtype)
        data.flags.writeable = False  # as a memory-mapped file's
        return HostTensor(name, dtype, array.shape, data)

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def float64(self) -> dict[str, NDArray[np.float64]]:
        """All tensors, for the reference."""
        return {name: array.astype(np.float64) for name, array in self.arrays.items()}


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Norms around 1, small biases, matrices that keep the size of what passes through them."""
    values = rng.standard_normal(shape)
    if name.endswith("norm.weight"):
        values = 1 + 0.3 * values
    elif name.endswith(".bias"):
        values *= 0.5
    elif not name.startswith("embed"):
        # Peaked attention: one wrong position must be seen.
        values *= (1.5 if name.endswith(("q.weight", "k.weight")) else 1.0) / np.sqrt(shape[-1])
    return values.astype(np.float32)


def _exact(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest values (cut, not rounded) with bfloat16's 8 bits of precision inside float16's normal range."""
    cut = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.abs(cut) < 2.0**-14, np.float32(0), cut)


def _encode(values: NDArray[np.float32], dtype: str) -> NDArray[np.uint8]:
    if dtype == "bfloat16":
        bits = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return np.ascontiguousarray(bits).reshape(-1).view(np.uint8)
    return np.ascontiguousarray(values.astype(dtype)).reshape(-1).view(np.uint8)
