"""vLLM through its `LLM` class. Needs vllm, built for the device, in the Python that runs this."""

from __future__ import annotations

import importlib
import time
from typing import Any

MAX_MODEL_LEN = 1024  # enough for the fixed workloads


class Engine:
    _llm: Any

    def load(self, model: str, dtype: str, threads: int | None = None, **settings: Any) -> dict[str, Any]:
        """`settings` are keyword arguments of `vllm.LLM`, which takes threads and memory from its variables."""
        vllm = importlib.import_module("vllm")
        options = {"max_model_len": MAX_MODEL_LEN, "skip_tokenizer_init": True, **settings}
        self._llm = vllm.LLM(model=model, dtype=dtype, **options)
        return {"version": vllm.__version__}

    def run(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        llm = self._llm
        llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": each["prompt"]} for each in requests]
        params = [self._params(each["out"]) for each in requests]
        if len(requests) == 1:
            return self._stream(prompts[0], params[0])
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        wall = time.perf_counter() - start
        return {"wall": wall, "tokens": [list(output.outputs[0].token_ids) for output in outputs]}

    def _stream(self, prompt: dict[str, Any], params: Any) -> dict[str, Any]:
        """One request, its tokens timed as they come."""
        engine = self._llm.llm_engine
        times: list[float] = []
        tokens: list[int] = []
        start = time.perf_counter()
        engine.add_request(f"stream-{start}", prompt, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
                times += [time.perf_counter()] * (len(tokens) - len(times))
        itl = (times[-1] - times[0]) / max(1, len(times) - 1)
        return {"wall": times[-1] - start, "ttft": [times[0] - start], "itl": [itl], "tokens": [tokens]}

    @staticmethod
    def _params(num_output: int) -> Any:
        params = importlib.import_module("vllm").SamplingParams
        return params(temperature=0, max_tokens=num_output, min_tokens=num_output, ignore_eos=True, detokenize=False)

    def close(self) -> None:
        del self._llm
