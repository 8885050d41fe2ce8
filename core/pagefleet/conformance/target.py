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


def find_target(config: pytest.Config) -> tuple[BackendInfo, int]:
    """The backend and device index that the command names."""
    if TARGET not in config.stash:
        surroundings = environment()
        name = config.getoption("--target-device") or surroundings.target_device
        try:
            config.stash[TARGET] = Plugins(surroundings.plugins).select(name)
        except BackendError as error:
            raise pytest.UsageError(str(error)) from error
    return config.stash[TARGET]
