"""The backend contract as data: described from the code, kept for every version, and compared.

`describe()` reads `pagefleet.backend` and the hooks: names, fields, methods, signatures, defaults. `contracts/` has
that description of each version as it was frozen; `docs/contract.md` says what it all means and what is promised.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from pagefleet import backend, hookspecs

FROZEN = Path(__file__).with_name("contracts")
BY_PLUGINS = (
    *("Backend", "BackendInfo", "DeviceInfo", "PendingTokens", "Probe", "ReadyTokens", "RowLogprobs", "SampledTokens"),
    "Traits",
)
"""What a plugin implements or makes: a member it does not know of must have a default. The engine makes the others."""

Description = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two versions; `breaking`: a backend of the old one may fail with the new one."""

    breaking: bool
    text: str

    def __str__(self) -> str:
        return f"{'BREAKING  ' if self.breaking else 'compatible'}  {self.text}"


def describe() -> Description:
    """The contract as it is in the code: {version, types: {name: ...}, hooks: {name: signature}}."""
    public = ((name, getattr(backend, name)) for name in sorted(backend.__all__))
    types = {name: _describe_type(value) for name, value in public if isinstance(value, type)}
    hooks = {name: _signature(hook) for name, hook in sorted(vars(hookspecs).items()) if _is_hook(hook)}
    return {"version": backend.CONTRACT_VERSION, "types": types, "hooks": hooks}


def frozen_versions() -> list[str]:
    """Versions whose description is kept, the oldest first."""
    return sorted((path.stem for path in FROZEN.glob("*.json")), key=_version_key)


def load(version_or_file: str) -> Description:
    """The description of a frozen version, or of a file that `pagefleet contract show` wrote; ValueError if neither."""
    path = FROZEN / f"{version_or_file}.json" if re.fullmatch(r"[0-9.]+", version_or_file) else Path(version_or_file)
    if not path.is_file():
        raise ValueError(
            f"{version_or_file!r} is neither a contract version ({', '.join(frozen_versions())}) nor a file"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {"version": str(found["version"]), "types": dict(found["types"]), "hooks": dict(found["hooks"])}
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is no description of a contract ({error!r}): pagefleet contract show writes one"
        ) from None


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """What changed from one description to another, the breaking changes first."""
    changes = _compare("hook ", old["hooks"], new["hooks"], set())
    for name in sorted({*old["types"], *new["types"]}):
        before, after = old["types"].get(name), new["types"].get(name)
        if before is None or after is None:
            changes.append(Change(after is None, f"{name} is {'gone' if after is None else 'new'}"))
            continue
        required = set(after["required"]) if name in BY_PLUGINS else set()
        changes += _compare(f"{name}.", before["members"], after["members"], required)
        changes += [
            Change(True, f"{name}.{member} has no default any more")
            for member in sorted(required & before["members"].keys() - set(before["required"]))
        ]
    return sorted(changes, key=lambda change: (not change.breaking, change.text))


def _compare(prefix: str, old: Mapping[str, str], new: Mapping[str, str], required: set[str]) -> list[Change]:
    """The members of one type; of the new ones those `required` are breaking."""
    changes = []
    for name in sorted({*old, *new}):
        if name not in new:
            changes.append(Change(True, f"{prefix}{name} is gone"))
        elif name not in old:
            changes.append(Change(name in required, f"{prefix}{name} is new: {new[name]}"))
        elif old[name] != new[name]:
            changes.append(Change(True, f"{prefix}{name} was {old[name]}, is {new[name]}"))
    return changes


def _describe_type(value: type) -> Description:
    """{kind: record | class, members: {name: what it is}, required: [what has no default]}."""
    if is_dataclass(value):
        members, required = {}, []
        for field in fields(value):
            has_default = field.default is not MISSING or field.default_factory is not MISSING
            members[field.name] = f"{field.type}" + (f" = {field.default!r}" if field.default is not MISSING else "")
            if field.default_factory is not MISSING:
                members[field.name] += f" = {getattr(field.default_factory, '__name__', 'made')}()"
            if not has_default:
                required.append(field.name)
        return {"kind": "record", "members": members | _methods(value), "required": required}
    methods = _methods(value)
    required = sorted(methods if getattr(value, "_is_protocol", False) else getattr(value, "__abstractmethods__", ()))
    attributes = {name: str(kind) for name, kind in vars(value).get("__annotations__", {}).items()}
    return {"kind": "class", "members": attributes | methods, "required": required}


def _methods(value: type) -> dict[str, str]:
    found = {}
    for name, member in vars(value).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            found[name] = (
                f"property -> {inspect.signature(member.fget).return_annotation}" if member.fget else "property"
            )
        elif callable(member) or isinstance(member, staticmethod | classmethod):
            found[name] = _signature(getattr(value, name))
    return found


def _signature(function: Callable[..., Any]) -> str:
    return str(inspect.signature(function)).replace("'", "")


def _is_hook(value: Any) -> bool:
    return inspect.isfunction(value) and value.__module__ == hookspecs.__name__


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
