"""AsyncLLM: the engine in a thread of its own, for servers and other asyncio programs.

The event loop is never blocked by a step, and the engine never waits for the event loop: commands go one way
through a queue, outputs the other way through `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from pagefleet.config import EngineConfig
from pagefleet.loading import load_engine
from pagefleet.request import RequestOutput
from pagefleet.sampling_params import InvalidRequest, SamplingParams

if TYPE_CHECKING:
    from pagefleet.outputs import Generation
    from pagefleet.text_engine import Prompt

logger = logging.getLogger("pagefleet")
Deliver = Callable[["RequestOutput | Exception"], None]


class AsyncLLM:
    """A model on a device, for asyncio. Keyword arguments are the fields of `EngineConfig`.

    It keeps its thread and the model until `close`.

    >>> async for output in llm.generate("Hello", SamplingParams(max_tokens=20), request_id="1"):
    ...     print(output.outputs[0].text)
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        self.config = EngineConfig(model=os.fspath(model), **options)
        self._engine = load_engine(self.config)
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()  # of `_closed`
        self._closed = False  # the last command has been given
        self._failure: Exception | None = None  # what ended the engine's thread before that
        self._generations: dict[str, tuple[Generation, Deliver]] = {}
        self._thread = threading.Thread(target=self._run, name="pagefleet-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, request_id: str, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """Complete a prompt, yielding what there is so far whenever there is more; the last is `finished`.

        Leaving the loop early aborts the request. A slow reader skips intermediate outputs and misses no text, each
        output holding all before it. Raises InvalidRequest.
        """
        if not isinstance(request_id, str):
            raise InvalidRequest(f"request_id must be a string, got {request_id!r:.80}")
        loop, mailbox = asyncio.get_running_loop(), Mailbox()
        params = SamplingParams() if sampling_params is None else sampling_params

        def deliver(item: RequestOutput | Exception) -> None:
            with suppress(RuntimeError):  # a closed loop has no readers
                loop.call_soon_threadsafe(mailbox.put, item)

        if not self._submit(lambda: self._start(prompt, params, request_id, priority, deliver)):
            raise self._failure or RuntimeError("this AsyncLLM is closed; make a new one")
        try:
            finished = False
            while not finished:
                output = await mailbox.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._submit(lambda: self._abort(request_id, deliver))

    async def abort(self, request_id: str) -> None:
        """End a request; whoever reads it gets what there is, with finish_reason `abort`. Unknown ids are ignored."""
        if not isinstance(request_id, str):
            raise InvalidRequest(f"request_id must be a string, got {request_id!r:.80}")
        self._submit(lambda: self._abort(request_id))

    def close(self) -> None:
        """Abort everything and give the device back. Whoever reads an output gets what there is."""
        self._submit(None)
        self._thread.join()

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- called from the event loop --------------------------------------------------------------------

    def _submit(self, command: Callable[[], None] | None) -> bool:
        """Have the engine's thread carry out a command, None being the last one. False: it takes no more."""
        with self._lock:
            if self._closed:
                return False
            self._closed = command is None
            self._commands.put(command)
            return True

    # -- called from the engine's thread ---------------------------------------------------------------

    def _run(self) -> None:
        """Obey and step until told to stop. However it ends, no reader is left waiting."""
        try:
            while self._obey(wait=not self._engine.has_work):
                for generation in self._engine.step():
                    self._deliver(generation)
            for request_id in list(self._generations):
                self._abort(request_id)
        except BaseException as error:
            logger.exception("the engine broke down")
            self._failure = RuntimeError(
                f"the engine broke down ({type(error).__name__}: {error}); make a new AsyncLLM"
            )
            for _, deliver in self._generations.values():
                deliver(self._failure)
            self._generations.clear()
            self._submit(None)
            self._obey(wait=False)  # tell those who came meanwhile
        self._engine.engine.close()

    def _obey(self, wait: bool) -> bool:
        """Carry out the commands that are there, waiting for one if asked to. False: it is time to stop."""
        try:
            while (command := self._commands.get(block=wait)) is not None:
                command()
                wait = False
            return False
        except Empty:
            return True

    def _start(self, prompt: Prompt, params: SamplingParams, request_id: str, priority: int, deliver: Deliver) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            if request_id in self._generations:
                raise InvalidRequest(f"request id {request_id!r} is in use; choose another")
            generation = self._engine.prepare(prompt, params, request_id=request_id, priority=priority, stream=True)
            self._engine.start(generation)
        except Exception as error:  # of one request: its caller gets it, the others go on
            deliver(error)
        else:
            self._generations[request_id] = generation, deliver

    def _deliver(self, generation: Generation) -> None:
        _, deliver = self._generations[generation.request_id]
        if generation.finished:
            del self._generations[generation.request_id]
        deliver(generation.output())

    def _abort(self, request_id: str, deliver: Deliver | None = None) -> None:
        """End a request; with `deliver`, only if it is that caller's."""
        generation, owner = self._generations.get(request_id, (None, None))
        if generation is not None and (deliver is None or deliver is owner):
            self._engine.abort(generation)
            self._deliver(generation)


class Mailbox:
    """The latest output of one request, or the error that ended it. Lives in the event loop."""

    def __init__(self) -> None:
        self._item: RequestOutput | Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, item: RequestOutput | Exception) -> None:
        self._item = item
        self._arrived.set()

    async def get(self) -> RequestOutput:
        await self._arrived.wait()
        self._arrived.clear()
        item = self._item
        if isinstance(item, RequestOutput):
            return item
        raise item if item is not None else RuntimeError("the mailbox is empty")
