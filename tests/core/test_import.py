"""Importing pagefleet is quick and touches nothing: no torch, no device, no thread; it works after fork and spawn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HEAVY = ("numpy", "pluggy", "rich", "tokenizers", "torch", "transformers", "typer")
BUILT_IN_ONLY = {"PAGEFLEET_PLUGINS": "", "TARGET_DEVICE": ""}


def python(*arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], env=os.environ | variables, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def fastest(*arguments: str) -> float:
    """Seconds of the fastest of five runs: the one that the machine's other work disturbed least."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        python(*arguments)
        times.append(time.perf_counter() - start)
    return min(times)


# What a process holds: heavy modules, open device files and threads. Linux only, as /proc is.
STATE = """
import json, os, sys, threading
devices = []
for fd in os.listdir("/proc/self/fd"):
    try:
        target = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        continue  # the listing's own
    if target.startswith("/dev/") and int(fd) > 2:
        devices.append(target)
heavy = sorted(name for name in %r if name in sys.modules)
print(json.dumps([heavy, devices, threading.active_count(), len(os.listdir("/proc/self/task"))]))
"""


def state_after(code: str) -> tuple[list[str], list[str], int, int]:
    heavy, devices, threads, tasks = json.loads(python("-c", code + STATE % (HEAVY,), **BUILT_IN_ONLY))
    return heavy, devices, threads, tasks


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")


@needs_proc
def test_import_brings_nothing_heavy_and_opens_no_device() -> None:
    assert state_after("import pagefleet; pagefleet.__version__; dir(pagefleet)") == ([], [], 1, 1)


@needs_proc
def test_probing_the_built_in_backends_imports_no_torch_and_opens_no_device() -> None:
    code = "from pagefleet.plugins import Plugins; print(end='' if Plugins([]).backends() else 'none')\n"
    heavy, devices, threads, _ = state_after(code)
    assert not {"torch", "transformers"} & set(heavy)
    assert devices == []
    assert threads == 1


def test_no_module_of_the_core_imports_torch() -> None:
    code = """
import importlib, json, pathlib, sys
import pagefleet
apart = ("torch_runner", "conformance", "__main__.py")
home = pathlib.Path(pagefleet.__file__).parent
files = [file.relative_to(home) for file in sorted(home.rglob("*.py"))]
names = [".".join(("pagefleet", *file.with_suffix("").parts)) for file in files if file.parts[0] not in apart]
modules = [name.removesuffix(".__init__") for name in names]
for module in modules:
    importlib.import_module(module)
    if "torch" in sys.modules:
        sys.exit(f"{module} imports torch")
print(json.dumps(modules))
"""
    modules = json.loads(python("-c", code))
    assert {"pagefleet.engine", "pagefleet.scheduler", "pagefleet.sampler", "pagefleet.cli"} <= set(modules)


def test_import_takes_under_300_ms() -> None:
    assert fastest("-c", "import pagefleet") < 0.3


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_the_command_answers_within_500_ms_without_torch(option: str) -> None:
    assert fastest("-m", "pagefleet", option) < 0.5
    loaded = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "pagefleet", option], capture_output=True, text=True, timeout=60
    ).stderr
    names = {line.rpartition("|")[2].strip() for line in loaded.splitlines()}
    assert "pagefleet.cli" in names
    assert not {"torch", "transformers", "numpy"} & names


def test_every_public_name_has_a_home() -> None:
    import pagefleet

    with pytest.raises(AttributeError, match="no attribute 'LMM'; it has LLM, AsyncLLM"):
        _ = pagefleet.LMM
    code = "import pagefleet\nfor name in pagefleet.__all__: getattr(pagefleet, name)\nassert dir(pagefleet)"
    python("-c", code)


LIST = "[report.info.name for report in Plugins([]).backends()]"


def test_a_forked_child_lists_the_same_backends() -> None:
    code = f"""
import os, pagefleet
from pagefleet.plugins import Plugins
before = {LIST}
child = os.fork()
if child == 0:
    os._exit(0 if {LIST} == before and before else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
"""
    python("-c", code)


def test_a_spawned_child_lists_the_same_backends(tmp_path: Path) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(f"""
import multiprocessing, pagefleet
from pagefleet.plugins import Plugins

def names(queue):
    queue.put({LIST})

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=names, args=(queue,))
    child.start()
    found = queue.get(timeout=60)
    child.join()
    assert found == {LIST} != [], found
""")
    python(str(script))
