"""Model families: how a checkpoint's config becomes a `ModelSpec`, one small file a family.

A family is data: nothing here imports torch or reads a file. Families from elsewhere come by the hook
`pagefleet_models` and are handed to `find_family` before or after the built-in ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pagefleet.model import ModelSpec

__all__ = ["ModelFamily", "builtin_families", "find_family"]


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One architecture: its name in `config.json`, and its spec as a function of that config.

    `spec` raises ValueError for a config it does not understand.
    """

    model_type: str  # as config.json says it
    spec: Callable[[Mapping[str, Any]], ModelSpec]
    gguf_arch: str | None = None  # `general.architecture` of its GGUF files
    gguf_interleaved_qk: bool = False  # GGUF keeps q and k rows for RoPE on neighbouring pairs


def builtin_families() -> tuple[ModelFamily, ...]:
    """The families pagefleet ships."""
    from pagefleet.models import llama, mistral, qwen2, qwen3

    return (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY)


def find_family(model_type: str, families: Iterable[ModelFamily] | None = None) -> ModelFamily:
    """The family of that `model_type` among `families` (None: the built-in ones); the first one wins.

    Raises ValueError, listing what is known.
    """
    known = []
    for family in builtin_families() if families is None else families:  # the rest may cost imports: stop when found
        if family.model_type == model_type:
            return family
        known.append(family.model_type)
    names = ", ".join(sorted(set(known)))
    raise ValueError(
        f"unknown model_type {model_type!r}; known: {names}. A plugin can add it through the hook pagefleet_models"
    )
