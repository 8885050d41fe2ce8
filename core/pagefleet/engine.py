"""Engine: one device, one scheduler, and the loop between them.

The next step is planned while the device runs the last one. A token not sampled yet is named in the plan by
reference; a device that finishes before it returns is driven from a thread of its own, so that both go on at once.
The engine knows nothing about text.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from pagefleet.batch import build_batch, build_sampling
from pagefleet.sampling_params import InvalidRequest
from pagefleet.table import blocks_for

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefleet.backend import Backend, ForwardBatch, PendingTokens
    from pagefleet.request import FinishReason, Request
    from pagefleet.sampler import SamplingBatch
    from pagefleet.scheduler import Scheduler, StepPlan


class Engine:
    """Runs requests on a backend. Not thread-safe: one caller adds, steps and aborts."""

    def __init__(self, backend: Backend, scheduler: Scheduler, *, pipeline: bool = True) -> None:
        self.backend, self.scheduler = backend, scheduler
        self.requests: dict[str, Request] = {}
        self._depth = 1 if pipeline else 0  # steps that may be under way while the next one is planned
        self._in_flight: deque[tuple[StepPlan, PendingTokens]] = deque()
        self._device = DeviceQueue(backend)

    def add(self, request: Request) -> None:
        """Take a request in. Raises InvalidRequest if it could never run."""
        family = {each.request_id: each for each in (request, *request.siblings)}
        for request_id in family:
            if request_id in self.requests:
                raise InvalidRequest(f"request id {request_id!r} is in use; choose another")
        self._check_fits(request)
        self.requests |= family
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request now; an id that is not there has ended already."""
        if request_id in self.requests:
            self.finish(self.requests[request_id], "abort")

    def finish(self, request: Request, reason: FinishReason, stop_reason: str | None = None) -> None:
        """End a request now, for a reason the scheduler does not see (or saw differently)."""
        self.requests.pop(request.request_id, None)
        self.scheduler.finish(request, reason, stop_reason)
        if request.beam is not None:
            request.beam.end(self.scheduler, reason)
        request.finish_reason, request.stop_reason = reason, stop_reason

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Request]:
        """Plan and launch a step, take in the one before. Returns requests that finished or that somebody watches."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self._in_flight.append((plan, self._launch(plan)))
        if len(self._in_flight) > self._depth or (plan is None and self._in_flight):
            return self._commit()
        return []

    def close(self) -> None:
        """Drop what is under way and give the device back."""
        self._device.close()
        self.backend.close()

    def _launch(self, plan: StepPlan) -> PendingTokens:
        table, traits = self.scheduler.table, self.backend.traits
        batch = build_batch(plan, table, traits.token_multiple)
        return self._device.run(plan.copies, batch, build_sampling(plan, table))

    def _commit(self) -> list[Request]:
        plan, pending = self._in_flight.popleft()
        try:
            sampled = pending.result()
        except Exception as error:  # whatever the device raised, it ends the step's requests and not the engine
            updated = self._discard(plan, error)
        else:
            updated = self.scheduler.commit(plan, sampled)
        for request in updated:
            if request.finished:
                self.requests.pop(request.request_id, None)
        return updated

    def _discard(self, plan: StepPlan, error: Exception) -> list[Request]:
        """A step failed, and with it those launched after it, which read what it should have written."""
        failed = self.scheduler.discard(plan, error)
        for later, pending in self._in_flight:
            with suppress(Exception):
                pending.result()
            failed += self.scheduler.discard(later, error)
        self._in_flight.clear()
        return failed

    def _check_fits(self, request: Request) -> None:
        width = request.beam.width if request.beam is not None else 1
        if width > self.scheduler.table.num_rows:
            raise InvalidRequest(
                f"request {request.request_id!r} wants {width} sequences at once, max_num_seqs is "
                f"{self.scheduler.table.num_rows}; lower beam_width or raise max_num_seqs"
            )
        wanted = width * blocks_for(request.length_limit - 1, self.scheduler.table.block_size)
        if wanted > self.scheduler.pool.num_blocks:
            raise InvalidRequest(
                f"request {request.request_id!r} may grow to {request.length_limit} tokens in {width} sequences: "
                f"{wanted} KV blocks, the pool has {self.scheduler.pool.num_blocks}; "
                "lower max_tokens or beam_width, or raise num_blocks"
            )


class DeviceQueue:
    """A backend's steps, in order. Each knows the tokens of the one before.

    A device that works while the host goes on is called directly; one that does not, from a thread of its own.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._thread = None if backend.traits.asynchronous else ThreadPoolExecutor(1, "pagefleet-device")
        self._previous: PendingTokens | None = None

    def run(self, copies: NDArray[np.int32], batch: ForwardBatch, sampling: SamplingBatch) -> PendingTokens:
        """Launch a step; the result is there when it is asked for."""
        previous = self._previous
        if self._thread is None:
            try:
                self._previous = self._step(copies, batch, sampling, previous)
            except Exception as error:  # found at launch; told where the result is asked for, like any other
                self._previous = Future()
                self._previous.set_exception(error)
        else:
            self._previous = self._thread.submit(lambda: self._step(copies, batch, sampling, previous).result())
        return self._previous

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _step(
        self,
        copies: NDArray[np.int32],
        batch: ForwardBatch,
        sampling: SamplingBatch,
        previous: PendingTokens | None,
    ) -> PendingTokens:
        if len(copies):
            self._backend.copy_blocks(copies)
        if previous is not None and not self._backend.traits.gathers_tokens:
            batch = _fill_in(batch, previous)
        return self._backend.sample(self._backend.forward(batch), sampling)


def _fill_in(batch: ForwardBatch, previous: PendingTokens) -> ForwardBatch:
    """The batch with the tokens it names by reference in their places."""
    missing = batch.token_ids < 0
    if not missing.any():
        return batch
    token_ids = batch.token_ids.copy()
    token_ids[missing] = previous.result().token_ids[-1 - token_ids[missing]]
    return dataclasses.replace(batch, token_ids=token_ids)
