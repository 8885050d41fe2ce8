"""OpenVINO GenAI's continuous batching pipeline. Needs openvino-genai in the Python that runs this.

A GGUF file is read by OpenVINO itself (the types it knows); a folder is one that optimum-intel exported.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

KV_GIB = 2


class Engine:
    _pipe: Any

    def load(self, model: str, dtype: str, threads: int | None = None, **settings: Any) -> dict[str, Any]:
        """`settings` are properties of the pipeline; `dtype`: that of the arithmetic, where OpenVINO has it."""
        self._genai = importlib.import_module("openvino_genai")
        self._openvino = importlib.import_module("openvino")
        self._numpy = importlib.import_module("numpy")
        properties = dict(settings)
        if dtype in ("float32", "bfloat16", "float16"):
            names = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
            properties["INFERENCE_PRECISION_HINT"] = names[dtype]
        if threads is not None:
            properties["INFERENCE_NUM_THREADS"] = threads
        self._arguments = model, properties
        self._make(shares_prefixes=False)
        return {"version": str(self._genai.__version__)}

    def run(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        inputs = [self._openvino.Tensor(self._numpy.array([each["prompt"]], "int64")) for each in requests]
        configs = [self._config(each["out"]) for each in requests]
        if len(requests) == 1:
            if self._shares_prefixes:  # it would know the prompt from last time
                self._make(shares_prefixes=False)
            return self._stream(inputs[0], configs[0])
        self._make(shares_prefixes=True)  # anew: the only way to an empty prefix cache
        start = time.perf_counter()
        outputs = self._pipe.generate(inputs, configs)
        wall = time.perf_counter() - start
        return {"wall": wall, "tokens": [list(map(int, each.m_generation_ids[0])) for each in outputs]}

    def _stream(self, prompt: Any, config: Any) -> dict[str, Any]:
        """One request, its tokens timed as they come."""
        times: list[float] = []
        tokens: list[int] = []
        start = time.perf_counter()
        handle = self._pipe.add_request(0, prompt, config)
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            while handle.can_read():
                new = [token for output in handle.read().values() for token in output.generated_ids]
                tokens += map(int, new)
                times += [time.perf_counter()] * len(new)
        itl = (times[-1] - times[0]) / max(1, len(times) - 1)
        return {"wall": times[-1] - start, "ttft": [times[0] - start], "itl": [itl], "tokens": [tokens]}

    def _make(self, shares_prefixes: bool) -> None:
        self._shares_prefixes = shares_prefixes
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = KV_GIB, 64, 512
        scheduler.enable_prefix_caching, scheduler.dynamic_split_fuse = shares_prefixes, True
        model, properties = self._arguments
        self._pipe = None
        device = self._openvino.Core().available_devices[0]  # the host's processor comes first
        self._pipe = self._genai.ContinuousBatchingPipeline(model, scheduler, device, properties)

    def _config(self, num_output: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_output
        config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
        return config

    def close(self) -> None:
        self._pipe = None
