"""The command `pagefleet contract`: the backend contract's versions, shown and compared."""

from __future__ import annotations

import json
from typing import Annotated

import typer

contract = typer.Typer(no_args_is_help=True, help="The contract between the engine and backends, by version.")

WHAT = "a version, as in 1.0, or a file that `contract show` wrote"
Old = Annotated[str, typer.Argument(metavar="OLD", help=f"{WHAT[0].upper()}{WHAT[1:]}.")]
Version = Annotated[str | None, typer.Argument(metavar="VERSION", help=f"Default: this engine's; else {WHAT}.")]


@contract.command()
def show(version: Version = None) -> None:
    """Print every type, member, signature and hook of a version as JSON.

    Example: pagefleet contract show > mine.json
    """
    from pagefleet.contract import describe, load

    typer.echo(json.dumps(describe() if version is None else load(version), indent=1))


@contract.command()
def diff(old: Old, new: Version = None) -> None:
    """Say what changed between two versions, and what of it a backend may stumble over. Exits 1 if anything does.

    Example: pagefleet contract diff 1.0
    """
    from pagefleet.contract import describe, load
    from pagefleet.contract import diff as compare

    changes = compare(load(old), describe() if new is None else load(new))
    for change in changes:
        typer.echo(str(change))
    if not changes:
        typer.echo("no difference")
    if any(change.breaking for change in changes):
        raise typer.Exit(1)
