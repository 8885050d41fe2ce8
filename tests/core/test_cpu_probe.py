"""What the CPU backend says of itself before it is loaded, and that what it promises is what loading then finds."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

import pagefleet_cpu
from pagefleet.backend import BackendError
from pagefleet_cpu import PLAIN_TRAITS, TRAITS, check_isa, probe, traits
from pagefleet_cpu.config import CpuConfig

UNITS = ("scalar", "avx2", "avx512", "avx512bf16")
VARIABLES = ("THREADS", "ISA", "LIBRARY", "ATTENTION")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*(f"PAGEFLEET_CPU_{name}" for name in VARIABLES), "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library as far as the probe looks, which does not open it: one unit, the default options."""
    path = tmp_path / "_cpu.so"
    path.touch()
    write_manifest(path, units={"scalar": []}, compiler="g++ 12.2.0", batch_invariant=True)
    monkeypatch.setenv("PAGEFLEET_CPU_LIBRARY", str(path))
    return path


def write_manifest(library: Path, **fields: object) -> None:
    library.with_suffix(".json").write_text(json.dumps(fields))


def cpuinfo(folder: Path, flags: str) -> Path:
    path = folder / "cpuinfo"
    path.write_text(f"model name\t: Toy\nflags\t\t: {flags}\n")
    return path


def test_with_kernels_the_evidence_names_them_and_the_traits_are_theirs(library: Path) -> None:
    found = probe()
    assert found.usable
    assert "; kernels scalar, " in found.evidence
    assert "built by g++ 12.2.0; " in found.evidence
    assert len(found.devices) == 1
    assert traits() == TRAITS


def test_kernels_that_are_not_batch_invariant_do_not_promise_it(library: Path) -> None:
    write_manifest(library, units={"scalar": []}, batch_invariant=False)
    assert traits().batch_invariant == ()
    assert traits().weight_formats == TRAITS.weight_formats


def test_without_kernels_it_is_usable_and_promises_no_quantised_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEFLEET_CPU_LIBRARY", str(tmp_path / "_cpu.so"))
    found = probe()
    assert found.usable
    assert "python build_scripts/cpu.py" in found.evidence
    assert traits() == PLAIN_TRAITS
    assert not PLAIN_TRAITS.weight_formats


def test_another_attention_promises_neither_kernels_nor_invariance(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEFLEET_CPU_ATTENTION", "ipex")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"torch": "2.8.0+cpu"}[name])
    assert probe().usable
    assert "Intel's extension" in probe().evidence
    assert (traits().weight_formats, traits().batch_invariant) == ((), ())


def test_an_attention_that_this_torch_refuses_makes_it_unusable(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEFLEET_CPU_ATTENTION", "ipex")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"torch": "2.13.0"}[name])
    assert not probe().usable
    assert "loads in torch 2.8 only; unset PAGEFLEET_CPU_ATTENTION" in probe().evidence


def test_a_wrong_value_makes_it_unusable_and_is_the_reason(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEFLEET_CPU_THREADS", "none")
    found = probe()
    assert not found.usable
    assert found.evidence == "PAGEFLEET_CPU_THREADS is 'none'; it must be an integer of at least 1"
    assert traits() == PLAIN_TRAITS


def test_threads_asked_for_are_those_of_the_device(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEFLEET_CPU_THREADS", "3")
    assert probe().devices[0].detail == "3 threads"


# -- an instruction set asked for ----------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="reads /proc")
def test_an_instruction_set_that_cannot_run_is_refused_by_the_probe_rather_than_by_load(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEFLEET_CPU_ISA", "avx2")  # the library has scalar kernels only
    found = probe()
    assert not found.usable
    assert found.evidence == (
        "PAGEFLEET_CPU_ISA is 'avx2', which this build of the kernels does not have; unset it, or take one of scalar"
    )
    monkeypatch.setenv("PAGEFLEET_CPU_ISA", "scalar")
    assert "kernels scalar (forced)" in probe().evidence


def test_an_instruction_set_of_newer_processors_is_refused(tmp_path: Path) -> None:
    haswell, units = cpuinfo(tmp_path, "fpu sse2 avx avx2 fma f16c"), {"units": {isa: [] for isa in UNITS}}
    for isa in ("scalar", "avx2"):
        check_isa(CpuConfig(isa=isa), units, haswell)
    for isa in ("avx512", "avx512bf16"):
        with pytest.raises(BackendError, match=f"'{isa}', which this processor does not have; .* one of scalar, avx2$"):
            check_isa(CpuConfig(isa=isa), units, haswell)
    with pytest.raises(BackendError, match="this processor"):  # a manifest that does not say has them all
        check_isa(CpuConfig(isa="avx512"), {}, haswell)


def test_where_there_is_nothing_to_compare_with_nothing_is_refused(tmp_path: Path) -> None:
    old, asked = cpuinfo(tmp_path, "fpu"), CpuConfig(isa="avx512")
    check_isa(CpuConfig(), {}, old)
    check_isa(asked, None, old)  # no kernels
    check_isa(CpuConfig(isa="avx512", attention="ipex"), {}, old)
    check_isa(asked, {}, tmp_path / "no-such-file")


# -- what it costs -------------------------------------------------------------------------------------


def test_probing_imports_neither_torch_nor_the_kernels() -> None:
    code = """
import sys
import pagefleet_cpu
pagefleet_cpu.probe(), pagefleet_cpu.traits()
print([name for name in ("torch", "pagefleet_kernels.cpu", "pagefleet_cpu.backend") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_hook_offers_the_traits_of_now(library: Path) -> None:
    (info,) = pagefleet_cpu.pagefleet_backends()
    assert (info.name, info.traits) == ("cpu", TRAITS)
