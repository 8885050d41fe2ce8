"""The command `pagefleet parity`: two backends, the same tokens."""

from __future__ import annotations

import json
import sys
from collections import deque
from pathlib import Path
from typing import Annotated

import typer

from pagefleet.cli_options import Dtype, Model

PROMPTS = (
    "The capital of France is",
    "def quicksort(items):\n    if len(items) < 2:\n        return items\n",
    "Once upon a time, in a house by the sea, there lived",
    "To prove that the square root of two is irrational, assume that",
    '{"name": "pagefleet", "version": "0.1", "dependencies": [',
    "Wer reitet so spät durch Nacht und Wind? Es ist",
)


def parity(
    model: Model,
    devices: Annotated[str, typer.Option(metavar="A,B", help="Two backends; the first is the one to be like.")],
    dtype: Dtype = "auto",
    prompts: Annotated[Path | None, typer.Option(help="A text file, a prompt a line. Default: six short ones.")] = None,
    num_tokens: Annotated[int, typer.Option(help="Tokens to decode after each prompt.")] = 32,
    near_tie: Annotated[
        float | None, typer.Option(help="Log-probabilities this close make a flip a near-tie. Default: by dtype.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON.")] = False,
) -> None:
    """Compare two backends position by position: prompts in chunks, then tokens one by one, the same for both.

    A position where they find different tokens the most likely is a flip: a near-tie, or a defect. Exits 1 if there
    is a defect.

    Example: pagefleet parity MODEL --devices NAME,OTHER --dtype float32
    """
    from rich.console import Console
    from rich.progress import track

    from pagefleet.config import EngineConfig
    from pagefleet.parity import parity as run
    from pagefleet.tokenizer import load_tokenizer
    from pagefleet.weights import open_checkpoint

    names = [name.strip() for name in devices.split(",")]
    if len(names) != 2 or not all(names):
        raise ValueError(f"--devices is {devices!r}; it must be two names with a comma between them")
    texts = list(PROMPTS) if prompts is None else [line for line in prompts.read_text("utf-8").splitlines() if line]
    if not texts:
        raise ValueError(f"{prompts} has no prompt in it")
    with open_checkpoint(model) as checkpoint:
        tokenizer = load_tokenizer(checkpoint.path)
    token_ids = [tokenizer.encode(text) for text in texts]
    first, second = (EngineConfig(model=model, device=name, dtype=dtype, max_num_seqs=1) for name in names)
    results = run((first, second), token_ids, num_tokens=num_tokens, near_tie=near_tie)
    console = Console(stderr=True)
    shown = track(results, "Prompts", len(texts), console=console, disable=not sys.stderr.isatty())
    (result,) = deque(shown, maxlen=1)
    if as_json:
        sys.stdout.write(json.dumps(result.as_dict(), indent=1) + "\n")
    else:
        a, b = (f"{name} ({dtype})" for name, dtype in zip(result.devices, result.dtypes, strict=True))
        lines = [
            f"{a} and {b}: {result.num_positions} positions of {len(texts)} prompts",
            f"equal argmax     {result.equal_argmax:.4%}",
            f"log-probability  max {result.max_difference:.2e}, mean {result.mean_difference:.2e} (likeliest 20)",
            f"KL               max {result.max_kl:.2e}, mean {result.mean_kl:.2e}",
            f"flips            {len(result.flips)}: {len(result.flips) - len(result.defects)} near-ties "
            f"(gap up to {result.near_tie:g}), {len(result.defects)} defects",
        ]
        lines += [
            f"  prompt {flip.prompt}, position {flip.position}: tokens {flip.tokens[0]} and {flip.tokens[1]}, "
            f"gap {flip.gap:.2g}, {'DEFECT' if flip.defect else 'near-tie'}"
            for flip in result.flips[:20]
        ]
        sys.stdout.write("\n".join(lines) + "\n")
    raise typer.Exit(1 if result.defects else 0)
