"""Compile the CPU kernels ahead of time, for the torch of the environment this runs in: `python build_scripts/cpu.py`.

`kernels/csrc/cpu/isa.cpp` is compiled once for each instruction set, everything else once for every processor of the
kind; which unit runs is decided when the library is loaded. The library uses torch's stable ABI alone, so one build
serves torch 2.11 and newer. Beside it lies a manifest that says how it was built. Without a change nothing is done.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from native import Builder, BuildError, NoCompiler, Recipe, Unit, find_compiler

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "kernels/csrc/cpu"
LIBRARY = ROOT / "kernels/pagefleet_kernels/_cpu.so"

STABLE_ABI = "0x020b000000000000"  # torch 2.11
OLDEST_TORCH = (2, 11)
WARNINGS = (  # gcc takes its own AVX-512 headers' undefined vectors for ours; clang does not know that warning
    *("-Wall", "-Wextra", "-Wno-unknown-warning-option", "-Wno-maybe-uninitialized"),
)
FLAGS = (
    *("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-fPIC", "-pthread"),
    *(*WARNINGS, f"-DTORCH_TARGET_VERSION={STABLE_ABI}"),
)
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", *AVX2)
ISAS: Mapping[str, tuple[str, ...]] = {
    "scalar": (),
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512bf16": (*AVX512, "-mavx512vnni", "-mavx512bf16"),
}
# Not -ffast-math itself: masks are infinities and NaNs must stay visible; numbers are rounded by adding and taking away
# a large one, which reordering would undo; and linked with it, gcc's start-up code flushes small numbers to zero in the
# whole process. What is left, fused operations and reciprocals, may differ from loop to loop, so from batch to batch.
FAST_MATH = ("-ffp-contract=fast", "-freciprocal-math", "-fno-signed-zeros", "-fno-trapping-math")
SANITIZERS = {
    "address": ("-fsanitize=address", "-O1", "-fno-omit-frame-pointer", "-g1"),
    "undefined": ("-fsanitize=undefined", "-fno-sanitize-recover=undefined", "-O1", "-fno-omit-frame-pointer", "-g1"),
}
SHORT = {"address": "asan", "undefined": "ubsan"}


@dataclass(frozen=True, slots=True)
class Options:
    """What is built. Every field has a variable, or none if it is for developers."""

    all_isas: bool  # ARCH_SPECIFIC_OPTIMIZATIONS
    fast_math: bool  # USE_FAST_MATH
    verbose: bool  # VERBOSE
    compiler: str | None  # CXX
    sanitize: str | None = None


def environment(variables: Mapping[str, str]) -> Options:
    """Read the variables that the build knows."""
    return Options(
        all_isas=_switch(variables, "ARCH_SPECIFIC_OPTIMIZATIONS", True),
        fast_math=_switch(variables, "USE_FAST_MATH", False),
        verbose=_switch(variables, "VERBOSE", False),
        compiler=variables.get("CXX", "").strip() or None,
    )


def recipe(options: Options, sources: Path, library: Path) -> Recipe:
    """The library of `sources`, for this machine's architecture and the torch that is installed."""
    torch, version = _find_torch()
    isas = {isa: flags for isa, flags in ISAS.items() if isa == "scalar" or (options.all_isas and _is_x86())}
    sanitizer = SANITIZERS[options.sanitize] if options.sanitize else ()
    baseline = ("-DPAGEFLEET_SCALAR_ONLY",) if isas.keys() == {"scalar"} else ()
    isa_flags = FAST_MATH if options.fast_math else ()
    units = [
        Unit(
            f"isa-{isa}", sources / "isa.cpp", (f"-DPAGEFLEET_ISA={isa}", *flags, *isa_flags), _namespace(isa, options)
        )
        for isa, flags in reversed(isas.items())  # the longest to compile first
    ]
    units += [Unit(path.stem, path, baseline) for path in sorted(sources.glob("*.cpp")) if path.name != "isa.cpp"]
    return Recipe(
        library=library,
        sources=sources,
        units=tuple(units),
        flags=(*FLAGS, *sanitizer),
        include=(torch / "include", torch / "include/torch/csrc/api/include"),
        link=(*sanitizer[:1], f"-L{torch / 'lib'}", "-ltorch_cpu"),
        record={
            "machine": platform.machine(),
            "torch": version,  # whose headers it was compiled with; it runs in OLDEST_TORCH and newer
            "units": {isa: list(flags) for isa, flags in isas.items()},
            "options": {"ARCH_SPECIFIC_OPTIMIZATIONS": options.all_isas, "USE_FAST_MATH": options.fast_math},
            "fast_math_flags": list(isa_flags),
            "batch_invariant": not options.fast_math,
            "sanitizer": options.sanitize,
        },
    )


def main(arguments: list[str] | None = None) -> int:
    try:
        defaults = environment(os.environ)
        given = _parser(defaults).parse_args(arguments)
        options = Options(given.all_isas, given.fast_math, given.verbose, given.compiler, given.sanitize)
        library = given.output or (ROOT / f"build/_cpu_{SHORT[given.sanitize]}.so" if given.sanitize else LIBRARY)
        wanted = recipe(options, given.sources.resolve(), library.resolve())
        work = ROOT / "build/cpu" / wanted.library.stem if given.work is None else given.work
        builder = Builder(find_compiler(options.compiler), work, jobs=given.jobs, verbose=options.verbose)
        manifest, built = builder.build(wanted)
    except NoCompiler as error:
        print(f"CPU kernels: {error}", file=sys.stderr)
        return 0 if given.if_possible else 1
    except BuildError as error:
        print(f"CPU kernels: {error}", file=sys.stderr)
        return 1
    what = f"built in {manifest['seconds']} s" if built else "up to date"
    isas, fast = ", ".join(manifest["units"]), ", fast math" if options.fast_math else ""
    print(f"{_shown(wanted.library)}: {what} ({isas}{fast}; {manifest['compiler']}, torch {manifest['torch']})")
    return 0


def _parser(defaults: Options) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Compile the CPU kernels for the torch of this environment.",
        epilog="Options that name a variable take their default from it.",
    )
    switch = argparse.BooleanOptionalAction
    parser.add_argument(
        *("--all-isas",),
        action=switch,
        default=defaults.all_isas,
        help="units for AVX2 and AVX-512 beside the one for every processor (ARCH_SPECIFIC_OPTIMIZATIONS)",
    )
    parser.add_argument(
        *("--fast-math",),
        action=switch,
        default=defaults.fast_math,
        help="let the compiler fuse and reciprocate; results may then depend on the batch (USE_FAST_MATH)",
    )
    parser.add_argument(
        "--verbose", action=switch, default=defaults.verbose, help="print the compiler's commands (VERBOSE)"
    )
    parser.add_argument(
        "--compiler", default=defaults.compiler, help="the C++ compiler (CXX); default: the first found"
    )
    parser.add_argument(
        "--sanitize", choices=SANITIZERS, help="a library for tests, build/_cpu_asan.so or _cpu_ubsan.so"
    )
    parser.add_argument("--if-possible", action="store_true", help="without a compiler say so, and succeed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers that run at once (%(default)s)")
    parser.add_argument("--output", type=Path, help="the library, instead of that of pagefleet_kernels")
    parser.add_argument("--sources", type=Path, default=SOURCES, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser


def _find_torch() -> tuple[Path, str]:
    """Where torch is installed, and its version, without the seconds that importing it takes."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError(f"no torch in {sys.prefix}: install pagefleet there first, or use the Python that has it")
    folder = Path(spec.origin).parent
    found = re.search(r"__version__ = ['\"]([^'\"]+)", (folder / "version.py").read_text())
    version = found[1] if found else "unknown"
    if not (folder / "include/torch/csrc/stable").is_dir() or tuple(map(int, version.split(".")[:2])) < OLDEST_TORCH:
        raise BuildError(f"torch {version} in {folder} has no stable ABI of 2.11: install torch 2.11 or newer")
    return folder, version


def _namespace(isa: str, options: Options) -> str | None:
    if isa == "scalar" or options.sanitize:  # any processor runs it; a sanitizer adds symbols of its own
        return None
    return f"pagefleet::{isa}"


def _is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def _switch(variables: Mapping[str, str], name: str, default: bool) -> bool:
    value = variables.get(name, "").strip().lower()
    if value in ("", "1", "on", "true", "yes"):
        return default if value == "" else True
    if value in ("0", "off", "false", "no"):
        return False
    raise BuildError(f"{name} is {variables[name]!r}; it must be 0 or 1")


def _shown(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


if __name__ == "__main__":
    sys.exit(main())
