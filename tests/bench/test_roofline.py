"""Bytes and FLOP are those of the shapes, and timing ops leaves the backend as it was."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pagefleet import LLM, SamplingParams
from pagefleet.backend import ForwardBatch
from pagefleet.bench.roofline import COUNTS, Ceilings, Profile, Step, num_bytes, profiled
from pagefleet.torch_runner.ceilings import measure


def batch(lengths: list[int], seq_lens: list[int], padding: int = 0) -> ForwardBatch:
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    tokens = np.zeros(starts[-1] + padding, np.int32)
    rows = np.zeros((len(lengths), 1), np.int32)
    return ForwardBatch(tokens, tokens, tokens, starts, np.array(seq_lens, np.int32), rows, starts[1:] - 1)


def test_a_product_reads_its_weight_and_padding_is_no_work() -> None:
    x, weight, out = torch.zeros(8, 64), torch.zeros(96, 64, dtype=torch.bfloat16), torch.zeros(8, 96)
    cost = COUNTS["linear"](batch([3, 2], [3, 2], padding=3), (x, weight, None), out)
    assert cost == (4 * 8 * 64 + 2 * 96 * 64 + 4 * 8 * 96, 2 * 5 * 96 * 64)


def test_a_quantised_weight_says_its_own_size() -> None:
    weight = SimpleNamespace(num_bytes=123, shape=(96, 64))
    out = torch.zeros(1, 48)
    cost = COUNTS["gated_linear"](batch([1], [9]), (torch.zeros(1, 64), weight, None, "silu"), out)
    assert cost == (4 * 64 + 123 + 4 * 48, 2 * 96 * 64)
    assert num_bytes((weight, None, "silu", 1.0)) == 123


@pytest.mark.parametrize(
    ("window", "read", "seen"), [(None, 10 + 4, 10 + 1 + 2 + 3 + 4), (2, 3 + 4, 2 + 1 + 2 + 2 + 2)]
)
def test_attention_reads_the_keys_that_are_seen(window: int | None, read: int, seen: int) -> None:
    q, cache = torch.zeros(5, 4, 16), torch.zeros(2, 9, 2, 8, 16, dtype=torch.float16)  # 2 key heads
    out = torch.zeros(5, 64)
    num, flop = COUNTS["attention"](batch([1, 4], [10, 4]), (q, cache, None, window, 1.0), out)
    assert num == 2 * read * 2 * 16 * 2 + 2 * 4 * 5 * 64  # key and value, heads, dim, bytes; q and out
    assert flop == 4 * 4 * 16 * seen


def test_a_floor_is_the_longer_of_reading_and_computing() -> None:
    ceilings = Ceilings(100.0, {"float32": 10.0, "bfloat16": 2.0, "int8": 40.0})
    assert ceilings.floor((200, 10), "float32") == 2
    assert ceilings.floor((100, 50), "float32") == 5
    assert ceilings.floor((100, 50), "bfloat16") == 5  # as float32: no instructions of its own
    assert ceilings.floor((0, 80), "int8") == 2


def test_the_hosts_share_is_that_of_full_decode_steps() -> None:
    profile = Profile(steps=[Step(0, 2, 40, 9.0), Step(10, 2, 2, 3.0), Step(14, 2, 2, 3.0), Step(18, 1, 1, 0.5)])
    assert profile.host_share(2) == 0.25
    assert profile.host_share(32) is None


def test_ops_are_timed_for_one_run_only(tiny_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    plain = tiny_llm.generate([[5, 6, 7]], params, use_tqdm=False)
    backend = tiny_llm._engine.engine.backend
    before = dict(vars(backend.ops)).keys(), dict(vars(backend)).keys()
    tiny_llm.reset_prefix_cache()
    with profiled(backend, Ceilings(1e9, {"float32": 1e9}), split=True) as profile:
        timed = tiny_llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert timed[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
    assert (vars(backend.ops).keys(), vars(backend).keys()) == before
    assert [step.num_tokens for step in profile.steps] == [3, 1, 1, 1]
    head = next(profile.ops[name] for name in ("logits 256x64", "linear 256x64") if name in profile.ops)
    assert head.calls == 4
    assert head.flop == 4 * 2 * 256 * 64
    assert head.floor > 0
    assert profile.ops["attention"].calls == 4 * 2  # steps, layers
    assert 0 < sum(cost.seconds for cost in profile.ops.values()) < profile.seconds
    tiny_llm.reset_prefix_cache()
    with profiled(backend) as whole:
        tiny_llm.generate([[5, 6, 7]], params, use_tqdm=False)
    if "layer" in whole.ops:  # in one call, it counts what its parts count
        assert sum(cost.flop for cost in whole.ops.values()) == sum(cost.flop for cost in profile.ops.values())


def test_a_backend_without_ops_is_refused(tiny_llm: LLM) -> None:
    with pytest.raises(ValueError, match="has no ops that can be timed"), profiled(SimpleNamespace()):  # type: ignore[arg-type]
        pass


def test_ceilings_are_positive_and_threads_are_put_back() -> None:
    threads = torch.get_num_threads()
    found = measure(torch.device("cpu"), read_bytes=1 << 20, size=64)
    assert torch.get_num_threads() == threads == found["threads"]
    assert {"float32", "bfloat16"} <= found["rates"].keys()  # type: ignore[attr-defined]
    assert all(rate > 0 for rate in [*found["bandwidth"].values(), *found["rates"].values()])  # type: ignore[attr-defined]
