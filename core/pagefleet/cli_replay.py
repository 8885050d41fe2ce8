"""The command `pagefleet replay`: a recording on a device, and where it parts."""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path
from typing import Annotated

import typer

from pagefleet.cli_options import Device


def replay(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What LLM(model, record=DIR) wrote.")],
    device: Device = None,
    bisect: Annotated[bool, typer.Option("--bisect", help="Name the first step and op that differ.")] = False,
    model: Annotated[str | None, typer.Option(help="Where the model is now, if not where it was.")] = None,
    tolerance: Annotated[float | None, typer.Option(help="Relative error of an op that counts as different.")] = None,
) -> None:
    """Run a recording's steps on a device, and compare the tokens drawn with those recorded.

    With --bisect every op is compared with the recorded digest (record_ops=True) or, without digests, with the device
    that was recorded. Exits 1 if anything differs.

    Example: pagefleet replay run1 --device NAME --bisect
    """
    from rich.console import Console
    from rich.progress import track

    from pagefleet.record import Recording
    from pagefleet.replay import replay as run

    results = run(Recording(folder), device=device, model=model, bisect=bisect, tolerance=tolerance)
    shown = track(results, "Steps", console=Console(stderr=True), disable=not sys.stderr.isatty())
    if (result := next(iter(deque(shown, maxlen=1)), None)) is None:
        raise ValueError(f"{folder} has no whole step in it")
    lines = [f"{result.device} against {result.against}: {result.num_steps} steps, {result.num_tokens} tokens drawn"]
    if bisect:
        lines.append(f"largest relative error of an op: {result.max_error:.1e}")
    if result.other_tokens:
        first = result.other_tokens[0]
        lines.append(
            f"{len(result.other_tokens)} tokens differ, the first in step {first.step}, row {first.row}: {first.drawn} "
            f"instead of {first.recorded}, {first.gap:.2g} more likely here (in log-probability)"
        )
    if (found := result.divergence) is not None:
        lines += [f"  {error:9.1e}  {op}" for op, error in found.before[-6:]]
        lines.append(f"DIVERGES in step {found.step} at {found.op}, token {found.token}: error {found.error:.1e}")
    lines.append("equal" if result.equal else "not equal")
    sys.stdout.write("\n".join(lines) + "\n")
    raise typer.Exit(0 if result.equal else 1)
