"""The matrix of CI: it is complete, says what is wrong with it, and a cell ends as its exit status says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from matrix import LEVELS, ROOT, MatrixError, read_matrix
from runner import summary

from pagefleet import conformance

TINY = """
[cells.good]
about = "a command that works"
python = "{python}"
torch = "none"
install = false
commands = ["echo $GREETING $VENV"]
env = {{ GREETING = "hello" }}

[cells.bad]
about = "one that does not"
python = "{python}"
torch = "none"
install = false
commands = ["true", "exit 7", "echo not reached"]

[cells.gone]
about = "a device that is nowhere"
python = "{python}"
torch = "none"
install = false
needs = {{ "/dev/no-such-device" = "no driver of no such device" }}
commands = ["echo not reached"]

[cells.unbuilt]
about = "a command that is nowhere"
python = "{python}"
torch = "none"
install = false
needs = {{ no-such-command = "no such command on PATH" }}
commands = ["echo not reached"]
"""
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "matrix.toml"
    path.write_text(TINY.format(python=VERSION))
    return path


def ci_run(matrix: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "ci/run"), "--matrix", str(matrix), "--build", str(matrix.parent / "build")]
    return subprocess.run([*command, *arguments], capture_output=True, text=True)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout.splitlines()[-1]


def read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    read_matrix(path)


def test_levels_are_those_of_the_kit() -> None:
    assert list(conformance.LEVELS) == list(LEVELS)


@pytest.mark.parametrize("name", read_matrix().cells)
def test_a_cells_files_exist_unless_it_waits_for_them(name: str) -> None:
    cell = read_matrix().cell(name)
    assert [file for file in cell.files() if not (ROOT / file).exists() and file not in cell.needs] == []
    assert (cell.leave_out != ()) >= (cell.torch == "none")  # else pip would bring torch
    if cell.constraints and cell.torch != "none":
        assert f"torch=={cell.torch}" in (ROOT / cell.constraints).read_text().split()


@pytest.mark.parametrize("name", read_matrix().cells)
def test_a_command_names_files_that_exist(name: str) -> None:
    words = [word for command in read_matrix().cell(name).commands for word in command.split()]
    paths = [word for word in words if word.startswith(("ci/", "tests/", "build_scripts/", "./", ".ci/"))]
    assert [path for path in paths if not list(ROOT.glob(path))] == []


def test_the_readme_has_every_cell() -> None:
    readme = (ROOT / "ci/README.md").read_text()
    assert [name for name in read_matrix().cells if f"| `{name}` |" not in readme] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("about", "aboot"), r"cells\.good: unknown key 'aboot'; it must be one of about, python, torch, .*env$"),
        (("python = ", "# "), r"cells\.good: 'python' is missing; every cell has about, python, torch$"),
        (('"none"', '"newest"'), r"torch is 'newest'; it must be 'none', 'latest' or a version"),
        (('"none"', "2.13"), r"torch is 2\.13; it must be a string"),
        (("install = false", 'devices = ["cpu"]'), "devices and level come together"),
        (("install = false", 'devices = ["cpu"]\nlevel = "L6"'), "level is 'L6'; it must be one of L0, .*L5$"),
        (("install = false", 'devices = ["cpu"]\nlevel = "L0"\ninstall = false'), "install must not be false"),
        (("install = false", 'build = "x.py"\nbuilt_by = "bad"'), "build and built_by exclude each other"),
        (("false", 'true\nbuilt_by = "worse"'), "built_by is 'worse'; it must be one of"),
        (("false", 'true\nbuilt_by = "bad"'), "built_by is 'bad'; it must be one of"),  # installs nothing
        (("install = false", 'plugins = "toy"'), "plugins is 'toy'; it must be a list of strings"),
        (('commands = ["echo $GREETING $VENV"]', ""), "nothing to run"),
        (("cells.good", "cells.Good"), "a cell's name is of small letters"),
        (("[cells.good]", "[defaults]\n[cells.good]"), "unknown table 'defaults'; there is only 'cells'"),
        (("[cells.good]", "[cells.good"), "wrong.toml: "),
    ],
)
def test_what_is_wrong_is_named_with_what_would_do(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(MatrixError, match=message):
        read(tmp_path, TINY.format(python=VERSION).replace(*change, 1))


def test_a_cell_that_works_passes(tiny: Path) -> None:
    done = ci_run(tiny, "good", "--summary", str(tiny.parent / "summary"))
    assert done.returncode == 0, done.stderr
    assert f"hello {tiny.parent / 'build/good/venv'}" in done.stdout.splitlines()
    assert last_line(done) == "good: passed (echo $GREETING $VENV)"
    assert (tiny.parent / "summary").read_text() == last_line(done) + "\n"


def test_a_command_that_fails_fails_the_cell(tiny: Path) -> None:
    done = ci_run(tiny, "bad")
    assert (done.returncode, last_line(done)) == (1, "bad: failed (exit 7: exit status 7)")
    assert "not reached" not in done.stdout


def test_a_file_that_is_gone_fails_the_cell(tiny: Path) -> None:
    tiny.write_text(tiny.read_text().replace("install = false", 'plugins = ["tests/plugins/no-such"]', 1))
    done = ci_run(tiny, "good")
    assert (done.returncode, last_line(done)) == (1, "good: failed (there is no tests/plugins/no-such)")


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gone", "no driver of no such device"), ("unbuilt", "no such command on PATH")],
)
def test_an_absent_device_is_not_a_pass(tiny: Path, name: str, reason: str) -> None:
    done = ci_run(tiny, name)
    assert (done.returncode, done.stdout) == (3, f"{name}: absent ({reason})\n")


def test_a_python_that_is_nowhere_is_absent(tiny: Path) -> None:
    tiny.write_text(tiny.read_text().replace(VERSION, "3.99"))
    done = ci_run(tiny, "good")
    assert (done.returncode, last_line(done)) == (3, "good: absent (no python3.99 on PATH)")


def test_of_several_cells_the_worst_counts(tiny: Path) -> None:
    assert ci_run(tiny, "good", "gone").returncode == 3
    assert ci_run(tiny, "gone", "bad", "good").returncode == 1


def test_a_cell_that_is_nowhere_is_wrong_usage(tiny: Path) -> None:
    done = ci_run(tiny, "goood")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: there is no cell 'goood'; the cells are good, bad, gone, unbuilt\n"
    assert ci_run(tiny).returncode == 2


def test_the_list_has_every_cell_and_what_is_lacking(tiny: Path) -> None:
    lines = ci_run(tiny, "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["cell", "good", "bad", "gone", "unbuilt"]
    assert lines[3].endswith("absent here: no driver of no such device")


def test_a_report_in_words() -> None:
    levels = {"L0": {"passed": 7, "skipped": 0}, "L1": {"passed": 5, "skipped": 2}}
    report = {"backend": "a", "level": "L1", "wanted": "L5", "levels": levels}
    assert summary([report]) == "reaches L1 of L5, 12 passed, 2 skipped"
    other = {**report, "backend": "b", "level": None}
    assert summary([report, other]) == "a reaches L1 of L5, b reaches no level of L5, 24 passed, 4 skipped"
