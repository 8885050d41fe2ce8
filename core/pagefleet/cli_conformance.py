"""The command `pagefleet conformance`: the kit, run by pytest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from pagefleet.cli_options import Device
from pagefleet.conformance import LEVELS

HIGHEST = [*LEVELS][-1]


def conformance(
    device: Device = None,
    level: Annotated[str, typer.Option(metavar="|".join(LEVELS), help="Highest level to test.")] = HIGHEST,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write report.json, report.md and junit.xml there.")
    ] = None,
    pytest_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- PYTEST_ARGS]...", help="More for pytest, after --: -- -x -k cache."),
    ] = None,
) -> None:
    """Test a backend on this machine, level by level.

    Levels: L0 comes up and goes away, L1 logits of any batch, op by op, L2 the paged cache and the scheduler over it,
    L3 model families against transformers, L4 sampling, beams, streams and aborts, L5 determinism. What the backend
    says it cannot do is skipped and counted. Exits 1 if a test failed.

    Example: pagefleet conformance --device NAME --report build/conformance
    """
    try:
        import pytest
    except ImportError as error:
        raise ImportError("the conformance kit runs on pytest, which is not installed: pip install pytest") from error
    if level not in LEVELS:
        raise ValueError(f"--level is {level!r}; it must be one of {', '.join(LEVELS)}")
    from pagefleet.conformance.target import select_target

    info, index = select_target(device)  # here, so that what is wrong with it is one line
    kit = Path(__file__).parent / "conformance"
    arguments = [str(kit), "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(kit)]  # no one's settings
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # this command has imported the plugin already
    arguments += ["--conformance-level", level, "--target-device", f"{info.name}:{index}"]
    arguments += ["--conformance-report", str(report.absolute())] if report else []
    raise typer.Exit(int(pytest.main([*arguments, *(pytest_args or [])])))
