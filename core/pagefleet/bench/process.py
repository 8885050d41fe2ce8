"""An engine in a process of its own: started, asked in JSON lines, paused while others are measured, and looked at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

ENGINES = Path(__file__).parent / "engines"
LOG_TAIL = 2000  # characters of an engine's own output that an error shows


class EngineError(RuntimeError):
    """An engine refused what it was asked, or ended; the message is its own."""


class EngineProcess:
    """Runs `engines/serve.py` with an engine's file under some Python, `variables` being added to its environment.

    Everything it prints goes to a log.
    """

    def __init__(self, python: str, engine: Path, variables: Sequence[str] = ()) -> None:
        self.started = time.perf_counter()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed in close)
        self._asked = False  # and not answered yet
        command = ["env", *variables, python] if variables else [python]
        self._process = subprocess.Popen(
            [*command, str(ENGINES / "serve.py"), str(engine)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # a group of its own, to be paused as one
        )

    def ask(self, command: str, **arguments: Any) -> Any:
        """The command's result. Raises EngineError with the engine's error, or with its last words if it ended."""
        requests, replies = self._process.stdin, self._process.stdout
        if requests is None or replies is None:
            raise EngineError("the engine's process has no pipes")
        line, self._asked = "", True
        with suppress(BrokenPipeError):
            requests.write(json.dumps({"do": command, **arguments}) + "\n")
            requests.flush()
            line = replies.readline()
        self._asked = False
        if not line:
            raise EngineError(f"the engine ended; it said last: {self.last_words()}")
        reply = json.loads(line)
        if "error" in reply:
            raise EngineError(reply["error"])
        return reply["result"]

    def last_words(self) -> str:
        """The end of what the engine printed."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - LOG_TAIL))
        return self._log.read().decode(errors="replace").strip()

    def pause(self) -> None:
        """Take the processor away from the engine and all it started: threads that wait by spinning would disturb."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def peak_memory(self) -> int:
        """Bytes: the largest resident sizes of the engine and its children, added up; 0 where there is no /proc."""
        return sum(map(_peak_resident, _tree(self._process.pid)))

    def cpu_seconds(self) -> float:
        """Processor time that the engine and its children have used."""
        return sum(map(_cpu_seconds, _tree(self._process.pid)))

    def close(self) -> None:
        """Ask it to end, unless it is at something else; then end it and all it started."""
        self.resume()
        if not self._asked:
            with suppress(EngineError, OSError, ValueError, subprocess.TimeoutExpired):
                self.ask("close")
                self._process.wait(10)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def busy_seconds() -> float:
    """Processor time that all of the machine has used; 0 where there is no /proc."""
    try:
        user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def _tree(root: int) -> list[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            children[int(_stat(int(folder.name))[1])].append(int(folder.name))
    found, left = [], [root]
    while left:
        found.append(left.pop())
        left += children[found[-1]]
    return found


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on: the second may hold spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _cpu_seconds(pid: int) -> float:
    with suppress(OSError, IndexError):
        fields = _stat(pid)
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _peak_resident(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
