"""What several commands of `pagefleet` take, and how they get a model by it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pagefleet.llm import LLM

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A local folder, a GGUF file or a hub name.")]
Device = Annotated[
    str | None,
    typer.Option("--device", "-d", help="Backend to use, NAME or NAME:INDEX. Default: TARGET_DEVICE, or auto."),
]
Dtype = Annotated[
    str, typer.Option(help="auto, float32, bfloat16 or float16: of weights and activations; int8, int4: of weights.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Any other engine setting, as in --set max_num_seqs=64. Repeatable."
    ),
]
Temperature = Annotated[float | None, typer.Option(help="0: always the most likely token. Default: 1.")]
TopP = Annotated[float | None, typer.Option(help="Keep the most likely tokens up to this probability. Default: 1.")]
TopK = Annotated[int | None, typer.Option(help="Keep this many of the most likely tokens. Default: all.")]
Seed = Annotated[int | None, typer.Option(help="Makes the draws of a request repeatable.")]


def load_llm(model: str, device: str | None, dtype: str, settings: list[str] | None) -> LLM:
    """The model, with every `FIELD=VALUE` of `settings`."""
    fields = dict(parse_setting(text) for text in settings or ())
    from pagefleet.llm import LLM

    return LLM(model=model, device=device, dtype=dtype, **fields)


def parse_setting(text: str) -> tuple[str, Any]:
    """`FIELD=VALUE` with VALUE as JSON has it, or as plain text; for a list of names, with commas between them."""
    from dataclasses import fields

    from pagefleet.config import EngineConfig

    name, equals, value = text.partition("=")
    known = {f.name: str(f.type) for f in fields(EngineConfig) if f.name not in ("model", "device", "dtype")}
    if not equals or name not in known:
        raise ValueError(f"--set {text!r}: must be FIELD=VALUE with FIELD one of {', '.join(known)}")
    if known[name].startswith("str"):
        return name, value
    if known[name].startswith("tuple"):
        return name, tuple(each.strip() for each in value.split(",") if each.strip())
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
