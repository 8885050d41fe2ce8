"""How much code runs between `generate()` and a token: `python tests/bench/core_path.py MODEL`.

Traces one `LLM.generate` (three prompts, sampled, after loading) and lists every pagefleet function that ran, with its
source lines, docstring included. Beside it: all lines of those files that are code.
"""

from __future__ import annotations

import argparse
import inspect
import io
import sys
import threading
import tokenize
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pagefleet
from pagefleet import LLM, SamplingParams

ROOTS = (str(Path(pagefleet.__file__).parent), str(Path(pagefleet.__file__).parents[2] / "backends"))
SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def trace(llm: LLM) -> set[CodeType]:
    """The functions of pagefleet that run in one call of generate."""
    ran: set[CodeType] = set()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # and no module or class, being imported just now
        if event == "call" and is_function and frame.f_code.co_filename.startswith(ROOTS):
            ran.add(frame.f_code)

    threading.setprofile_all_threads(watch) if sys.version_info >= (3, 12) else threading.setprofile(watch)
    sys.setprofile(watch)
    llm.generate(
        ["Hello, my name is", "The capital of France is", "The future of AI is"], SamplingParams(max_tokens=20)
    )
    sys.setprofile(None)
    threading.setprofile(None)
    return ran


def code_lines(path: str) -> int:
    """Lines of a file that hold code: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    statement_start = True
    for token in tokenize.generate_tokens(io.StringIO(Path(path).read_text()).readline):
        docstring = token.type == tokenize.STRING and statement_start
        if token.type not in SKIPPED and not docstring:
            lines |= set(range(token.start[0], token.end[0] + 1))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            statement_start = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    llm = LLM(arguments.model, device=arguments.device, kv_cache_memory_bytes=256 << 20)
    functions: dict[str, list[int]] = defaultdict(list)
    for code in trace(llm):
        if code.co_name not in ("<genexpr>", "<lambda>", "<listcomp>", "<dictcomp>", "<setcomp>"):  # within another
            functions[code.co_filename].append(len(inspect.getsourcelines(code)[0]))
    print(f"{'file':42} {'functions run':>14} {'their lines':>12} {'code in file':>13}")
    rows = [(path, len(sizes), sum(sizes), code_lines(path)) for path, sizes in sorted(functions.items())]
    for path, count, ran, total in rows:
        print(f"{path.split('/core/')[-1].split('/backends/')[-1]:42} {count:14} {ran:12} {total:13}")
    totals = [sum(row[i] for row in rows) for i in (1, 2, 3)]
    print(f"{'total':42} {totals[0]:14} {totals[1]:12} {totals[2]:13}")
    llm.close()


if __name__ == "__main__":
    main()
