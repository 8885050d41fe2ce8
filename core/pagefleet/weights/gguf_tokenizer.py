"""The tokenizer a GGUF file carries, built in a third of a second.

transformers reads the file with a slow reader and converts through several tokenizer classes (seconds for 49,000
tokens). A byte-level BPE is a vocabulary, merges and a rule for splitting text, so it is built here with the
tokenizers library. The rule is the one named by `tokenizer.ggml.pre`, as in llama.cpp's `llama-vocab.cpp`, with the
normaliser of the model's own `tokenizer.json`. transformers does not know the rule `smollm` and splits like GPT-2:
its ids differ where several blanks or newlines are followed by a digit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pagefleet.weights.files import CheckpointError
from pagefleet.weights.gguf_file import GGUFArray, read_gguf

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = "GPT-2's rule, built into tokenizers"
_DIGITS = "GPT-2's rule after every digit stands alone"
_SPLITS: Mapping[str, str] = MappingProxyType(
    {"gpt-2": _GPT2, "gpt2": _GPT2, "olmo": _GPT2, "mpt": _GPT2}
    | {"smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS, "command-r": _DIGITS, "codeshell": _DIGITS}
    | {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "falcon3": _LLAMA3, "smaug-bpe": _LLAMA3}
    | {"qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "megrez": _QWEN2, "tekken": _TEKKEN}
)
_SPECIAL = ("bos", "eos", "unknown", "padding")  # tokenizer.ggml.NAME_token_id
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


def load_gguf_tokenizer(path: Path) -> Any:
    """The file's tokenizer and chat template as a `transformers.PreTrainedTokenizerFast`.

    Raises CheckpointError if the file has none, or one that cannot be rebuilt faithfully.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    metadata = read_gguf(path).metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "llama":  # sentencepiece: its merges are worked out from scores, which transformers does
        _check_sentencepiece(path, metadata)
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if kind != "gpt2":
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model is {kind!r}; known: gpt2, llama. Give a tokenizer's folder"
        )
    tokens = _strings(path, metadata, "tokenizer.ggml.tokens")
    ids = {name: _special(path, metadata, name, len(tokens)) for name in _SPECIAL}
    named = {name: None if token_id is None else tokens[token_id] for name, token_id in ids.items()}
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{path}: tokenizer.chat_template is {template!r:.80}, not a string; the file is corrupt")
    fast = _byte_level_bpe(path, metadata, tokens)
    _add_bos_eos(fast, metadata, named)
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token=named["bos"],
        eos_token=named["eos"],
        unk_token=named["unknown"],
        pad_token=named["padding"],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def _byte_level_bpe(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> FastTokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    rule = str(metadata.get("tokenizer.ggml.pre"))
    if rule not in _SPLITS:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.pre is {rule!r}; known: {', '.join(_SPLITS)}. Give a tokenizer's folder"
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = []
    for merge in _strings(path, metadata, "tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not space or " " in right:
            raise CheckpointError(f"{path}: merge {merge!r} does not join two tokens; the file is corrupt")
        if unknown := [part for part in (left, right, left + right) if part not in vocabulary]:  # tokenizers panics
            raise CheckpointError(
                f"{path}: merge {merge!r} needs {unknown[0]!r}, which is not among its {len(tokens)} tokens; the file "
                "is corrupt"
            )
        merges.append((left, right))
    try:
        model = models.BPE(vocab=vocabulary, merges=merges)
    except Exception as error:  # the library raises bare exceptions
        raise CheckpointError(f"{path}: its vocabulary and merges do not fit together: {error}") from error
    fast = Tokenizer(model)
    fast.pre_tokenizer, fast.decoder = _pre_tokenizer(_SPLITS[rule]), decoders.ByteLevel()
    if _SPLITS[rule] == _QWEN2:
        fast.normalizer = normalizers.NFC()
    key = "tokenizer.ggml.token_type"
    _add_whole_tokens(fast, tokens, _numbers(path, metadata, key, len(tokens)) if key in metadata else [])
    return fast


def _pre_tokenizer(split: str) -> PreTokenizer:
    """The rule that cuts a text into the pieces merges stay within."""
    from tokenizers import Regex, pre_tokenizers

    if split == _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split == _DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    pieces = pre_tokenizers.Split(Regex(split), behavior="isolated")
    return pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _add_whole_tokens(fast: FastTokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Make control and user-defined tokens stand for themselves wherever they are written out."""
    from tokenizers import AddedToken

    def of_kind(wanted: int) -> list[AddedToken]:
        special = wanted == _CONTROL
        chosen = [token for token, kind in zip(tokens, kinds, strict=bool(kinds)) if kind == wanted]
        return [AddedToken(token, normalized=False, special=special) for token in chosen]

    fast.add_special_tokens(of_kind(_CONTROL))
    fast.add_tokens(of_kind(_USER_DEFINED))


def _add_bos_eos(fast: FastTokenizer, metadata: Mapping[str, Any], named: Mapping[str, str | None]) -> None:
    """Make `fast` put bos before and eos after a text, if the file says so."""
    from tokenizers.processors import TemplateProcessing

    bos = named["bos"] if metadata.get("tokenizer.ggml.add_bos_token") else None
    eos = named["eos"] if metadata.get("tokenizer.ggml.add_eos_token") else None
    if used := [token for token in (bos, eos) if token is not None]:
        first, last = [bos] if bos else [], [eos] if eos else []
        fast.post_processor = TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *(f"{token}:1" for token in first), "$B:1", *(f"{token}:1" for token in last)],
            special_tokens=[(token, fast.token_to_id(token)) for token in used],
        )


def _check_sentencepiece(path: Path, metadata: Mapping[str, Any]) -> None:
    """CheckpointError unless what transformers takes for granted is there."""
    num_tokens = len(_strings(path, metadata, "tokenizer.ggml.tokens"))
    for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        _numbers(path, metadata, key, num_tokens)
    for name in _SPECIAL:
        _special(path, metadata, name, num_tokens)


def _numbers(path: Path, metadata: Mapping[str, Any], key: str, num_tokens: int) -> list[Any]:
    """An array of the metadata that has a number for each token."""
    array = metadata.get(key)
    if not isinstance(array, GGUFArray) or array.count != num_tokens or array.is_text:
        raise CheckpointError(
            f"{path}: {key} must have a number for each of its {num_tokens} tokens; the file is corrupt"
        )
    return array.values()


def _strings(path: Path, metadata: Mapping[str, Any], key: str) -> list[str]:
    array = metadata.get(key)
    if not isinstance(array, GGUFArray):
        raise CheckpointError(f"{path}: no {key} in its metadata; give the folder of the model's tokenizer")
    if not array.is_text:
        raise CheckpointError(f"{path}: {key} holds numbers, not strings; the file is corrupt")
    return array.values()


def _special(path: Path, metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < num_tokens:
        raise CheckpointError(f"{path}: {name}_token_id is {token_id!r:.80}, outside its {num_tokens} tokens")
    return token_id
