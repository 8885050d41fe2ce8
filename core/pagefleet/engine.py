"""Engine: one device, one scheduler, and the loop between them.

The next step is planned while the device runs the last one. A token not sampled yet is named in the plan by
reference; a device that finishes before it returns is driven from a thread of its own, so that both go on at once.
The engine knows nothing about text.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np

from pagefleet.backend import BackendError
from pagefleet.batch import build_batch, build_sampling
from pagefleet.sampling_params import InvalidRequest
from pagefleet.table import blocks_for

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefleet.backend import Backend, ForwardBatch, PendingTokens
    from pagefleet.request import FinishReason, Request
    from pagefleet.sampler import SampledTokens, SamplingBatch
    from pagefleet.scheduler import Scheduler
    from pagefleet.table import StepPlan


logger = logging.getLogger("pagefleet")


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
        self.scheduler.add(request)
        self.requests |= family

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
        self._device.check_usable()
        plan = None
        if len(self._in_flight) <= self._depth:  # it is not if the waiting for a step was interrupted
            with self._whole() as failed:
                plan = self.scheduler.schedule()
                if plan is not None:
                    self._in_flight.append((plan, self._launch(plan)))
            if failed:
                return failed
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
        plan, pending = self._in_flight[0]
        failure: Exception | None = None
        try:
            sampled = pending.result()  # an interrupt ends the waiting and changes nothing
        except Exception as error:  # whatever the device raised, it ends the step's requests and not the engine
            failure = error
        updated: list[Request] = []
        with self._whole() as failed:
            self._in_flight.popleft()
            updated = self.scheduler.commit(plan, sampled) if failure is None else self._discard(plan, failure)
            for request in updated:
                if request.finished:
                    self.requests.pop(request.request_id, None)
        return failed or updated

    @contextmanager
    def _whole(self) -> Iterator[list[Request]]:
        """All of the block is done, or the engine starts afresh: a table half written would spoil later requests.

        Yields a list, which has every request afterwards if an exception has ended them all. An interrupt ends them
        too, and goes on.
        """
        failed: list[Request] = []
        try:
            yield failed
        except Exception as error:
            logger.exception("a step went wrong: all requests end with it")
            failed += self._start_afresh(error)
        except BaseException:
            self._start_afresh(RuntimeError("interrupted amid a step"))
            raise

    def _start_afresh(self, error: Exception) -> list[Request]:
        while self._in_flight:
            with suppress(Exception):
                self._in_flight.popleft()[1].result()
        requests, self.requests = list(self.requests.values()), {}
        self.scheduler.reset(requests, error)
        return requests

    def _discard(self, plan: StepPlan, error: Exception) -> list[Request]:
        """A step failed, and with it those launched after it, which read what it should have written."""
        logger.error("the device failed: the requests of this step end with it", exc_info=error)
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
        self._process, self._closed = os.getpid(), False

    def check_usable(self) -> None:
        """Raises BackendError after `close`, and in a forked process, which has the memory but not the thread."""
        if self._closed:
            raise BackendError("this engine is closed; make a new one")
        if os.getpid() != self._process:
            raise BackendError("this engine belongs to the process it was made in; make one in the forked process")

    def run(self, copies: NDArray[np.int32], batch: ForwardBatch, sampling: SamplingBatch) -> PendingTokens:
        """Launch a step; the result, or what the device raised, is there when it is asked for."""
        previous = self._previous
        if self._thread is None:
            try:
                self._previous = self._step(copies, batch, sampling, previous)
            except Exception as error:
                self._previous = Future()
                self._previous.set_exception(error)
        else:
            self._previous = self._thread.submit(self._result, copies, batch, sampling, previous)
        return self._previous

    def close(self) -> None:
        self._closed = True
        if self._thread is not None:
            self._thread.shutdown()

    def _result(
        self,
        copies: NDArray[np.int32],
        batch: ForwardBatch,
        sampling: SamplingBatch,
        previous: PendingTokens | None,
    ) -> SampledTokens:
        """A step and its result, in the device's thread."""
        try:
            return self._step(copies, batch, sampling, previous).result()
        except Exception:
            raise
        except BaseException as error:  # such as SystemExit, which must not end the thread that asks for the result
            raise BackendError(f"the device raised {type(error).__name__}: {error}") from error

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
