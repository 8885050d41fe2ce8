"""The progress bar of `LLM.generate`: prompts done, tokens per second in and out."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from pagefleet.outputs import Generation


class Progress:
    """Follows generations to their ends. Shown on a terminal's standard error only, so that logs stay clean."""

    def __init__(self, generations: list[Generation], *, shown: bool) -> None:
        self._left = {generation.request_id: generation for generation in generations}
        self._start = time.perf_counter()
        self._num_in = self._num_out = 0
        self._bar: Bar | None = None
        if shown and sys.stderr is not None and sys.stderr.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task("Generating", total=len(generations), speed="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, changed: list[Generation]) -> None:
        """Count the generations among `changed` that have finished."""
        if self._bar is None:
            return
        for generation in changed:
            if generation.finished and self._left.pop(generation.request_id, None) is not None:
                self._num_in += len(generation.requests[0].prompt_token_ids)
                self._num_out += sum(len(request.output_token_ids) for request in generation.requests)
                seconds = time.perf_counter() - self._start
                speed = f"{self._num_in / seconds:,.0f} tok/s in, {self._num_out / seconds:,.0f} tok/s out"
                self._bar.update(self._task, advance=1, speed=speed)


def _bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, TextColumn("{task.fields[speed]}"), console=Console(stderr=True))
