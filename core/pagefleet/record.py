"""Recording: a backend in front of a backend that writes down what it is asked, for `pagefleet replay`.

A recording is a folder: `record.json` says what ran, and `steps.bin` holds one event after another: a line of JSON
(the event's name, its step, and for each array its name, dtype and shape), then the bytes of the arrays. There is no
pickle in it, and nothing of it is ever executed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from pagefleet._version import __version__
from pagefleet.backend import Backend, ForwardBatch, KVLayout
from pagefleet.sampler import SampledTokens, SamplingBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefleet.backend import ModelSpec, PendingTokens, WeightSource
    from pagefleet.config import EngineConfig

    Arrays = Mapping[str, NDArray[Any]]

FORMAT = 1
NUM_PROJECTIONS = 8
MAX_EVENT_BYTES = 1 << 32
DTYPES = ("int32", "int64", "uint64", "float32")


class RecordError(ValueError):
    """A recording cannot be written or read; the message says which and why."""


class Recorder(Backend):
    """Passes every call on to `backend`, and writes it to a new folder."""

    def __init__(self, backend: Backend, config: EngineConfig, device: str) -> None:
        assert config.record is not None
        self.inner, self.traits = backend, backend.traits
        self.folder = Path(config.record)
        kept = ("model", "revision", "dtype", "kv_cache_dtype", "block_size")
        self.facts: dict[str, Any] = {
            "format": FORMAT,
            "pagefleet": __version__,
            "device": device,
            **{name: getattr(config, name) for name in kept},
        }
        self.with_ops = config.record_ops
        self.num_steps = 0
        self._file: IO[bytes] | None = None

    def load(self, model: ModelSpec, weights: WeightSource, dtype: str) -> None:
        self.inner.load(model, weights, dtype)
        self.facts |= {"compute_dtype": dtype, "max_model_len": model.max_position_embeddings}

    def allocate_kv(self, layout: KVLayout) -> None:
        self.inner.allocate_kv(layout)
        self.facts |= {"layout": asdict(layout), "ops": self.with_ops}
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / "record.json").exists():
            raise RecordError(f"record is {str(self.folder)!r}, which holds a recording; name another folder")
        (self.folder / "record.json").write_text(json.dumps(self.facts, indent=1) + "\n", encoding="utf-8")
        self._file = (self.folder / "steps.bin").open("wb")

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        self._write("copy", {"pairs": pairs})
        self.inner.copy_blocks(pairs)

    def forward(self, batch: ForwardBatch) -> Any:
        self._write("forward", {name: getattr(batch, name) for name in ForwardBatch.__slots__})
        if not self.with_ops:
            return self.inner.forward(batch)
        ops: dict[str, NDArray[np.float32]] = {}
        logits = self.inner.trace(batch, lambda name, value: ops.__setitem__(name, sketch(value)))
        ops["logits"] = sketch(self.inner.to_host(logits))
        self._write("ops", ops)
        return logits

    def sample(self, logits: Any, sampling: SamplingBatch) -> PendingTokens:
        names = [name for name in SamplingBatch.__slots__ if name != "rules"]
        ruled = np.array(sorted(sampling.rules), np.int32)
        self._write("sample", {"ruled": ruled, **{name: getattr(sampling, name) for name in names}})
        pending = RecordedTokens(self, self.num_steps, self.inner.sample(logits, sampling))
        self.num_steps += 1
        return pending

    def tokens(self, step: int, tokens: SampledTokens) -> None:
        """Note what a step drew."""
        failed = np.array(sorted(tokens.errors), np.int32)
        self._write("tokens", {"token_ids": np.asarray(tokens.token_ids, np.int32), "failed": failed}, step)

    def _write(self, event: str, arrays: Arrays, step: int | None = None) -> None:
        assert self._file is not None
        described = [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]
        head = {"event": event, "step": self.num_steps if step is None else step, "arrays": described}
        self._file.write(json.dumps(head).encode() + b"\n")
        for array in arrays.values():
            self._file.write(np.ascontiguousarray(array).data)

    # -- passed on as they are -----------------------------------------------------------------------------

    def to_host(self, logits: Any) -> NDArray[np.float32]:
        return self.inner.to_host(logits)

    def kv_budget(self) -> int | None:
        return self.inner.kv_budget()

    def export_blocks(self, blocks: NDArray[np.int32]) -> NDArray[Any]:
        return self.inner.export_blocks(blocks)

    def import_blocks(self, blocks: NDArray[np.int32], data: NDArray[Any]) -> None:
        self.inner.import_blocks(blocks, data)

    def warm_up(self) -> None:
        self.inner.warm_up()

    def synchronize(self) -> None:
        self.inner.synchronize()

    def explain(self) -> Mapping[str, str]:
        return self.inner.explain()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self.inner.close()


@dataclass(slots=True)
class RecordedTokens:
    """`PendingTokens` that are written down once they are known."""

    recorder: Recorder
    step: int
    pending: PendingTokens
    known: SampledTokens | None = None

    def result(self) -> SampledTokens:
        if self.known is None:
            self.known = self.pending.result()
            self.recorder.tokens(self.step, self.known)
        return self.known


# -- digests -------------------------------------------------------------------------------------------


def sketch(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The norm of each row of `values` [T, n], and `NUM_PROJECTIONS` sums of it with random signs: [T, 1 + 8].

    The sums of a difference have its norm as their expected root mean square (Alon, Matias, Szegedy 1999), so that two
    sketches tell how far apart the rows are (`sketch_error`), which no hash does.
    """
    wide = values.reshape(len(values), -1).astype(np.float64)
    norm = np.sqrt((wide**2).sum(axis=1, keepdims=True))
    return np.concatenate([norm, wide @ _signs(wide.shape[1])], axis=1).astype(np.float32)


def sketch_error(got: NDArray[np.float32], want: NDArray[np.float32]) -> float:
    """About the largest ||got - want|| / ||want|| of the rows that were sketched; inf if one is not a number."""
    if got.shape != want.shape or not (np.isfinite(got).all() and np.isfinite(want).all()):
        same = got.shape == want.shape and np.array_equal(got, want, equal_nan=True)
        return 0.0 if same else math.inf
    difference = np.sqrt(np.mean((got[:, 1:].astype(np.float64) - want[:, 1:]) ** 2, axis=1))
    size = np.maximum(want[:, 0], np.float32(1e-30))
    return float((difference / size).max(initial=0.0))


@lru_cache(maxsize=32)
def _signs(n: int) -> NDArray[np.float64]:
    """+1 and -1 [n, NUM_PROJECTIONS], the same on every machine (bits of splitmix64)."""
    x = np.arange(1, n * NUM_PROJECTIONS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.where(x >> np.uint64(63), 1.0, -1.0).reshape(n, NUM_PROJECTIONS)


# -- reading -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Step:
    """One step of a recording."""

    index: int
    batch: ForwardBatch
    copies: NDArray[np.int32]  # [C, 2]
    sampling: SamplingBatch
    ruled: NDArray[np.int32]  # rows that had rules, which are not recorded
    token_ids: NDArray[np.int32] | None = None  # [S] None: the recording ends before they were known
    failed: NDArray[np.int32] | None = None  # rows for which no token could be drawn
    ops: Mapping[str, NDArray[np.float32]] | None = None  # sketches, if they were recorded


class Recording:
    """A folder that `LLM(record=...)` wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.facts: dict[str, Any] = json.loads((folder / "record.json").read_text(encoding="utf-8"))
            if self.facts["format"] != FORMAT:
                raise RecordError(f"{folder} is of format {self.facts['format']}; this pagefleet reads {FORMAT}")
            self.layout = KVLayout(**self.facts["layout"])
        except (OSError, json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise RecordError(f"{folder} holds no recording: {type(error).__name__}: {error}") from error

    def steps(self) -> Iterator[Step]:
        """The steps in order, each when its tokens are known; a last one that was cut off is left out."""
        waiting: list[Step] = []
        ops: dict[str, NDArray[np.float32]] = {}
        copies, batch = np.zeros((0, 2), np.int32), None
        for event, index, arrays in self._events():
            match event:
                case "copy":
                    copies = arrays["pairs"]
                case "forward":
                    batch = ForwardBatch(**arrays)
                case "ops":
                    ops |= arrays
                case "sample" if batch is not None:
                    ruled = arrays.pop("ruled")
                    sampling = SamplingBatch(rules={}, **arrays)
                    waiting.append(Step(index, batch, copies, sampling, ruled, ops=ops or None))
                    copies, ops, batch = np.zeros((0, 2), np.int32), {}, None
                case "tokens":
                    for step in waiting:
                        if step.index == index:
                            step.token_ids, step.failed = arrays["token_ids"], arrays["failed"]
                case _:
                    raise RecordError(f"{self.folder}/steps.bin has an event {event!r:.40} that does not belong there")
            while waiting and (waiting[0].token_ids is not None or len(waiting) > 2):
                yield waiting.pop(0)
        yield from waiting

    def _events(self) -> Iterator[tuple[str, int, dict[str, NDArray[Any]]]]:
        with (self.folder / "steps.bin").open("rb") as file:
            while line := file.readline(1 << 20):
                try:
                    head = json.loads(line)
                    arrays = [_read_array(file, *described) for described in head["arrays"]]
                    event = str(head["event"]), int(head["step"]), dict(arrays)
                except EOFError:
                    return  # the process ended while it wrote
                except (ValueError, KeyError, TypeError) as error:
                    raise RecordError(f"{self.folder}/steps.bin is damaged: {error}") from error
                yield event


def _read_array(file: IO[bytes], name: str, dtype: str, shape: list[int]) -> tuple[str, NDArray[Any]]:
    if dtype not in DTYPES or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError(f"array {name!r:.40} is of dtype {dtype!r:.40} and shape {shape!r:.80}")
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if num_bytes > MAX_EVENT_BYTES:
        raise ValueError(f"array {name!r:.40} has {num_bytes} bytes; the limit is {MAX_EVENT_BYTES}")
    data = file.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError
    return name, np.frombuffer(data, dtype).reshape(shape)
