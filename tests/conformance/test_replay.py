"""Recordings, what replay says of them, and parity of two backends: on tiny models, with the example plugins."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagefleet import LLM, SamplingParams
from pagefleet.config import ConfigError, EngineConfig
from pagefleet.conformance.checkpoints import variants, write_checkpoint
from pagefleet.models import builtin_families
from pagefleet.parity import parity
from pagefleet.record import RecordError, Recording, sketch, sketch_error
from pagefleet.replay import replay

if "numpy" not in {entry_point.name for entry_point in entry_points(group="pagefleet")}:
    pytest.skip("no plugin 'numpy' is installed: pip install -e tests/plugins/pagefleet-numpy", allow_module_level=True)

from pagefleet_numpy.backend import NumpyBackend

PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [40, 2, 77], [90] * 19, [3])
LAYER = ("attn_norm", "q", "k", "v", "attention", "o", "mlp_norm", "gated", "down")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    variant = next(iter(variants(builtin_families())))
    write_checkpoint(variant, folder)
    return folder


def record(model: Path, folder: Path, device: str = "numpy", **options: Any) -> list[list[int]]:
    """Run the prompts, forked and in chunks, and return their tokens."""
    settings = {"max_num_batched_tokens": 16, "block_size": 4, "num_blocks": 64, **options}
    llm = LLM(model=model, device=device, dtype="float32", record=folder, **settings)
    params = [SamplingParams(temperature=t, n=n, seed=1, max_tokens=9) for t, n in ((0, 1), (0.8, 3), (1, 1), (0, 2))]
    outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], params, use_tqdm=False)
    llm.close()
    return [list(completion.token_ids) for output in outputs for completion in output.outputs]


def last(results: Any) -> Any:
    return deque(results, maxlen=1)[0]


@pytest.mark.parametrize("pipeline", [True, False])
@pytest.mark.parametrize("ops", [False, True])
def test_a_recording_replays_to_the_same_tokens(pipeline: bool, ops: bool, model: Path, tmp_path: Path) -> None:
    tokens = record(model, tmp_path / "run", record_ops=ops, pipeline=pipeline)
    recording = Recording(tmp_path / "run")
    result = last(replay(recording, device="numpy", bisect=ops))
    assert result.equal
    assert result.num_tokens >= sum(map(len, tokens))
    assert result.max_error == 0


@pytest.mark.parametrize("ops", [False, True])
def test_another_device_draws_what_was_recorded(ops: bool, model: Path, tmp_path: Path) -> None:
    record(model, tmp_path / "run", record_ops=ops)
    result = last(replay(Recording(tmp_path / "run"), device="cpu", bisect=True))
    assert result.equal
    assert 0 < result.max_error < 1e-5
    assert result.against == ("numpy, as recorded" if ops else "numpy")


class Planted:
    """A numpy backend that gets one op of one step wrong, in one token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int, op: str, token: int) -> None:
        self.step, self.op, self.token, self.num_steps = step, op, token, 0
        forward, told, write = NumpyBackend.forward, NumpyBackend.told, NumpyBackend.write

        def faulty_forward(backend: NumpyBackend, batch: Any) -> Any:
            self.num_steps += 1
            return forward(backend, batch)

        def faulty_told(backend: NumpyBackend, name: str, x: Any) -> Any:
            return told(backend, name, self.spoil(x) if self.hits(name) and name[-1] not in "kv" else x)

        def faulty_write(backend: NumpyBackend, layer: int, keys: Any, values: Any, slots: Any) -> None:
            keys = self.spoil(keys) if self.hits(f"layers.{layer}.k") else keys
            values = self.spoil(values) if self.hits(f"layers.{layer}.v") else values
            write(backend, layer, keys, values, slots)

        monkeypatch.setattr(NumpyBackend, "forward", faulty_forward)
        monkeypatch.setattr(NumpyBackend, "told", faulty_told)
        monkeypatch.setattr(NumpyBackend, "write", faulty_write)

    def hits(self, name: str) -> bool:
        return name == self.op and self.num_steps == self.step + 1

    def spoil(self, x: Any) -> Any:
        """One of the token's values is off by a hundredth of its vector's length."""
        spoilt = x.copy()
        row = spoilt[self.token].reshape(-1)
        row[self.token % len(row)] += 0.01 * np.linalg.norm(row)
        return spoilt


@pytest.mark.parametrize("seed", range(20))
def test_a_planted_fault_is_located_exactly(
    seed: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each op has its turn; by digests and, every other time, by the device that was recorded."""
    rng = np.random.default_rng(seed)
    device = ("numpy", "cpu")[seed % 2]
    record(model, tmp_path / "run", device, record_ops=device == "numpy")
    steps = list(Recording(tmp_path / "run").steps())
    ops = ["embed", *(f"layers.{i}.{name}" for name in LAYER for i in (seed % 3,))]
    op, step = ops[seed % len(ops)], steps[int(rng.integers(len(steps)))]
    token = int(rng.integers(step.batch.query_starts[-1]))
    Planted(monkeypatch, step.index, op, token)
    found = last(replay(Recording(tmp_path / "run"), device="numpy", bisect=True)).divergence
    assert found is not None
    assert (found.step, found.op, found.token) == (step.index, op, token)


def test_the_command_names_step_and_op(model: Path, tmp_path: Path) -> None:
    """A recording that was tampered with stands for a device that is wrong."""
    record(model, tmp_path / "run", record_ops=True)
    command = [sys.executable, "-m", "pagefleet", "replay", str(tmp_path / "run"), "--device", "numpy", "--bisect"]
    good = subprocess.run(command, capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stderr
    assert good.stdout.endswith("equal\n")
    steps = tmp_path / "run/steps.bin"
    lines = steps.read_bytes()
    at = lines.index(b'{"event": "forward", "step": 3,')
    start = lines.index(b"\n", at) + 1
    steps.write_bytes(lines[:start] + bytes([lines[start] ^ 1]) + lines[start + 1 :])
    bad = subprocess.run(command, capture_output=True, text=True, check=False)
    assert bad.returncode == 1
    assert "DIVERGES in step 3 at embed, token 0" in bad.stdout


def test_recordings_that_cannot_be_used_are_refused_in_words(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds no recording"):
        Recording(tmp_path)
    with pytest.raises(ConfigError, match="record_ops is True and record is None"):
        EngineConfig(model="m", record_ops=True)
    record(model, tmp_path / "run")
    with pytest.raises(RecordError, match="which holds a recording; name another folder"):
        record(model, tmp_path / "run")
    steps = tmp_path / "run/steps.bin"
    data = steps.read_bytes()
    num_steps = len(list(Recording(tmp_path / "run").steps()))
    steps.write_bytes(data[:-10])  # the process was killed
    assert len(list(Recording(tmp_path / "run").steps())) in (num_steps - 1, num_steps)
    for damaged in (b'{"event": "forward", "step": 0, "arrays": [["x", "object", [1]]]}\n', b"[]\n", b"\x80\x04"):
        steps.write_bytes(damaged)
        with pytest.raises(RecordError, match=r"steps\.bin is damaged"):
            list(Recording(tmp_path / "run").steps())
    steps.write_bytes(b'{"event": "forward", "step": 0, "arrays": [["x", "int32", [9999999999999]]]}\n')
    with pytest.raises(RecordError, match="the limit is"):
        list(Recording(tmp_path / "run").steps())


def test_sketches_tell_how_far_apart_rows_are() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((500, 300)).astype(np.float32)
    for size in (1e-4, 1e-2, 1):
        y = x + size * rng.standard_normal(x.shape).astype(np.float32)
        assert sketch_error(sketch(x), sketch(x)) == 0
        each = [sketch_error(sketch(y[i : i + 1]), sketch(x[i : i + 1])) for i in range(len(x))]
        assert 0.8 * size < float(np.sqrt(np.mean(np.square(each)))) < 1.2 * size
    assert sketch_error(sketch(x), sketch(np.full_like(x, np.nan))) == np.inf


# -- parity ----------------------------------------------------------------------------------------------


def compared(model: Path, devices: tuple[str, str]) -> Any:
    first, second = (EngineConfig(model=str(model), device=name, dtype="float32", num_blocks=32) for name in devices)
    return last(parity((first, second), PROMPTS, num_tokens=8))


def test_parity_of_good_backends(model: Path) -> None:
    result = compared(model, ("cpu", "numpy"))
    assert result.num_positions == sum(map(len, PROMPTS)) + 8 * len(PROMPTS)
    assert not result.defects
    assert result.equal_argmax > 0.98
    assert 0 < result.mean_difference <= result.max_difference < 1e-4
    assert 0 <= result.mean_kl <= result.max_kl < 1e-6


def test_parity_calls_a_fault_a_defect(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NumpyBackend, "rotate", lambda self, x, positions: x)
    result = compared(model, ("cpu", "numpy"))
    assert result.defects
    assert result.equal_argmax == 1 - len(result.flips) / result.num_positions
    assert result.max_kl > 0.01


def test_the_parity_command(model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("t005 t006 t007\nt040\n")
    command = [sys.executable, "-m", "pagefleet", "parity", str(model), "--devices", "cpu,numpy"]
    command += ["--prompts", str(tmp_path / "prompts.txt"), "--num-tokens", "5", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["devices"] == ["cpu", "numpy"]
    assert figures["num_defects"] == 0
    assert figures["num_positions"] == 3 + 1 + 2 * 5
    wrong = subprocess.run([*command[:5], "--devices", "cpu"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 1
    assert "--devices is 'cpu'; it must be two names" in wrong.stderr
