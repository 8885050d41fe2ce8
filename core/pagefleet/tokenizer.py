"""Tokenizer: text to token ids and back, whole or while it is being generated.

A thin layer over transformers, which is imported when a tokenizer is loaded. It does not know about models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pagefleet.weights.files import CheckpointError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no whole character decode to
_NOT_FAULTS = (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError)
_CONTEXT = 6  # tokens of the prompt that decide how the first new token is spelled


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded; the message names where from, what is wrong and the way out."""


class Tokenizer:
    """A model's tokenizer with its own policy: `encode` adds what the model's tokenizer adds (such as bos)."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: any of transformers' (a `PreTrainedTokenizerBase`)."""
        self.transformers = tokenizer
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._byte_ids = _byte_fallback_ids(tokenizer)

    @property
    def eos_token_id(self) -> int | None:
        token_id: int | None = self.transformers.eos_token_id
        return token_id

    @property
    def vocab_size(self) -> int:
        """Token ids it knows, added tokens included. A model's logits may have more, for alignment."""
        return len(self.transformers)

    @property
    def chat_template(self) -> str | None:
        template: str | None = self.transformers.chat_template
        return template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written out in the text are taken as such, as transformers does.

        Raises ValueError for a lone surrogate: half of a character, which no encoding has.
        """
        _check_text(text)
        ids: list[int] = self.transformers.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of some ids, with no space tidied away before punctuation: a stream could not take it back."""
        text: str = self.transformers.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Token ids of a conversation. `kwargs` go to transformers: tools, chat_template, enable_thinking, ...

        Raises ValueError if the tokenizer has no chat template and none is given, and if the template refuses the
        messages.
        """
        if self.chat_template is None and kwargs.get("chat_template") is None:
            raise ValueError(
                "this tokenizer has no chat template; pass one as chat_template=..., or encode a prompt written out"
            )
        for message in messages:
            if not isinstance(message, Mapping):
                raise ValueError(f"message {message!r:.80} is no mapping; give {{'role': ..., 'content': ...}}")
            for value in message.values():
                if isinstance(value, str):
                    _check_text(value)
        try:
            ids: list[int] = self.transformers.apply_chat_template(
                list(messages), tokenize=True, return_dict=False, add_generation_prompt=add_generation_prompt, **kwargs
            )
        except Exception as error:  # a template is code, and raises what it likes
            raise ValueError(
                f"the chat template fails on these messages: {type(error).__name__}: {error}; change the messages, or "
                "pass another as chat_template=..."
            ) from error
        return ids

    def stream(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> TokenStream:
        """A detokenizer for tokens that follow `prompt_ids`."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        return TokenStream(lambda ids: self.decode(ids, skip_special_tokens), prompt_ids, skipped, self._byte_ids)


class TokenStream:
    """Text of tokens as they come, only whole characters.

    What `push` and `flush` return, joined, is the text of prompt and tokens without that of the prompt; so without
    a prompt it is `decode` of the tokens. How a token is spelled depends on the ones before it (leading spaces,
    characters of several tokens), so it is decoded together with the tokens that were last written out.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt_ids: Sequence[int],
        skipped: frozenset[int],
        byte_ids: frozenset[int],
    ) -> None:
        """`skipped` ids have no text; `byte_ids` are single bytes, which only a whole run of them turns into text."""
        self._decode, self._skipped, self._byte_ids = decode, skipped, byte_ids
        self._ids = list(prompt_ids[-_CONTEXT:])
        if self._ids and not decode(self._ids):  # only special tokens: look further back
            self._ids = list(prompt_ids)
        self._num_written = len(self._ids)
        self._written = decode(self._ids).rstrip(_REPLACEMENT) if self._ids else ""

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before; often that of this token, sometimes none."""
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        if token_id in self._byte_ids:
            return ""
        text = self._decode(self._ids)
        return "" if text.endswith(_REPLACEMENT) else self._write(text)

    def flush(self) -> str:
        """What was held back, at the end: half a character becomes U+FFFD, as in `decode`."""
        return self._write(self._decode(self._ids)) if len(self._ids) > self._num_written else ""

    def _write(self, text: str) -> str:
        new = text[len(self._written) :]
        if new:
            del self._ids[: self._num_written]
            self._num_written, self._written = len(self._ids), self._decode(self._ids)
        return new


def load_tokenizer(path: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a folder, a .gguf file (or a folder with one and nothing else), or a name on the hub.

    `trust_remote_code` lets the folder or hub bring Python code that runs here. Raises TokenizerError (of a .gguf
    file: CheckpointError) if there is no tokenizer, or none that works.
    """
    try:
        return _load(path, revision, trust_remote_code)
    except (CheckpointError, ImportError, *_NOT_FAULTS):
        raise
    except BaseException as error:  # tokenizers panics with a BaseException, transformers raises anything
        reason = " ".join(str(error).split())
        raise TokenizerError(
            f"{path}: its tokenizer cannot be loaded: {type(error).__name__}: {reason}; give another as tokenizer=..."
        ) from error


def _load(path: str | Path, revision: str | None, trust_remote_code: bool) -> Tokenizer:
    from transformers import AutoTokenizer

    local = Path(path).expanduser()
    ggufs = sorted(local.glob("*.gguf")) if local.is_dir() and not (local / "config.json").is_file() else []
    if local.suffix == ".gguf" or len(ggufs) == 1:
        from pagefleet.weights.gguf_tokenizer import load_gguf_tokenizer

        return Tokenizer(load_gguf_tokenizer(ggufs[0] if ggufs else local))
    source = str(local) if local.exists() else str(path)
    return Tokenizer(AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code))


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text has a lone surrogate, {text[error.start]!r}, at character {error.start}; decode the input as UTF-8"
        ) from None


def _byte_fallback_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens <0x00> to <0xFF>, where the vocabulary has them."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    ids: Iterable[int | None] = tokenizer.convert_tokens_to_ids(names)
    return frozenset(token_id for token_id in ids if token_id is not None and token_id != tokenizer.unk_token_id)
