"""The kit's command line option, as a pytest plugin (entry point group `pytest11`). The fixtures are in conftest.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pagefleet", "pagefleet conformance")
    group.addoption(
        "--target-device",
        metavar="NAME",
        default=None,
        help="backend to test, NAME or NAME:INDEX; default: TARGET_DEVICE, else the automatic choice",
    )
