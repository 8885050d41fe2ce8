"""The matrix: reads `matrix.toml` and says what is wrong with it. Runs nothing."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MATRIX = ROOT / "ci/matrix.toml"
LEVELS = ("L0", "L1", "L2", "L3", "L4", "L5")  # the kit's


class MatrixError(Exception):
    """The file, or the name of a cell, is wrong; the message says what would do."""


def _nothing() -> Mapping[str, str]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Cell:
    """One environment and what runs in it; the fields are the keys in `matrix.toml`. Paths are the checkout's."""

    name: str  # the table's
    about: str  # one line for people
    python: str  # "3.11"
    torch: str  # "2.13.0", "latest", or "none": not installed
    devices: tuple[str, ...] = ()  # backends that go through the kit
    level: str | None = None  # of the kit; there is one if there are devices
    commands: tuple[str, ...] = ()  # lines for the shell, run in the checkout after the kit
    needs: Mapping[str, str] = field(default_factory=_nothing)  # a file, or a command on PATH -> what its absence means
    nightly: bool = False  # in workflows: by schedule or by hand only
    runner: tuple[str, ...] = ()  # in workflows: labels of a self-hosted runner; none: a hosted one
    system: tuple[str, ...] = ()  # in workflows: Debian packages that a hosted runner lacks

    install: bool = True  # false: there are only commands, which make what they need
    constraints: str | None = None  # pip's file of tested versions
    build: str | None = None  # compiles kernels: a script of build_scripts and its options
    built_by: str | None = None  # another cell: its wheel is installed, instead of one that is built here
    extras: tuple[str, ...] = ()  # of pagefleet
    leave_out: tuple[str, ...] = ()  # requirements of pagefleet that are not installed
    packages: tuple[str, ...] = ()  # what else pip installs
    plugins: tuple[str, ...] = ()  # their repositories: folders of the checkout, or what pip takes (git+https://...)
    fresh: bool = False  # in a temporary folder outside the checkout, nothing reused
    env: Mapping[str, str] = field(default_factory=_nothing)  # variables of the build, the kit and the commands

    def files(self) -> list[str]:
        """Paths in the checkout that must be there for the cell to run."""
        build = self.build.split()[:1] if self.build else []
        constraints = [self.constraints] if self.constraints else []
        return [*constraints, *build, *filter(is_folder, self.plugins)]


@dataclass(frozen=True, slots=True)
class Matrix:
    """All cells, in the file's order."""

    cells: Mapping[str, Cell]

    def cell(self, name: str) -> Cell:
        if name not in self.cells:
            raise MatrixError(f"there is no cell {name!r}; the cells are {', '.join(self.cells)}")
        return self.cells[name]


def is_folder(plugin: str) -> bool:
    """Whether it is a folder of the checkout, not something that pip fetches."""
    return "://" not in plugin


def read_matrix(path: Path = MATRIX) -> Matrix:
    """MatrixError names the table, the key and what it may be."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise MatrixError(f"{path}: {error}") from error
    if unknown := sorted(document.keys() - {"cells"}):
        raise MatrixError(f"{path}: unknown table {unknown[0]!r}; there is only 'cells'")
    cells = {name: _cell(f"{path}: cells.{name}", name, table) for name, table in document.get("cells", {}).items()}
    for cell in cells.values():
        builders = [each for each in cells.values() if each.install and not each.fresh and not each.built_by]
        if cell.built_by and cell.built_by not in (names := [each.name for each in builders]):
            raise MatrixError(f"{path}: cells.{cell.name}: built_by is {cell.built_by!r}; it must be {_any_of(names)}")
    return Matrix(cells)


def _cell(where: str, name: str, table: Any) -> Cell:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise MatrixError(f"{where}: a cell's name is of small letters, digits and -")
    if not isinstance(table, dict):
        raise MatrixError(f"{where} is {table!r}; it must be a table")
    fields = {each.name: each for each in dataclasses.fields(Cell) if each.name != "name"}
    if unknown := sorted(table.keys() - fields.keys()):
        raise MatrixError(f"{where}: unknown key {unknown[0]!r}; it must be {_any_of(fields)}")
    absent = (dataclasses.MISSING, dataclasses.MISSING)
    required = [key for key, each in fields.items() if (each.default, each.default_factory) == absent]
    if missing := [key for key in required if key not in table]:
        raise MatrixError(f"{where}: {missing[0]!r} is missing; every cell has {', '.join(required)}")
    values = {key: _value(f"{where}: {key}", str(fields[key].type), value) for key, value in table.items()}
    cell = Cell(name=name, **values)
    _check(where, cell)
    return cell


def _value(where: str, annotation: str, value: Any) -> Any:
    """As the field has it: lists become tuples."""
    strings = isinstance(value, list | dict) and all(isinstance(each, str) for each in _values(value))
    if annotation.startswith("tuple"):
        if not isinstance(value, list) or not strings:
            raise MatrixError(f"{where} is {value!r}; it must be a list of strings")
        return tuple(value)
    if annotation.startswith("Mapping"):
        if not isinstance(value, dict) or not strings:
            raise MatrixError(f"{where} is {value!r}; it must be a table of strings")
        return MappingProxyType(value)
    wanted = bool if annotation == "bool" else str
    if not isinstance(value, wanted):
        raise MatrixError(f"{where} is {value!r}; it must be {'true or false' if wanted is bool else 'a string'}")
    return value


def _values(value: list[Any] | dict[str, Any]) -> list[Any]:
    return [*value.values()] if isinstance(value, dict) else value


def _check(where: str, cell: Cell) -> None:
    """What one key says of another."""
    if not re.fullmatch(r"3\.\d+", cell.python):
        raise MatrixError(f"{where}: python is {cell.python!r}; it must be a version such as '3.11'")
    if not re.fullmatch(r"none|latest|\d+(\.\d+)+", cell.torch):
        raise MatrixError(f"{where}: torch is {cell.torch!r}; it must be 'none', 'latest' or a version: '2.13.0'")
    if cell.level is not None and cell.level not in LEVELS:
        raise MatrixError(f"{where}: level is {cell.level!r}; it must be {_any_of(LEVELS)}")
    if bool(cell.devices) != bool(cell.level):
        raise MatrixError(f"{where}: devices and level come together: backends for the kit, and how far it goes")
    if cell.build and cell.built_by:
        raise MatrixError(f"{where}: build and built_by exclude each other: kernels are built here, or there")
    if not cell.install and cell.devices:
        raise MatrixError(f"{where}: devices take an environment; install must not be false")
    if not (cell.devices or cell.commands or cell.build):
        raise MatrixError(f"{where}: nothing to run; it takes devices with a level, commands, or build")


def _any_of(choices: Any) -> str:
    return f"one of {', '.join(choices)}"
