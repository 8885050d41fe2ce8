"""EngineConfig: wrong values are refused naming field, value and limit; arguments win over the environment."""

from __future__ import annotations

import dataclasses
import math

import pytest

from pagefleet.config import ConfigError, EngineConfig, Environment, environment


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TARGET_DEVICE", "PAGEFLEET_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


def test_the_defaults_hold() -> None:
    config = EngineConfig("model")
    assert (config.device, config.plugins, config.dtype, config.block_size) == (None, None, "auto", 16)


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("model", "", "a non-empty string"),
        ("model", None, "a non-empty string"),
        ("tokenizer", 3, "a non-empty string"),
        ("device", " ", "a non-empty string"),
        ("revision", "", "a non-empty string"),
        ("plugins", "cpu", "a tuple of plugin names"),
        ("plugins", (1,), "a tuple of plugin names"),
        ("block_size", 10**30, "below 2147483648"),
        ("max_num_seqs", 2**31, "below 2147483648"),
        ("max_num_batched_tokens", 10**30, "below 2147483648"),
        ("num_blocks", 2**31, "below 2147483648, or None"),
        ("max_model_len", 2**31, "below 2147483648, or None"),
        ("kv_cache_memory_bytes", 10**30, "or None"),
        ("dtype", "float64", "'auto', 'float32', 'bfloat16', 'float16'"),
        ("numerics", "fast", "'default', 'strict'"),
        ("trust_remote_code", "yes", "True or False"),
        ("enable_prefix_caching", 1, "True or False"),
        ("pipeline", None, "True or False"),
        ("block_size", 0, "an integer of at least 1"),
        ("block_size", True, "an integer of at least 1"),
        ("block_size", 16.0, "an integer of at least 1"),
        ("max_num_seqs", -1, "an integer of at least 1"),
        ("max_num_batched_tokens", math.nan, "an integer of at least 1"),
        ("max_model_len", 0, "or None"),
        ("num_blocks", 0, "or None"),
        ("kv_cache_memory_bytes", "4GB", "or None"),
        ("seed", -1, "at least 0 and below"),
        ("seed", 2**63, "at least 0 and below"),
        ("priority_ageing", math.nan, "seconds above 0"),
        ("priority_ageing", 0, "seconds above 0"),
        ("priority_ageing", True, "seconds above 0"),
    ],
)
def test_a_wrong_value_is_refused_naming_field_value_and_limit(field: str, value: object, limit: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(**{"model": "model", field: value})  # type: ignore[arg-type]
    assert str(error.value).startswith(f"{field} is {value!r}; it must be ")
    assert limit in str(error.value)


def test_the_cache_is_sized_once() -> None:
    with pytest.raises(ConfigError, match=r"num_blocks is 8 and kv_cache_memory_bytes is 1024; .* set one of them"):
        EngineConfig("model", num_blocks=8, kv_cache_memory_bytes=1024)


def test_the_largest_and_smallest_values_are_accepted() -> None:
    EngineConfig("m", block_size=1, num_blocks=1, max_model_len=1, seed=2**63 - 1, priority_ageing=math.inf)


def test_plugins_may_be_a_list() -> None:
    assert EngineConfig("model", plugins=["a", "b"]).plugins == ("a", "b")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a tuple of plugin names"):
        EngineConfig("model", plugins=[1])  # type: ignore[arg-type]


def test_a_config_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig("model").block_size = 32  # type: ignore[misc]


def test_the_environment_stands_in_for_what_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TARGET_DEVICE", "here")
    monkeypatch.setenv("PAGEFLEET_PLUGINS", "a, b,")
    config = EngineConfig("model")
    assert (config.device, config.plugins) == ("here", ("a", "b"))
    config = EngineConfig("model", device="there:1", plugins=())
    assert (config.device, config.plugins) == ("there:1", ())


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Environment(None, None)),
        ({"TARGET_DEVICE": "", "PAGEFLEET_PLUGINS": ""}, Environment(None, ())),
        ({"TARGET_DEVICE": " cpu ", "PAGEFLEET_PLUGINS": ","}, Environment("cpu", ())),
        ({"PAGEFLEET_PLUGINS": "a,b"}, Environment(None, ("a", "b"))),
    ],
)
def test_empty_and_unset_variables(variables: dict[str, str], expected: Environment) -> None:
    assert environment(variables) == expected
