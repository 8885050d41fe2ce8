"""Parity: the same tokens through two backends, and how far their distributions are apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pagefleet.backend import ForwardBatch
from pagefleet.conformance.reference import log_softmax
from pagefleet.loading import ready_backend
from pagefleet.sampling_params import InvalidRequest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefleet.config import EngineConfig
    from pagefleet.loading import ReadyBackend

    Logprobs = NDArray[np.float64]

NEAR_TIES: Mapping[str, float] = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.15}
"""A flip is a near-tie if the log-probabilities of the two tokens are no further apart than this, by compute dtype."""
CHUNK = 256


@dataclass(frozen=True, slots=True)
class Flip:
    """A position where the two find different tokens the most likely."""

    prompt: int
    position: int  # of the token they disagree about
    tokens: tuple[int, int]  # the first device's, the second's
    gap: float  # of their log-probabilities, the larger of both devices' views
    defect: bool  # too large a gap for a near-tie


@dataclass(slots=True)
class Parity:
    """How far two devices are apart, over every position of some token sequences."""

    devices: tuple[str, str]
    dtypes: tuple[str, str]
    near_tie: float
    num_positions: int = 0
    equal_argmax: float = 1.0  # share of positions
    max_difference: float = 0.0  # of log-probabilities, over the tokens that are among the likeliest 20 of the first
    mean_difference: float = 0.0
    max_kl: float = 0.0  # nats, of the second's distribution from the first's
    mean_kl: float = 0.0
    flips: list[Flip] = field(default_factory=list)

    @property
    def defects(self) -> list[Flip]:
        return [flip for flip in self.flips if flip.defect]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "num_defects": len(self.defects)}

    def add(self, prompt: int, first: Logprobs, second: Logprobs) -> None:
        """Count one sequence's distributions [N, vocab_size]; entry i is of the token at i + 1."""
        top = np.argsort(-first, axis=1)[:, :20]
        difference = np.abs(np.take_along_axis(first, top, 1) - np.take_along_axis(second, top, 1))
        kl = np.maximum((np.exp(first) * (first - second)).sum(axis=1), 0)
        pairs = np.stack([first.argmax(1), second.argmax(1)], axis=1)
        for i in np.flatnonzero(pairs[:, 0] != pairs[:, 1]).tolist():
            a, b = pairs[i].tolist()
            gap = float(max(first[i, a] - first[i, b], second[i, b] - second[i, a]))
            self.flips.append(Flip(prompt, i + 1, (a, b), gap, gap > self.near_tie))
        self.num_positions += len(first)
        weight = len(first) / self.num_positions
        self.mean_difference += (float(difference.mean()) - self.mean_difference) * weight
        self.mean_kl += (float(kl.mean()) - self.mean_kl) * weight
        self.max_difference = max(self.max_difference, float(difference.max()))
        self.max_kl = max(self.max_kl, float(kl.max()))
        self.equal_argmax = 1 - len(self.flips) / self.num_positions


def parity(
    configs: tuple[EngineConfig, EngineConfig],
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int = 32,
    near_tie: float | None = None,
) -> Iterator[Parity]:
    """Prefill each prompt on both devices, decode what the first finds most likely on both, compare every position.

    Prompts are token ids. Yields the figures so far after each prompt. Raises InvalidRequest for a prompt that does
    not fit the model, and as `load_engine` does.
    """
    with ready_backend(configs[0]) as first, ready_backend(configs[1]) as second:
        slack = max(NEAR_TIES[first.dtype], NEAR_TIES[second.dtype]) if near_tie is None else near_tie
        result = Parity((first.name, second.name), (first.dtype, second.dtype), slack)
        for i, prompt in enumerate(prompts):
            _check(i, prompt, num_tokens, first)
            runners = _Runner(first), _Runner(second)
            tokens = list(prompt)
            for start in range(0, len(prompt), CHUNK):
                pair = [runner.run(tokens[start : start + CHUNK], start) for runner in runners]
                result.add(i, *pair)
            for position in range(len(prompt), len(prompt) + num_tokens):
                tokens.append(int(pair[0][-1].argmax()))
                pair = [runner.run(tokens[position:], position) for runner in runners]
                result.add(i, *pair)
            yield result


def _check(index: int, prompt: Sequence[int], num_tokens: int, ready: ReadyBackend) -> None:
    longest = min(ready.spec.max_position_embeddings, ready.layout.num_blocks * ready.layout.block_size)
    if not 0 < len(prompt) <= longest - num_tokens:
        raise InvalidRequest(
            f"prompt {index} has {len(prompt)} tokens; 1 to {longest - num_tokens} leave room for {num_tokens} more"
        )
    if not 0 <= min(prompt) <= max(prompt) < ready.spec.vocab_size:
        raise InvalidRequest(f"prompt {index} has tokens outside the vocabulary of {ready.spec.vocab_size}")


class _Runner:
    """One sequence on one backend, in blocks 0, 1, 2, ..."""

    def __init__(self, ready: ReadyBackend) -> None:
        self.ready = ready

    def run(self, token_ids: Sequence[int], start: int) -> Logprobs:
        """Compute these tokens, the first of which is at position `start`: log-probabilities [N, vocab_size]."""
        backend, end = self.ready.backend, start + len(token_ids)
        padding = -len(token_ids) % backend.traits.token_multiple
        positions = np.arange(start, end, dtype=np.int32)
        batch = ForwardBatch(
            token_ids=np.pad(np.array(token_ids, np.int32), (0, padding)),
            positions=np.pad(positions, (0, padding)),
            slots=np.pad(positions, (0, padding), constant_values=-1),
            query_starts=np.array([0, len(token_ids)], np.int32),
            seq_lens=np.array([end], np.int32),
            block_tables=np.arange(-(-end // self.ready.layout.block_size), dtype=np.int32)[None],
            logit_rows=np.pad(np.arange(len(token_ids), dtype=np.int32), (0, padding)),
        )
        return log_softmax(backend.to_host(backend.forward(batch))[: len(token_ids)])
