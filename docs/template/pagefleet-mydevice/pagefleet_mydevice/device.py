"""What the device computes. Each function is one call of your driver, or one kernel; here it is numpy."""

import math

import numpy as np


def upload(array):
    """An array of the host in the device's memory."""
    return np.array(array)


def download(array):
    """And back, as a numpy array."""
    return np.asarray(array)


def linear(x, weight, bias):
    """x [T, in], weight [out, in], bias [out] or None -> [T, out]."""
    y = x @ weight.T
    return y if bias is None else y + bias


def rms_norm(x, weight, eps):
    """Over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight


def rope(x, cos, sin):
    """x [T, heads, dim]; cos, sin [T, rotary_dim / 2]. Dimension i turns with i + rotary_dim / 2; the rest stays."""
    half, cos, sin = cos.shape[-1], cos[:, None], sin[:, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def gated(gate, up, activation):
    """activation(gate) * up, of the names in `ModelSpec.activation`."""
    if activation == "silu":
        return gate * (1 + np.tanh(gate / 2)) / 2 * up
    if activation == "gelu_tanh":
        return gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2 * up
    erf = np.vectorize(math.erf, otypes=[np.float32])
    return gate * (1 + erf(gate / np.float32(math.sqrt(2)))) / 2 * up


def write_kv(cache, keys, values, slots):
    """cache [2, slots, kv_heads, dim]: put the key and value of each token into its slot; -1 means nowhere."""
    real = slots >= 0
    cache[0, slots[real]], cache[1, slots[real]] = keys[real], values[real]


def paged_attention(queries, cache, positions, row_slots, window, scale):
    """One row: queries [Q, heads, dim] at `positions`; the key of position p lies in slot row_slots[p]."""
    keys, values = cache[0, row_slots], cache[1, row_slots]
    grouped = queries.reshape(len(queries), keys.shape[1], -1, keys.shape[2])
    scores = np.einsum("qhgd,khd->hgqk", grouped, keys) * np.float32(scale)
    distance = positions[:, None] - np.arange(len(row_slots))
    scores = np.where((distance >= 0) & (distance < (window or len(row_slots))), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return np.einsum("hgqk,khd->qhgd", shares, values).reshape(len(queries), -1)
