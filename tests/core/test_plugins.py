"""Discovery, with real packages on disk: a broken plugin is named with its cause and disturbs nobody else."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from pagefleet.backend import CONTRACT_VERSION, BackendError
from pagefleet.devices import describe
from pagefleet.devices import report as devices_report
from pagefleet.models import find_family
from pagefleet.plugins import BackendReport, Plugin, Plugins, parse_device

Install = Callable[..., None]

HEAD = """
from pagefleet.backend import BackendInfo, DeviceInfo, Probe, Traits
from pagefleet.hookspecs import hookimpl

def usable():
    return Probe(True, "found it", (DeviceInfo("d0"), DeviceInfo("d1")))

def absent():
    return Probe(False, "no such hardware")

def broken():
    raise OSError("driver too old")

def load(index):
    raise NotImplementedError

class Rude(Exception):
    def __str__(self):
        raise RuntimeError("no words")
    __repr__ = __str__

"""


def backends(*infos: str) -> str:
    """Source of a plugin that registers these."""
    return HEAD + f"@hookimpl\ndef pagefleet_backends():\n    return [{', '.join(infos)}]\n"


GOOD = backends("BackendInfo('good', usable, load, priority=1000)")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a package of one module, found by its entry point, as pip would have left it."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name: str, source: str, distribution: str | None = None) -> None:
        distribution = distribution or f"dist-{name}"
        module = f"plugin_{distribution}_{name}".replace("-", "_")
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[pagefleet]\n{name} = {module}\n")

    yield install
    for module in set(sys.modules) - before:
        if module.startswith("plugin_"):
            del sys.modules[module]


def report(plugins: Plugins, name: str) -> BackendReport:
    return next(report for report in plugins.backends() if report.info.name == name)


# -- what is broken stays alone ----------------------------------------------------------------------------

BROKEN = {
    "import fails": ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
    "import is no Python": ("def", "SyntaxError"),
    "import exits": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "import raises without a word": ("raise ValueError", "ValueError"),
    "hook takes what it is not given": (
        HEAD + "@hookimpl\ndef pagefleet_backends(surprise): return []",
        "Argument(s) {'surprise'}",
    ),
    "hook is misspelt": (HEAD + "@hookimpl\ndef pagefleet_backend(): return []", "unknown hook 'pagefleet_backend'"),
    "no hook": ("x = 1", "implements no hook"),
    "hook raises": (HEAD + "@hookimpl\ndef pagefleet_backends(): raise KeyError('bad')", "KeyError: 'bad'"),
    "hook returns one instead of a list": (
        HEAD + "@hookimpl\ndef pagefleet_backends(): return BackendInfo('bad', usable, load)",
        "must return a list of BackendInfo",
    ),
    "hook returns something else": (
        HEAD + "@hookimpl\ndef pagefleet_backends(): return ['bad']",
        "returned ['bad']; it must return a list of BackendInfo",
    ),
    "name twice in one plugin": (
        backends("BackendInfo('bad', usable, load)", "BackendInfo('bad', usable, load)"),
        "registers backend 'bad' twice",
    ),
    "name with a colon": (backends("BackendInfo('bad:0', usable, load)"), "backend name 'bad:0': must be a word"),
    "name is auto": (backends("BackendInfo('auto', usable, load)"), "backend name 'auto'"),
    "name is no string": (backends("BackendInfo(7, usable, load)"), "BackendInfo.name is 7; it must be str"),
    "another contract": (
        backends("BackendInfo('bad', usable, load, contract='>=2,<3')"),
        f"backend 'bad' supports contract >=2,<3, this pagefleet has {CONTRACT_VERSION}",
    ),
    "a contract that is no range": (backends("BackendInfo('bad', usable, load, contract='new')"), "InvalidSpecifier"),
    "contract is None": (backends("BackendInfo('bad', usable, load, contract=None)"), "BackendInfo.contract is None"),
    "priority is text": (
        backends("BackendInfo('bad', usable, load, priority='9')"),
        "BackendInfo.priority is '9'; it must be int",
    ),
    "priority is None": (backends("BackendInfo('bad', usable, load, priority=None)"), "BackendInfo.priority is None"),
    "priority is a flag": (backends("BackendInfo('bad', usable, load, priority=True)"), "BackendInfo.priority is True"),
    "priority is too long to print": (backends("BackendInfo('bad', usable, load, priority=10**5000)"), "priority is"),
    "probe cannot be called": (
        backends("BackendInfo('bad', None, load)"),
        "BackendInfo.probe is None; it must be Callable[[], Probe]",
    ),
    "load cannot be called": (
        backends("BackendInfo('bad', usable, None)"),
        "BackendInfo.load is None; it must be Callable[[int], Backend]",
    ),
    "traits are None": (
        backends("BackendInfo('bad', usable, load, None)"),
        "BackendInfo.traits is None; it must be Traits",
    ),
    "traits are a dict": (backends("BackendInfo('bad', usable, load, {'dtypes': ()})"), "it must be Traits"),
    "dtypes are None": (
        backends("BackendInfo('bad', usable, load, Traits(dtypes=None))"),
        "Traits.dtypes is None; it must be tuple[str, ...]",
    ),
    "block sizes are text": (
        backends("BackendInfo('bad', usable, load, Traits(block_sizes=('16',)))"),
        "Traits.block_sizes is ('16',); it must be tuple[int, ...] | None",
    ),
    "a number of numpy": (
        "import numpy\n" + backends("BackendInfo('bad', usable, load, Traits(token_multiple=numpy.int64(8)))"),
        "Traits.token_multiple is np.int64(8); it must be int",
    ),
    "exception that cannot be shown": (
        HEAD + "@hookimpl\ndef pagefleet_backends(): raise Rude",
        "Rude: (its message cannot be shown)",
    ),
    "name that cannot be shown": (backends("BackendInfo(Rude(), usable, load)"), "BackendInfo.name is <"),
    "list that cannot be shown": (
        HEAD + "@hookimpl\ndef pagefleet_backends(): return [Rude()]",
        "it must return a list of BackendInfo",
    ),
    "half good": (
        backends("BackendInfo('half', usable, load)", "BackendInfo('bad', usable, load, contract='<1')"),
        "<1",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_named_with_its_cause_and_disturbs_nobody(
    case: str, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    source, cause = BROKEN[case]
    install("bad", source)
    install("good", GOOD)

    plugins = Plugins()
    with caplog.at_level(logging.WARNING, logger="pagefleet"):
        info, index = plugins.select("auto")

    assert (info.name, index) == ("good", 0)
    failure = plugins.failures[Plugin("bad", "dist-bad")]
    assert cause in failure.reason
    assert f"plugin 'bad' of dist-bad is not used: {failure.reason}" in caplog.text
    assert not {"bad", "half"} & {report.info.name for report in plugins.backends()}  # whole or not at all

    with pytest.raises(BackendError, match="'bad' of dist-bad") as error:
        Plugins().select("bad")
    assert cause in str(error.value)
    assert error.value.__cause__ is not None
    assert Plugins().select("good")[0].name == "good"


def test_a_plugin_that_fails_under_another_name_raises_its_cause_too(install: Install) -> None:
    install("entry", backends("BackendInfo('bad', usable, load, contract='>=7')"))
    with pytest.raises(BackendError, match=r"'entry' of dist-entry is not used: backend 'bad' supports contract >=7"):
        Plugins().select("bad")


def test_an_interrupt_during_import_is_not_swallowed(install: Install) -> None:
    install("bad", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        Plugins().backends()


def test_the_first_to_register_a_name_keeps_it_and_both_are_named(install: Install) -> None:
    install("one", backends("BackendInfo('twin', usable, load, priority=1)"))
    install("two", backends("BackendInfo('twin', usable, load, priority=2)"))
    plugins = Plugins()
    assert plugins.select("twin")[0].priority == 1
    (failure,) = plugins.failures.values()
    assert failure.reason == "backend 'twin' is already registered by plugin 'one' of dist-one, not 'two' of dist-two"


def test_a_stranger_cannot_take_the_name_of_another_entry_point(install: Install) -> None:
    install("aaa", backends("BackendInfo('good', usable, load, priority=2000)"))  # sorted before the owner
    install("good", GOOD)
    plugins = Plugins()
    assert plugins.select("auto")[0].priority == 1000
    assert "has the name of another plugin's entry point" in plugins.failures[Plugin("aaa", "dist-aaa")].reason
    assert Plugins().select("good")[0].priority == 1000  # the same backend, however it is found


def test_a_stranger_cannot_take_a_built_in_name(install: Install) -> None:
    install("cpu", backends("BackendInfo('cpu', usable, load, priority=9000)"), distribution="aaa")
    plugins = Plugins()
    assert plugins.select("cpu")[0].priority != 9000
    assert "already registered by plugin 'cpu' of pagefleet" in plugins.failures[Plugin("cpu", "aaa")].reason


def test_a_probe_that_raises_makes_its_backend_unusable_and_no_other(install: Install) -> None:
    install("bad", backends("BackendInfo('bad', broken, load, priority=3000)", "BackendInfo('fine', usable, load)"))
    install("good", GOOD)
    plugins = Plugins()
    assert plugins.select("auto")[0].name == "good"
    assert not plugins.failures
    assert report(plugins, "bad").probe.evidence == "probe failed: OSError: driver too old"
    assert report(plugins, "fine").probe.usable
    with pytest.raises(BackendError, match="OSError: driver too old") as error:
        plugins.select("bad")
    assert isinstance(error.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("return True", "returned True"),
        ("return Rude()", "it must return a Probe"),
        ("raise SystemExit(1)", "SystemExit: 1"),
        ("raise Rude", "Rude: (its message cannot be shown)"),
        ("return Probe('no', 'e')", "Probe.usable is 'no'; it must be bool"),
        ("return Probe(True, Rude())", "Probe.evidence is <"),
        ("return Probe(True, 'e', None)", "Probe.devices is None; it must be tuple[DeviceInfo, ...]"),
        ("return Probe(True, 'e', ['d0'])", "Probe.devices is ['d0']"),
        ("return Probe(True, 'e', (DeviceInfo('d', '16G'),))", "DeviceInfo.memory is '16G'; it must be int"),
    ],
)
def test_a_probe_that_misbehaves_is_evidence_and_disturbs_nobody(install: Install, body: str, cause: str) -> None:
    odd = backends("BackendInfo('odd', odd, load, priority=9000)").removeprefix(HEAD)
    install("odd", HEAD + f"def odd():\n    {body}\n" + odd)
    install("good", GOOD)
    plugins = Plugins()
    assert plugins.select("auto")[0].name == "good"
    assert cause in report(plugins, "odd").probe.evidence
    found = devices_report(plugins, "odd")
    assert (found.chosen, json.dumps(asdict(found)).count(found.backends[0].evidence)) == (None, 1)
    assert "odd: not usable\n" in describe(found)
    with pytest.raises(BackendError) as error:
        plugins.select("odd")
    assert cause in str(error.value)


def test_a_package_without_metadata_disturbs_nobody(install: Install, tmp_path: Path) -> None:
    install("good", GOOD)
    install("bare", "import no_such_library")
    (tmp_path / "dist_bare-1.0.dist-info" / "METADATA").unlink()
    plugins = Plugins()
    assert plugins.select("auto")[0].name == "good"
    (failure,) = plugins.failures.values()
    assert str(failure.plugin) == f"'bare' of a package without METADATA in {tmp_path}"


def test_a_backend_is_probed_once(install: Install, tmp_path: Path) -> None:
    log = tmp_path / "log"
    source = f"def once():\n    open({str(log)!r}, 'a').write('x')\n    return usable()\n"
    install("good", HEAD + source + GOOD.removeprefix(HEAD).replace("usable", "once"))
    plugins = Plugins()
    for _ in range(3):
        plugins.select("auto")
        plugins.select("good:1")
        plugins.backends()
    assert log.read_text() == "x"


# -- model families ------------------------------------------------------------------------------------------

FAMILY = """
from pagefleet.hookspecs import hookimpl
from pagefleet.models import ModelFamily

@hookimpl
def pagefleet_models():
    return [ModelFamily({name!r}, dict)]
"""


def test_model_families_come_after_the_built_in_ones(install: Install) -> None:
    install("mine", FAMILY.format(name="my_model"))
    names = [family.model_type for family in Plugins().models()]
    assert "llama" in names[:-1]
    assert "my_model" in names[4:]


def test_finding_a_built_in_family_imports_no_plugin(install: Install) -> None:
    install("mine", FAMILY.format(name="my_model"))
    assert find_family("llama", Plugins().models()).model_type == "llama"
    assert not [name for name in sys.modules if name.startswith("plugin_")]


def test_a_family_with_a_wrong_field_is_refused(install: Install) -> None:
    install("odd", FAMILY.replace("{name!r}", "7"))
    plugins = Plugins()
    with pytest.raises(ValueError, match="unknown model_type 'my_model'"):
        find_family("my_model", plugins.models())
    (failure,) = plugins.failures.values()
    assert failure.reason == "ModelFamily.model_type is 7; it must be str"


def test_a_family_keeps_its_name(install: Install) -> None:
    install("one", FAMILY.format(name="twin"))
    install("two", FAMILY.format(name="twin"))
    install("zoo", FAMILY.format(name="llama"))
    plugins = Plugins(allow=["one", "two", "zoo"])
    assert [family.model_type for family in plugins.models()].count("llama") == 1
    reasons = {plugin.name: failure.reason for plugin, failure in plugins.failures.items()}
    assert reasons == {
        "two": "model 'twin' is already registered by plugin 'one' of dist-one, not 'two' of dist-two",
        "zoo": "model 'llama' is built in; a plugin cannot replace it",
    }


# -- which backend a device means --------------------------------------------------------------------------


def test_auto_takes_the_usable_one_with_the_highest_priority_and_says_why(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("absent", backends("BackendInfo('absent', absent, load, priority=5000)"))
    install("zeta", backends("BackendInfo('zeta', usable, load, priority=1000)"))
    install("good", GOOD)  # the same priority: the name decides
    with caplog.at_level(logging.INFO, logger="pagefleet"):
        info, index = Plugins().select()
    assert (info.name, index) == ("good", 0)
    assert "device auto: backend good, found it" in caplog.text
    assert "absent: not usable: no such hardware" in caplog.text


def test_a_named_backend_that_is_not_usable_is_refused_with_every_reason(install: Install) -> None:
    install("absent", backends("BackendInfo('absent', absent, load)"))
    install("bad", "import no_such_library")
    install("good", GOOD)
    with pytest.raises(BackendError) as error:
        Plugins().select("absent")
    lines = str(error.value).splitlines()
    assert lines[0] == "backend 'absent' is not usable: no such hardware"
    assert "  good: usable: found it" in lines
    assert "  plugin 'bad' of dist-bad: not used: ModuleNotFoundError: No module named 'no_such_library'" in lines


def test_an_unknown_name_lists_what_there_is_and_what_was_meant(install: Install) -> None:
    install("good", GOOD)
    with pytest.raises(BackendError) as error:
        Plugins().select("Gooood")
    assert str(error.value).startswith("no backend is called 'Gooood'; did you mean 'good'?\n")
    assert "  good: usable: found it" in str(error.value)


def test_nothing_usable_is_said_with_every_reason(install: Install) -> None:
    install("absent", backends("BackendInfo('absent', absent, load)"))
    plugins = Plugins(allow=["absent"])
    plugins.load()
    for name in set(plugins._backends) - {"absent"}:  # the built-in ones, which are always allowed
        del plugins._backends[name]
    with pytest.raises(BackendError, match=r"no backend is usable\n  absent: not usable: no such hardware"):
        plugins.select("auto")


def test_an_index_names_a_device_of_the_backend(install: Install) -> None:
    install("good", GOOD)
    assert Plugins().select("good:1")[1] == 1
    with pytest.raises(BackendError, match=r"device 'good:2': good has 2 device\(s\), index 0 to 1"):
        Plugins().select("good:2")


@pytest.mark.parametrize(
    "device", [":", ":1", "good:", "good:x", "good:-1", "good:1:2", "auto:1", "good:²", " ", f"good:{'1' * 5000}"]
)
def test_a_malformed_device_is_refused(device: str) -> None:
    with pytest.raises(BackendError, match="must be 'auto', a backend's name, or its name and an index") as error:
        parse_device(device)
    assert len(str(error.value)) < 200


def test_a_backend_is_found_under_another_entry_point_name(install: Install) -> None:
    install("vendor", backends("BackendInfo('v1', usable, load)", "BackendInfo('v2', usable, load)"))
    assert Plugins().select("v2")[0].name == "v2"


# -- the allow list ----------------------------------------------------------------------------------------


def test_a_plugin_that_is_not_allowed_is_not_imported_but_mentioned(install: Install) -> None:
    install("bad", "raise RuntimeError('imported')")
    install("good", GOOD)
    plugins = Plugins(allow=["good"])
    assert plugins.select("auto")[0].name == "good"
    assert not plugins.failures
    with pytest.raises(
        BackendError, match=r"'bad' of dist-bad is installed but not allowed: add it to PAGEFLEET_PLUGINS"
    ):
        plugins.select("bad")


def test_an_empty_allow_list_leaves_the_built_in_ones(install: Install) -> None:
    install("good", GOOD)
    assert {report.plugin.distribution for report in Plugins(allow=[]).backends()} == {"pagefleet"}


# -- a process of its own, where what has been imported matters ----------------------------------------------


def python(code: str, tmp_path: Path, **variables: str) -> str:
    unset = ("TARGET_DEVICE", "PAGEFLEET_PLUGINS")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths)} | variables
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


SELECT = """
import json, sys
from pagefleet.config import EngineConfig
from pagefleet.plugins import Plugins
config = EngineConfig(model="m", device={device!r})
info, index = Plugins(config.plugins).select(config.device)
plugins = sorted(name for name in sys.modules if name.startswith(("plugin_", "pagefleet_")))
print(json.dumps([info.name, index, plugins]))
"""


@pytest.mark.parametrize(
    ("device", "variables", "expected"),
    [
        ("good", {}, "good"),
        (None, {"TARGET_DEVICE": "good"}, "good"),
        ("good", {"TARGET_DEVICE": "other"}, "good"),  # the argument wins
        ("good", {"TARGET_DEVICE": "no_such_backend"}, "good"),
        ("good:1", {}, "good"),
    ],
)
def test_only_the_named_entry_point_is_imported(
    install: Install, tmp_path: Path, device: str | None, variables: dict[str, str], expected: str
) -> None:
    install("good", GOOD)
    install("other", backends("BackendInfo('other', usable, load, priority=9000)"))
    name, _, imported = json.loads(python(SELECT.format(device=device), tmp_path, **variables))
    assert name == expected
    assert imported == ["plugin_dist_good_good"]


@pytest.mark.parametrize("variables", [{}, {"TARGET_DEVICE": ""}, {"TARGET_DEVICE": "auto"}])
def test_unset_and_auto_mean_the_same(install: Install, tmp_path: Path, variables: dict[str, str]) -> None:
    install("good", GOOD)
    install("other", backends("BackendInfo('other', usable, load, priority=9000)"))
    assert json.loads(python(SELECT.format(device=None), tmp_path, **variables))[0] == "other"


def test_the_environment_names_the_allowed_plugins(install: Install, tmp_path: Path) -> None:
    install("good", GOOD)
    install("other", backends("BackendInfo('other', usable, load, priority=9000)"))
    name, _, imported = json.loads(python(SELECT.format(device=None), tmp_path, PAGEFLEET_PLUGINS=" good, none "))
    assert name == "good"
    assert "plugin_dist_other_other" not in imported


def test_two_instances_share_nothing(install: Install) -> None:
    install("bad", "import no_such_library")
    one, two = Plugins(), Plugins()
    one.load()
    assert one.failures
    assert not two.failures
