"""This engine, as a user has it."""

from __future__ import annotations

import time
from typing import Any


class Engine:
    _llm: Any

    def load(self, model: str, dtype: str, threads: int | None = None, **settings: Any) -> dict[str, Any]:
        """`settings` are fields of `EngineConfig`; `threads` is left to the backend."""
        from pagefleet import LLM, __version__

        if isinstance(settings.get("plugins"), list):
            settings["plugins"] = tuple(settings["plugins"])
        self._llm = LLM(model, dtype=dtype, **settings)
        return {"version": __version__, "explain": self._llm.explain()}

    def run(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        from pagefleet import SamplingParams

        llm = self._llm
        llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": each["prompt"]} for each in requests]
        params = [
            SamplingParams(temperature=0, max_tokens=each["out"], ignore_eos=True, detokenize=False)
            for each in requests
        ]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        wall = time.perf_counter() - start
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
        return {
            "wall": wall,
            "ttft": [output.metrics.time_to_first_token for output in outputs],
            "itl": [output.metrics.inter_token_latency for output in outputs],
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        }

    def close(self) -> None:
        self._llm.close()
