"""The hooks a plugin may implement. They register things and nothing else: pluggy is never on the step path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from pagefleet.backend import BackendInfo
    from pagefleet.models import ModelFamily

hookspec = pluggy.HookspecMarker("pagefleet")
hookimpl = pluggy.HookimplMarker("pagefleet")


@hookspec
def pagefleet_backends() -> list[BackendInfo]:
    """The backends this plugin brings. An entry point named after its backend is the only one imported for it."""
    raise NotImplementedError


@hookspec
def pagefleet_models() -> list[ModelFamily]:
    """The model families this plugin brings: a checkpoint's `model_type` and how its config becomes a `ModelSpec`."""
    raise NotImplementedError
