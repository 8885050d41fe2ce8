"""From an EngineConfig to a running engine: choose the device, open the checkpoint, size the cache."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagefleet.backend import Backend, BackendError, KVLayout
from pagefleet.blocks import BlockPool
from pagefleet.config import ConfigError
from pagefleet.engine import Engine
from pagefleet.plugins import Plugins
from pagefleet.record import Recorder
from pagefleet.scheduler import Scheduler
from pagefleet.table import RunningTable, blocks_for
from pagefleet.text_engine import TextEngine
from pagefleet.tokenizer import load_tokenizer
from pagefleet.weights import DenseWeights, Int4Weights, Int8Weights, open_checkpoint

if TYPE_CHECKING:
    from pagefleet.backend import BackendInfo, Traits, WeightSource
    from pagefleet.config import EngineConfig
    from pagefleet.model import ModelSpec
    from pagefleet.tokenizer import Tokenizer
    from pagefleet.weights import Checkpoint

DEFAULT_MAX_LEN = 1 << 17  # where only the checkpoint asks for more: every position takes memory before its first use
DEFAULT_KV_BYTES = 1 << 30  # where the backend has no opinion
logger = logging.getLogger("pagefleet")


def load_engine(config: EngineConfig) -> TextEngine:
    """Everything `config` asks for, ready to generate.

    Raises BackendError for a device that cannot, CheckpointError and TokenizerError for files that do not fit,
    ConfigError for sizes that do not. Whatever is raised, the device is given back.
    """
    plugins = Plugins(config.plugins)
    info, index = plugins.select(config.device)
    with open_checkpoint(config.model, revision=config.revision, families=plugins.models()) as checkpoint:
        tokenizer = load_tokenizer(  # before the weights: what is wrong with it shows at once
            config.tokenizer or checkpoint.path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
        name = _device_name(info, index)
        backend = _load_backend(info, index)
        if config.record is not None:
            backend = Recorder(backend, config, name)
        try:
            return _start(config, checkpoint, tokenizer, backend, name, info.probe().evidence)
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                backend.close()
            raise


@dataclass(frozen=True, slots=True)
class ReadyBackend:
    """A backend with its model and its cache, and no engine: whoever has it schedules."""

    backend: Backend
    name: str
    spec: ModelSpec
    layout: KVLayout
    dtype: str


@contextmanager
def ready_backend(config: EngineConfig) -> Iterator[ReadyBackend]:
    """What `config` asks for as far as it concerns the device; it is given back at the end. Raises as `load_engine`."""
    plugins = Plugins(config.plugins)
    info, index = plugins.select(config.device)
    name = _device_name(info, index)
    with (
        open_checkpoint(config.model, revision=config.revision, families=plugins.models()) as checkpoint,
        closing(_load_backend(info, index)) as backend,
    ):
        yield ReadyBackend(backend, name, *_load_model(config, checkpoint, backend, name))


def _device_name(info: BackendInfo, index: int) -> str:
    """As a user writes it: the first device has no index."""
    return info.name if index == 0 else f"{info.name}:{index}"


def _load_backend(info: BackendInfo, index: int) -> Backend:
    try:
        backend = info.load(index)
    except BackendError:
        raise
    except Exception as error:  # of the plugin, whose own words may not say where they come from
        raise BackendError(f"backend {info.name!r} failed to load: {type(error).__name__}: {error}") from error
    if not isinstance(backend, Backend):
        raise BackendError(
            f"backend {info.name!r}: its load({index}) returned {backend!r:.80}, no pagefleet.backend.Backend; that is "
            "a fault of its plugin: update it, or choose another device"
        )
    return backend


def _start(
    config: EngineConfig, checkpoint: Checkpoint, tokenizer: Tokenizer, backend: Backend, name: str, evidence: str
) -> TextEngine:
    spec, layout, dtype = _load_model(config, checkpoint, backend, name)
    max_len = min(spec.max_position_embeddings, layout.num_blocks * layout.block_size)
    facts = {
        "backend": f"{name}: {evidence}",
        "model": f"{spec.model_type}, {spec.num_parameters:,} parameters, {config.model}",
        "dtype": dtype + _describe_weights(config, checkpoint, backend.traits),
        "KV cache": f"{layout.num_blocks} blocks of {layout.block_size} tokens in {layout.dtype}, "
        f"{layout.num_bytes / 2**20:.0f} MiB",
        "max_model_len": str(max_len),
    }
    logger.info("%s", "; ".join(f"{name}: {value}" for name, value in facts.items()))
    return TextEngine(_build(config, backend, layout, max_len), tokenizer, spec, config, max_len, facts)


def _load_model(
    config: EngineConfig, checkpoint: Checkpoint, backend: Backend, name: str
) -> tuple[ModelSpec, KVLayout, str]:
    """Give the backend its weights and its cache; the spec they are for, the cache's layout and the dtype."""
    dtype = _choose_dtype(config, checkpoint, backend.traits, name)
    _check_features(checkpoint.spec, backend.traits, name)
    block = _one_block(config, checkpoint.spec, backend.traits, dtype)
    spec = _fit_length(config, checkpoint.spec, block)
    backend.load(spec, _choose_form(config, checkpoint), dtype)
    checkpoint.close()
    layout = _size_cache(config, spec, block, backend)
    backend.allocate_kv(layout)
    backend.warm_up()
    return spec, layout, dtype


def _build(config: EngineConfig, backend: Backend, layout: KVLayout, max_len: int) -> Engine:
    num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    scheduler = Scheduler(
        RunningTable(num_rows, max_len, layout.block_size),
        BlockPool(layout.num_blocks),
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefix_caching=config.enable_prefix_caching,
        copies_blocks=backend.traits.copies_blocks,
        ageing=config.priority_ageing,
    )
    return Engine(backend, scheduler, pipeline=config.pipeline)


def _fit_length(config: EngineConfig, spec: ModelSpec, block: KVLayout) -> ModelSpec:
    """The spec for the longest request: as asked for; else as the cache can hold; else as the model says, in bounds."""
    longest, length = spec.max_position_embeddings, config.max_model_len
    if length is not None and length > longest:
        raise ConfigError(f"max_model_len is {length}; the model has positions for {longest}: lower it")
    num_blocks = _asked_blocks(config, block)
    if num_blocks is not None:
        _check_blocks(config, num_blocks, length or longest, block)
        length = length or min(longest, num_blocks * block.block_size)
    if length is None and longest > DEFAULT_MAX_LEN:
        logger.info("max_model_len: %d of the model's %d; set max_model_len for more", DEFAULT_MAX_LEN, longest)
    return replace(spec, max_position_embeddings=length or min(longest, DEFAULT_MAX_LEN))


def _choose_dtype(config: EngineConfig, checkpoint: Checkpoint, traits: Traits, name: str) -> str:
    """What to compute in: as the user asks; else as stored, if the device has that; else the device's first."""
    dtype = config.dtype
    if dtype in ("auto", "int8", "int4"):
        stored = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype"))
        dtype = stored if stored in traits.dtypes else traits.dtypes[0]
    if dtype not in traits.dtypes:
        raise BackendError(f"backend {name!r} does not compute in {dtype}; it can: {', '.join(traits.dtypes)}")
    if config.numerics == "strict" and dtype not in traits.batch_invariant:
        able = ", ".join(traits.batch_invariant) or "no dtype"
        raise BackendError(
            f"backend {name!r} is batch-invariant in {able}, not in {dtype}: numerics='strict' is refused"
        )
    return dtype


def _check_features(spec: ModelSpec, traits: Traits, name: str) -> None:
    lacking = [feature for feature in spec.features if feature not in traits.model_features]
    if lacking:
        able = ", ".join(traits.model_features) or "none of them"
        raise BackendError(
            f"{spec.model_type} needs {', '.join(lacking)}, which backend {name!r} does not have (of such features it "
            f"has: {able}): choose another device"
        )


def _choose_form(config: EngineConfig, checkpoint: Checkpoint) -> WeightSource:
    """The tensors as the user wants them kept: as stored, quantised, or dense in the dtype that was named."""
    match config.dtype:
        case "auto":
            return checkpoint
        case "int8":
            return Int8Weights(checkpoint)
        case "int4":
            return Int4Weights(checkpoint)
        case _:
            return DenseWeights(checkpoint)


def _describe_weights(config: EngineConfig, checkpoint: Checkpoint, traits: Traits) -> str:
    formats = {"auto": checkpoint.formats, "int8": ("int8",), "int4": ("Q4_0", "Q8_0")}.get(config.dtype, ())
    kept = [name for name in formats if name in traits.weight_formats]
    return f", weights in {' and '.join(kept)}" if kept else ""


def _one_block(config: EngineConfig, spec: ModelSpec, traits: Traits, dtype: str) -> KVLayout:
    """The layout of a cache of one block."""
    sizes = traits.block_sizes
    if sizes is not None and config.block_size not in sizes:
        raise ConfigError(f"block_size is {config.block_size}; this backend pages {', '.join(map(str, sizes))}")
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    if kv_dtype not in (dtype, *traits.kv_dtypes):
        able = ", ".join(dict.fromkeys((dtype, *traits.kv_dtypes)))
        raise BackendError(f"kv_cache_dtype is {kv_dtype!r}; with dtype {dtype} this backend can keep KV in: {able}")
    return KVLayout(spec.num_layers, 1, config.block_size, spec.num_kv_heads, spec.head_dim, kv_dtype)


def _size_cache(config: EngineConfig, spec: ModelSpec, block: KVLayout, backend: Backend) -> KVLayout:
    """As many blocks as asked for or as fit, but no more than the running requests can fill."""
    num_blocks = config.num_blocks
    if num_blocks is None:
        fitting = _asked_blocks(config, block)
        if fitting is None:
            fitting = (backend.kv_budget() or DEFAULT_KV_BYTES) // block.num_bytes
        num_blocks = min(fitting, blocks_for(spec.max_position_embeddings, block.block_size) * config.max_num_seqs)
    _check_blocks(config, num_blocks, spec.max_position_embeddings, block)
    return replace(block, num_blocks=num_blocks)


def _asked_blocks(config: EngineConfig, block: KVLayout) -> int | None:
    """Blocks of a cache the user sized; None: it is for the backend to say, once it has the weights."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes // block.num_bytes
    return config.num_blocks


def _check_blocks(config: EngineConfig, num_blocks: int, length: int, block: KVLayout) -> None:
    needed = blocks_for(length, block.block_size)
    if num_blocks < (1 if config.max_model_len is None else needed):
        raise ConfigError(
            f"the KV cache has {num_blocks} blocks; one request of max_model_len={length} needs {needed} of "
            f"{block.num_bytes} bytes: raise num_blocks or kv_cache_memory_bytes, or lower max_model_len"
        )
