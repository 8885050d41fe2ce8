"""Rotary position embeddings: which angle each position turns each pair of a head by.

Formulas and their float32 arithmetic follow `transformers.modeling_rope_utils`, so that cos and sin agree with it
at long positions too, where one unit in the last place of a frequency is a visible angle. Two scalings depend there
on how long the sequence has become; here an angle is a pure function of the position, as a paged KV cache demands:

- `dynamic`: position p beyond `max_position_embeddings` uses the base for a sequence of p + 1 tokens: what
  transformers computes when it decodes token by token.
- `longrope`: the short or the long factors are chosen once, from the number of positions the engine asks for
  (its `max_model_len`) against `original_max_position_embeddings`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LARGEST = 1e18  # of a rope's numbers: float32 holds their products
_MAX_DIM = 1 << 16  # rotary_dim; heads have 64 to 256
# rope_type -> (keys it needs, keys it also understands)
_KEYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor", "max_position_embeddings"), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate", "finetuned"),
    ),
    "longrope": (("factor", "short_factor", "long_factor", "original_max_position_embeddings"), ("attention_factor",)),
}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The rotation of one model: `theta` is the base, `scaling` is how it is stretched (`{}`: it is not).

    `scaling` holds `rope_type` and that type's fields, complete (see `rope_from_config`). A pair is
    (x[i], x[i + rotary_dim // 2]), "rotate half"; dimensions from `rotary_dim` on are not rotated.
    Raises ValueError for a type, a field or a value it does not know.
    """

    rotary_dim: int
    theta: float
    scaling: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.rotary_dim <= _MAX_DIM or self.rotary_dim % 2:
            raise ValueError(
                f"rotary_dim is {self.rotary_dim}; RoPE turns pairs, so it must be even and positive, up to {_MAX_DIM}"
            )
        if not _is_positive(self.theta):
            raise ValueError(f"rope_theta is {self.theta!r:.80}; it must be a number above 0 and at most {_LARGEST:g}")
        if self.rope_type not in _KEYS:
            raise ValueError(f"unknown rope_type {self.rope_type!r}; known: {', '.join(_KEYS)}")
        required, optional = _KEYS[self.rope_type]
        given = {key for key, value in self.scaling.items() if value is not None} - {"rope_type"}
        if missing := set(required) - given:
            raise ValueError(f"rope_type {self.rope_type!r} needs {sorted(missing)}; it was given {sorted(given)}")
        if unknown := given - set(required) - set(optional):
            raise ValueError(
                f"rope_type {self.rope_type!r} does not know {sorted(unknown)}; it knows {[*required, *optional]}"
            )
        for key in given:
            _check_value(key, self.scaling[key], self.rotary_dim // 2)
        if self.rope_type == "llama3" and self.scaling["high_freq_factor"] <= self.scaling["low_freq_factor"]:
            raise ValueError(f"high_freq_factor must be above low_freq_factor in {dict(self.scaling)}")
        if self.rope_type == "dynamic" and self.rotary_dim <= 2:
            raise ValueError(f"rope_type 'dynamic' needs a rotary_dim above 2, not {self.rotary_dim}")
        if self.rope_type == "yarn" and self.theta <= 1:
            raise ValueError(f"rope_theta is {self.theta!r}; rope_type 'yarn' needs one above 1")
        original = self.scaling.get("original_max_position_embeddings")
        if self.rope_type == "longrope" and original is not None and original <= 1:
            raise ValueError(
                f"original_max_position_embeddings is {original!r}; rope_type 'longrope' needs one above 1"
            )
        self._check_frequencies(2 if original is None else int(original) + 1)

    @property
    def rope_type(self) -> str:
        return str(self.scaling.get("rope_type", "default"))

    def max_positions(self, max_position_embeddings: int) -> int:
        """How many positions the model is good for, given what its config says.

        `yarn` and `dynamic` configs usually keep the length before stretching in `max_position_embeddings`.
        """
        if self.rope_type == "yarn":
            stretched = int(self.scaling["factor"] * self.scaling["original_max_position_embeddings"])
            return max(max_position_embeddings, stretched)
        if self.rope_type == "dynamic":
            return int(self.scaling["factor"] * max_position_embeddings)
        return max_position_embeddings

    def _check_frequencies(self, num_positions: int) -> None:
        """Raise ValueError unless every angle is finite: each field may be in range, and their quotient not."""
        lengths = (1, num_positions) if self.rope_type == "longrope" else (1,)  # both of its lists
        with np.errstate(all="ignore"):
            inv_freqs = [_FREQUENCIES[self.rope_type](self, length)[0] for length in lengths]
        if not all((np.abs(inv_freq) <= _LARGEST).all() for inv_freq in inv_freqs):  # false for NaN too
            raise ValueError(
                f"rope_theta {self.theta!r} with {dict(self.scaling)!r:.200} gives frequencies above {_LARGEST:g}, or "
                "none; the config is corrupt"
            )

    def table(self, num_positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """cos and sin of every angle, each float32 [num_positions, rotary_dim // 2], times the attention factor.

        `num_positions` is the longest sequence the engine will run: `longrope` chooses its factors by it.
        """
        inv_freq, attention_factor = _FREQUENCIES[self.rope_type](self, num_positions)
        angles = np.arange(num_positions, dtype=np.float32)[:, None] * inv_freq
        # numpy's float32 cos and sin are a few units off for large angles: go through float64, in buffered pieces
        cos = np.cos(angles, out=np.empty_like(angles), dtype=np.float64, casting="same_kind")
        sin = np.sin(angles, out=np.empty_like(angles), dtype=np.float64, casting="same_kind")
        return cos * np.float32(attention_factor), sin * np.float32(attention_factor)


def rope_from_config(config: Mapping[str, Any], head_dim: int, default_theta: float = 10000.0) -> RopeSpec:
    """The RopeSpec a `config.json` states, for heads of `head_dim`.

    Reads both spellings: `rope_theta` with `rope_scaling` (`type` or `rope_type` in it), and `rope_parameters`
    with everything in it. Needs `max_position_embeddings`. Raises ValueError for what it does not understand.
    """
    old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    if old and new and old != new:
        raise ValueError(f"config has rope_scaling {old!r} and rope_parameters {new!r}; keep one of them")
    fields = old or new
    if not isinstance(fields, Mapping):
        raise ValueError(f"rope_scaling is {fields!r}; it must be an object with a rope_type")
    if nested := [key for key, value in fields.items() if isinstance(value, Mapping)]:
        raise ValueError(f"rope parameters differ by layer type ({', '.join(nested)}); one for all layers is supported")
    scaling = dict(fields)
    old_type = scaling.pop("type", None)
    rope_type = scaling.pop("rope_type", None) or old_type or "default"
    rope_type = "longrope" if rope_type == "su" else rope_type  # its name in the first Phi-3 configs
    theta = _first(scaling.pop("rope_theta", None), config.get("rope_theta"), default_theta)
    partial = _first(scaling.pop("partial_rotary_factor", None), config.get("partial_rotary_factor"), 1.0)
    if not _is_number(partial) or not 0 < partial <= 1:
        raise ValueError(f"partial_rotary_factor is {partial!r}; it must be above 0 and at most 1")
    if rope_type != "default":
        scaling = {"rope_type": rope_type, **_complete(rope_type, scaling, config)}
    elif scaling:
        raise ValueError(f"rope parameters {sorted(scaling)} need a rope_type; known: {', '.join(_KEYS)}")
    return RopeSpec(int(head_dim * partial), theta if not _is_number(theta) else float(theta), scaling)


def _complete(rope_type: str, scaling: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a scaling, with those filled in that transformers takes from elsewhere in the config."""
    filled = {key: value for key, value in scaling.items() if value is not None}
    longest = config.get("max_position_embeddings")
    if rope_type == "dynamic":
        filled["max_position_embeddings"] = longest
    if rope_type in ("llama3", "yarn", "longrope"):
        outer = config.get("original_max_position_embeddings")  # Phi-3 keeps it outside; there it takes precedence
        filled["original_max_position_embeddings"] = _first(
            outer, filled.get("original_max_position_embeddings"), longest
        )
    if rope_type in ("yarn", "longrope") and "factor" not in filled and _is_number(longest):
        original = filled["original_max_position_embeddings"]
        _check_value("original_max_position_embeddings", original, 0)
        filled["factor"] = longest / original
    return filled


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _is_number(value: Any) -> bool:
    """Whether it is a finite number that float32 has room for, and for its product with a position."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value >= 1 / _LARGEST


def _check_value(key: str, value: Any, num_pairs: int) -> None:
    """Raise ValueError unless a scaling's field has a value its formula can take."""
    if key in ("truncate", "finetuned"):
        if not isinstance(value, bool):
            raise ValueError(f"rope {key} is {value!r}; it must be true or false")
    elif key in ("short_factor", "long_factor"):
        if not isinstance(value, list | tuple) or len(value) != num_pairs or not all(map(_is_positive, value)):
            raise ValueError(
                f"rope {key} must be a list of rotary_dim / 2 = {num_pairs} numbers above 0, not {value!r:.80}"
            )
    elif not _is_positive(value) and not ("mscale" in key and _is_number(value) and value == 0):
        raise ValueError(f"rope {key} is {value!r:.80}; it must be a number above 0 and at most {_LARGEST:g}")


# -- inverse frequencies, each [rotary_dim // 2] or [num_positions, rotary_dim // 2], and the attention factor --

_Frequencies = tuple["NDArray[np.float32]", float]


def _powers(spec: RopeSpec, base: float | NDArray[np.float32]) -> NDArray[np.float32]:
    """base ** (2i / rotary_dim) in float32; [n, rotary_dim // 2] for a `base` of [n, 1]."""
    exponents = np.arange(0, spec.rotary_dim, 2, dtype=np.float32) / np.float32(spec.rotary_dim)
    # in double precision, then rounded: a processor's own float32 power may be off by a unit in the last place
    powers: NDArray[np.float32] = np.power(np.asarray(base, np.float32), exponents, dtype=np.float64).astype(np.float32)
    return powers


def _default(spec: RopeSpec, num_positions: int) -> _Frequencies:
    return np.float32(1) / _powers(spec, spec.theta), 1.0


def _linear(spec: RopeSpec, num_positions: int) -> _Frequencies:
    return _default(spec, num_positions)[0] / np.float32(spec.scaling["factor"]), 1.0


def _dynamic(spec: RopeSpec, num_positions: int) -> _Frequencies:
    """NTK-aware scaling whose base grows with the sequence: https://www.reddit.com/r/LocalLLaMA/comments/14mrgpr"""
    factor, longest = spec.scaling["factor"], spec.scaling["max_position_embeddings"]
    lengths = np.maximum(np.arange(1, num_positions + 1, dtype=np.float32), np.float32(longest))[:, None]
    growth = np.float32(factor) * lengths / np.float32(longest) - np.float32(factor - 1)
    base = np.float32(spec.theta) * growth ** np.float32(spec.rotary_dim / (spec.rotary_dim - 2))
    return np.float32(1) / _powers(spec, base), 1.0


def _llama3(spec: RopeSpec, num_positions: int) -> _Frequencies:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between interpolated."""
    factor, original = spec.scaling["factor"], spec.scaling["original_max_position_embeddings"]
    low, high = spec.scaling["low_freq_factor"], spec.scaling["high_freq_factor"]
    inv_freq = _default(spec, num_positions)[0]
    wavelen = np.float32(2 * math.pi) / inv_freq
    stretched = np.where(wavelen > original / low, inv_freq / np.float32(factor), inv_freq)
    smooth = (np.float32(original) / wavelen - np.float32(low)) / np.float32(high - low)
    between = (1 - smooth) * stretched / np.float32(factor) + smooth * stretched
    is_between = (wavelen >= original / high) & (wavelen <= original / low)
    return np.where(is_between, between, stretched), 1.0


def _yarn(spec: RopeSpec, num_positions: int) -> _Frequencies:
    """YaRN, https://arxiv.org/abs/2309.00071."""
    factor, original = spec.scaling["factor"], spec.scaling["original_max_position_embeddings"]
    powers = _powers(spec, spec.theta)
    extrapolated, interpolated = np.float32(1) / powers, np.float32(1) / (np.float32(factor) * powers)

    def turning_dim(num_rotations: float) -> float:
        return spec.rotary_dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = turning_dim(spec.scaling.get("beta_fast") or 32)
    high = turning_dim(spec.scaling.get("beta_slow") or 1)
    if spec.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    high = high + 0.001 if low == high else high  # no division by zero
    ramp = (np.arange(spec.rotary_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = 1 - np.clip(ramp, np.float32(0), np.float32(1))
    return interpolated * (1 - keep) + extrapolated * keep, _yarn_attention_factor(spec.scaling)


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * weight * math.log(scaling["factor"]) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


def _longrope(spec: RopeSpec, num_positions: int) -> _Frequencies:
    """LongRoPE, https://arxiv.org/abs/2402.13753."""
    factor, original = spec.scaling["factor"], spec.scaling["original_max_position_embeddings"]
    factors = spec.scaling["long_factor" if num_positions > original else "short_factor"]
    attention_factor = spec.scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return np.float32(1) / (np.asarray(factors, np.float32) * _powers(spec, spec.theta)), float(attention_factor)


_FREQUENCIES: Mapping[str, Callable[[RopeSpec, int], _Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
