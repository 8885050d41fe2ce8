"""The workflow files of GitHub and GitLab: a job for each cell, which calls `ci/run CELL` as people do.

Absent is not passed: in GitLab such a job ends with a warning. GitHub knows no such end: the run has a warning there,
and the job's summary the reason. A self-hosted cell's job is left out until the variable PAGEFLEET_RUNNERS names its
runner's last label; else it would wait a day for a runner that is not there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from matrix import Cell, Matrix

HEAD = "# Written by `ci/run --write-workflows` from ci/matrix.toml: change that.\n"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # builds without CUDA; pip takes 2.13.0+cpu before 2.13.0
CHECKOUT, PYTHON, UPLOAD = "actions/checkout@v4.2.2", "actions/setup-python@v5.3.0", "actions/upload-artifact@v4.4.3"
MINUTES = 120
ABSENT = 3  # exit status of `ci/run`
CRON = "17 2 * * *"  # no full hour: those are crowded


def write(matrix: Matrix, root: Path) -> None:
    """Both files into the checkout."""
    for name, generate in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(generate(matrix), encoding="utf-8")
        print(f"wrote {name}")


def github(matrix: Matrix) -> str:
    """`.github/workflows/ci.yml`."""
    head = f"""{HEAD}
name: ci

on:
  push:
    branches: [main]
  pull_request:
  schedule:
    - cron: {_quote(CRON)}
  workflow_dispatch:

permissions:
  contents: read

jobs:
"""
    return head + "\n".join(map(_github_job, matrix.cells.values()))


def _github_job(cell: Cell) -> str:
    conditions = ["(github.event_name == 'schedule' || github.event_name == 'workflow_dispatch')"] * cell.nightly
    conditions += [f"contains(vars.PAGEFLEET_RUNNERS, '{cell.runner[-1]}')"] if cell.runner else []
    runs_on = f"[{', '.join(cell.runner)}]" if cell.runner else "ubuntu-24.04"
    lines = [
        f"  {cell.name}:",
        *([f"    if: {' && '.join(conditions)}"] if conditions else []),
        f"    runs-on: {runs_on}",
        f"    timeout-minutes: {MINUTES}",
        *([] if cell.runner else ["    env:", f"      PIP_EXTRA_INDEX_URL: {CPU_INDEX}"]),
        "    steps:",
        f"      - uses: {CHECKOUT}",
        f"      - uses: {PYTHON}",
        "        with:",
        f"          python-version: {_quote(cell.python)}",
        f"      - name: {_quote(cell.about)}",
        "        run: |",
        *(f"          {line}" for line in _github_script(cell)),
        f"      - uses: {UPLOAD}",
        "        if: always()",
        "        with:",
        f"          name: {cell.name}",
        f"          path: build/ci/{cell.name}/report",
        "          if-no-files-found: ignore",
    ]
    return "\n".join(lines) + "\n"


def _github_script(cell: Cell) -> list[str]:
    system = [f"sudo apt-get update && sudo apt-get install -y {' '.join(cell.system)}"] if cell.system else []
    absent = f"echo '::warning title={cell.name}::absent, the summary says why'"
    call = f'ci/run {cell.name} --summary "$GITHUB_STEP_SUMMARY"'
    return [*system, f"{call} || {{ status=$?; [ $status -eq {ABSENT} ] || exit $status; {absent}; }}"]


def gitlab(matrix: Matrix) -> str:
    """`.gitlab-ci.yml`."""
    return f"{HEAD}\n" + "\n".join(map(_gitlab_job, matrix.cells.values()))


def _gitlab_job(cell: Cell) -> str:
    conditions = ["$CI_PIPELINE_SOURCE =~ /^(schedule|web)$/"] * cell.nightly
    conditions += [f"$PAGEFLEET_RUNNERS =~ /{cell.runner[-1]}/"] if cell.runner else []
    install = [f"apt-get update && apt-get install -y {' '.join(cell.system)}"] if cell.system else []
    lines = [
        f"{cell.name}:  # {cell.about}",
        *([f"  tags: [{', '.join(cell.runner)}]"] if cell.runner else [f"  image: python:{cell.python}"]),
        *(["  rules:", f"    - if: {_quote(' && '.join(conditions))}"] if conditions else []),
        *([] if cell.runner else ["  variables:", f"    PIP_EXTRA_INDEX_URL: {CPU_INDEX}"]),
        f"  timeout: {MINUTES} minutes",
        "  script:",
        *(f"    - {line}" for line in [*install, f"ci/run {cell.name}"]),
        "  allow_failure:",
        f"    exit_codes: [{ABSENT}]",
        "  artifacts:",
        "    when: always",
        f"    paths: [build/ci/{cell.name}/report]",
        "    reports:",
        f"      junit: build/ci/{cell.name}/report/**/junit.xml",
    ]
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    return json.dumps(text)  # JSON's strings are YAML's


FILES: Mapping[str, Callable[[Matrix], str]] = {".github/workflows/ci.yml": github, ".gitlab-ci.yml": gitlab}
