"""The kit's command line options and its report, as a pytest plugin (entry point group `pytest11`).

The fixtures are in conftest.py. Tests without the marker `level` are none of this plugin's business.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pagefleet.conformance import LEVELS

if TYPE_CHECKING:
    from pagefleet.conformance.report import Report


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pagefleet", "pagefleet conformance")
    group.addoption(
        "--target-device",
        metavar="NAME",
        default=None,
        help="backend to test, NAME or NAME:INDEX; default: TARGET_DEVICE, else the automatic choice",
    )
    group.addoption("--level", choices=[*LEVELS], default=[*LEVELS][-1], help="highest level to test")
    group.addoption("--report", metavar="DIR", type=Path, help="write report.json, report.md and junit.xml to DIR")


@pytest.hookimpl(tryfirst=True)  # before pytest's own plugin looks at `xmlpath`
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "level(name): the level of the conformance kit that a test belongs to")
    folder = config.getoption("--report")
    if folder is not None and config.option.xmlpath is None:
        config.option.xmlpath = str(folder / "junit.xml")
    config.pluginmanager.register(_Session(config), "pagefleet-conformance-session")


class _Session:
    """One run of the kit: which tests are wanted, and what became of them."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.level_of: dict[str, str] = {}  # test -> its level
        self.report: Report | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        wanted, highest = [], self.config.getoption("--level")
        for item in items:
            marker = item.get_closest_marker("level")
            if marker is not None:
                self.level_of[item.nodeid] = marker.args[0]
            if marker is None or marker.args[0] <= highest:
                wanted.append(item)
        if len(wanted) < len(items):
            self.config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
            items[:] = wanted

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (level := self.level_of.get(report.nodeid)) is not None:
            self._report().add(level, report)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.report is not None:
            terminalreporter.section("pagefleet conformance")
            for line in self.report.table():
                terminalreporter.write_line(line)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        folder = self.config.getoption("--report")
        if self.report is not None and folder is not None:
            self.report.write(folder)

    def _report(self) -> Report:
        if self.report is None:
            from pagefleet.conformance.report import Report
            from pagefleet.conformance.target import find_target

            self.report = Report(self.config.getoption("--level"), find_target(self.config))
        return self.report
