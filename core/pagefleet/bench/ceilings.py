"""The machine's ceilings, measured in a process of their own: the core itself has no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from pagefleet.bench.roofline import Ceilings


def measure_ceilings(torch_device: str | None = None) -> tuple[Ceilings, dict[str, Any]]:
    """Of a torch device (None: its own default): with all threads, and all that was measured, in units a second."""
    command = [sys.executable, "-m", "pagefleet.torch_runner.ceilings"]
    command += [torch_device] if torch_device else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the ceilings could not be measured: {done.stderr.strip()[-500:]}")
    found = json.loads(done.stdout)
    return Ceilings(max(found["bandwidth"].values()), found["rates"]), found
