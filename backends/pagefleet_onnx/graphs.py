"""A decoder's dense parts as ONNX graphs, one for each stretch between two attentions.

Segment 0 ends with the first layer's queries, keys and values; segment i finishes layer i - 1 and starts layer i; the
last one finishes the last layer, for the rows whose logits are wanted, and has the head. Only standard operators (opset
23) and, for quantised weights, onnxruntime's MatMulNBits: any provider may take them.

This module knows which tensors a segment multiplies with; how they are read and bound is up to `segments`. The onnx
package is imported only where a graph is written: a host that has them as files (`graph_files`) does without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagefleet.model import ModelSpec

if TYPE_CHECKING:
    from onnx import TensorProto

OPSET, IR_VERSION = 23, 11
FLOAT, UINT8, INT32 = 1, 2, 6  # of TensorProto.DataType
BITS = {"Q4_0": 4, "Q8_0": 8}  # of formats with blocks of 32 values and a scale each
BLOCK = 32
TRACED = ("attn_norm", "o", "mlp_norm", "gated", "down")
"""Outputs of a segment beside those it is there for, under their names in `Backend.trace`."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix or vector of a graph, made of checkpoint tensors below each other."""

    name: str  # of the initialiser; a quantised one has two, `.quants` and `.scales`
    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    format: str = "float32"

    def initialisers(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Name -> ONNX element type and shape."""
        if self.format not in BITS:
            return {self.name: (FLOAT, self.shape)}
        outputs, inputs = self.shape
        blocks, size = inputs // BLOCK, BLOCK * BITS[self.format] // 8
        return {
            f"{self.name}.quants": (UINT8, (outputs, blocks, size)),
            f"{self.name}.scales": (FLOAT, (outputs * blocks,)),
        }


@dataclass(frozen=True, slots=True)
class Node:
    """An operator: of ONNX's own if `domain` is empty."""

    op: str
    inputs: Sequence[str]
    output: str
    domain: str = ""
    attributes: Mapping[str, float | int | str] = field(default_factory=dict)


class SegmentGraph:
    """The graph of one segment. `format_of`: the format in which a tensor is multiplied, "float32" or one of BITS.

    Inputs: segment 0 `hidden` float32 [T, hidden]; the others `attended` [T, H * D] and `residual` [T, hidden], the
    last one also `rows` int32 [L]. Outputs: `qkv` [T, (H + 2 K) * D] and, but for segment 0, `next_residual`; of the
    last one `logits` [L, vocab_size].
    """

    def __init__(self, model: ModelSpec, index: int, format_of: Callable[[str], str]) -> None:
        self.model, self.index, self.format_of = model, index, format_of
        self.weights: list[Weight] = []
        self._nodes: list[Node] = []
        self._traced: list[str] = []
        self.inputs, self.outputs = self._build()

    def describe(self) -> str:
        """All that the graph depends on: what `model_bytes` returns is a function of it, and of the onnx package."""
        weights = [(weight.name, weight.shape, weight.format) for weight in self.weights]
        return repr((OPSET, IR_VERSION, self.inputs, self.outputs, self._traced, weights, self._nodes))

    @property
    def is_last(self) -> bool:
        return self.index == self.model.num_layers

    def model_bytes(self) -> bytes:
        """The graph with its weights left outside, as onnxruntime reads it."""
        from onnx import helper

        shapes = {
            "hidden": ("T", self.model.hidden_size),
            "residual": ("T", self.model.hidden_size),
            "attended": ("T", self.model.num_heads * self.model.head_dim),
        }
        inputs = [helper.make_tensor_value_info(n, FLOAT, shapes[n]) for n in self.inputs if n in shapes]
        if "rows" in self.inputs:
            inputs.append(helper.make_tensor_value_info("rows", INT32, ("L",)))
        names = (*self.outputs, *self._traced)
        outputs = [helper.make_tensor_value_info(name, FLOAT, None) for name in names]
        initialisers = [
            _external(name, *kind) for weight in self.weights for name, kind in weight.initialisers().items()
        ]
        nodes = [
            helper.make_node(node.op, node.inputs, [node.output], domain=node.domain, **node.attributes)
            for node in self._nodes
        ]
        graph = helper.make_graph(nodes, f"segment {self.index}", inputs, outputs, initialisers)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION).SerializeToString())

    # -- what is in it -------------------------------------------------------------------------------------

    def _build(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        if self.index == 0:
            self._start_layer("hidden")
            return ("hidden",), ("qkv",)
        if self.is_last:
            rows = {name: self._node("Gather", [name, "rows"], axis=0) for name in ("attended", "residual")}
            hidden = self._finish_layer(rows["attended"], rows["residual"], "last_residual")
            normed = self._norm(hidden, "norm.weight", "norm")
            tensor = "head.weight" if "head.weight" in self.model.tensors else "embed.weight"
            self._linear(normed, "head", (tensor,), (), "logits")
            return ("attended", "residual", "rows"), ("logits",)
        self._start_layer(self._finish_layer("attended", "residual", "next_residual"))
        return ("attended", "residual"), ("qkv", "next_residual")

    def _start_layer(self, hidden: str) -> None:
        prefix = f"layers.{self.index}."
        normed = self._norm(hidden, f"{prefix}attn_norm.weight", "attn_norm")
        self._affine(normed, "qkv", prefix, ("q", "k", "v"), "qkv")
        self._traced.append("attn_norm")

    def _finish_layer(self, attended: str, residual: str, out: str) -> str:
        prefix = f"layers.{self.index - 1}."
        mixed = self._affine(attended, "o", prefix, ("o",), "o")
        hidden = self._node("Add", [residual, mixed])
        normed = self._norm(hidden, f"{prefix}mlp_norm.weight", "mlp_norm")
        gate = self._activate(self._affine(normed, "gate", prefix, ("gate",)))
        gated = self._node("Mul", [gate, self._affine(normed, "up", prefix, ("up",))], "gated")
        if not self.is_last:  # which has no values of all tokens
            self._traced += ["o", "mlp_norm", "gated", "down"]
        return self._node("Add", [hidden, self._affine(gated, "down", prefix, ("down",), "down")], out)

    def _norm(self, x: str, tensor: str, out: str) -> str:
        name = f"{out}.weight"
        self.weights.append(Weight(name, (tensor,), self.model.tensors[tensor].shape))
        return self._node("RMSNormalization", [x, name], out, axis=-1, epsilon=self.model.norm_eps)

    def _activate(self, x: str) -> str:
        match self.model.activation:
            case "silu":
                return self._node("Mul", [x, self._node("Sigmoid", [x])])
            case "gelu":
                return self._node("Gelu", [x])
            case "gelu_tanh":
                return self._node("Gelu", [x], approximate="tanh")
            case other:
                raise ValueError(f"unknown activation {other!r}; known: silu, gelu, gelu_tanh")

    def _affine(self, x: str, name: str, prefix: str, parts: Sequence[str], out: str | None = None) -> str:
        """x @ weight^T + bias, the weights of `parts` below each other."""
        tensors = tuple(f"{prefix}{part}.weight" for part in parts)
        biases = tuple(f"{prefix}{part}.bias" for part in parts)
        has_bias = any(bias in self.model.tensors for bias in biases)
        return self._linear(x, name, tensors, biases if has_bias else (), out)

    def _linear(
        self, x: str, name: str, tensors: tuple[str, ...], biases: tuple[str, ...], out: str | None = None
    ) -> str:
        shapes = [self.model.tensors[tensor].shape for tensor in tensors]
        outputs, inputs = sum(shape[0] for shape in shapes), shapes[0][1]
        formats = {self.format_of(tensor) for tensor in tensors}
        format = formats.pop() if len(formats) == 1 else "float32"
        weight = Weight(f"{name}.weight", tensors, (outputs, inputs), format)
        self.weights.append(weight)
        if biases:
            self.weights.append(Weight(f"{name}.bias", biases, (outputs,)))
        bias = [f"{name}.bias"] if biases else []
        if format not in BITS:
            return self._node("Gemm", [x, weight.name, *bias], out, transB=1)
        return self._node(
            "MatMulNBits",
            [x, *weight.initialisers(), *(["", "", *bias] if bias else [])],
            out,
            domain="com.microsoft",
            K=inputs,
            N=outputs,
            bits=BITS[format],
            block_size=BLOCK,
            accuracy_level=4,  # activations in 8 bits
        )

    def _node(
        self, op: str, inputs: Sequence[str], out: str | None = None, domain: str = "", **attributes: float | int | str
    ) -> str:
        name = out or f"{op.lower()}_{len(self._nodes)}"
        self._nodes.append(Node(op, inputs, name, domain, attributes))
        return name


def _external(name: str, element: int, shape: tuple[int, ...]) -> TensorProto:
    """An initialiser whose bytes are handed to the session when it is made."""
    from onnx import TensorProto

    tensor = TensorProto(name=name, data_type=element, dims=shape, data_location=TensorProto.EXTERNAL)
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "given"
    return tensor
