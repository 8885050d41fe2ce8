"""Run an engine's file as a process that answers JSON lines: `python serve.py ENGINE_FILE`.

A line in is `{"do": METHOD, ...arguments}`, a line out `{"result": ...}` or `{"error": ...}`. Whatever the engine
prints goes to stderr. Standard library only, and any Python from 3.9 on: this runs where a peer is installed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import sys
from typing import Any, TextIO

COMMANDS = ("load", "run", "close")


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _end_with_parent()
    sys.path.pop(0)  # this folder: its files are not for the engine to import
    serve(_load(sys.argv[1]), sys.stdin, replies)


def serve(engine: Any, requests: TextIO, replies: TextIO) -> None:
    """Answer requests until one says close, or there are no more."""
    for line in requests:
        request = json.loads(line)
        command = request.pop("do")
        try:
            if command not in COMMANDS:
                raise ValueError(f"no command is called {command!r}; there are {', '.join(COMMANDS)}")
            reply = {"result": getattr(engine, command)(**request)}
        except Exception as error:  # whatever it is, it is for the other side to report
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)
        if command == "close":
            return


def _load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("benchmarked_engine", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Engine()


def _end_with_parent() -> None:
    """Where the system can: a paused process would never see its input end."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    main()
