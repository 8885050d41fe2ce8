"""The model, as the device's calls: four methods, and a layer."""

import numpy as np

from pagefleet.backend import Backend
from pagefleet_mydevice import TRAITS, device


class MyBackend(Backend):
    traits = TRAITS

    def load(self, model, weights, dtype):
        """Weights into the device's memory. `HostTensor.numpy()` is float32, whatever the file holds."""
        self.model = model
        self.weights = {name: device.upload(weights.read(name).numpy()) for name in model.tensors}
        self.cos, self.sin = (device.upload(table) for table in model.rope.table(model.max_position_embeddings))

    def allocate_kv(self, layout):
        """A cache [layers, 2, slots, kv_heads, head_dim]; slot = block * block_size + offset in the block."""
        self.block_size = layout.block_size
        slots = layout.num_blocks * layout.block_size
        self.cache = device.upload(
            np.zeros((layout.num_layers, 2, slots, layout.num_kv_heads, layout.head_dim), np.float32)
        )

    def forward(self, batch):
        """Logits of the tokens in `batch.logit_rows`; the keys and values of all tokens go into the cache."""
        x = self.weights["embed.weight"][batch.token_ids]
        for i in range(self.model.num_layers):
            x = x + self.attention(i, self.norm(x, f"layers.{i}.attn_norm"), batch)
            y = self.norm(x, f"layers.{i}.mlp_norm")
            gate, up = self.linear(y, f"layers.{i}.gate"), self.linear(y, f"layers.{i}.up")
            x = x + self.linear(device.gated(gate, up, self.model.activation), f"layers.{i}.down")
        head = "head" if "head.weight" in self.weights else "embed"  # tied to the embeddings
        return self.linear(self.norm(x[batch.logit_rows], "norm"), head)

    def to_host(self, logits):
        return device.download(logits)

    def attention(self, i, x, batch):
        model, name = self.model, f"layers.{i}."
        q, k, v = (self.linear(x, name + part).reshape(len(x), -1, model.head_dim) for part in "qkv")
        if name + "q_norm.weight" in self.weights:
            q, k = self.norm(q, name + "q_norm"), self.norm(k, name + "k_norm")
        cos, sin = self.cos[batch.positions], self.sin[batch.positions]
        q, k = device.rope(q, cos, sin), device.rope(k, cos, sin)
        device.write_kv(self.cache[i], k, v, batch.slots)  # all rows write before any row reads
        out = np.zeros((len(x), model.num_heads * model.head_dim), np.float32)  # 0 for padding
        for row in range(batch.num_rows):
            own = slice(batch.query_starts[row], batch.query_starts[row + 1])
            place = np.arange(batch.seq_lens[row])
            slots = batch.block_tables[row, place // self.block_size] * self.block_size + place % self.block_size
            attended = q[own], self.cache[i], batch.positions[own], slots
            out[own] = device.paged_attention(*attended, model.windows[i], model.attention_scale)
        return self.linear(out, name + "o")

    def linear(self, x, name):
        return device.linear(x, self.weights[name + ".weight"], self.weights.get(name + ".bias"))

    def norm(self, x, name):
        return device.rms_norm(x, self.weights[name + ".weight"], self.model.norm_eps)
