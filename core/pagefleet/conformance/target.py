"""The backend under test, found as the engine finds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pagefleet.backend import BackendError
from pagefleet.config import environment
from pagefleet.plugins import Plugins

if TYPE_CHECKING:
    from pagefleet.backend import BackendInfo

TARGET = pytest.StashKey["tuple[BackendInfo, int]"]()


def find_plugins() -> Plugins:
    """Those that the environment allows."""
    return Plugins(environment().plugins)


def select_target(name: str | None) -> tuple[BackendInfo, int]:
    """The backend and device index of NAME or NAME:INDEX, None: as the environment says; BackendError if unusable."""
    return find_plugins().select(name or environment().target_device)


def find_target(config: pytest.Config) -> tuple[BackendInfo, int]:
    """The one that the command names."""
    if TARGET not in config.stash:
        try:
            config.stash[TARGET] = select_target(config.getoption("--target-device"))
        except BackendError as error:
            raise pytest.UsageError(str(error)) from error
    return config.stash[TARGET]
