"""The kit's command line options and its report, as a pytest plugin (entry point group `pytest11`).

The fixtures are in conftest.py. Tests without the marker `conformance_level` are none of this plugin's business.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pagefleet.conformance import LEVELS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefleet.conformance.report import Report

MARKER = "conformance_level"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pagefleet", "pagefleet conformance")
    group.addoption(
        "--target-device",
        metavar="NAME",
        default=None,
        help="backend to test, NAME or NAME:INDEX; default: TARGET_DEVICE, else the automatic choice",
    )
    group.addoption(
        "--conformance-level", choices=[*LEVELS], default=[*LEVELS][-1], help="highest level of the kit to test"
    )
    group.addoption(
        "--conformance-report", metavar="DIR", type=Path, help="write report.json, report.md and junit.xml to DIR"
    )


@pytest.hookimpl(tryfirst=True)  # before pytest's own plugin looks at `xmlpath`
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARKER}(name): the level of pagefleet's kit that a test belongs to")
    folder = config.getoption("--conformance-report")
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise pytest.UsageError(f"--conformance-report: {error}") from error
        if getattr(config.option, "xmlpath", "none") is None:
            config.option.xmlpath = str(folder / "junit.xml")
    config.pluginmanager.register(_Session(config), "pagefleet-conformance-session")


class _Session:
    """One run of the kit: which tests are wanted, and what became of them."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.level_of: dict[str, str] = {}  # test -> its level
        self.above: set[str] = set()  # tests left out for their level
        self.report: Report | None = None
        self.partial = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        highest = self.config.getoption("--conformance-level")
        for item in items:
            level = _level(item)
            if level is not None:
                self.level_of[item.nodeid] = level
                if level > highest:
                    self.above.add(item.nodeid)
        if self.above:
            self.config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self.above])
            items[:] = [item for item in items if item.nodeid not in self.above]

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        left_out = {item.nodeid for item in items}
        self.partial |= bool(left_out & self.level_of.keys() - self.above)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (level := self.level_of.get(report.nodeid)) is not None:
            self._report().add(level, report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if self.report is None:
            return
        self.report.partial = self.partial or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        folder = self.config.getoption("--conformance-report")
        if folder is not None:
            self.report.write(folder)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.report is not None:
            terminalreporter.section("pagefleet conformance")
            for line in self.report.table():
                terminalreporter.write_line(line)
            if self.report.failed:
                terminalreporter.write_line("What a failure means: docs/backends.md, section 5.")

    def _report(self) -> Report:
        if self.report is None:
            from pagefleet.conformance.report import Report
            from pagefleet.conformance.target import find_target

            self.report = Report(self.config.getoption("--conformance-level"), find_target(self.config))
        return self.report


def _level(item: pytest.Item) -> str | None:
    """The level a test is marked with; None: it is no test of the kit."""
    marker = item.get_closest_marker(MARKER)
    level = marker.args[0] if marker is not None and marker.args else None
    return level if level in LEVELS else None
