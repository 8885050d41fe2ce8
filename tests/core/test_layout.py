"""The house rules that a machine can check: who imports whom, where things lie, what is documented."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagefleet import hookspecs

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "pagefleet"
SOURCE_ROOTS = ("core", "backends", "kernels")

REQUIRED = {"pyproject.toml", *SOURCE_ROOTS, "build_scripts", "tests", "ci", "README.md", "LICENSE", "Makefile"}
ALLOWED = REQUIRED | {"CHANGELOG.md", "docs", "build", "dist"}  # build and dist are made, not kept


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


CORE_FILES = [path for path in sources("core") if CORE / "torch_runner" not in path.parents]


def test_the_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_top_level_is_what_the_readme_maps() -> None:
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert REQUIRED - found == set()
    assert found - ALLOWED == set()


@pytest.mark.parametrize("folder", SOURCE_ROOTS)
def test_source_roots_are_no_packages(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("path", CORE_FILES, ids=relative)
def test_the_core_knows_no_device_by_name(path: Path) -> None:
    words = r"\b(amd|cann|cpu|cuda|hip|metal|mps|npu|nvidia|onnx|rocm|tpu|vulkan|xla|xpu)\b|gpu"
    assert re.findall(words, path.read_text(encoding="utf-8"), flags=re.IGNORECASE) == []


@pytest.mark.parametrize("path", sources(*SOURCE_ROOTS), ids=relative)
def test_the_environment_is_read_in_one_file_of_a_package(path: Path) -> None:
    """`config.py`, of the core and of a backend that has variables of its own."""
    reads = re.findall(r"\benviron\b|\bgetenv\b", path.read_text(encoding="utf-8"))
    configs = [package / "config.py" for package in (CORE, *(ROOT / "backends").glob("pagefleet_*"))]
    assert bool(reads) == (path in configs)


@pytest.mark.parametrize("path", sources(*SOURCE_ROOTS), ids=relative)
def test_a_file_stays_short_and_is_named_for_what_is_in_it(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400
    assert not re.search(r"util|helper|manager|common|misc|^base$", path.stem)


@pytest.mark.parametrize("path", CORE_FILES, ids=relative)
def test_no_module_holds_state(path: Path) -> None:
    """No `global` statement, and no list, dict or set at module level but constants declared as immutable."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Global)]
    mutable = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, mutable):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            assert names == {"__all__"}, f"line {node.lineno}: use a tuple, or annotate it as a Mapping or Sequence"


def test_every_hook_is_specified_and_documented() -> None:
    names = {name for name in vars(hookspecs) if name.startswith("pagefleet_")}
    page = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(pagefleet_[a-z_]+)\(\)`", page)) == names
    assert all(vars(hookspecs)[name].__doc__ for name in names)


def test_every_variable_of_the_environment_is_documented() -> None:
    read = set(re.findall(r'variables\.get\("([A-Z_]+)"', (CORE / "config.py").read_text(encoding="utf-8")))
    page = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    assert read == {"TARGET_DEVICE", "PAGEFLEET_PLUGINS"}
    assert all(f"`{name}" in page for name in read)


def test_the_readme_maps_every_module_of_the_core() -> None:
    house = (ROOT / "README.md").read_text(encoding="utf-8").split("## The house")[1].split("## ")[0]
    modules = {path.name for path in CORE.glob("*.py") if not path.name.startswith("_")}
    folders = {f"{path.name}/" for path in CORE.iterdir() if path.is_dir() and not path.name.startswith("_")}
    mapped = set(re.findall(r"[a-z_]+\.py", house))
    assert mapped == modules
    assert folders <= set(re.findall(r"[a-z_]+/", house))


def test_the_readme_follows_a_request_through_functions_that_exist() -> None:
    path = (ROOT / "README.md").read_text(encoding="utf-8").split("## The path of a request")[1].split("## ")[0]
    source = "\n".join(file.read_text(encoding="utf-8") for file in CORE.glob("*.py"))
    methods = re.findall(r"`([A-Z]\w+)\.(\w+)`", path)
    assert len(methods) >= 8
    for owner, method in methods:
        body = re.split(rf"^class {owner}\b.*$", source, maxsplit=1, flags=re.MULTILINE)[1]
        body = re.split(r"^(?:class |def |@)", body, maxsplit=1, flags=re.MULTILINE)[0]
        assert f"def {method}(" in body, f"{owner}.{method}"
    for function in ("build_batch",):
        assert f"`{function}`" in path
        assert f"\ndef {function}(" in source
