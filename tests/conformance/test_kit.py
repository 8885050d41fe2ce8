"""The conformance kit itself: good backends pass, wrong ones do not, and the example plugins stay small."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as xml
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from pagefleet.plugins import Plugins

HERE = Path(__file__).parent
PLUGINS = HERE.parent / "plugins"
INSTALLED = {entry_point.name for entry_point in entry_points(group="pagefleet")}
FAULTS = [node.name for node in ast.parse((HERE / "faults.py").read_text()).body if isinstance(node, ast.ClassDef)]


def run_kit(device: str, *options: str, cwd: Path, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the kit in a process of its own, outside the repository, with no pytest plugin but its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pagefleet.conformance.plugin"]
    command += [*options, "--pyargs", "pagefleet.conformance", "--target-device", device]
    entries = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
    # One thread: the models are tiny, and several processes may share the cores.
    settings = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    env = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(entries)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def need_plugin(name: str) -> None:
    if name not in INSTALLED:
        pytest.skip(f"no plugin {name!r} is installed: pip install -e tests/plugins/*")
    report = next(report for report in Plugins().backends() if report.info.name == name)
    if not report.probe.usable:
        pytest.skip(f"{name}: {report.probe.evidence}")


@pytest.mark.parametrize("device", ["cpu", "numpy", "toy", "toy10", "onnx", "accelerator"])
def test_good_backends_pass(device: str, tmp_path: Path) -> None:
    need_plugin(device)
    result = run_kit(device, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " failed" not in result.stdout


def test_an_unknown_backend_is_refused_in_words(tmp_path: Path) -> None:
    result = run_kit("no-such-device", cwd=tmp_path)
    assert result.returncode != 0
    assert "no backend is called 'no-such-device'" in result.stdout + result.stderr


def test_the_command_as_documented(tmp_path: Path) -> None:
    need_plugin("numpy")
    command = "pytest --pyargs pagefleet.conformance --target-device numpy --collect-only -q -p no:cacheprovider"
    subprocess.run([sys.executable, "-m", *command.split()], cwd=tmp_path, check=True, capture_output=True)


@pytest.fixture(scope="session")
def fault_plugin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """The faults as an installed plugin: a folder of metadata for the path, and the folder of the module."""
    need_plugin("numpy")
    site = tmp_path_factory.mktemp("site")
    metadata = site / "pagefleet_faults-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pagefleet-faults\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[pagefleet]\nfaults = faults\n")
    return site, HERE


def test_there_are_faults_enough() -> None:
    assert len(FAULTS) >= 40


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str, fault_plugin: tuple[Path, ...], tmp_path: Path) -> None:
    result = run_kit(fault, "-x", cwd=tmp_path, path=fault_plugin)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, f"{fault} passes: {result.stdout}{result.stderr}"


@pytest.mark.parametrize("name", ["numpy", "toy"])
def test_example_plugins_stay_small(name: str) -> None:
    files = sorted((PLUGINS / f"pagefleet-{name}").rglob("*.py"))
    counts = {file.name: len(file.read_text().splitlines()) for file in files}
    assert 0 < sum(counts.values()) < 200, counts


FROZEN = {"__init__.py": "289029dce475904c", "backend.py": "7558ac9928f311b6"}


def test_the_plugin_of_contract_1_0_is_left_as_it_was() -> None:
    """What it needs is the engine's to keep: a change here would hide that plugins in the field broke."""
    folder = PLUGINS / "pagefleet-toy-1.0" / "pagefleet_toy10"
    assert {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in folder.glob("*.py")} == FROZEN


# -- levels and reports --------------------------------------------------------------------------------


def test_a_level_leaves_out_those_above_it(tmp_path: Path) -> None:
    need_plugin("numpy")
    result = run_kit("numpy", "--conformance-level", "L0", cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    assert "numpy:0 reaches L0 of L0" in result.stdout
    assert "deselected" in result.stdout
    assert "L1  " not in result.stdout


def test_a_report_counts_what_happened(tmp_path: Path) -> None:
    need_plugin("numpy")
    result = run_kit(
        "numpy", "--conformance-report", "out", "-k", "draws_are_those or go_out or probe or invariance", cwd=tmp_path
    )
    assert result.returncode == 0, result.stdout
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert (report["schema"], report["backend"], report["device"], report["wanted"]) == (1, "numpy", 0, "L5")
    assert report["levels"]["L0"]["passed"] == 2
    assert report["levels"]["L4"]["passed"] == 1
    assert sum(report["skipped"].values()) == sum(level["skipped"] for level in report["levels"].values())
    assert {"pagefleet", "contract", "python", "numpy"} <= set(report["versions"])
    cases = xml.parse(tmp_path / "out/junit.xml").getroot().iter("testcase")
    assert len(list(cases)) == sum(level["passed"] + level["skipped"] for level in report["levels"].values())
    assert (report["partial"], report["level"]) == (True, None)
    assert (tmp_path / "out/report.md").read_text().startswith("# numpy: no level of L5, in part\n")


def test_a_report_names_failures_and_the_level_that_was_reached(fault_plugin: tuple[Path, ...], tmp_path: Path) -> None:
    result = run_kit("GroupsInterleaved", "--conformance-report", "out", cwd=tmp_path, path=fault_plugin)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["level"] == "L0"
    assert sum(level["failed"] for level in report["levels"].values()) == len(report["failed"]) > 0
    assert all(each["message"] for each in report["failed"])
    assert "GroupsInterleaved:0 reaches L0 of L5" in result.stdout
    assert "Failed:" in (tmp_path / "out/report.md").read_text()


def test_the_command_line_runs_the_kit(tmp_path: Path) -> None:
    need_plugin("numpy")
    command = [sys.executable, "-m", "pagefleet", "conformance", "--device", "numpy", "--level", "L0"]
    result = subprocess.run([*command, "--", "-k", "traits"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 passed" in result.stdout
    wrong = subprocess.run([*command[:-1], "L9"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert wrong.returncode == 1
    assert "--level is 'L9'; it must be one of L0, L1, L2, L3, L4, L5" in wrong.stderr
    absent = [*command[:-3], "no-such-device"]
    absent_result = subprocess.run(absent, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert absent_result.returncode == 1
    assert absent_result.stderr.startswith("error: no backend is called 'no-such-device'")


def test_other_peoples_tests_are_left_alone(tmp_path: Path) -> None:
    """A project with options and markers of the kit's names, or something like them."""
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--level')\n    parser.addoption('--report')\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = level\n")
    (tmp_path / "test_theirs.py").write_text(
        "import pytest\n"
        "@pytest.mark.level\ndef test_bare(): pass\n"
        "@pytest.mark.conformance_level\ndef test_without_a_name(): pass\n"
        "@pytest.mark.conformance_level('hard')\ndef test_of_another_level(): pass\n"
        "@pytest.mark.conformance_level(3)\ndef test_of_a_number(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--level", "x", "--report", "y"]
    env = {**os.environ, "TARGET_DEVICE": "no-such-device"}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert "4 passed" in result.stdout, result.stdout + result.stderr


def test_the_command_heeds_no_settings_of_where_it_is_run(tmp_path: Path) -> None:
    need_plugin("numpy")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\nfilterwarnings = error\n")
    command = [sys.executable, "-m", "pagefleet", "conformance", "--device", "numpy", "--level", "L0"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "numpy:0 reaches L0 of L0" in result.stdout
