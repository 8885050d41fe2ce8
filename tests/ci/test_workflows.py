"""The workflow files are those of the matrix, and do nothing but call `ci/run`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from matrix import ROOT, read_matrix
from workflows import FILES

MATRIX = read_matrix()
GITHUB, GITLAB = (yaml.safe_load(generate(MATRIX)) for generate in FILES.values())
SYSTEM = ("sudo apt-get ", "apt-get ")  # what a hosted runner lacks


@pytest.mark.parametrize("name", FILES)
def test_the_committed_file_is_the_generated_one(name: str) -> None:
    assert (ROOT / name).read_text() == FILES[name](MATRIX), "run ci/run --write-workflows"


def test_every_cell_has_a_job_in_both() -> None:
    assert list(GITHUB["jobs"]) == list(GITLAB) == list(MATRIX.cells)


@pytest.mark.parametrize("name", MATRIX.cells)
def test_a_job_calls_the_runner_and_nothing_else(name: str) -> None:
    runs = [step["run"].splitlines() for step in GITHUB["jobs"][name]["steps"] if "run" in step]
    for lines in (*runs, GITLAB[name]["script"]):
        *before, last = lines
        assert last.split()[:2] == ["ci/run", name]
        assert all(line.startswith(SYSTEM) for line in before)
    assert len(runs) == 1


@pytest.mark.parametrize("status", [0, 1, 2, 3])
def test_absent_is_told_apart_from_passed(tmp_path: Path, status: int) -> None:
    (tmp_path / "ci").mkdir()
    (tmp_path / "ci/run").write_text(f"#!/bin/sh\necho $1 >> $3\nexit {status}\n")
    (tmp_path / "ci/run").chmod(0o755)
    (run,) = (step["run"] for step in GITHUB["jobs"]["cuda"]["steps"] if "run" in step)
    done = subprocess.run(
        ["bash", "-e", "-c", run],
        cwd=tmp_path,
        env={**os.environ, "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == (0 if status == 3 else status)
    assert done.stdout.startswith("::warning title=cuda::absent") == (status == 3)
    assert (tmp_path / "summary").read_text() == "cuda\n"
    assert all(job["allow_failure"] == {"exit_codes": [3]} for job in GITLAB.values())


@pytest.mark.parametrize("name", MATRIX.cells)
def test_nightly_and_self_hosted_cells_are_not_run_by_each_change(name: str) -> None:
    cell, job = MATRIX.cells[name], GITHUB["jobs"][name]
    rules: list[dict[str, Any]] = GITLAB[name].get("rules", [{"if": ""}])
    for condition in (job.get("if", ""), rules[0]["if"]):
        assert ("schedule" in condition) == cell.nightly
        assert ("PAGEFLEET_RUNNERS" in condition) == bool(cell.runner)
    assert job["runs-on"] == (list(cell.runner) or "ubuntu-24.04")
    assert ("PIP_EXTRA_INDEX_URL" in job.get("env", {})) != bool(cell.runner)


def test_actions_are_pinned_by_version() -> None:
    used = {step["uses"] for job in GITHUB["jobs"].values() for step in job["steps"] if "uses" in step}
    assert used
    assert all(action.rpartition("@")[2].startswith("v") and action.count(".") == 2 for action in used)
