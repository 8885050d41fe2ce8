"""The conformance kit: what a backend must do, as tests a vendor runs on their own device.

    pagefleet conformance --device NAME [--level L3] [--report DIR]
    pytest --pyargs pagefleet.conformance --target-device NAME [--conformance-level L3] [--conformance-report DIR]

It finds the backend as the engine does, knows no device by name, and holds it to a dense float64 reference that
shares no code with any backend. What a backend says in `Traits` it cannot do is skipped, with that reason, and counted.
A report's files are described in `report.py`.
"""

from collections.abc import Mapping
from types import MappingProxyType

LEVELS: Mapping[str, str] = MappingProxyType(
    {
        "L0": "comes up, says what it can do, fails in words, goes away",
        "L1": "logits of any batch, op by op",
        "L2": "the paged cache, and the scheduler over it",
        "L3": "model families, against transformers",
        "L4": "features: parameters, log-probabilities, beams, streams, aborts",
        "L5": "determinism: run to run, whatever shares the batch",
    }
)
