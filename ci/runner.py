"""Runs one cell: an environment of its own, the package as a user gets it, the kit, and what else the cell says."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matrix import ROOT, Cell, Matrix, is_folder

SOURCES = ("core", "backends", "kernels", "build_scripts", "pyproject.toml", "README.md", "LICENSE", ".gitignore")
BUILT = ("*.so", "_*.json", "__pycache__")  # what the checkout's own builds leave among them


class Failed(Exception):
    """A step went wrong; the message says which."""


class Absent(Exception):
    """This machine lacks what the cell needs; the message says what."""


def run_cell(matrix: Matrix, name: str, build: Path) -> str:
    """What it reached, in words; Failed or Absent otherwise. Everything made lies in `build`/NAME."""
    cell = matrix.cell(name)
    check_needs(cell)
    if missing := [file for file in cell.files() if not (ROOT / file).exists()]:
        raise Failed(f"there is no {missing[0]}")
    folder = build / name
    shutil.rmtree(folder / "report", ignore_errors=True)
    with _workplace(cell, folder) as work:
        place = Place(cell, work)
        if cell.install:
            place.make_environment()
            place.install(_wheel(matrix, cell, place, build))
        results = [place.run_kit(device, folder / "report") for device in cell.devices]
        for command in cell.commands:
            place.run(command)
    return summary(results) if results else "; ".join(cell.commands or (str(cell.build),))


def check_needs(cell: Cell) -> None:
    """Absent names the first thing that is not there."""
    for need, reason in cell.needs.items():
        found = (ROOT / need).exists() if "/" in need else shutil.which(need)
        if not found:
            raise Absent(reason)
    find_python(cell.python)


def find_python(version: str) -> str:
    """An interpreter of that version; Absent if none is on PATH."""
    for candidate in (sys.executable, f"python{version}", "python3"):
        command = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        with contextlib.suppress(OSError):
            if subprocess.run(command, capture_output=True, text=True).stdout.strip() == version:
                return candidate
    raise Absent(f"no python{version} on PATH")


def summary(reports: Sequence[dict[str, Any]]) -> str:
    """Of the kit's reports: what was reached and how many tests say so."""
    named = len(reports) > 1
    reached = [f"{each['backend']} {reach(each)}" if named else reach(each) for each in reports]
    levels = [level for each in reports for level in each["levels"].values()]
    passed, skipped = (sum(level[outcome] for level in levels) for outcome in ("passed", "skipped"))
    return f"{', '.join(reached)}, {passed} passed, {skipped} skipped"


def reach(report: dict[str, Any]) -> str:
    return f"reaches {report['level'] or 'no level'} of {report['wanted']}"


@contextlib.contextmanager
def _workplace(cell: Cell, folder: Path) -> Iterator[Path]:
    if not cell.fresh:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix=f"{cell.name}-") as work:
        yield Path(work)


def _wheel(matrix: Matrix, cell: Cell, place: Place, build: Path) -> Path:
    """pagefleet's: built in this cell's environment, or in another's."""
    if not cell.built_by:
        return place.build_wheel()
    other = matrix.cell(cell.built_by)
    check_needs(other)
    with _workplace(other, build / other.name) as work:
        builder = Place(other, work)
        builder.make_environment()
        return builder.build_wheel()


class Place:
    """A cell in a folder. A user's settings do not reach it; those of pip and of the compiler do."""

    def __init__(self, cell: Cell, work: Path) -> None:
        self.cell, self.work = cell, work
        self.venv = work / "venv"
        self.python = self.venv / "bin/python"
        strangers = ("PAGEFLEET_", "PYTHONPATH", "PYTHONHOME", "TARGET_DEVICE")
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(strangers)}
        self.env |= {
            "PATH": f"{self.venv / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "PYTHON": find_python(cell.python),  # this and three more: as the Makefile knows them
            "VENV": str(self.venv.relative_to(ROOT) if self.venv.is_relative_to(ROOT) else self.venv),
            "TORCH": self._torch() or "torch",
            "CONSTRAINTS": cell.constraints or "",
            **cell.env,
        }

    def make_environment(self) -> None:
        """A venv with torch; the one that is there, if it was made for the same declaration and that is a version."""
        constraints = (ROOT / self.cell.constraints).read_text() if self.cell.constraints else ""
        declared = json.dumps({**dataclasses.asdict(_plain(self.cell)), "constraints": constraints}, indent=1)
        stamp = self.work / "declared.json"
        kept = self.python.exists() and stamp.is_file() and stamp.read_text() == declared
        if kept and self.cell.torch != "latest":
            return
        stamp.unlink(missing_ok=True)
        shutil.rmtree(self.venv, ignore_errors=True)
        self._call([self.env["PYTHON"], "-m", "venv", str(self.venv)], "making the environment")
        if torch := self._torch():
            self._pip("install", torch)  # first and alone: pip takes the build that is at hand before others ask for it
        stamp.write_text(declared)

    def build_wheel(self) -> Path:
        """pagefleet's, of a copy of the sources: the checkout's own kernels are neither used nor touched."""
        sources = self.work / "sources"
        sources.mkdir(exist_ok=True)
        for name in SOURCES:
            source, target = ROOT / name, sources / name
            if source.is_dir():
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(source, target, ignore=shutil.ignore_patterns(*BUILT))
            else:
                shutil.copy2(source, target)
        if self.cell.build:  # its objects stay in sources/build
            self._call([str(self.python), *self.cell.build.split()], self.cell.build, cwd=sources)
        return self._pack([str(sources)], self.work / "wheel")[0]

    def install(self, wheel: Path) -> None:
        """The wheel, the plugins' wheels, and what they require."""
        shutil.rmtree(self.work / "plugins", ignore_errors=True)
        plugins = [self._copy(plugin) if is_folder(plugin) else plugin for plugin in self.cell.plugins]
        wheels = [*map(str, self._pack(plugins, self.work / "wheels"))] if plugins else []
        extras = f"[{','.join(self.cell.extras)}]" if self.cell.extras else ""
        required = self._requirements() if self.cell.leave_out else [f"{wheel}{extras}", *wheels]
        self._pip("install", "pytest", *self.cell.packages, *required)
        self._pip("install", "--no-deps", "--force-reinstall", str(wheel), *wheels)

    def run_kit(self, device: str, report: Path) -> dict[str, Any]:
        """The kit's report; Failed if a test failed, or if none was run."""
        folder = report / device if len(self.cell.devices) > 1 else report
        command = [str(self.venv / "bin/pagefleet"), "conformance", "--device", device]
        command += ["--level", str(self.cell.level), "--report", str(folder.absolute())]
        status = self._status(command, cwd=self.work)
        with contextlib.suppress(OSError):
            found: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
            if status == 0 and not found["failed"]:
                return found
            raise Failed(f"conformance of {device}: {len(found['failed'])} tests failed, {reach(found)}")
        raise Failed(f"conformance of {device}: exit status {status}, no report")

    def run(self, command: str) -> None:
        """A line for the shell, in the checkout."""
        self._call(["sh", "-c", command], command, shown=command)

    def _torch(self) -> str | None:
        return {"none": None, "latest": "torch"}.get(self.cell.torch, f"torch=={self.cell.torch}")

    def _requirements(self) -> list[str]:
        """What pagefleet requires, but for what is left out."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        optional = project["optional-dependencies"]
        required = [*project["dependencies"], *(each for extra in self.cell.extras for each in optional[extra])]
        return [each for each in required if re.split(r"[^\w.-]", each)[0] not in self.cell.leave_out]

    def _copy(self, plugin: str) -> str:
        """A folder of the checkout as a repository of its own."""
        target = self.work / "plugins" / Path(plugin).name
        shutil.copytree(ROOT / plugin, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        return str(target)

    def _pack(self, sources: Sequence[str], folder: Path) -> list[Path]:
        shutil.rmtree(folder, ignore_errors=True)
        self._pip("wheel", "--no-deps", "--wheel-dir", str(folder), *sources)
        return sorted(folder.glob("*.whl"))

    def _pip(self, verb: str, *arguments: str) -> None:
        constraints = ["-c", str(ROOT / self.cell.constraints)] if self.cell.constraints else []
        command = [str(self.python), "-m", "pip", "--quiet", "--disable-pip-version-check", verb]
        self._call([*command, *(constraints if verb == "install" else []), *arguments], f"pip {verb}", cwd=self.work)

    def _call(self, command: Sequence[str], what: str, *, cwd: Path = ROOT, shown: str = "") -> None:
        if status := self._status(command, cwd=cwd, shown=shown):
            raise Failed(f"{what}: exit status {status}")

    def _status(self, command: Sequence[str], *, cwd: Path, shown: str = "") -> int:
        print(f"+ {shown or ' '.join(command)}", flush=True)
        try:
            return subprocess.run(command, cwd=cwd, env=self.env).returncode
        except OSError as error:
            print(error, file=sys.stderr, flush=True)
            return 127


def _plain(cell: Cell) -> Cell:
    """With dicts, which can be copied and written."""
    return dataclasses.replace(cell, needs=dict(cell.needs), env=dict(cell.env))
