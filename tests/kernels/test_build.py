"""`build_scripts/cpu.py` on a library of two small sources, and what the probe makes of its manifest."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pagefleet_cpu.config import CpuConfig
from pagefleet_cpu.evidence import describe_kernels, read_manifest

SCRIPT = Path(__file__).resolve().parents[2] / "build_scripts/cpu.py"
X86 = platform.machine() == "x86_64"

needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")

ISA = """
#include "unit.h"
#define NAME2(isa) width_##isa
#define NAME(isa) NAME2(isa)
extern "C" int NAME(PAGEFLEET_ISA)() {
#if defined(__AVX512F__)
  return 16;
#elif defined(__AVX2__)
  return 8;
#else
  return 4;
#endif
}
"""
MAIN = """
#ifdef PAGEFLEET_SCALAR_ONLY
extern "C" __attribute__((visibility("default"))) int units() { return 1; }
#else
extern "C" int width_avx512();
extern "C" __attribute__((visibility("default"))) int units() { return width_avx512() ? 4 : 0; }
#endif
"""


class Toy:
    def __init__(self, folder: Path) -> None:
        self.folder, self.library = folder, folder / "out/_toy.so"
        (folder / "src").mkdir()
        self.write("isa.cpp", ISA)
        self.write("unit.h", "")
        self.write("main.cpp", MAIN)

    def write(self, name: str, text: str) -> None:
        (self.folder / "src" / name).write_text(text)

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        unset = ("CXX", "VERBOSE", "USE_FAST_MATH", "ARCH_SPECIFIC_OPTIMIZATIONS")
        env = {name: value for name, value in os.environ.items() if name not in unset} | variables
        paths = [
            "--sources",
            str(self.folder / "src"),
            "--output",
            str(self.library),
            "--work",
            str(self.folder / "work"),
        ]
        command = [sys.executable, str(SCRIPT), *paths, *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)

    def build(self, *arguments: str, **variables: str) -> str:
        done = self.run(*arguments, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def manifest(self) -> dict[str, Any]:
        return dict(json.loads(self.library.with_suffix(".json").read_text()))


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path)


@needs_compiler
def test_a_unit_for_each_instruction_set_in_one_library(toy: Toy) -> None:
    assert "built in" in toy.build()
    units = ["scalar", "avx2", "avx512", "avx512bf16"] if X86 else ["scalar"]
    assert list(toy.manifest["units"]) == units
    assert toy.manifest["options"] == {"ARCH_SPECIFIC_OPTIMIZATIONS": True, "USE_FAST_MATH": False}
    assert toy.manifest["batch_invariant"] is True
    assert toy.manifest["torch"].startswith("2.")
    assert ctypes.CDLL(str(toy.library)).units() == len(units)


@needs_compiler
def test_what_is_unchanged_is_not_built_again(toy: Toy) -> None:
    toy.build()
    before = toy.library.stat().st_mtime_ns
    assert "up to date" in toy.build()
    assert toy.library.stat().st_mtime_ns == before
    toy.write("main.cpp", MAIN + "// changed")
    commands = toy.build(VERBOSE="1")
    assert commands.count(" -c ") == 1
    assert "main.cpp" in commands
    toy.write("unit.h", "// a header is a source of all")
    assert toy.build(VERBOSE="1").count(" -c ") == len(toy.manifest["units"]) + 1
    toy.library.unlink()
    assert "built in" in toy.build()


@needs_compiler
def test_without_arch_specific_optimizations_there_is_one_unit_for_all(toy: Toy) -> None:
    toy.build(ARCH_SPECIFIC_OPTIMIZATIONS="0")
    assert list(toy.manifest["units"]) == ["scalar"]
    assert toy.manifest["options"]["ARCH_SPECIFIC_OPTIMIZATIONS"] is False
    assert ctypes.CDLL(str(toy.library)).units() == 1


@needs_compiler
def test_fast_math_is_recorded_keeps_infinities_and_is_not_called_invariant(toy: Toy) -> None:
    commands = toy.build(USE_FAST_MATH="1", VERBOSE="on")
    assert "-ffp-contract=fast" in commands
    assert not {"-ffast-math", "-Ofast", "-ffinite-math-only", "-fassociative-math"} & set(commands.split())
    assert toy.manifest["options"]["USE_FAST_MATH"] is True
    assert toy.manifest["batch_invariant"] is False
    assert "not batch-invariant" in describe_kernels(CpuConfig(library=toy.library), toy.manifest)


@needs_compiler
def test_a_sanitized_library_says_so(toy: Toy) -> None:
    toy.build("--sanitize", "undefined")
    assert toy.manifest["sanitizer"] == "undefined"
    assert "-fsanitize=undefined" in toy.manifest["flags"]


def runtime(name: str) -> str:
    """Where the compiler has a sanitizer's library; only a name if it has none."""
    compiler = shutil.which("g++") or "true"
    return subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()


@pytest.mark.skipif(not Path(runtime("libasan.so")).is_absolute(), reason="no AddressSanitizer")
@needs_compiler
def test_a_library_with_address_sanitizer_catches_a_read_past_the_end_of_a_tensor(toy: Toy) -> None:
    toy.write(
        "main.cpp",
        MAIN + 'extern "C" __attribute__((visibility("default"))) float at(float* p, int i) { return p[i]; }',
    )
    toy.build("--sanitize", "address")
    code = f"""
import ctypes, sys, torch
at = ctypes.CDLL({str(toy.library)!r}).at
x = torch.zeros(64)
at(ctypes.c_void_p(x.data_ptr()), int(sys.argv[1]))
print("read")
"""
    libraries = " ".join(map(runtime, ("libasan.so", "libstdc++.so")))
    env = os.environ | {"LD_PRELOAD": libraries, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    inside, outside = (
        subprocess.run([sys.executable, "-c", code, index], env=env, capture_output=True, text=True, timeout=120)
        for index in ("63", "64")
    )
    assert inside.stdout == "read\n", inside.stderr
    assert "heap-buffer-overflow" in outside.stderr
    assert outside.stdout == ""


@pytest.mark.skipif(not X86, reason="one unit only")
@needs_compiler
def test_a_function_that_the_linker_might_take_for_old_processors_is_refused_by_name(toy: Toy) -> None:
    shared = "inline __attribute__((noinline)) float twice(float x) { return x + x; }\n"
    toy.write("isa.cpp", shared + ISA + "float use(float x) { return twice(x); }")
    done = toy.run()
    assert done.returncode == 1
    assert "weak symbols outside pagefleet::avx" in done.stderr
    assert "_Z5twicef" in done.stderr
    assert not toy.library.exists()
    toy.write(
        "isa.cpp", f"namespace pagefleet::PAGEFLEET_ISA {{ {shared} float use(float x) {{ return twice(x); }} }}{ISA}"
    )
    toy.build()  # in a namespace of its own it cannot be mixed up


@needs_compiler
def test_torch_symbols_that_are_not_stable_are_refused_by_name(toy: Toy) -> None:
    toy.write("main.cpp", MAIN + "namespace at { int get_num_threads(); }\nint use() { return at::get_num_threads(); }")
    done = toy.run()
    assert done.returncode == 1
    assert "_ZN2at15get_num_threadsEv" in done.stderr
    assert not toy.library.exists()


@needs_compiler
def test_an_error_shows_what_the_compiler_said_and_its_command(toy: Toy) -> None:
    toy.write("main.cpp", "int broken( {")
    done = toy.run()
    assert done.returncode == 1
    assert "could not compile main.cpp" in done.stderr
    assert "error:" in done.stderr
    assert "The command was: " in done.stderr


def test_without_a_compiler_the_way_out_is_named(toy: Toy, tmp_path: Path) -> None:
    done = toy.run(PATH=str(tmp_path))
    assert done.returncode == 1
    assert "no C++ compiler on PATH (looked for g++, clang++, c++): install one" in done.stderr
    assert toy.run("--if-possible", PATH=str(tmp_path)).returncode == 0


@pytest.mark.parametrize(
    ("command", "banner", "found"),
    [
        ("g++-9", "g++-9 (Toy) 9.4.0", "g++ 9.4.0"),
        ("clang++-13", "Toy clang version 13.0.1", "clang 13.0.1"),
    ],
)
def test_a_compiler_that_is_too_old_is_named(toy: Toy, tmp_path: Path, command: str, banner: str, found: str) -> None:
    old = tmp_path / command
    version = found.split()[1]
    old.write_text(f'#!/bin/sh\ncase "$1" in --version) echo "{banner}";; *) echo {version};; esac\n')
    old.chmod(0o755)
    done = toy.run(CXX=str(old))
    assert done.returncode == 1
    assert f"{command} is {found}; it takes g++ 11 or newer, or clang 14 or newer: install one" in done.stderr
    assert not toy.library.exists()
    assert toy.run("--if-possible", CXX=str(old)).returncode == 0


def test_a_compiler_that_is_not_there_is_named(toy: Toy) -> None:
    done = toy.run(CXX="no-such-compiler -O3")
    assert done.returncode == 1
    assert "CXX is 'no-such-compiler -O3', which does not run" in done.stderr


def test_a_switch_is_0_or_1(toy: Toy) -> None:
    done = toy.run(USE_FAST_MATH="maybe")
    assert done.returncode == 1
    assert "USE_FAST_MATH is 'maybe'; it must be 0 or 1" in done.stderr


# -- the wheel -------------------------------------------------------------------------------------------


class Wheel:
    """`hatch_build.py` in a checkout of two files; ci/wheel runs it in hatchling itself."""

    def __init__(self, root: Path, hook: ModuleType) -> None:
        self.root, self.hook = root, hook
        self.sources, self.library = root / hook.SOURCES, root / hook.LIBRARY
        self.sources.mkdir(parents=True)
        (self.sources / "isa.cpp").write_text(ISA)
        self.library.parent.mkdir(parents=True)

    def compiled(self, **manifest: Any) -> None:
        self.library.touch()
        manifest = {"sources": self.hook.digest_sources(self.sources), "sanitizer": None} | manifest
        self.library.with_suffix(".json").write_text(json.dumps(manifest))

    def packed(self, version: str = "standard") -> dict[str, Any]:
        """What the hook decides, from hatchling's defaults."""
        build_data: dict[str, Any] = {"pure_python": True, "artifacts": []}
        self.hook.KernelHook(str(self.root)).initialize(version, build_data)
        return build_data


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    class Interface:  # hatchling is there only while a wheel is built
        def __init__(self, root: str) -> None:
            self.root = root

    stand_in = ModuleType("hatchling.builders.hooks.plugin.interface")
    vars(stand_in)["BuildHookInterface"] = Interface
    parts = stand_in.__name__.split(".")
    for depth in range(1, len(parts)):
        name = ".".join(parts[:depth])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("hatch_build", SCRIPT.with_name("hatch_build.py"))
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    return Wheel(tmp_path, hook)


def test_a_wheel_without_kernels_is_pure(wheel: Wheel) -> None:
    assert wheel.packed() == {"pure_python": True, "artifacts": []}


def test_a_wheel_with_kernels_is_for_this_platform_and_any_python_3(wheel: Wheel) -> None:
    wheel.compiled()
    packed = wheel.packed()
    assert packed["pure_python"] is False
    assert packed["artifacts"] == [f"/kernels/pagefleet_kernels/_cpu.{kind}" for kind in ("so", "json")]
    assert packed["tag"].startswith("py3-none-")
    assert set("-.") & set(packed["tag"].removeprefix("py3-none-")) == set()


def test_an_editable_install_finds_the_library_where_it_is(wheel: Wheel) -> None:
    wheel.compiled(sources="of another day")
    assert wheel.packed("editable") == {"pure_python": True, "artifacts": []}


@pytest.mark.parametrize("manifest", [{"sources": "of another day"}, {"sanitizer": "address"}])
def test_kernels_of_other_sources_or_with_a_sanitizer_are_not_packed(wheel: Wheel, manifest: dict[str, str]) -> None:
    wheel.compiled(**manifest)
    with pytest.raises(RuntimeError, match=r"run python build_scripts/cpu\.py again, or delete it"):
        wheel.packed()


def test_kernels_that_changed_since_are_not_packed(wheel: Wheel) -> None:
    wheel.compiled()
    (wheel.sources / "new.h").write_text("")
    with pytest.raises(RuntimeError, match="was not built from these sources"):
        wheel.packed()


def test_kernels_of_unknown_origin_are_not_packed(wheel: Wheel) -> None:
    wheel.library.touch()
    with pytest.raises(RuntimeError, match="was not built from these sources"):
        wheel.packed()


# -- what `pagefleet devices` says ---------------------------------------------------------------------


UNITS = {"scalar": [], "avx2": [], "avx512": [], "avx512bf16": []}
ZEN3 = "fpu sse2 avx avx2 fma f16c"
SKYLAKE = ZEN3 + " avx512f avx512bw avx512vl avx512dq"
ZEN4 = SKYLAKE + " avx512_vnni avx512_bf16"


@pytest.mark.parametrize(
    ("flags", "isa"),
    [("fpu sse2", "scalar"), ("avx avx2 fma", "scalar"), (ZEN3, "avx2"), (SKYLAKE, "avx512"), (ZEN4, "avx512bf16")],
)
def test_the_evidence_names_the_unit_that_this_processor_runs(tmp_path: Path, flags: str, isa: str) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: Toy\nflags\t\t: {flags}\n")
    manifest = {"units": UNITS, "compiler": "g++ 12.2.0"}
    assert describe_kernels(CpuConfig(), manifest, cpuinfo) == f"kernels {isa}, built by g++ 12.2.0"
    forced = describe_kernels(CpuConfig(isa="scalar"), manifest, cpuinfo)
    assert forced == "kernels scalar (forced), built by g++ 12.2.0"
    only_scalar = {"units": {"scalar": []}, "compiler": "clang 19"}
    left_out = f"this processor has {isa}, which the build left out (ARCH_SPECIFIC_OPTIMIZATIONS=1 builds it), "
    lost = "" if isa == "scalar" else left_out
    assert describe_kernels(CpuConfig(), only_scalar, cpuinfo) == f"kernels scalar, {lost}built by clang 19"


def test_the_evidence_names_another_attention() -> None:
    evidence = describe_kernels(CpuConfig(attention="ipex"), {"units": UNITS})
    assert evidence == "attention by Intel's extension (PAGEFLEET_CPU_ATTENTION), all else plain torch"


def test_the_evidence_says_what_is_lost_without_kernels(tmp_path: Path) -> None:
    config = CpuConfig(library=tmp_path / "_cpu.so")
    assert read_manifest(config) is None
    evidence = describe_kernels(config, None)
    assert "not there" in evidence
    assert "several times slower; build them with `python build_scripts/cpu.py`" in evidence


def test_a_library_without_a_readable_manifest_is_still_one(tmp_path: Path) -> None:
    library = tmp_path / "_cpu.so"
    library.touch()
    library.with_suffix(".json").write_text("{")
    manifest = read_manifest(CpuConfig(library=library))
    assert manifest == {}
    assert "built by an unknown compiler" in describe_kernels(CpuConfig(library=library), manifest)
