"""What the machine can do, measured with torch in seconds: `python -m pagefleet.torch_runner.ceilings [DEVICE]`.

Prints one JSON object: bytes read a second by one thread and by all, and operations a second of matrix products in
float32, bfloat16 and int8, the best of several tries each. They are what torch reaches, not what the hardware promises.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

READ_BYTES = 512 << 20  # no cache holds it
SIZE = 1536  # rows and columns of the products
TRIES = 3


def main() -> None:
    """Measure DEVICE, a torch device; the CPU unless named."""
    device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    json.dump(measure(device), sys.stdout)


@torch.inference_mode()
def measure(device: torch.device, read_bytes: int = READ_BYTES, size: int = SIZE) -> dict[str, object]:
    """Bytes and operations a second, see above. A product that torch does not have there is left out."""
    threads = torch.get_num_threads()
    bandwidth = {}
    for count in sorted({1, threads}) if device.type == "cpu" else (threads,):
        torch.set_num_threads(count)
        bandwidth[str(count)] = _read(device, read_bytes)
    rates = {}
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        try:
            rates[str(dtype).removeprefix("torch.")] = _multiply(device, dtype, size)
        except RuntimeError:  # torch has no such product there
            continue
    return {"threads": threads, "bandwidth": bandwidth, "rates": rates}


def _read(device: torch.device, num_bytes: int) -> float:
    """Bytes a second, by the fastest of several ways to look at every element."""
    data = torch.ones(num_bytes // 4096 // 4, 4096, device=device)
    vector = torch.ones(4096, device=device)
    ways: tuple[Callable[[], object], ...] = (lambda: data.sum(), lambda: data @ vector, lambda: data.amax())
    return num_bytes / min(_best(way, device) for way in ways)


def _multiply(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Operations a second of a product of two square matrices, the second one as a linear layer has it."""
    if dtype == torch.int8:
        x, weight = (torch.randint(-100, 100, (size, size), dtype=dtype, device=device) for _ in range(2))
        return 2 * size**3 / _best(lambda: torch._int_mm(x, weight.t()), device)
    x, weight = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _best(lambda: torch.nn.functional.linear(x, weight), device)


def _best(action: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest try, after one to warm up."""
    times = []
    for _ in range(TRIES + 1):
        start = time.perf_counter()
        action()
        torch.get_device_module(device).synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


if __name__ == "__main__":
    main()
