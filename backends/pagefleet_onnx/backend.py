"""The onnx backend: dense parts by onnxruntime, attention and the paged cache by the CPU backend's ops.

One step runs a segment, then an attention, L times over; see `graphs`. All tensors lie in the host's memory: a provider
whose device has its own is handed copies by onnxruntime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from onnxruntime import InferenceSession
from torch import Tensor

from pagefleet.backend import BackendError, ForwardBatch, Observe, WeightSource
from pagefleet.model import ModelSpec
from pagefleet.torch_runner import Ops, TorchBackend
from pagefleet.torch_runner.layer import Norms, Weight
from pagefleet.torch_runner.parameters import ParameterLoader
from pagefleet.torch_runner.plan import Plan
from pagefleet.torch_runner.tracing import Watch
from pagefleet_cpu.backend import choose_ops
from pagefleet_cpu.config import environment as cpu_environment
from pagefleet_cpu.threads import choose_num_threads
from pagefleet_onnx import traits
from pagefleet_onnx.config import environment
from pagefleet_onnx.graph_files import graph_bytes
from pagefleet_onnx.segments import Segments, check_provider, make_session
from pagefleet_onnx.weights import SegmentSource


class OnnxBackend(TorchBackend):
    _decoder: SegmentDecoder

    def __init__(self, index: int = 0) -> None:
        if index:
            raise BackendError(f"onnx:{index}: a provider is one device; use onnx or onnx:0")
        config = environment()
        self.provider, self.graphs = config.provider, config.graphs
        check_provider(self.provider)
        super().__init__("cpu", choose_ops()[0], traits())

    @torch.inference_mode()
    def load(self, model: ModelSpec, weights: WeightSource, dtype: str) -> None:
        self.ops.close()
        loader = ParameterLoader(model, weights, self.ops, self.device, self._torch_dtype(dtype))
        num_threads = choose_num_threads(cpu_environment()).count
        sessions = [
            self._load_segment(SegmentSource(model, weights, index), num_threads)
            for index in range(model.num_layers + 1)
        ]
        qkv_size = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        self._decoder = SegmentDecoder(
            model,
            self.ops,
            embed=loader.matrix("embed.weight"),
            rotary=loader.rotary(),
            norms=tuple(loader.qk_norms(f"layers.{index}.") for index in range(model.num_layers)),
            segments=Segments(sessions, model.hidden_size, qkv_size, model.vocab_size),
        )

    def _load_segment(self, source: SegmentSource, num_threads: int) -> InferenceSession:
        graph = graph_bytes(source.graph, self.graphs)
        return make_session(graph, source.initialisers(), self.provider, num_threads)

    @torch.inference_mode()
    def trace(self, batch: ForwardBatch, observe: Observe) -> Tensor:
        return self._run(batch, replace(self._decoder, watch=Watch(observe, batch, self._layout)))

    def explain(self) -> Mapping[str, str]:
        return {**super().explain(), "segments": f"onnxruntime, {self.provider}"}


@dataclass(frozen=True, slots=True)
class SegmentDecoder:
    """The forward pass: segments, and between them what a cache is needed for."""

    model: ModelSpec
    ops: Ops
    embed: Weight
    rotary: Tensor  # as in `Parameters`
    norms: tuple[Norms | None, ...]  # of each layer's queries and keys
    segments: Segments
    watch: Watch | None = None  # told of what is computed

    def forward(self, tokens: Tensor, positions: Tensor, logit_rows: Tensor, plan: Plan, kv: Tensor) -> Tensor:
        """Logits float32 [L, vocab_size] of the tokens named by `logit_rows`; see `torch_runner.decoder`."""
        model, watch = self.model, self.watch
        observe = None if watch is None else watch.observe
        rotary = self.rotary.index_select(0, positions)
        hidden = self.ops.embed(tokens, self.embed, torch.float32)
        if watch is not None:
            watch.tell("embed", hidden)
        qkv = self.segments.start(hidden, observe)
        for layer in range(model.num_layers - 1):
            attended = self._attend(layer, qkv, rotary, kv[layer], plan)
            qkv = self.segments.go_on(layer + 1, attended, observe)
        attended = self._attend(model.num_layers - 1, qkv, rotary, kv[-1], plan)
        return self.segments.finish(attended, logit_rows)

    def _attend(self, layer: int, qkv: Tensor, rotary: Tensor, cache: Tensor, plan: Plan) -> Tensor:
        """One layer's attention [T, H * D], its keys and values written."""
        model, prefix = self.model, f"layers.{layer}."
        heads = qkv.view(len(qkv), -1, model.head_dim)
        q = self.ops.rope_and_write(heads, self.norms[layer], rotary, cache, plan)
        if self.watch is not None:
            self.watch.tell_written(prefix, q, cache)
        attended = self.ops.attention(q, cache, plan, model.windows[layer], model.attention_scale)
        if self.watch is not None:
            self.watch.tell(prefix + "attention", attended)
        return attended
