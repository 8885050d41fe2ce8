"""The conformance kit itself: good backends pass, wrong ones do not, and the example plugins stay small."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
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


@pytest.mark.parametrize("device", ["cpu", "numpy", "toy", "accelerator"])
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


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str, fault_plugin: tuple[Path, ...], tmp_path: Path) -> None:
    result = run_kit(fault, "-x", cwd=tmp_path, path=fault_plugin)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, f"{fault} passes: {result.stdout}{result.stderr}"


@pytest.mark.parametrize("name", ["numpy", "toy"])
def test_example_plugins_stay_small(name: str) -> None:
    files = sorted((PLUGINS / f"pagefleet-{name}").rglob("*.py"))
    counts = {file.name: len(file.read_text().splitlines()) for file in files}
    assert 0 < sum(counts.values()) < 200, counts
