"""The command `pagefleet bench`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from pagefleet.cli_options import Device, Model, Settings, load_llm, parse_setting

if TYPE_CHECKING:
    from rich.console import Console

    from pagefleet.llm import LLM


def bench(
    model: Model,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests, all there from the start.")] = 32,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt, drawn at random.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens generated for each.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the random prompts.")] = 0,
    suite: Annotated[
        bool, typer.Option("--suite", help="Instead: all of --workload w1,w2,w3, --roofline and --static-batching.")
    ] = False,
    workload: Annotated[
        str | None,
        typer.Option(help="w1: one stream, w2: 64 mixed requests, w3: 32 with a shared prefix. Commas between them."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="PEER", help="Run llama.cpp, vllm or openvino too, in turn with this engine.")
    ] = None,
    peer_python: Annotated[
        str | None, typer.Option(metavar="PATH", help="The Python that has the peer installed. Default: this one.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Times each workload is run; medians are shown.")] = 3,
    roofline: Annotated[
        bool, typer.Option("--roofline", help="The machine's ceilings, and what each op reaches of them.")
    ] = False,
    static_batching: Annotated[
        bool, typer.Option("--static-batching", help="w2 in padded batches and contiguous memory, against the engine.")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests of a static batch.")] = 32,
    threads: Annotated[int | None, typer.Option(min=1, help="Of a peer. Default: one a core.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    device: Device = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="auto, float32, bfloat16, float16, int8 or int4; default: auto. With fixed workloads also q8_0 (a "
            "GGUF file of that type is made), and several with commas; default: bfloat16,float32,q8_0,auto where they "
            "make sense."
        ),
    ] = None,
    settings: Settings = None,
) -> None:
    """Measure throughput and latency.

    Without more, random prompts in this process. All requests are there from the start: time to first token includes
    the wait for a place in the batch.

    With --suite, or any part of it, the fixed workloads: each engine in a process of its own, medians of several runs.

    Example: pagefleet bench MODEL --workload w1 --dtype bfloat16 --against llama.cpp
    """
    wanted = {
        "compare": suite or workload is not None or against is not None,
        "roofline": suite or roofline,
        "static": suite or static_batching,
    }
    if not any(wanted.values()):
        _bench_random(
            load_llm(model, device, dtype or "auto", settings), num_prompts, input_len, output_len, seed, as_json
        )
        return
    from rich.console import Console

    from pagefleet.bench.suite import Suite, SuiteOptions

    asked = SuiteOptions(
        model=model,
        sections=tuple(name for name, want in wanted.items() if want),
        workloads=_names(workload),
        weights=_names(dtype),
        against=against,
        peer_python=peer_python,
        repeat=repeat,
        threads=threads,
        static_batch=batch_size,
        device=device,
        settings=dict(parse_setting(text) for text in settings or ()),
    )
    with Console(stderr=True).status("") as status:
        found = Suite(asked, _console(quiet=as_json), status.update).run()
    if as_json:
        typer.echo(json.dumps(found))


def _bench_random(llm: LLM, num_prompts: int, input_len: int, output_len: int, seed: int, as_json: bool) -> None:
    from pagefleet.bench import Workload, run, table

    workload = Workload(num_prompts=num_prompts, input_len=input_len, output_len=output_len, seed=seed)
    result = run(llm, workload)
    if as_json:
        typer.echo(json.dumps(asdict(workload) | asdict(result)))
    else:
        from rich.console import Console

        Console().print(table(workload, result))


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip().lower() for name in (text or "").split(",") if name.strip())


def _console(quiet: bool) -> Console:
    """Wide where there is no terminal to fit into."""
    from rich.console import Console

    return Console(quiet=quiet, width=None if sys.stdout.isatty() else 160)
