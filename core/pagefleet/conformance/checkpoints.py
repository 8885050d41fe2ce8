"""Tiny random checkpoints of every model family, written on the spot, and transformers' own logits for them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from pagefleet.conformance.cases import RandomWeights
from pagefleet.conformance.reference import DenseDecoder, ReferenceRun
from pagefleet.models import ModelFamily

VOCAB_SIZE = 113
EOS = 2
TINY: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": None,
    }
)
LLAMA3: Mapping[str, Any] = MappingProxyType(
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
)
# family -> what a checkpoint of it may say beyond the plainest, by name
CHANGES: Mapping[str, Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama": {
            "tied": {"tie_word_embeddings": True},
            "scaled-rope": {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}, "rope_theta": 5e5},
            "biases": {"attention_bias": True, "mlp_bias": True},
        },
        "mistral": {"window": {"sliding_window": 11}},
        "qwen2": {"windows": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}},
        "qwen3": {"head-dim-32": {"head_dim": 32}},
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """A family, and what its checkpoint says beyond `TINY`."""

    name: str
    family: ModelFamily
    changes: Mapping[str, Any]

    def config(self) -> dict[str, Any]:
        """As transformers writes it to config.json. Raises ValueError if transformers does not know the family."""
        from transformers import AutoConfig

        made = AutoConfig.for_model(self.family.model_type, **{**TINY, **self.changes})
        return json.loads(made.to_json_string(use_diff=False))  # type: ignore[no-any-return]


def variants(families: Iterable[ModelFamily]) -> Iterator[Variant]:
    """Of each family the plainest, then those of `CHANGES`."""
    for family in families:
        yield Variant(family.model_type, family, {})
        for name, changes in CHANGES.get(family.model_type, {}).items():
            yield Variant(f"{family.model_type}-{name}", family, changes)


def write_checkpoint(variant: Variant, folder: Path) -> DenseDecoder:
    """config.json, model.safetensors, and a tokenizer of the words t000, t001, ...; returns the model as the reference.

    Every weight has a value that all dtypes hold exactly.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    config = variant.config()
    spec = variant.family.spec(config)
    weights = RandomWeights(spec, seed=0)
    tensors = {spec.tensors[name].checkpoint_name: array for name, array in weights.arrays.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = Tokenizer(models.WordLevel({word(i): i for i in range(spec.vocab_size)}, unk_token=word(0)))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": word(0), "bos_token": word(1), "eos_token": word(EOS)}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    return DenseDecoder(spec, weights.float64())


def word(token_id: int) -> str:
    """How the tokenizer spells a token; no word is part of another."""
    return f"t{token_id:03}"


class TransformersModel:
    """A checkpoint as transformers runs it: float64 matrices, attention written out. A `Reference` without ops."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model, loading = AutoModelForCausalLM.from_pretrained(
            folder, dtype="float64", attn_implementation="eager", output_loading_info=True
        )
        strangers = {kind: names for kind in ("missing_keys", "unexpected_keys") if (names := loading[kind])}
        assert not strangers, f"transformers has other tensors in such a checkpoint than the family's spec: {strangers}"

    def run(self, token_ids: Sequence[int]) -> ReferenceRun:
        """Run the whole sequence at once."""
        from transformers import BatchEncoding

        inputs = BatchEncoding({"input_ids": [list(token_ids)]}, tensor_type="pt")
        logits = self._model(**inputs, use_cache=False).logits[0].detach().numpy()
        return ReferenceRun(logits.astype(np.float64), {})
