"""Replay: the steps of a recording on some device, and where they part from what was recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pagefleet.backend import BackendError, ForwardBatch
from pagefleet.config import EngineConfig
from pagefleet.loading import ready_backend
from pagefleet.record import RecordError, sketch, sketch_error

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefleet.backend import Backend
    from pagefleet.record import Recording, Step

    Sketches = Mapping[str, NDArray[np.float32]]

TOLERANCES: Mapping[str, float] = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""Relative error of an op from which on two devices differ by more than rounding, by the dtype they compute in."""


@dataclass(frozen=True, slots=True)
class OtherToken:
    """A row that drew another token than the recorded one."""

    step: int
    row: int
    recorded: int
    drawn: int
    gap: float  # log-probability of the token drawn over that of the recorded one, on the device of the replay


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first op that is further from the other side than rounding explains."""

    step: int
    op: str
    error: float
    before: tuple[tuple[str, float], ...]  # the ops of that step up to it, with their errors
    token: int  # the token of the step with the largest error


@dataclass(slots=True)
class Replay:
    """What came of it."""

    device: str
    against: str
    num_steps: int = 0
    num_tokens: int = 0  # drawn and compared
    other_tokens: list[OtherToken] = dataclasses.field(default_factory=list)
    divergence: Divergence | None = None
    max_error: float = 0.0  # of all ops that were compared

    @property
    def equal(self) -> bool:
        return not self.other_tokens and self.divergence is None


def replay(
    recording: Recording,
    *,
    device: str | None = None,
    model: str | None = None,
    bisect: bool = False,
    tolerance: float | None = None,
) -> Iterator[Replay]:
    """Run every step of a recording on `device`, teacher-forced with the tokens that were recorded.

    Yields what came of it so far, after each step. With `bisect` every op is compared with the recorded digest or, if
    there are none, with the device that was recorded, which then runs beside it; the first that differs ends it.
    Raises RecordError, BackendError, CheckpointError and ConfigError.
    """
    facts = recording.facts
    with ExitStack() as stack:
        ready = stack.enter_context(ready_backend(_config(recording, device, model)))
        other: Backend | None = None
        if bisect and not facts["ops"]:
            other = stack.enter_context(ready_backend(_config(recording, facts["device"], model))).backend
        limit = TOLERANCES[max((facts["compute_dtype"], ready.dtype), key=TOLERANCES.__getitem__)]
        result = Replay(ready.name, facts["device"] + ("" if other else ", as recorded"))
        previous: NDArray[np.int32] | None = None
        for step in recording.steps():
            ops = _run(ready.backend, step, previous, result, traced=bisect)
            if bisect:
                want = step.ops if other is None else _run(other, step, previous, None, traced=True)
                result.divergence = _first_difference(step.index, ops, want or {}, tolerance or limit, result)
            result.num_steps += 1
            previous = step.token_ids
            yield result
            if result.divergence is not None:
                return


def _config(recording: Recording, device: str | None, model: str | None) -> EngineConfig:
    facts, layout = recording.facts, recording.layout
    kept = {name: facts[name] for name in ("revision", "dtype", "kv_cache_dtype", "max_model_len")}
    kept |= {"block_size": layout.block_size, "num_blocks": layout.num_blocks}
    return EngineConfig(model=model or facts["model"], device=device, **kept)


def _run(
    backend: Backend, step: Step, previous: NDArray[np.int32] | None, result: Replay | None, *, traced: bool
) -> dict[str, NDArray[np.float32]]:
    """One step; the sketches of its ops if it is traced. What it draws goes into `result`."""
    ops: dict[str, NDArray[np.float32]] = {}
    if len(step.copies):
        if not backend.traits.copies_blocks:
            raise BackendError(f"step {step.index} copies blocks, which this device cannot (Traits.copies_blocks)")
        backend.copy_blocks(step.copies)
    batch = _fitted(step, previous, backend.traits.token_multiple)
    if traced:
        logits = backend.trace(batch, lambda name, value: ops.__setitem__(name, sketch(value)))
        ops["logits"] = sketch(np.array(backend.to_host(logits))[: len(step.batch.logit_rows)])
    else:
        logits = backend.forward(batch)
    if result is not None and step.token_ids is not None:
        _compare_tokens(backend, logits, step, result)
    return ops


def _fitted(step: Step, previous: NDArray[np.int32] | None, multiple: int) -> ForwardBatch:
    """The batch for a device that wants another padding and may not know tokens by reference."""
    batch, real = step.batch, int(step.batch.query_starts[-1])
    token_ids = batch.token_ids[:real].copy()
    if (missing := token_ids < 0).any():
        if previous is None:
            raise RecordError(f"step {step.index} continues one whose tokens are not in the recording")
        token_ids[missing] = previous[-1 - token_ids[missing]]
    padding, rows = -real % multiple, -len(batch.logit_rows) % multiple
    return dataclasses.replace(
        batch,
        token_ids=np.pad(token_ids, (0, padding)),
        positions=np.pad(batch.positions[:real], (0, padding)),
        slots=np.pad(batch.slots[:real], (0, padding), constant_values=-1),
        logit_rows=np.pad(batch.logit_rows, (0, rows)),
    )


def _compare_tokens(backend: Backend, logits: Any, step: Step, result: Replay) -> None:
    """Draw as the recorded step did; rows whose logits were changed by rules that are not recorded are left out."""
    assert step.token_ids is not None
    assert step.failed is not None
    host = np.array(backend.to_host(logits))
    drawn = backend.sample(logits, step.sampling).result().token_ids
    left_out = {*step.ruled.tolist(), *step.failed.tolist()}
    for row, (token, recorded) in enumerate(zip(drawn.tolist(), step.token_ids.tolist(), strict=True)):
        if row in left_out:
            continue
        result.num_tokens += 1
        if token != recorded:
            gap = float(host[row, token]) - float(host[row, recorded])
            result.other_tokens.append(OtherToken(step.index, row, recorded, token, gap))


def _first_difference(index: int, got: Sketches, want: Sketches, limit: float, result: Replay) -> Divergence | None:
    """The first op that both sides tell of and that differs by more than `limit`."""
    before: list[tuple[str, float]] = []
    for op, sketched in got.items():
        if op not in want:
            continue
        common = min(len(sketched), len(want[op]))  # one side may be padded
        errors = [sketch_error(sketched[i : i + 1], want[op][i : i + 1]) for i in range(common)]
        error = max(errors, default=0.0)
        before.append((op, error))
        result.max_error = max(result.max_error, error)
        if error > limit:
            return Divergence(index, op, error, tuple(before), int(np.argmax(errors)))
    return None
