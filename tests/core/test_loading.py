"""load_engine: what is prepared is bounded, faults show before the weights are read, the device is given back."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from safetensors.numpy import save_file

from pagefleet import loading
from pagefleet.backend import Backend, BackendError, BackendInfo, ForwardBatch, KVLayout, ModelSpec, Probe, WeightSource
from pagefleet.config import ConfigError, EngineConfig
from pagefleet.loading import DEFAULT_MAX_LEN, load_engine
from pagefleet.models import find_family
from pagefleet.plugins import Plugins
from pagefleet.text_engine import TextEngine
from pagefleet.tokenizer import TokenizerError

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
    "max_position_embeddings": 20_000_000,
}
BLOCK_BYTES = 2 * 16 * 2 * 4  # key and value of 16 tokens, one head of 2 float32


class Recorder(Backend):
    """Computes nothing; keeps what it was asked for, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.model: ModelSpec | None = None
        self.budget: int | None = None
        self.failing = ""

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.failing:
            raise RuntimeError(f"{name} failed")

    def load(self, model: ModelSpec, weights: WeightSource, dtype: str) -> None:
        self.model = model
        self._called("load")

    def kv_budget(self) -> int | None:
        self._called("kv_budget")
        return self.budget

    def allocate_kv(self, layout: KVLayout) -> None:
        self._called("allocate_kv")

    def warm_up(self) -> None:
        self._called("warm_up")

    def forward(self, batch: ForwardBatch) -> Any:
        raise NotImplementedError

    def to_host(self, logits: Any) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        self._called("close")


class WordsOnly:
    eos_token_id = 2
    vocab_size = 8


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    backend = Recorder()
    info = BackendInfo("recorder", probe=lambda: Probe(True, "a test"), load=lambda index: backend)
    monkeypatch.setattr(Plugins, "select", lambda self, device: (info, 0))
    monkeypatch.setattr(loading, "load_tokenizer", lambda *args, **kwargs: WordsOnly())
    return backend


class Load(Protocol):
    def __call__(self, **options: Any) -> TextEngine: ...


@pytest.fixture
def load(recorder: Recorder, tmp_path: Path) -> Load:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shapes = {each.checkpoint_name: each.shape for each in find_family("llama").spec(CONFIG).tensors.values()}
    save_file({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    return lambda **options: load_engine(EngineConfig(str(tmp_path), plugins=(), **options))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_blocks": 1}, 16),
        ({"num_blocks": 100, "block_size": 8}, 800),
        ({"kv_cache_memory_bytes": 10 * BLOCK_BYTES + 1}, 160),
        ({"max_model_len": 200_000, "num_blocks": 20_000}, 200_000),
        ({"num_blocks": 2 * DEFAULT_MAX_LEN}, 2 * DEFAULT_MAX_LEN * 16),
        ({}, DEFAULT_MAX_LEN),
    ],
)
def test_the_backend_prepares_for_no_more_positions_than_a_request_can_have(
    options: dict[str, Any], expected: int, recorder: Recorder, load: Load
) -> None:
    engine = load(**{"max_num_seqs": 1, **options})
    assert recorder.model is not None
    assert recorder.model.max_position_embeddings == engine.max_model_len == expected


def test_a_length_cut_to_the_default_says_how_to_raise_it(
    recorder: Recorder, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pagefleet"):
        load(max_num_seqs=1)
    assert "max_model_len: 131072 of the model's 20000000; set max_model_len for more" in caplog.text


def test_the_budget_is_asked_for_after_the_weights_and_only_then(recorder: Recorder, load: Load) -> None:
    recorder.budget = 7 * BLOCK_BYTES
    assert load(max_num_seqs=1).max_model_len == 7 * 16
    assert recorder.calls == ["load", "kv_budget", "allocate_kv", "warm_up"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_blocks": 1, "max_model_len": 17}, r"has 1 blocks; one request of max_model_len=17 needs 2 of 256 bytes"),
        ({"kv_cache_memory_bytes": 1}, r"has 0 blocks; .*raise num_blocks or kv_cache_memory_bytes"),
        ({"max_model_len": 20_000_001}, r"max_model_len is 20000001; the model has positions for 20000000"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_the_weights_are_read(
    options: dict[str, Any], words: str, recorder: Recorder, load: Load
) -> None:
    with pytest.raises(ConfigError, match=words):
        load(**options)
    assert recorder.calls == ["close"]


def test_a_broken_tokenizer_is_reported_before_the_device_is_touched(
    recorder: Recorder, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise TokenizerError("broken")

    monkeypatch.setattr(loading, "load_tokenizer", fail)
    with pytest.raises(TokenizerError, match="broken"):
        load()
    assert recorder.calls == []


def test_a_model_that_needs_more_than_the_device_has_is_refused_before_the_weights_are_read(
    recorder: Recorder, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loading.open_checkpoint

    def with_alibi(*args: Any, **kwargs: Any) -> Any:
        checkpoint = real(*args, **kwargs)
        checkpoint.spec = replace(checkpoint.spec, alibi_slopes=(0.5, 0.25), attention_soft_cap=30.0)
        return checkpoint

    monkeypatch.setattr(loading, "open_checkpoint", with_alibi)
    recorder.traits = replace(recorder.traits, model_features=("soft_cap",))
    with pytest.raises(
        BackendError, match=r"llama needs alibi, which backend 'recorder' does not have .*has: soft_cap"
    ):
        load()
    assert recorder.calls == ["close"]
    recorder.traits = replace(recorder.traits, model_features=("soft_cap", "alibi"))
    load(max_num_seqs=1)


@pytest.mark.parametrize("step", ["load", "kv_budget", "allocate_kv", "warm_up"])
def test_the_device_is_given_back_when_a_step_fails(step: str, recorder: Recorder, load: Load) -> None:
    recorder.failing = step
    with pytest.raises(RuntimeError, match=f"{step} failed"):
        load(max_num_seqs=1)
    assert recorder.calls[-2:] == [step, "close"]


@pytest.mark.parametrize("what", [None, "a backend", Recorder])
def test_what_is_no_backend_is_refused_naming_who_returned_it(
    what: object, recorder: Recorder, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = BackendInfo("odd", probe=lambda: Probe(True, "a test"), load=lambda index: what)  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(Plugins, "select", lambda self, device: (info, 0))
    with pytest.raises(BackendError, match=r"backend 'odd': its load\(0\) returned"):
        load()
