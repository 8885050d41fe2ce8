"""Segments of a decoder as onnxruntime sessions, bound to the host's memory without copies.

A session runs through an `IOBinding`; those of a number of tokens are kept, since making one costs more than a call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import onnxruntime
import torch
from torch import Tensor

from pagefleet.backend import BackendError, Observe
from pagefleet_onnx.config import CPU
from pagefleet_onnx.graphs import FLOAT, INT32, TRACED

KEPT_SIZES = 64  # numbers of tokens whose bindings are kept
ELEMENTS = {torch.float32: FLOAT, torch.int32: INT32}


def check_provider(name: str) -> None:
    """BackendError if this onnxruntime has no such provider. There is no falling back to another one."""
    available = onnxruntime.get_available_providers()
    if name not in available:
        raise BackendError(
            f"PAGEFLEET_ONNX_PROVIDER is {name!r}, which onnxruntime {onnxruntime.__version__} here does not have; it "
            f"has {', '.join(available)}: choose one of these, or install the onnxruntime distribution that has it "
            "(one at a time: they share their import name)"
        )


def make_session(
    graph: bytes, weights: Mapping[str, Tensor], provider: str, num_threads: int
) -> onnxruntime.InferenceSession:
    """A session of one segment that runs on `provider` and nowhere else; BackendError if it cannot.

    `weights`: initialiser -> a tensor, which the session keeps as long as it needs it.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 3  # errors
    options.enable_cpu_mem_arena = False  # one a session would hold its largest batch's memory, for every layer
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # attention has threads of its own
    if provider != CPU:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    values = [onnxruntime.OrtValue.from_dlpack(tensor) for tensor in weights.values()]
    options.add_external_initializers(list(weights), values)
    try:
        session = onnxruntime.InferenceSession(graph, options, providers=[provider])
    except Exception as error:  # of many kinds
        raise BackendError(f"{provider} does not take a segment of this model: {error!s:.500}") from error
    if session.get_providers()[0] != provider:
        raise BackendError(f"onnxruntime put {session.get_providers()[0]} in the place of {provider}")
    return session


class Segments:
    """The sessions of a model, segment 0 first. A step calls `start`, `go_on` after each attention, `finish` after the
    last."""

    def __init__(
        self, sessions: Sequence[onnxruntime.InferenceSession], hidden_size: int, qkv_size: int, vocab_size: int
    ) -> None:
        self.sessions, self.vocab_size = sessions, vocab_size
        self._widths = hidden_size, hidden_size, qkv_size
        self._memory = [torch.empty(0, width) for width in self._widths]  # of the largest step so far
        self._kept: OrderedDict[int, list[onnxruntime.IOBinding]] = OrderedDict()  # number of tokens -> of each segment

    def start(self, hidden: Tensor, observe: Observe | None = None) -> Tensor:
        """The first layer's queries, keys and values [T, (H + 2 K) * D], of hidden float32 [T, hidden].

        They are overwritten by the next segment's.
        """
        num_tokens = len(hidden)
        if num_tokens > len(self._memory[0]):
            self._memory = [torch.empty(num_tokens, width) for width in self._widths]
            self._kept.clear()
        self._memory[0][:num_tokens].copy_(hidden)
        return self._run(0, num_tokens, {}, observe)

    def go_on(self, index: int, attended: Tensor, observe: Observe | None = None) -> Tensor:
        """Layer `index`'s, of what the attention of the layer before came to, float32 [T, H * D]."""
        return self._run(index, len(attended), {"attended": attended}, observe)

    def finish(self, attended: Tensor, rows: Tensor) -> Tensor:
        """Logits float32 [L, vocab_size] of `rows` int32 [L], after the last layer's attention."""
        logits = torch.empty(len(rows), self.vocab_size)
        if len(rows):
            index = len(self.sessions) - 1
            binding = self._bindings(len(attended))[index]
            _bind_output(binding, "logits", logits)
            _run(self.sessions[index], binding, {"attended": attended, "rows": rows})
        return logits

    def _run(self, index: int, num_tokens: int, inputs: Mapping[str, Tensor], observe: Observe | None) -> Tensor:
        session = self.sessions[index]
        if observe is None:
            _run(session, self._bindings(num_tokens)[index], inputs)
        else:
            _run_traced(session, self._bind(index, num_tokens), inputs, index, observe)
        return self._memory[2][:num_tokens]

    def _bindings(self, num_tokens: int) -> list[onnxruntime.IOBinding]:
        if num_tokens not in self._kept:
            if len(self._kept) == KEPT_SIZES:
                self._kept.popitem(last=False)
            self._kept[num_tokens] = [self._bind(index, num_tokens) for index in range(len(self.sessions))]
        self._kept.move_to_end(num_tokens)
        return self._kept[num_tokens]

    def _bind(self, index: int, num_tokens: int) -> onnxruntime.IOBinding:
        """What stays the same from step to step: by turns, a segment reads one residual and writes the other."""
        binding = self.sessions[index].io_binding()
        *residuals, qkv = (memory[:num_tokens] for memory in self._memory)
        if index == 0:
            _bind_input(binding, "hidden", residuals[0])
        else:
            _bind_input(binding, "residual", residuals[(index - 1) % 2])
        if index < len(self.sessions) - 1:
            _bind_output(binding, "qkv", qkv)
            if index > 0:
                _bind_output(binding, "next_residual", residuals[index % 2])
        return binding


def _run(session: onnxruntime.InferenceSession, binding: onnxruntime.IOBinding, inputs: Mapping[str, Tensor]) -> None:
    for name, tensor in inputs.items():
        _bind_input(binding, name, tensor)
    session.run_with_iobinding(binding)


def _run_traced(
    session: onnxruntime.InferenceSession,
    binding: onnxruntime.IOBinding,
    inputs: Mapping[str, Tensor],
    index: int,
    observe: Observe,
) -> None:
    """Run with the outputs that `Backend.trace` tells of: the end of layer index - 1, and the start of layer index."""
    bound = [name for name in (output.name for output in session.get_outputs()) if name in TRACED]
    num_others = len(session.get_outputs()) - len(bound)
    for name in bound:
        binding.bind_output(name, "cpu", 0)
    _run(session, binding, inputs)
    values = dict(zip(bound, binding.copy_outputs_to_cpu()[num_others:], strict=True))
    for name in sorted(bound, key=("o", "mlp_norm", "gated", "down", "attn_norm").index):
        layer = index if name == "attn_norm" else index - 1
        observe(f"layers.{layer}.{name}", values[name])


def _bind_input(binding: onnxruntime.IOBinding, name: str, tensor: Tensor) -> None:
    binding.bind_input(name, "cpu", 0, ELEMENTS[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())


def _bind_output(binding: onnxruntime.IOBinding, name: str, tensor: Tensor) -> None:
    binding.bind_output(name, "cpu", 0, ELEMENTS[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
