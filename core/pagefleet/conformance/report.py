"""What the kit found, level by level: a table in the terminal, and `--conformance-report DIR` with three files.

`report.json` (`schema` 1) is one object:

- `backend`, `device` (index), `level` (the highest reached, null: none), `wanted` (the highest asked for), `partial`
  (some of its tests were left out or never came to be run: no level is reached)
- `devices`: [{`name`, `memory` (bytes, 0: unknown), `detail`}] and `evidence`, as the probe gave them
- `versions`: of pagefleet, its contract, Python, the platform, and the frameworks that are installed
- `levels`: {level: {`title`, `passed`, `failed`, `skipped`, `seconds`}}
- `skipped`: {reason: tests}, `failed`: [{`test`, `level`, `message`}]

`report.md` says the same to people, `junit.xml` to a CI. A level is reached if some test of it passed and none failed,
there and below.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagefleet._version import __version__
from pagefleet.backend import CONTRACT_VERSION
from pagefleet.conformance import LEVELS

if TYPE_CHECKING:
    import pytest

    from pagefleet.backend import BackendInfo

FRAMEWORKS = ("numpy", "torch", "triton", "onnxruntime", "jax", "tensorflow")
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Tally:
    """The tests of one level. A test that fails in its setup or teardown has failed."""

    passed: int
    failed: int
    skipped: int
    seconds: float


@dataclass(slots=True)
class Report:
    """Grows with each test's outcome; `target` is the backend that was tested, and its device."""

    wanted: str
    target: tuple[BackendInfo, int]
    partial: bool = False
    outcomes: dict[str, tuple[str, str]] = field(default_factory=dict)  # test -> its level; passed, skipped or failed
    seconds: dict[str, float] = field(default_factory=dict)  # of a level
    skipped: Counter[str] = field(default_factory=Counter)  # reason -> tests
    failed: dict[str, str] = field(default_factory=dict)  # test -> the first line of its error

    def add(self, level: str, outcome: pytest.TestReport) -> None:
        """Take in one phase (setup, call, teardown) of a test."""
        test = outcome.nodeid
        self.seconds[level] = self.seconds.get(level, 0.0) + outcome.duration
        if outcome.failed:
            self.outcomes[test] = level, "failed"
            self.failed[test] = _first_line(outcome)
        elif outcome.skipped:
            self.outcomes[test] = level, "skipped"
            self.skipped[_reason(outcome)] += 1
        else:
            self.outcomes.setdefault(test, (level, "passed"))

    @property
    def levels(self) -> dict[str, Tally]:
        """Of every level that had a test."""
        counts = Counter(self.outcomes.values())
        return {
            level: Tally(
                counts[level, "passed"], counts[level, "failed"], counts[level, "skipped"], self.seconds[level]
            )
            for level in sorted(self.seconds)
        }

    @property
    def level(self) -> str | None:
        """The highest level reached; None: not even L0."""
        reached = None
        for level, tally in () if self.partial else self.levels.items():
            if tally.failed:
                break
            if tally.passed:
                reached = level
        return reached

    def write(self, folder: Path) -> None:
        """report.json and report.md into `folder`."""
        (folder / "report.json").write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        (folder / "report.md").write_text(self.as_markdown(), encoding="utf-8")

    def as_json(self) -> dict[str, Any]:
        """The object described above."""
        info, index = self.target
        probe = info.probe()
        return {
            "schema": SCHEMA,
            "backend": info.name,
            "device": index,
            "level": self.level,
            "wanted": self.wanted,
            "partial": self.partial,
            "devices": [asdict(device) for device in probe.devices],
            "evidence": probe.evidence,
            "versions": versions(),
            "levels": {
                level: {"title": LEVELS[level], **asdict(tally), "seconds": round(tally.seconds, 3)}
                for level, tally in self.levels.items()
            },
            "skipped": dict(self.skipped),
            "failed": [
                {"test": test, "level": self.outcomes[test][0], "message": message}
                for test, message in self.failed.items()
            ],
        }

    def as_markdown(self) -> str:
        """A page of it."""
        found = self.as_json()
        devices = "; ".join(f"{each['name']} {each['detail']}".strip() for each in found["devices"])
        lines = [
            f"# {found['backend']}: {found['level'] or 'no level'} of {found['wanted']}{', in part' * self.partial}",
            "",
            f"- device {found['device']}: {devices or 'unnamed'}",
            f"- {found['evidence']}",
            *(f"- {name} {version}" for name, version in found["versions"].items()),
            "",
            "| level | | passed | failed | skipped | seconds |",
            "|---|---|---|---|---|---|",
            *(
                f"| {level} | {each['title']} | {each['passed']} | {each['failed']} | {each['skipped']} | "
                f"{each['seconds']:.1f} |"
                for level, each in found["levels"].items()
            ),
        ]
        if self.failed:
            lines += ["", "Failed:", "", *(f"- `{test}`: {message}" for test, message in self.failed.items())]
        if self.skipped:
            lines += ["", "Skipped:", "", *(f"- {number} x {reason}" for reason, number in self.skipped.most_common())]
        return "\n".join(lines) + "\n"

    def table(self) -> list[str]:
        """A line for each level, and one for what was reached."""
        info, index = self.target
        lines = [
            f"{level}  {tally.passed:4} passed, {tally.skipped:3} skipped{_failures(tally):12} {tally.seconds:7.1f} s  "
            f"{LEVELS[level]}"
            for level, tally in self.levels.items()
        ]
        reached = "was tested in part" if self.partial else f"reaches {self.level or 'no level'} of {self.wanted}"
        return [*lines, f"{info.name}:{index} {reached}"]


def _failures(tally: Tally) -> str:
    return f", {tally.failed} failed" if tally.failed else ""


def versions() -> dict[str, str]:
    """Name -> version of what a result depends on."""
    found = {
        "pagefleet": __version__,
        "contract": CONTRACT_VERSION,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    for name in FRAMEWORKS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _reason(outcome: pytest.TestReport) -> str:
    longrepr = outcome.longrepr
    reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return reason.removeprefix("Skipped: ")


def _first_line(outcome: pytest.TestReport) -> str:
    crash = getattr(outcome.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(outcome.longrepr)
    return text.strip().splitlines()[0] if text.strip() else f"failed in {outcome.when}"
