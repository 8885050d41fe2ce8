"""docs/backends.md: its code is the template's, the template is a backend, and a renamed copy of it passes the kit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pagefleet.conformance
from pagefleet.backend import Traits

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
TEMPLATE = ROOT / "docs" / "template" / "pagefleet-mydevice"
KIT = Path(pagefleet.conformance.__file__).parent


def test_the_code_on_the_page_is_the_template() -> None:
    blocks = re.findall(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```$", PAGE, re.M | re.S)
    package = "pagefleet_mydevice"
    modules = {f"{package}/{name}.py" for name in ("__init__", "backend", "device")}
    assert {path for path, _ in blocks} == {"pyproject.toml", *modules}
    for path, text in blocks:
        assert (TEMPLATE / path).read_text(encoding="utf-8") == text, path


def test_the_template_is_short() -> None:
    files = sorted(TEMPLATE.rglob("*.py"))
    assert 0 < sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) < 200


def test_the_page_names_tests_cases_and_traits_that_exist() -> None:
    """Names that were cut short end in dots."""
    source = "\n".join(file.read_text(encoding="utf-8") for file in KIT.glob("*.py"))
    section = PAGE.split("## 5.")[1].split("## 6.")[0]
    names = re.findall(r"`(test_\w+)", section)
    assert len(names) > 10
    assert [name for name in names if f"def {name}" not in source] == []
    for case in ("gqa-tied", "multi-query", "window", "partial-rope", "scaled-rope", "qk-norm-128", "biases-80"):
        assert f'"{case}"' in source
        assert f"`{case}`" in section
    told = set(re.findall(r"^\| `(\w+)", PAGE.split("## 7.")[1], re.M)) | {"exchanges_blocks"}
    assert told == set(Traits.__slots__)


def test_a_renamed_copy_passes_the_kit(tmp_path: Path) -> None:
    """By the commands of the page, without pip: the metadata that it would write."""
    site = tmp_path / "site"
    shutil.copytree(
        TEMPLATE / "pagefleet_mydevice", site / "pagefleet_acme", ignore=shutil.ignore_patterns("__pycache__")
    )
    for file in site.rglob("*.py"):
        file.write_text(file.read_text(encoding="utf-8").replace("mydevice", "acme"), encoding="utf-8")
    info = site / "pagefleet_acme-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pagefleet-acme\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[pagefleet]\nacme = pagefleet_acme\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pagefleet", "conformance", "--device", "acme"]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "acme:0 reaches L5 of L5" in result.stdout
