"""How a shared library is compiled ahead of time: the compiler, objects in parallel, link, checks, manifest.

This module knows compilers and files; it does not know what is compiled (cpu.py does). Plain Python, no torch imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMPILERS = ("g++", "clang++", "c++")  # what is looked for if CXX is not set
OLDEST = {"g++": 11, "clang": 14}  # know every instruction set that is asked for by name
WAY_OUT = (
    "install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++) or set CXX to one that is there; "
    "without the kernels pagefleet runs on its reference ops, several times slower"
)


class BuildError(Exception):
    """The library cannot be built; the message says what was found and the way out."""


class NoCompiler(BuildError):
    """There is no compiler that could build it."""


@dataclass(frozen=True, slots=True)
class Compiler:
    command: tuple[str, ...]  # more than one word for a launcher: ccache g++
    name: str  # "g++" or "clang"
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True, slots=True)
class Unit:
    """One object: a source and what it is compiled with beside the flags of all."""

    name: str
    source: Path
    flags: tuple[str, ...] = ()
    namespace: str | None = None  # its code is for some processors only; all that it defines must lie in here


@dataclass(frozen=True, slots=True)
class Recipe:
    """A library and all that decides its bytes."""

    library: Path
    sources: Path  # the folder whose files, headers included, are the sources
    units: tuple[Unit, ...]
    flags: tuple[str, ...]  # of every object
    include: tuple[Path, ...] = ()
    link: tuple[str, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)  # what else the manifest says


def find_compiler(wanted: str | None) -> Compiler:
    """`wanted` (CXX), or the first of COMPILERS; NoCompiler if it is missing or too old."""
    words = shlex.split(wanted) if wanted else next(([name] for name in COMPILERS if shutil.which(name)), None)
    if not words:
        raise NoCompiler(f"no C++ compiler on PATH (looked for {', '.join(COMPILERS)}): {WAY_OUT}")
    try:
        banner = _output([*words, "--version"])
        version = _output([*words, "-dumpfullversion", "-dumpversion"]).strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoCompiler(f"CXX is {shlex.join(words)!r}, which does not run ({error}): {WAY_OUT}") from error
    name = "clang" if "clang" in banner.splitlines()[0] else "g++"
    if int(version.partition(".")[0]) < OLDEST[name]:
        wanted = ", or ".join(f"{compiler} {oldest} or newer" for compiler, oldest in OLDEST.items())
        raise NoCompiler(f"{shlex.join(words)} is {name} {version}; it takes {wanted}: {WAY_OUT}")
    return Compiler(tuple(words), name, version)


def digest_sources(sources: Path) -> str:
    """Of every source and header in the folder (not below it)."""
    files = sorted(path for path in sources.iterdir() if path.suffix in (".cpp", ".h"))
    return _digest(*(part for path in files for part in (path.name.encode(), path.read_bytes())))


def read_manifest(library: Path) -> dict[str, Any]:
    """What is recorded beside the library; {} if nothing is, or the library is gone."""
    try:
        return dict(json.loads(library.with_suffix(".json").read_text())) if library.is_file() else {}
    except (OSError, ValueError):
        return {}


class Builder:
    """Builds recipes with one compiler; objects stay in `work`, for as long as nothing they depend on changes."""

    def __init__(self, compiler: Compiler, work: Path, *, jobs: int, verbose: bool) -> None:
        self.compiler, self.work, self.jobs, self.verbose = compiler, work, jobs, verbose

    def build(self, recipe: Recipe) -> tuple[dict[str, Any], bool]:
        """The manifest, and whether anything had to be built."""
        commands = {unit: self._compile_command(recipe, unit) for unit in recipe.units}
        link = [*self.compiler.command, "-shared", "-pthread", *recipe.link]
        sources = digest_sources(recipe.sources)
        key = _digest(str(self.compiler), sources, repr(list(commands.values())), repr(link), repr(recipe.record))
        manifest = read_manifest(recipe.library)
        if manifest.get("key") == key:
            return manifest, False
        start = time.perf_counter()
        self.work.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(self.jobs) as pool:
            objects = list(pool.map(lambda unit: self._compile(recipe, unit, commands[unit]), recipe.units))
        self._check_isolation(recipe.units, objects)
        fresh = recipe.library.with_name(f".{recipe.library.name}.{os.getpid()}")  # who has the old one open keeps it
        recipe.library.parent.mkdir(parents=True, exist_ok=True)
        self._run([*link[:2], *map(str, objects), *link[2:], "-o", str(fresh)], "link")
        self._check_stable_abi(fresh)
        fresh.replace(recipe.library)
        manifest = {
            "compiler": str(self.compiler),
            "flags": list(recipe.flags),
            **recipe.record,
            "sources": sources,
            "key": key,
            "seconds": round(time.perf_counter() - start, 1),
        }
        recipe.library.with_suffix(".json").write_text(json.dumps(manifest, indent=1) + "\n")
        return manifest, True

    def _compile_command(self, recipe: Recipe, unit: Unit) -> list[str]:
        include = [f"-isystem{path}" for path in recipe.include]
        return [*self.compiler.command, *recipe.flags, *unit.flags, *include, "-c", str(unit.source)]

    def _compile(self, recipe: Recipe, unit: Unit, command: list[str]) -> Path:
        target = self.work / f"{unit.name}.o"
        headers = [path.read_bytes() for path in sorted(recipe.sources.glob("*.h"))]
        key = _digest(str(self.compiler), repr(command), repr(recipe.record), unit.source.read_bytes(), *headers)
        stamp = target.with_suffix(".key")
        if not (target.is_file() and stamp.is_file() and stamp.read_text() == key):
            stamp.unlink(missing_ok=True)
            self._run([*command, "-o", str(target)], f"compile {unit.source.name} as {unit.name}")
            stamp.write_text(key)
        return target

    def _run(self, command: list[str], what: str) -> None:
        if self.verbose:
            print(shlex.join(command), flush=True)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise BuildError(
                f"{self.compiler} could not {what}:\n{done.stderr.rstrip()}\nThe command was: {shlex.join(command)}\n"
                "Another compiler may do: set CXX"
            )
        if done.stderr.strip():
            print(done.stderr.rstrip(), flush=True)

    def _check_isolation(self, units: tuple[Unit, ...], objects: list[Path]) -> None:
        """The linker keeps one copy of a weak symbol (an inline function, a template) for the whole library: if it were
        that of a unit for newer processors, the others would run into an illegal instruction."""
        for unit, path in zip(units, objects, strict=True):
            if unit.namespace is None:
                continue
            own = "".join(f"{len(name)}{name}" for name in unit.namespace.split("::"))  # as it is mangled
            weak = [name for kind, name in self._symbols(path) if kind in "WVu" and own not in name]
            if weak:
                raise BuildError(
                    f"{unit.source.name} as {unit.name} defines {len(weak)} weak symbols outside {unit.namespace}, "
                    f"which the linker may take for all processors: {', '.join(weak[:5])}. Make them static"
                )

    def _check_stable_abi(self, library: Path) -> None:
        """A symbol of torch's C++ ties the library to one version of torch; the stable ABI is C."""
        tied = [
            name
            for _, name in self._symbols(library, "-D", "--undefined-only")
            if re.match(r"_ZNK?\d?(2at|3c10|5torch)", name)
        ]
        if tied:
            library.unlink()
            raise BuildError(f"{', '.join(tied)}: not in torch's stable ABI, the library would need this very torch")

    def _symbols(self, path: Path, *options: str) -> list[tuple[str, str]]:
        """(kind, name) as `nm` has them."""
        nm = _output([*self.compiler.command, "-print-prog-name=nm"]).strip()
        lines = _output([nm, *(options or ("--defined-only",)), str(path)]).splitlines()
        return [(words[-2], words[-1]) for words in map(str.split, lines) if len(words) >= 2]


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
