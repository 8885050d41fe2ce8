"""The command `pagefleet` and its subcommands. What a command needs is imported when it runs."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from pagefleet._version import __version__
from pagefleet.cli_bench import bench
from pagefleet.cli_conformance import conformance
from pagefleet.cli_contract import contract
from pagefleet.cli_options import Device, Dtype, Model, Seed, Settings, Temperature, TopK, TopP, load_llm
from pagefleet.cli_parity import parity
from pagefleet.cli_replay import replay

if TYPE_CHECKING:
    from pagefleet.request import RequestOutput
    from pagefleet.sampling_params import SamplingParams


class Commands(TyperGroup):
    """Prints what a user can cause as one message and exits 1; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, BrokenPipeError):  # whoever reads the output has seen enough: leave quietly
            raise
        except (ImportError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
            if ctx.params["debug"]:
                raise
            typer.echo(f"error: {error or type(error).__name__}", err=True)
            raise typer.Exit(1) from error


# Plain help: drawing it with rich costs as much as all the rest.
app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


def main() -> None:
    """Entry point of the command."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pagefleet {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what is chosen and why.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Run a language model on any device.

    The device is the best usable one, unless --device or the variable TARGET_DEVICE names a backend.

    Begin with: pagefleet devices, then pagefleet chat MODEL. Each command explains itself with --help.
    """
    if verbose:
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("pagefleet").setLevel(logging.INFO)


@app.command()
def devices(as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False) -> None:
    """List the backends: usable, or why not.

    With their devices, memory, dtypes and what they can do, and every plugin that is not used with its cause.
    """
    from pagefleet.config import environment
    from pagefleet.devices import describe, report
    from pagefleet.plugins import Plugins

    logging.getLogger("pagefleet").setLevel(logging.ERROR)  # the report says it all
    surroundings = environment()
    plugins = Plugins(surroundings.plugins)
    found = report(plugins, surroundings.target_device)
    typer.echo(json.dumps(asdict(found), indent=2) if as_json else describe(found))


@app.command()
def generate(
    model: Model,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="What to complete. None: one a line from stdin.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read prompts from here, one a line.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens less likely than this share of the best.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Subtracted for tokens already generated.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="Subtracted for each time one was.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: discourage what has occurred.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End when this text appears. Repeatable.")] = None,
    n: Annotated[int, typer.Option("--num-completions", "-n", help="Completions of each prompt.")] = 1,
    seed: Seed = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print text while it is generated.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a prompt.")] = False,
    device: Device = None,
    dtype: Dtype = "auto",
    settings: Settings = None,
) -> None:
    """Complete prompts: given, or from a file or stdin.

    Example: pagefleet generate MODEL "The capital of France is" --temperature 0 --max-tokens 20
    """
    if stream and (as_json or n > 1):
        raise ValueError("--stream prints the text of one completion a prompt: leave out --json and -n")
    given = prompts or _read_prompts(file)
    params = _sampling(
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        stop=stop,
        seed=seed,
    )
    llm = load_llm(model, device, dtype, settings)
    if stream:
        outputs = _print_streams(llm.stream(given, params))
    else:
        outputs = llm.generate(given, params, use_tqdm=_is_terminal(sys.stderr))
        for output in outputs:
            _print_output(output, as_json, heading=len(given) > 1)
    from pagefleet.bench import raise_failures

    raise_failures(outputs)


@app.command()
def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    device: Device = None,
    dtype: Dtype = "auto",
    settings: Settings = None,
) -> None:
    """Talk to a model.

    /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer.
    """
    if sys.stdin is None:
        raise ValueError("stdin is closed: chat reads from it what you say")
    params = _sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    llm = load_llm(model, device, dtype, settings)
    start = [{"role": "system", "content": system}] if system else []
    messages, failed = list(start), False
    for line in _lines_typed("/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."):
        if line == "/reset":
            messages = list(start)
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            answer = _print_answer(llm.stream(llm.chat_prompts(asked), params))
        except (RuntimeError, ValueError) as error:  # too long for the model, say: the conversation stays as it was
            typer.echo(f"error: {error}", err=True)
            failed = True
        else:
            messages = [*asked, {"role": "assistant", "content": answer}]
    if failed and not _is_terminal(sys.stdin):  # a script cannot see what a person has seen
        raise typer.Exit(1)


app.command()(bench)
app.command()(conformance)
app.add_typer(contract, name="contract")
app.command()(parity)
app.command()(replay)


# -- in ----------------------------------------------------------------------------------------------------


def _sampling(**options: Any) -> SamplingParams:
    from pagefleet.sampling_params import SamplingParams

    return SamplingParams(**{name: value for name, value in options.items() if value is not None})


def _read_prompts(file: Path | None) -> list[str]:
    piped = sys.stdin is not None and not sys.stdin.isatty()  # None: closed
    text = file.read_text(encoding="utf-8") if file else sys.stdin.read() if piped else ""
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ValueError("no prompt: give some as arguments, in --file or on stdin, one a line")
    return prompts


def _lines_typed(greeting: str) -> Iterator[str]:
    """What a person types, until /exit or the end of input; Ctrl-C discards the line."""
    interactive = _is_terminal(sys.stdin)
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is not UTF-8 is refused as a prompt, not here
    if interactive:
        import readline  # noqa: F401  (editing and history of the line, by being imported)

        typer.echo(greeting)
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            typer.echo("  (/exit or Ctrl-D leaves)")
            continue
        if line == "/exit":
            return
        if line:
            yield line


def _is_terminal(file: TextIO | None) -> bool:
    """None: closed before Python started."""
    return file is not None and file.isatty()


# -- out ---------------------------------------------------------------------------------------------------


def _print_output(output: RequestOutput, as_json: bool, heading: bool) -> None:
    if as_json:
        completions = [
            {
                "text": o.text,
                "token_ids": list(o.token_ids),
                "finish_reason": o.finish_reason,
                "stop_reason": o.stop_reason,
            }
            for o in output.outputs
        ]
        found = {"prompt": output.prompt, "outputs": completions, "error": output.error}
        typer.echo(json.dumps(found, ensure_ascii=False))
        return
    for completion in output.outputs:
        if heading or len(output.outputs) > 1:
            typer.secho(f"--- {output.prompt}", bold=True)
        if completion.text or output.error is None:
            typer.echo(completion.text)


def _print_streams(outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
    """Print the first unfinished prompt's text as it comes; the others, generated beside it, follow in order.

    Returns the last output of each.
    """
    latest: dict[str, RequestOutput] = {}
    order: list[str] = []
    current, printed = 0, 0
    for changed in outputs:
        if changed.request_id not in latest:
            order.append(changed.request_id)
        latest[changed.request_id] = changed
        while current < len(order):
            output = latest[order[current]]
            text = output.outputs[0].text
            typer.echo(text[printed:], nl=False)
            printed = len(text)
            if not output.finished:
                break
            if text or output.error is None:
                typer.echo()
            current, printed = current + 1, 0
    return list(latest.values())


def _print_answer(outputs: Iterable[RequestOutput]) -> str:
    """Print an answer while it is generated; Ctrl-C ends it there. Raises RuntimeError if the request fails."""
    text, error = "", None
    try:
        for output in outputs:
            typer.echo(output.outputs[0].text[len(text) :], nl=False)
            text, error = output.outputs[0].text, output.error
    except KeyboardInterrupt:
        typer.echo(" [stopped]", nl=False)
    if text or error is None:
        typer.echo()
    if error is not None:
        raise RuntimeError(error)
    return text
