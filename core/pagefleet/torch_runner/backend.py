"""TorchBackend: the `Backend` of every torch device, given a device string and the device's `Ops`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagefleet.backend import Backend, BackendError, ForwardBatch, KVLayout, Observe, Traits, WeightSource
from pagefleet.model import ModelSpec
from pagefleet.torch_runner.decoder import Decoder
from pagefleet.torch_runner.ops import Ops
from pagefleet.torch_runner.parameters import ParameterLoader
from pagefleet.torch_runner.plan import to_device
from pagefleet.torch_runner.tracing import TracedOps, Watch


class TorchBackend(Backend):
    """Runs models on one torch device."""

    _decoder: Decoder
    _layout: KVLayout
    _kv: Tensor  # [num_layers, 2 (key, value), num_blocks + 1, num_kv_heads, block_size, row_size]

    def __init__(self, device: str, ops: Ops, traits: Traits) -> None:
        self.device = torch.device(device)
        self.ops = ops
        self.traits = traits

    @torch.inference_mode()
    def load(self, model: ModelSpec, weights: WeightSource, dtype: str) -> None:
        self.ops.close()  # a model that was there before
        loader = ParameterLoader(model, weights, self.ops, self.device, self._torch_dtype(dtype))
        self._decoder = Decoder(model, loader.load(), self.ops)

    @torch.inference_mode()
    def allocate_kv(self, layout: KVLayout) -> None:
        shape = (layout.num_layers, 2, layout.num_blocks + 1, layout.num_kv_heads, layout.block_size, layout.row_size)
        self._kv = torch.empty(shape, dtype=getattr(torch, layout.dtype), device=self.device)
        self._kv[:, :, -1] = 0  # padding points here; the host takes memory for the other blocks when they are written
        self._layout = layout

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        return self._run(batch, self._decoder)

    @torch.inference_mode()
    def trace(self, batch: ForwardBatch, observe: Observe) -> Tensor:
        decoder = self._decoder
        traced = TracedOps(self.ops, Watch(observe, batch, self._layout), decoder.model.num_layers)
        return self._run(batch, Decoder(decoder.model, decoder.parameters, traced))

    def _run(self, batch: ForwardBatch, decoder: Decoder) -> Tensor:
        plan = decoder.ops.plan(batch, decoder.model, self._layout, self.device)
        tokens, positions, logit_rows = (
            to_device(array, self.device) for array in (batch.token_ids, batch.positions, batch.logit_rows)
        )
        return decoder.forward(tokens, positions, logit_rows, plan, self._kv)

    def to_host(self, logits: Tensor) -> NDArray[np.float32]:
        return np.asarray(logits.cpu().numpy(), np.float32)

    def kv_budget(self) -> int | None:
        """Nine tenths of the device's free memory; the rest is for activations."""
        device_module = torch.get_device_module(self.device)
        if not hasattr(device_module, "mem_get_info"):
            return None
        free, _ = device_module.mem_get_info(self.device)
        return int(free * 0.9)

    @torch.inference_mode()
    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        source, destination = to_device(pairs.T.astype(np.int64), self.device)
        self._kv.index_copy_(2, destination, self._kv.index_select(2, source))

    @torch.inference_mode()
    def export_blocks(self, blocks: NDArray[np.int32]) -> NDArray[Any]:
        data = self._kv.index_select(2, to_device(blocks, self.device)).permute(2, 0, 1, 4, 3, 5).cpu().contiguous()
        if data.dtype == torch.bfloat16:
            return data.view(torch.int16).numpy().view(np.uint16)
        return data.numpy()

    @torch.inference_mode()
    def import_blocks(self, blocks: NDArray[np.int32], data: NDArray[Any]) -> None:
        host = torch.from_numpy(data.view(np.int16) if data.dtype == np.uint16 else data)
        source = host.view(self._kv.dtype).to(self.device).permute(1, 2, 0, 4, 3, 5)
        self._kv.index_copy_(2, to_device(blocks.astype(np.int64), self.device), source)

    def synchronize(self) -> None:
        torch.get_device_module(self.device).synchronize()

    def explain(self) -> Mapping[str, str]:
        """op -> "implementation x calls", ...; a call passed on to another implementation counts for both."""
        served: dict[str, list[str]] = {}
        for (name, implementation), calls in self.ops.ledger.items():
            served.setdefault(name, []).append(f"{implementation} x {calls}")
        return {name: ", ".join(by) for name, by in served.items()}

    def close(self) -> None:
        self.ops.close()
        for name in ("_decoder", "_kv"):
            self.__dict__.pop(name, None)

    def _torch_dtype(self, name: str) -> torch.dtype:
        if name not in self.traits.dtypes:
            raise BackendError(f"dtype {name} is not among those of {self.device}: {', '.join(self.traits.dtypes)}")
        dtype: torch.dtype = getattr(torch, name)
        return dtype
