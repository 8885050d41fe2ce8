"""EngineConfig: every setting of an engine, checked. The only file that reads the environment.

Each variable is also a field, and the field wins: `TARGET_DEVICE` stands in for `device`, `PAGEFLEET_PLUGINS` for
`plugins`. What a device makes of `dtype` or `numerics` is decided when the backend is known, not here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "int4")
KV_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
NUMERICS = ("default", "strict")


class ConfigError(ValueError):
    """A setting has a wrong value; the message names the field, the value, the limit and the way out."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment says."""

    target_device: str | None  # TARGET_DEVICE; None: unset or empty
    plugins: tuple[str, ...] | None  # PAGEFLEET_PLUGINS; None: unset, all plugins; empty: only built-in ones


def environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the variables pagefleet knows (of the process, unless others are given)."""
    variables = os.environ if variables is None else variables
    plugins = variables.get("PAGEFLEET_PLUGINS")
    names = None if plugins is None else tuple(name.strip() for name in plugins.split(",") if name.strip())
    return Environment(target_device=variables.get("TARGET_DEVICE", "").strip() or None, plugins=names)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. Unset `device` and `plugins` are taken from the environment when it is made."""

    model: str  # a local folder, a GGUF file or a hub name
    tokenizer: str | None = None  # None: the model's own
    revision: str | None = None  # of a hub name
    trust_remote_code: bool = False  # run Python code that comes with the checkpoint
    device: str | None = None  # a backend's name, or NAME:INDEX; "auto": the best usable one
    plugins: tuple[str, ...] | None = None  # plugins that may be imported beside the built-in ones; None: all
    dtype: str = "auto"  # of weights and activations; "auto": as stored, or the device's first; "int8", "int4": weights
    kv_cache_dtype: str = "auto"  # "auto": that of activations
    numerics: str = "default"  # "strict": the same tokens whatever shares the batch, or an error
    max_model_len: int | None = None  # prompt and output tokens of a request; None: the model's, up to 131072
    block_size: int = 16  # token slots of a KV block
    num_blocks: int | None = None  # of the KV cache; None: as many as fit
    kv_cache_memory_bytes: int | None = None  # instead of num_blocks; None: the backend's budget
    enable_prefix_caching: bool = True
    max_logprobs: int = 20  # log-probabilities a request may ask for at each token; -1: no limit
    max_num_seqs: int = 256  # requests that run at once
    max_num_batched_tokens: int = 2048  # of one step, prompts are chunked to fit
    priority_ageing: float = 30.0  # seconds of waiting worth one level of priority; inf: priorities never age
    pipeline: bool = True  # plan and launch the next step while one runs
    seed: int = 0  # of requests without a seed of their own
    record: str | None = None  # a folder to write every step to, for `pagefleet replay`
    record_ops: bool = False  # digests of what each op gave, too: slow

    def __post_init__(self) -> None:
        surroundings = environment()
        if self.device is None:
            object.__setattr__(self, "device", surroundings.target_device)
        if self.plugins is None:
            object.__setattr__(self, "plugins", surroundings.plugins)
        self._check_names()
        self._check_choices()
        self._check_sizes()

    def _check_names(self) -> None:
        _check_text("model", self.model)
        if isinstance(self.record, os.PathLike):
            object.__setattr__(self, "record", os.fspath(self.record))
        for name in ("tokenizer", "revision", "device", "record"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        plugins = self.plugins
        if isinstance(plugins, list):
            plugins = tuple(plugins)
            object.__setattr__(self, "plugins", plugins)
        if plugins is not None and not (isinstance(plugins, tuple) and all(isinstance(name, str) for name in plugins)):
            raise ConfigError(
                f"plugins is {plugins!r}; it must be a tuple of plugin names (or a list), or None for all of them"
            )

    def _check_choices(self) -> None:
        for name, allowed in (("dtype", DTYPES), ("kv_cache_dtype", KV_DTYPES), ("numerics", NUMERICS)):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")
        for name in ("trust_remote_code", "enable_prefix_caching", "pipeline", "record_ops"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"{name} is {value!r}; it must be True or False")

    def _check_sizes(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            _check_integer(name, getattr(self, name), at_least=1, below=2**31)
        for name, below in (("max_model_len", 2**31), ("num_blocks", 2**31), ("kv_cache_memory_bytes", 2**63)):
            if getattr(self, name) is not None:
                way_out = "or None to leave it to the engine"
                _check_integer(name, getattr(self, name), at_least=1, below=below, way_out=way_out)
        _check_integer("max_logprobs", self.max_logprobs, at_least=-1, way_out="-1 for no limit")
        _check_integer("seed", self.seed, at_least=0, below=2**63)
        ageing = self.priority_ageing
        if isinstance(ageing, bool) or not isinstance(ageing, int | float) or math.isnan(ageing) or ageing <= 0:
            raise ConfigError(
                f"priority_ageing is {ageing!r}; it must be a number of seconds above 0, "
                "or float('inf') for priorities that never age"
            )
        if self.record_ops and self.record is None:
            raise ConfigError("record_ops is True and record is None; name the folder to write to: record=DIR")
        if self.num_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                f"num_blocks is {self.num_blocks} and kv_cache_memory_bytes is {self.kv_cache_memory_bytes}; "
                "both size the KV cache: set one of them"
            )


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{name} is {value!r}; it must be a non-empty string")


def _check_integer(name: str, value: object, at_least: int, below: int | None = None, way_out: str = "") -> None:
    # bool is a subclass of int, but True sequences is nobody's intention
    valid = isinstance(value, int) and not isinstance(value, bool)
    if not valid or value < at_least or (below is not None and value >= below):  # type: ignore[operator]
        limit = f"an integer of at least {at_least}" + (f" and below {below}" if below is not None else "")
        raise ConfigError(f"{name} is {value!r}; it must be {limit}" + (f", {way_out}" if way_out else ""))
