"""Simulated hosts: what is plugged in, installed, hidden or broken there, and which device an engine takes or refuses.

The two vendors' plugins are real packages on disk with probes as a vendor would write them, over a root folder of their
own; the built-in backends and whatever else is installed here are on every host too, and never preferred to a GPU.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pagefleet.backend import BackendError
from pagefleet.plugins import Plugins

VENDOR = """
import os
from pathlib import Path
from pagefleet.backend import BackendInfo, DeviceInfo, Probe, Traits
from pagefleet.hookspecs import hookimpl

ROOT = Path(os.environ["SIMULATED_ROOT"])

def probe():
    nodes = sorted(ROOT.glob("dev/{node}[0-9]"))
    if not nodes:
        return Probe(False, "no {name} driver: there is no /dev/{node}0")
    if not all(os.stat(node).st_mode & 0o004 for node in nodes):
        return Probe(False, "no permission on /dev/{node}0: join the group {group}")
    if not (ROOT / "lib/{library}").exists():
        return Probe(False, "{library} is missing: install the {name} user-space driver")
    version = int((ROOT / "lib/{library}").read_text())
    if version < {oldest}:
        return Probe(False, f"{name} driver {{version}} is too old: {oldest} or newer")
    wheel = (ROOT / "wheel").read_text() if (ROOT / "wheel").exists() else ""
    if wheel != "{wheel}":
        return Probe(False, f"this torch is built for {{wheel or 'no GPU'}}: install the {wheel} build")
    shown = os.environ.get("{visible}")
    chosen = range(len(nodes)) if shown is None else [int(i) for i in shown.split(",") if i]
    if not chosen:
        return Probe(False, "{visible} is empty, which hides every device: unset it")
    devices = tuple(DeviceInfo("{name} " + str(i), 16 << 30) for i in chosen if i < len(nodes))
    if not devices:
        return Probe(False, f"{visible} is {{shown}}, and there are {{len(nodes)}} devices")
    return Probe(True, f"{{len(devices)}} of {{len(nodes)}} {name} devices, driver {{version}}", devices)

def load(index):
    raise NotImplementedError

@hookimpl
def pagefleet_backends():
    return [BackendInfo("{backend}", probe, load, Traits(), priority={priority})]
"""
GREEN = VENDOR.format(
    name="Green", node="green", group="video", library="libgreen.so", oldest=525, wheel="green12",
    visible="GREEN_VISIBLE_DEVICES", backend="green", priority=100,
)  # fmt: skip
RED = VENDOR.format(
    name="Red", node="red", group="render", library="libred.so", oldest=6, wheel="red6",
    visible="RED_VISIBLE_DEVICES", backend="red", priority=90,
)  # fmt: skip
HEAD = "from pagefleet.backend import BackendInfo, Probe, Traits\nfrom pagefleet.hookspecs import hookimpl\n"
ONE = "@hookimpl\ndef pagefleet_backends(): return [BackendInfo('odd', probe, lambda index: None{rest})]\n"
ODD = {
    "cannot be imported": "import no_such_vendor_library",
    "exits while it is imported": "raise SystemExit(1)",
    "probe raises": HEAD + "def probe(): raise OSError('the bus is gone')\n" + ONE.format(rest=", priority=200"),
    "probe returns a word": HEAD + "def probe(): return 'yes'\n" + ONE.format(rest=", priority=200"),
    "says no": HEAD + "def probe(): return Probe(False, 'no odd card')\n" + ONE.format(rest=", priority=200"),
    "for another contract": HEAD + "def probe(): return Probe(True, 'here')\n" + ONE.format(rest=", contract='>=9'"),
    "is best": HEAD + "def probe(): return Probe(True, 'odd card 7')\n" + ONE.format(rest=", priority=200"),
    "takes a built-in name": HEAD
    + "def probe(): return Probe(True, 'x')\n"
    + ONE.format(rest="").replace("odd", "cpu"),
}
GREEN_HOST = {"dev/green0": "", "lib/libgreen.so": "550", "wheel": "green12"}
RED_HOST = {"dev/red0": "", "lib/libred.so": "6", "wheel": "red6"}


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, what is asked for on it, and what must come of it: `NAME:INDEX`, or the words of a refusal."""

    outcome: str
    device: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    plugins: tuple[str, ...] = ("green", "red")  # and names of ODD
    no_access: str | None = None
    refused: bool = False


HOSTS = {
    # the choice is free
    "no driver of any vendor": Host("cpu:0"),
    "a green card": Host("green:0", files=GREEN_HOST),
    "a red card": Host("red:0", files=RED_HOST),
    "both, with the green build of torch": Host("green:0", files={**RED_HOST, **GREEN_HOST}),
    "both, with the red build of torch": Host("red:0", files={**GREEN_HOST, **RED_HOST}),
    "both drivers, torch without GPU": Host("cpu:0", files={**GREEN_HOST, **RED_HOST, "wheel": ""}),
    "green hidden": Host("cpu:0", files=GREEN_HOST, environment={"GREEN_VISIBLE_DEVICES": ""}),
    "green hidden beside red": Host(
        "red:0", files={**GREEN_HOST, **RED_HOST}, environment={"GREEN_VISIBLE_DEVICES": ""}
    ),
    "driver too old": Host("cpu:0", files={**GREEN_HOST, "lib/libgreen.so": "470"}),
    "user-space driver missing": Host("cpu:0", files={"dev/red0": "", "wheel": "red6"}),
    "no permission": Host("cpu:0", files=RED_HOST, no_access="dev/red0"),
    "vendors' plugins not installed": Host("cpu:0", files=GREEN_HOST, plugins=()),
    "a broken plugin beside a good one": Host("green:0", files=GREEN_HOST, plugins=("green", "cannot be imported")),
    "a plugin that exits": Host("cpu:0", plugins=("exits while it is imported",)),
    "a probe that raises": Host("cpu:0", plugins=("probe raises",)),
    "a probe that returns a word": Host("red:0", files=RED_HOST, plugins=("red", "probe returns a word")),
    "a third vendor that is best": Host("odd:0", files=GREEN_HOST, plugins=("green", "is best")),
    "a third vendor without its card": Host("green:0", files=GREEN_HOST, plugins=("green", "says no")),
    "a plugin for another contract": Host("cpu:0", plugins=("for another contract",)),
    "a plugin that takes a built-in name": Host("cpu:0", plugins=("takes a built-in name",)),
    "plugins not allowed": Host("cpu:0", files=GREEN_HOST, environment={"PAGEFLEET_PLUGINS": "red"}),
    "auto by name": Host("green:0", "auto", GREEN_HOST),
    # a device is asked for
    "the second card": Host("green:1", "green:1", {**GREEN_HOST, "dev/green1": ""}),
    "the less preferred of two": Host("red:0", "red", {**GREEN_HOST, **RED_HOST}),
    "the host beside a card": Host("cpu:0", "cpu", GREEN_HOST),
    "by the environment": Host("cpu:0", None, GREEN_HOST, {"TARGET_DEVICE": "cpu"}),
    "by name while another plugin is broken": Host("red:0", "red", RED_HOST, plugins=("red", "cannot be imported")),
    # and is not to be had
    "asked for without driver": Host("no Green driver: there is no /dev/green0", "green", refused=True),
    "asked for and hidden": Host(
        "GREEN_VISIBLE_DEVICES is empty, which hides every device", "green", GREEN_HOST,
        {"GREEN_VISIBLE_DEVICES": ""}, refused=True,
    ),
    "asked for with the other vendor's torch": Host(
        "this torch is built for green12: install the red6 build", "red", {**RED_HOST, **GREEN_HOST}, refused=True
    ),
    "asked for with a torch without GPU": Host(
        "built for no GPU: install the green12", "green", {**GREEN_HOST, "wheel": ""}, refused=True
    ),
    "asked for with an old driver": Host(
        "Green driver 470 is too old: 525 or newer", "green", {**GREEN_HOST, "lib/libgreen.so": "470"}, refused=True
    ),
    "asked for without permission": Host(
        "join the group render", "red", RED_HOST, no_access="dev/red0", refused=True
    ),
    "asked for without its library": Host(
        "libred.so is missing: install the Red", "red", {"dev/red0": "", "wheel": "red6"}, refused=True
    ),
    "a card that is not there": Host(
        r"device 'green:4': green has 1 device\(s\), index 0 to 0", "green:4", GREEN_HOST, refused=True
    ),
    "a name nobody has": Host("no backend is called 'gren'; did you mean 'green'", "gren", GREEN_HOST, refused=True),
    "a plugin not installed": Host("no backend is called 'green'", "green", GREEN_HOST, plugins=(), refused=True),
    "a plugin not allowed": Host(
        "is installed but not allowed: add it to PAGEFLEET_PLUGINS", "green", GREEN_HOST,
        {"PAGEFLEET_PLUGINS": "red"}, refused=True,
    ),
    "a plugin that cannot be imported": Host(
        "No module named 'no_such_vendor_library'", "odd", plugins=("cannot be imported",), refused=True
    ),
    "a plugin for another contract, by name": Host(
        "backend 'odd' supports contract >=9, this pagefleet has", "odd",
        plugins=("for another contract",), refused=True,
    ),
    "a probe that raises, by name": Host("the bus is gone", "odd", plugins=("probe raises",), refused=True),
    "the environment asks for what is not there": Host(
        "no Red driver", None, GREEN_HOST, {"TARGET_DEVICE": "red"}, refused=True
    ),
    "a provider of onnxruntime that is not there": Host(
        "ElsewhereExecutionProvider|not installed", "onnx",
        environment={"PAGEFLEET_ONNX_PROVIDER": "ElsewhereExecutionProvider"}, refused=True,
    ),
    "kernels for another processor": Host(
        "PAGEFLEET_CPU_ISA is 'riscv'", "cpu", environment={"PAGEFLEET_CPU_ISA": "riscv"}, refused=True
    ),
}  # fmt: skip


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to install packages in, found as site-packages is."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def install(site: Path, name: str, source: str, key: str) -> None:
    module = f"simulated_{abs(hash((site, key)))}"
    (site / f"{module}.py").write_text(textwrap.dedent(source))
    info = site / f"pagefleet_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pagefleet-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[pagefleet]\n{name} = {module}\n")


def load(plugins: Plugins, device: str | None) -> None:
    """Some of what is missing shows only then."""
    info, index = plugins.select(device)
    info.load(index)


@pytest.mark.parametrize("name", HOSTS)
def test_right_choice_or_right_refusal(name: str, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagefleet.config import EngineConfig

    host = HOSTS[name]
    for path, content in host.files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(content)
    if host.no_access is not None:
        (tmp_path / host.no_access).chmod(0o600)
    for variable in ("TARGET_DEVICE", "PAGEFLEET_PLUGINS", "GREEN_VISIBLE_DEVICES", "RED_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in {"SIMULATED_ROOT": str(tmp_path), **host.environment}.items():
        monkeypatch.setenv(variable, value)
    for plugin in host.plugins:
        source = {"green": GREEN, "red": RED, **ODD}[plugin]
        install(site, plugin if plugin in ("green", "red") else "odd", source, plugin)
    config = EngineConfig(model="any", device=host.device)
    plugins = Plugins(config.plugins)
    if host.refused:
        with pytest.raises(BackendError, match=host.outcome):
            load(plugins, config.device)
        return
    info, index = plugins.select(config.device)
    assert f"{info.name}:{index}" == host.outcome


def test_there_are_hosts_enough() -> None:
    assert len(HOSTS) >= 30
    assert sum(host.refused for host in HOSTS.values()) >= 12
    assert all(re.compile(host.outcome) for host in HOSTS.values())
