"""From an EngineConfig to a running engine: choose the device, open the checkpoint, size the cache."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from pagefleet.backend import BackendError, KVLayout
from pagefleet.blocks import BlockPool
from pagefleet.config import ConfigError
from pagefleet.engine import Engine
from pagefleet.plugins import Plugins
from pagefleet.scheduler import Scheduler
from pagefleet.table import RunningTable, blocks_for
from pagefleet.text_engine import TextEngine
from pagefleet.tokenizer import load_tokenizer
from pagefleet.weights import open_checkpoint

if TYPE_CHECKING:
    from pagefleet.backend import Backend, Traits
    from pagefleet.config import EngineConfig
    from pagefleet.model import ModelSpec
    from pagefleet.weights import Checkpoint

DEFAULT_KV_BYTES = 1 << 30  # where the backend has no opinion
logger = logging.getLogger("pagefleet")


def load_engine(config: EngineConfig) -> TextEngine:
    """Everything `config` asks for, ready to generate.

    Raises BackendError for a device that cannot, CheckpointError for files that do not fit, ConfigError for sizes
    that do not.
    """
    plugins = Plugins(config.plugins)
    info, index = plugins.select(config.device)
    with open_checkpoint(config.model, revision=config.revision, families=plugins.models()) as checkpoint:
        spec = _fit_length(checkpoint.spec, config.max_model_len)
        backend = info.load(index)
        dtype = _choose_dtype(config, checkpoint, backend.traits, info.name)
        backend.load(spec, checkpoint, dtype)
    layout = _size_cache(config, spec, backend, dtype)
    backend.allocate_kv(layout)
    backend.warm_up()
    max_len = min(spec.max_position_embeddings, layout.num_blocks * layout.block_size)
    facts = {
        "backend": info.name if index == 0 else f"{info.name}:{index}",
        "model": f"{spec.model_type}, {spec.num_parameters:,} parameters, {config.model}",
        "dtype": dtype,
        "KV cache": f"{layout.num_blocks} blocks of {layout.block_size} tokens, {layout.num_bytes / 2**20:.0f} MiB",
        "max_model_len": str(max_len),
    }
    logger.info("%s", "; ".join(f"{name}: {value}" for name, value in facts.items()))
    tokenizer = load_tokenizer(
        config.tokenizer or checkpoint.path, revision=config.revision, trust_remote_code=config.trust_remote_code
    )
    return TextEngine(_build(config, backend, layout, max_len), tokenizer, spec, max_len, config.seed, facts)


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


def _fit_length(spec: ModelSpec, max_model_len: int | None) -> ModelSpec:
    """The spec for an engine of that length: the backend need not prepare for more."""
    longest = spec.max_position_embeddings
    if max_model_len is not None and max_model_len > longest:
        raise ConfigError(f"max_model_len is {max_model_len}; the model has positions for {longest}: lower it")
    return replace(spec, max_position_embeddings=max_model_len or longest)


def _choose_dtype(config: EngineConfig, checkpoint: Checkpoint, traits: Traits, name: str) -> str:
    """What the user asks for; else the checkpoint's own dtype, if the device has it; else the device's first."""
    dtype = config.dtype
    if dtype == "auto":
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


def _size_cache(config: EngineConfig, spec: ModelSpec, backend: Backend, dtype: str) -> KVLayout:
    """As many blocks as asked for or as fit, but no more than the running requests can fill."""
    sizes = backend.traits.block_sizes
    if sizes is not None and config.block_size not in sizes:
        raise ConfigError(f"block_size is {config.block_size}; this backend pages {', '.join(map(str, sizes))}")
    layout = KVLayout(spec.num_layers, 1, config.block_size, spec.num_kv_heads, spec.head_dim, dtype)
    longest = blocks_for(spec.max_position_embeddings, config.block_size)
    num_blocks = config.num_blocks
    if num_blocks is None:
        budget = config.kv_cache_memory_bytes or backend.kv_budget() or DEFAULT_KV_BYTES
        num_blocks = min(budget // layout.num_bytes, longest * config.max_num_seqs)
    if num_blocks < (1 if config.max_model_len is None else longest):
        raise ConfigError(
            f"the KV cache has {num_blocks} blocks; one request of max_model_len={spec.max_position_embeddings} needs "
            f"{longest} of {layout.num_bytes} bytes: raise num_blocks or kv_cache_memory_bytes, or lower max_model_len"
        )
    return replace(layout, num_blocks=num_blocks)
