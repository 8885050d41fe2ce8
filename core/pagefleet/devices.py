"""What `pagefleet devices` reports: every backend, every plugin that is not used, and which one `auto` takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from pagefleet.backend import CONTRACT_VERSION, BackendError, DeviceInfo
from pagefleet.plugins import BackendReport, Plugins


@dataclass(frozen=True, slots=True)
class BackendRow:
    """One backend, as plain data."""

    name: str
    plugin: str
    distribution: str
    usable: bool
    evidence: str
    priority: int
    contract: str
    devices: tuple[DeviceInfo, ...]
    traits: dict[str, Any]

    @classmethod
    def of(cls, report: BackendReport) -> BackendRow:
        info = report.info
        return cls(
            name=info.name,
            plugin=report.plugin.name,
            distribution=report.plugin.distribution,
            usable=report.probe.usable,
            evidence=report.probe.evidence,
            priority=info.priority,
            contract=info.contract,
            devices=report.probe.devices,
            traits=asdict(info.traits),
        )


@dataclass(frozen=True, slots=True)
class FailureRow:
    """One plugin that is not used, as plain data."""

    plugin: str
    distribution: str
    cause: str


@dataclass(frozen=True, slots=True)
class DevicesReport:
    """Everything `pagefleet devices` says."""

    contract: str
    backends: tuple[BackendRow, ...]
    failures: tuple[FailureRow, ...]
    target_device: str | None  # what the environment asks for
    chosen: str | None  # what an engine would take now; None: it would be refused


def report(plugins: Plugins, target_device: str | None) -> DevicesReport:
    """Load and probe all there is."""
    backends = tuple(BackendRow.of(report) for report in plugins.backends())
    failures = tuple(FailureRow(f.plugin.name, f.plugin.distribution, f.reason) for f in plugins.failures.values())
    failures += tuple(FailureRow(p.name, p.distribution, "not among PAGEFLEET_PLUGINS") for p in plugins.not_allowed)
    try:
        chosen = plugins.select(target_device)[0].name
    except BackendError:
        chosen = None
    return DevicesReport(CONTRACT_VERSION, backends, failures, target_device, chosen)


def describe(found: DevicesReport) -> str:
    """The report for people."""
    lines = [line for row in found.backends for line in _describe_backend(row)]
    for failure in found.failures:
        lines += [
            f"{failure.plugin}: not used",
            f"  {'why':<8} {failure.cause}",
            f"  {'from':<8} {failure.distribution}",
            "",
        ]
    wanted = f"TARGET_DEVICE={found.target_device}" if found.target_device else "auto"
    lines.append(f"{wanted}: {found.chosen or 'no such usable backend'}")
    return "\n".join(lines)


def _describe_backend(row: BackendRow) -> Iterator[str]:
    traits = dict(row.traits)
    dtypes = ", ".join(traits.pop("dtypes"))
    yield f"{row.name}: {'usable' if row.usable else 'not usable'}"
    yield f"  {'why':<8} {row.evidence}"
    for index, device in enumerate(row.devices):
        memory = f", {device.memory / 2**30:.1f} GiB" if device.memory else ""
        detail = f", {device.detail}" if device.detail else ""
        yield f"  {f'{row.name}:{index}':<8} {device.name}{memory}{detail}"
    yield f"  {'dtypes':<8} {dtypes}"
    yield f"  {'can':<8} {', '.join(_abilities(traits)) or 'run a model'}"
    yield f"  {'from':<8} {row.distribution}, priority {row.priority}"
    yield ""


def _abilities(traits: dict[str, Any]) -> Iterator[str]:
    """Traits in words; any new trait shows up under its own name."""
    for name, value in traits.items():
        words = name.replace("_", " ")
        if value is True:
            yield words
        elif isinstance(value, tuple | list) and value:
            yield f"{words}: {' '.join(map(str, value))}"
        elif isinstance(value, int) and value > 1:
            yield f"{words}: {value}"
