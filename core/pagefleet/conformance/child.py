"""What L0 does in processes of its own: `python -m pagefleet.conformance.child WHAT NAME:INDEX`, an exit status.

- `probe`: find the backend; prints the seconds that took and the modules it imported, as JSON
- `cycles`: load, step and close over and over; prints the bytes the process has grown by, and the device's budget
- `fork`, `spawn`: find the backend here, then load it and step in a process started that way
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from typing import Any

NUM_WARM, NUM_CYCLES = 3, 6


def probe(device: str) -> None:
    from pagefleet.plugins import Plugins

    start = time.perf_counter()
    Plugins().select(device)
    sys.stdout.write(json.dumps([time.perf_counter() - start, sorted(sys.modules)]))


def cycles(device: str) -> None:
    import resource

    found = []
    for _ in range(NUM_WARM + NUM_CYCLES):
        budget = load_and_step(device, vocab_size=40_000)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        found.append((peak, budget))
    (peak_before, budget_before), (peak, budget) = found[NUM_WARM - 1], found[-1]
    lost = 0 if budget is None or budget_before is None else budget_before - budget
    sys.stdout.write(json.dumps([peak - peak_before, lost]))


def in_process(method: str, device: str) -> None:
    from pagefleet.plugins import Plugins

    Plugins().select(device)
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=load_and_step, args=(device,))
    process.start()
    process.join()
    sys.exit(process.exitcode)


def load_and_step(device: str, vocab_size: int = 97) -> int | None:
    """A few steps compared with the reference; returns the backend's budget for the cache, loaded."""
    from pagefleet.conformance.cases import Case, model_spec
    from pagefleet.conformance.driver import Driver
    from pagefleet.plugins import Plugins

    info, index = Plugins().select(device)
    backend = info.load(index)
    case = Case("child", model_spec(vocab_size=vocab_size))
    size = min(info.traits.block_sizes or (4,))
    driver = Driver.of_case(backend, case, info.traits.dtypes[0], size, num_blocks=16)
    budget = backend.kv_budget()
    driver.finish([driver.prompt(5)], chunk=3)
    backend.close()
    return budget


if __name__ == "__main__":
    what, name = sys.argv[1:]
    {"probe": probe, "cycles": cycles}[what](name) if what in ("probe", "cycles") else in_process(what, name)
