"""Discovery of plugins: finds what is installed, survives what is broken, and remembers why.

A plugin is an entry point of the group `pagefleet`; its module implements hooks of `hookspecs`. A plugin either
registers all it brings or, when anything about it is wrong, nothing: then its cause is kept, and nobody else notices.
What a backend is called decides how little is imported: asked for by name, only the entry point of that name is.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import EntryPoint, entry_points
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

import pluggy
from packaging.specifiers import SpecifierSet

from pagefleet import hookspecs
from pagefleet.backend import CONTRACT_VERSION, BackendError, BackendInfo, Probe

if TYPE_CHECKING:
    from pagefleet.models import ModelFamily

GROUP = "pagefleet"
BUILT_IN = "pagefleet"  # the distribution whose plugins come first and are always allowed

logger = logging.getLogger("pagefleet")
T = TypeVar("T")


class PluginError(RuntimeError):
    """What a plugin did wrong, in a sentence."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """An installed entry point."""

    name: str
    distribution: str

    def __str__(self) -> str:
        return f"{self.name!r} of {self.distribution}"


@dataclass(frozen=True, slots=True)
class Failure:
    """A plugin that could not be used."""

    plugin: Plugin
    cause: BaseException
    backends: tuple[str, ...] = ()  # names it tried to register

    @property
    def reason(self) -> str:
        return explain(self.cause)


@dataclass(frozen=True, slots=True)
class BackendReport:
    """A registered backend, who brought it and what its probe found."""

    info: BackendInfo
    plugin: Plugin
    probe: Probe
    cause: BaseException | None = None  # what probe() raised

    def __str__(self) -> str:
        return f"{self.info.name}: {'usable' if self.probe.usable else 'not usable'}: {self.probe.evidence}"


class Plugins:
    """The plugins of one engine or one command. Two instances share nothing but what Python has imported."""

    def __init__(self, allow: Iterable[str] | None = None) -> None:
        """`allow`: entry points that may be imported beside the built-in ones; None: all of them."""
        self.failures: dict[Plugin, Failure] = {}
        self.not_allowed: list[Plugin] = []
        self._pending: list[tuple[Plugin, EntryPoint]] = []
        self._backends: dict[str, tuple[Plugin, BackendInfo]] = {}
        self._families: dict[str, tuple[Plugin, ModelFamily]] = {}
        self._reports: dict[str, BackendReport] = {}
        allowed = None if allow is None else set(allow)
        for plugin, entry_point in installed():
            if allowed is None or plugin.distribution == BUILT_IN or plugin.name in allowed:
                self._pending.append((plugin, entry_point))
            else:
                self.not_allowed.append(plugin)
        self._entry_point_names = {plugin.name for plugin, _ in self._pending}

    # -- what is asked of it -----------------------------------------------------------------------------

    def select(self, device: str | None = None) -> tuple[BackendInfo, int]:
        """The backend and device index that `device` means: NAME, NAME:INDEX, or `auto` (also None).

        A named backend is used or refused with every probe's reason, never replaced; `auto` takes the usable one with
        the highest priority. Either way the choice is logged with its evidence. Raises `BackendError`.
        """
        name, index = parse_device(device or "auto")
        report = self._best() if name == "auto" else self._named(name)
        num_devices = len(report.probe.devices)
        if num_devices and index >= num_devices:
            raise BackendError(f"device {device!r}: {name} has {num_devices} device(s), index 0 to {num_devices - 1}")
        logger.info("device %s: backend %s, %s", device or "auto", report.info.name, report.probe.evidence)
        return report.info, index

    def backends(self) -> list[BackendReport]:
        """Every backend there is, the preferred first, each probed (once)."""
        self.load()
        reports = [self._report(name) for name in self._backends]
        return sorted(reports, key=lambda report: (-report.info.priority, report.info.name))

    def models(self) -> Iterator[ModelFamily]:
        """Every model family, the built-in ones first. Plugins are imported only when iteration gets that far."""
        from pagefleet.models import builtin_families

        yield from builtin_families()
        self.load()
        yield from [family for _, family in self._families.values()]

    def load(self, name: str | None = None) -> None:
        """Import the plugins with that entry point name, or all that are left, and register what they bring."""
        chosen = [item for item in self._pending if name is None or item[0].name == name]
        self._pending = [item for item in self._pending if item not in chosen]
        for plugin, entry_point in chosen:
            infos: list[BackendInfo] = []
            try:
                manager = load_hooks(entry_point)
                infos += _results(manager, "pagefleet_backends", BackendInfo)
                self._register(plugin, infos, manager)
            except KeyboardInterrupt:
                raise
            except BaseException as cause:  # a plugin may even call sys.exit(): it must not take the engine along
                names = tuple(info.name for info in infos if _fits(getattr(info, "name", None), str))
                self.failures[plugin] = Failure(plugin, cause, names)
                logger.warning("plugin %s is not used: %s", plugin, self.failures[plugin].reason)

    # -- registration ------------------------------------------------------------------------------------

    def _register(self, plugin: Plugin, infos: list[BackendInfo], manager: pluggy.PluginManager) -> None:
        """Check everything first, so that a plugin is registered whole or not at all."""
        families = _families(manager)
        backends: dict[str, tuple[Plugin, BackendInfo]] = {}
        for info in infos:
            check_fields(info)
            self._check_backend(plugin, info, twice=info.name in backends)
            backends[info.name] = plugin, info
        for family in families:
            if family.model_type in self._families:
                owner = self._families[family.model_type][0]
                raise PluginError(f"model {family.model_type!r} is already registered by plugin {owner}, not {plugin}")
        self._backends |= backends
        self._families |= {family.model_type: (plugin, family) for family in families}

    def _check_backend(self, plugin: Plugin, info: BackendInfo, twice: bool) -> None:
        name = info.name
        if not name or name == "auto" or ":" in name or name.split() != [name]:
            raise PluginError(f"backend name {name!r}: must be a word without colon or spaces, and not 'auto'")
        if twice:
            raise PluginError(f"registers backend {name!r} twice")
        if name in self._backends:
            raise PluginError(
                f"backend {name!r} is already registered by plugin {self._backends[name][0]}, not {plugin}"
            )
        # Asked for by name, only the entry point of that name is imported: the name must mean the same backend then.
        if name in self._entry_point_names and name != plugin.name:
            raise PluginError(f"backend {name!r} of plugin {plugin} has the name of another plugin's entry point")
        if CONTRACT_VERSION not in SpecifierSet(info.contract):
            raise PluginError(
                f"backend {name!r} supports contract {info.contract}, this pagefleet has {CONTRACT_VERSION}; "
                f"install a release of {plugin.distribution} made for it"
            )

    # -- choice ------------------------------------------------------------------------------------------

    def _named(self, name: str) -> BackendReport:
        self.load(name)
        if name not in self._backends and not self._failed(name):
            self.load()
        if name in self._backends:
            report = self._report(name)
            if report.probe.usable:
                return report
            raise BackendError(
                f"backend {name!r} is not usable: {report.probe.evidence}\n{self._listing()}"
            ) from report.cause
        for failure in self._failed(name):
            raise BackendError(f"plugin {failure.plugin} is not used: {failure.reason}") from failure.cause
        raise BackendError(self._unknown(name))

    def _failed(self, name: str) -> list[Failure]:
        return [f for f in self.failures.values() if name == f.plugin.name or name in f.backends]

    def _best(self) -> BackendReport:
        reports = self.backends()
        for report in reports:
            if report.probe.usable:
                logger.info("backends, the preferred first: %s", "; ".join(map(str, reports)))
                return report
        raise BackendError(f"no backend is usable\n{self._listing()}")

    def _unknown(self, name: str) -> str:
        message = f"no backend is called {name!r}"
        close = difflib.get_close_matches(name.lower(), self._backends, n=3)
        if close:
            message += f"; did you mean {' or '.join(map(repr, close))}?"
        for plugin in self.not_allowed:
            if plugin.name == name:
                message += f"; plugin {plugin} is installed but not allowed: add it to PAGEFLEET_PLUGINS"
        return f"{message}\n{self._listing()}"

    def _listing(self) -> str:
        """Every backend with its probe's reason and every failed plugin with its cause, a line each."""
        lines = [str(report) for report in self.backends()]
        lines += [f"plugin {failure.plugin}: not used: {failure.reason}" for failure in self.failures.values()]
        return "\n".join(f"  {line}" for line in lines or ["no plugin is installed: run `pip install pagefleet`"])

    def _report(self, name: str) -> BackendReport:
        if name not in self._reports:
            self._reports[name] = probe(*self._backends[name])
        return self._reports[name]


# -- one plugin at a time --------------------------------------------------------------------------------


def installed() -> list[tuple[Plugin, EntryPoint]]:
    """Entry points of the group, the built-in distribution's first, then by distribution and name."""
    found = [
        (Plugin(entry_point.name, _distribution(entry_point)), entry_point) for entry_point in entry_points(group=GROUP)
    ]
    return sorted(found, key=lambda item: (item[0].distribution != BUILT_IN, item[0].distribution, item[0].name))


def _distribution(entry_point: EntryPoint) -> str:
    """The name of the package it is of; one without METADATA has none."""
    if entry_point.dist is None:
        return "an unknown package"
    # a missing name is None, or in later versions of importlib.metadata an error
    with suppress(Exception):
        name: str | None = entry_point.dist.name
        if name:
            return name
    return f"a package without METADATA in {entry_point.dist.locate_file('')}"


def load_hooks(entry_point: EntryPoint) -> pluggy.PluginManager:
    """Import a plugin and check its hooks. Each has a manager of its own: nothing it does can reach another's."""
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    module = entry_point.load()
    manager.register(module, name=entry_point.name)  # checks the signatures of its hooks
    manager.check_pending()  # and that there are such hooks
    if not manager.get_hookcallers(module):
        raise PluginError(f"{entry_point.value} implements no hook; mark functions with pagefleet.hookspecs.hookimpl")
    return manager


def _results(manager: pluggy.PluginManager, hook: str, kind: type[T]) -> list[T]:
    """What the plugin's implementation of that hook returned, checked."""
    items: list[T] = []
    for result in getattr(manager.hook, hook)():
        if not isinstance(result, list | tuple) or not all(type(item) is kind for item in result):
            raise PluginError(f"{hook} returned {_show(result)}; it must return a list of {kind.__name__}")
        items += result
    return items


def _families(manager: pluggy.PluginManager) -> list[ModelFamily]:
    """The model families the plugin brings; the built-in ones are nobody's to replace."""
    if not manager.hook.pagefleet_models.get_hookimpls():
        return []
    from pagefleet.models import ModelFamily, builtin_families

    families = _results(manager, "pagefleet_models", ModelFamily)
    builtin = {family.model_type for family in builtin_families()}
    for family in families:
        check_fields(family)
        if family.model_type in builtin:
            raise PluginError(f"model {family.model_type!r} is built in; a plugin cannot replace it")
    return families


def probe(plugin: Plugin, info: BackendInfo) -> BackendReport:
    """Probe a backend; a probe that raises is evidence too."""
    try:
        found = info.probe()
        if type(found) is not Probe:
            raise PluginError(f"probe returned {_show(found)}; it must return a Probe")
        check_fields(found)
    except KeyboardInterrupt:
        raise
    except BaseException as cause:
        return BackendReport(info, plugin, Probe(usable=False, evidence=f"probe failed: {explain(cause)}"), cause)
    return BackendReport(info, plugin, found)


def check_fields(item: Any) -> None:
    """Refuse a dataclass with a field that is not of its annotated type, so that nobody trips over it later."""
    kind = type(item)
    hints = get_type_hints(kind)
    for field in fields(kind):
        value = getattr(item, field.name)
        if not _fits(value, hints[field.name]):
            raise PluginError(f"{kind.__name__}.{field.name} is {_show(value)}; it must be {field.type}")


def _fits(value: object, hint: Any) -> bool:
    """Whether a value is of a field's type: of exactly that, as a subclass may misbehave in any way (True is no int).

    Of a callable it is only known that it is one.
    """
    origin, kinds = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return any(_fits(value, kind) for kind in kinds)
    if origin is tuple:  # tuple[X, ...]
        return type(value) is tuple and all(_fits(each, kinds[0]) for each in value)
    if origin is Callable:
        return callable(value)
    if type(value) is not hint:
        return False
    if is_dataclass(hint):
        check_fields(value)
    return not isinstance(value, int) or -(2**63) <= value < 2**63  # beyond, Python may refuse to print it


def parse_device(device: str) -> tuple[str, int]:
    """`NAME` or `NAME:INDEX` -> name, index."""
    name, colon, index = device.strip().partition(":")
    if not name or (colon and (name == "auto" or len(index) > 9 or not (index.isascii() and index.isdecimal()))):
        raise BackendError(
            f"device {_show(device)}: must be 'auto', a backend's name, or its name and an index of at most 9 digits, "
            "as in 'NAME:1'"
        )
    return name, int(index or 0)


def explain(cause: BaseException) -> str:
    """An exception in one line, whatever its own code does."""
    try:
        text = " ".join(str(cause).split())
    except Exception:
        text = "(its message cannot be shown)"
    return text if isinstance(cause, PluginError) else f"{type(cause).__name__}: {text}".removesuffix(": ")


def _show(value: object) -> str:
    """A value in at most 80 characters, whatever its own code does."""
    try:
        text = repr(value)
    except Exception:
        return object.__repr__(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
