"""The contract as data: the code is what was frozen, minor versions break nobody, and the page names everything."""

from __future__ import annotations

import copy
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pagefleet import contract
from pagefleet.backend import CONTRACT_VERSION
from pagefleet.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "contract.md"


def test_the_code_is_the_contract_of_its_version() -> None:
    """A change needs a new version with a file of its own, or, before its release, a new file."""
    frozen, found = contract.load(CONTRACT_VERSION), contract.describe()
    assert contract.diff(frozen, found) == []
    assert found == frozen


def test_minor_versions_break_no_backend() -> None:
    versions = contract.frozen_versions()
    assert versions[-1] == CONTRACT_VERSION
    for old, new in pairwise(versions):
        if old.split(".")[0] == new.split(".")[0]:
            assert [
                str(change) for change in contract.diff(contract.load(old), contract.load(new)) if change.breaking
            ] == []


def test_what_came_with_1_1() -> None:
    changes = contract.diff(contract.load("1.0"), contract.load("1.1"))
    assert {change.text.split(" is ")[0] for change in changes} == {
        "Backend.sampler", "HostTensor.rows", "KVLayout.row_size", "PendingTokens", "ReadyTokens",
        "RowLogprobs", "Sampler", "Traits.kv_dtypes", "Traits.weight_formats",
    }  # fmt: skip


def test_what_came_with_1_2() -> None:
    changes = contract.diff(contract.load("1.1"), contract.load("1.2"))
    assert {change.text.split(" is ")[0] for change in changes} == {
        "Backend.trace", "ModelSpec.alibi_slopes", "ModelSpec.attention_soft_cap", "ModelSpec.features",
        "Traits.model_features",
    }  # fmt: skip


def edited(**changes: Any) -> contract.Description:
    """The contract with members of types replaced: name__member="text", None: gone; required=[type__member, ...]."""
    found = copy.deepcopy(contract.describe())
    for key, text in changes.items():
        name, _, member = key.partition("__")
        members = found["types"][name]["members"]
        if text is None:
            del members[member]
        else:
            members[member] = text[0]
            if text[1]:
                found["types"][name]["required"].append(member)
    return found


@pytest.mark.parametrize(
    ("changes", "breaking", "text"),
    [
        ({"Backend__warm_up": None}, True, "Backend.warm_up is gone"),
        (
            {"Backend__forward": ("(self) -> None", False)},
            True,
            "Backend.forward was (self, batch: ForwardBatch) -> Logits, is",
        ),
        ({"Backend__prefetch": ("(self) -> None", True)}, True, "Backend.prefetch is new"),
        ({"Backend__prefetch": ("(self) -> None", False)}, False, "Backend.prefetch is new"),
        ({"Traits__colour": ("str", True)}, True, "Traits.colour is new"),
        ({"Traits__colour": ("str = 'red'", False)}, False, "Traits.colour is new"),
        ({"ForwardBatch__colours": ("Ints", True)}, False, "ForwardBatch.colours is new"),  # the engine makes it
        ({"ForwardBatch__slots": None}, True, "ForwardBatch.slots is gone"),
    ],
)
def test_what_breaks_a_backend(changes: dict[str, Any], breaking: bool, text: str) -> None:
    (change,) = contract.diff(contract.describe(), edited(**changes))
    assert change.breaking == breaking
    assert change.text.startswith(text)


def test_types_and_hooks_that_come_and_go() -> None:
    old, new = contract.describe(), contract.describe()
    del new["types"]["Probe"], new["hooks"]["pagefleet_models"]
    assert [change.text for change in contract.diff(old, new)] == ["Probe is gone", "hook pagefleet_models is gone"]
    assert [change.breaking for change in contract.diff(new, old)] == [False, False]


def test_a_member_that_must_now_be_supplied() -> None:
    new = contract.describe()
    new["types"]["Backend"]["required"].append("close")
    assert [str(change) for change in contract.diff(contract.describe(), new)] == [
        "BREAKING    Backend.close has no default any more"
    ]


def test_a_protocol_has_no_defaults() -> None:
    old, new = contract.describe(), edited(PendingTokens__cancel=("(self) -> None", False))
    assert old["types"]["PendingTokens"]["required"] == ["result"]
    new["types"]["PendingTokens"]["required"].append("cancel")
    assert [str(change) for change in contract.diff(old, new)] == [
        "BREAKING    PendingTokens.cancel is new: (self) -> None"
    ]


# -- the command ---------------------------------------------------------------------------------------


def test_the_command_shows_and_compares(tmp_path: Path) -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["contract", "show"])
    assert json.loads(shown.stdout) == contract.describe()
    mine = tmp_path / "mine.json"
    mine.write_text(shown.stdout)
    assert runner.invoke(app, ["contract", "diff", str(mine)]).stdout == "no difference\n"
    since = runner.invoke(app, ["contract", "diff", "1.0"])
    assert since.exit_code == 0
    assert "compatible  Traits.kv_dtypes is new" in since.stdout
    back = runner.invoke(app, ["contract", "diff", "1.1", "1.0"])
    assert back.exit_code == 1
    assert "BREAKING    Traits.kv_dtypes is gone" in back.stdout


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', "\xff"])
def test_a_file_that_is_no_description_is_refused_in_words(tmp_path: Path, text: str) -> None:
    path = tmp_path / "old.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="is no description of a contract"):
        contract.load(str(path))
    with pytest.raises(ValueError, match=r"neither a contract version \(1.0, 1.1, 1.2\) nor a file"):
        contract.load("0.7")


# -- the page ------------------------------------------------------------------------------------------


def test_the_page_names_every_type_member_and_hook() -> None:
    named = set(re.findall(r"`([A-Za-z_.]+)[`(]", PAGE.read_text(encoding="utf-8")))
    found = contract.describe()
    missing = {name for name in (*found["types"], *found["hooks"]) if name not in named}
    for name, described in found["types"].items():
        missing |= {f"{name}.{member}" for member in described["members"] if f"{name}.{member}" not in named}
    assert missing == set()


def test_the_page_names_nothing_that_is_not_there() -> None:
    found = contract.describe()
    known = {f"{name}.{member}" for name, described in found["types"].items() for member in described["members"]}
    dotted = set(re.findall(r"`([A-Z][A-Za-z]+\.[a-z_]+)[`(]", PAGE.read_text(encoding="utf-8")))
    assert dotted - known == set()
