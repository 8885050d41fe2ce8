"""Write a model's ONNX graphs ahead of time: `python build_scripts/onnx.py MODEL --graphs DIR`.

With PAGEFLEET_ONNX_GRAPHS=DIR the onnx backend then finds them there, on hosts that have no onnx package too. They hold
no weights: each takes a kilobyte or two, and layers of one shape share theirs. Without MODEL nothing is written; the
script says what this onnxruntime has and runs one small graph on the wanted provider (PAGEFLEET_ONNX_PROVIDER).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
for root in ("backends", "kernels", "core"):
    sys.path.insert(0, str(ROOT / root))
sys.path = [
    entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent
]  # onnx.py is not onnx


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a checkpoint's folder, or a GGUF file")
    parser.add_argument("--graphs", type=Path, metavar="DIR", help="where to; default: PAGEFLEET_ONNX_GRAPHS")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "int4"), default="auto", help="as LLM(dtype=...); default: auto"
    )
    options = parser.parse_args()
    from pagefleet.backend import BackendError

    try:
        return check_provider() if options.model is None else write(options.model, options.dtype, options.graphs)
    except (BackendError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def check_provider() -> int:
    import onnxruntime
    import torch

    from pagefleet.conformance.cases import RandomWeights, case_named
    from pagefleet_onnx.config import environment
    from pagefleet_onnx.segments import check_provider, make_session
    from pagefleet_onnx.weights import SegmentSource

    provider = environment().provider
    check_provider(provider)
    model = case_named("plain").model
    source = SegmentSource(model, RandomWeights(model, 0), 0)
    session = make_session(source.graph.model_bytes(), source.initialisers(), provider, 1)
    session.run(None, {"hidden": torch.ones(3, model.hidden_size).numpy()})
    print(f"onnxruntime {onnxruntime.__version__} has {', '.join(onnxruntime.get_available_providers())}")
    print(f"{provider} takes this backend's graphs")
    return 0


def write(model: str, dtype: str, folder: Path | None) -> int:
    from pagefleet.weights import DenseWeights, Int4Weights, open_checkpoint
    from pagefleet_onnx.config import environment
    from pagefleet_onnx.graph_files import graph_bytes
    from pagefleet_onnx.weights import SegmentSource

    folder = folder or environment().graphs
    if folder is None:
        raise ValueError("no folder to write to: give --graphs DIR, or set PAGEFLEET_ONNX_GRAPHS")
    with open_checkpoint(model) as checkpoint:
        forms = {"auto": lambda source: source, "float32": DenseWeights, "int4": Int4Weights}
        spec, weights = checkpoint.spec, forms[dtype](checkpoint)
        for index in range(spec.num_layers + 1):
            graph_bytes(SegmentSource(spec, weights, index).graph, folder)
    print(f"{spec.num_layers + 1} segments' graphs are in {folder}: {len(list(folder.glob('*.onnx')))} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
