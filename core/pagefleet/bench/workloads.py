"""The fixed workloads: W1 one stream, W2 many requests of unequal length, W3 a shared prefix."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

TITLES: Mapping[str, str] = {"w1": "one stream", "w2": "mixed requests", "w3": "shared prefix"}


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """Token ids in, and how many tokens to generate, whatever they are."""

    prompt: tuple[int, ...]
    num_output: int

    def message(self) -> dict[str, Any]:
        """As an engine's process reads it."""
        return {"prompt": self.prompt, "out": self.num_output}


def load_workload(name: str, vocab_size: int | None = None) -> list[BenchRequest]:
    """The requests of "w1", "w2" or "w3"; ids that a smaller vocabulary lacks are taken modulo its size."""
    if name not in TITLES:
        raise ValueError(f"no workload is called {name!r}; there are {', '.join(TITLES)}")
    stored = json.loads(files(__package__).joinpath("workloads.json").read_text())[name]
    size = vocab_size or 1 << 31
    return [
        BenchRequest(tuple(token % size for token in (*stored["prefix"], *each["prompt"])), each["out"])
        for each in stored["requests"]
    ]


def describe(requests: list[BenchRequest]) -> str:
    """Numbers of requests and tokens, for a heading."""
    num_input, num_output = sum(len(each.prompt) for each in requests), sum(each.num_output for each in requests)
    return f"{len(requests)} requests, {num_input:,} tokens in, {num_output:,} out"
