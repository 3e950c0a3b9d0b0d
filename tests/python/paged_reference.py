"""Paged attention in plain numpy, in double precision: what tests/python/test_bindings.py compares with.

It covers what the bindings could confuse: every tensor and attribute of the SEPARATE layout has an effect here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray


def rotate(x: Array, cos: Array, sin: Array, interleaved: int, offset: int) -> Array:
    """RoPE on one head's channels x (head_size) with one position's cos and sin (rotary_dim/2)."""
    half = cos.shape[0]
    channels = np.arange(2 * half).reshape(half, 2) if interleaved else np.arange(2 * half).reshape(2, half).T
    first, second = offset + channels[:, 0], offset + channels[:, 1]
    rotated = x.copy()
    rotated[first] = x[first] * cos - x[second] * sin
    rotated[second] = x[second] * cos + x[first] * sin
    return rotated


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    return x / np.sqrt(np.mean(x * x) + epsilon) * weight


def reference(call: dict[str, Any]) -> tuple[Array, Array, Array, Array, Array]:
    """(output, scores or probabilities, lse, key_cache, value_cache) of a call in the operator's names, all float64.

    The caches are given as what they mean (already dequantised), and come back so, with the new tokens unquantised.
    """
    heads, kv_heads = call["num_heads"], call["kv_num_heads"]
    get = call.get
    as_double = {
        name: np.asarray(value, np.float64)
        for name, value in call.items()
        if isinstance(value, np.ndarray) and value.dtype.kind not in "iu"
    }
    key_cache, value_cache = as_double["key_cache"].copy(), as_double["value_cache"].copy()
    block_size, head_size = key_cache.shape[1], key_cache.shape[3]
    query, key, value = as_double["query"], as_double.get("key"), as_double.get("value")
    tokens = query.shape[0]
    if key is None:
        widths = np.cumsum([heads * head_size, kv_heads * head_size])
        query, key, value = np.split(query, widths, axis=1)
    query = query.reshape(tokens, heads, head_size).copy()
    key = key.reshape(tokens, kv_heads, head_size).copy()
    value = value.reshape(tokens, kv_heads, head_size)
    offsets, past, table = call["cumulative_sequence_length"], call["past_seqlens"], call["block_table"]
    scale = get("scale", 0.0) or head_size**-0.5
    context = table.shape[1] * block_size
    output = np.zeros((tokens, heads, head_size))
    output_qk = np.zeros((heads, tokens, context))
    lse = np.full((heads, tokens), -np.inf)

    for sequence in range(len(past)):
        for token in range(offsets[sequence], offsets[sequence + 1]):
            position = past[sequence] + token - offsets[sequence]
            if get("query_positions") is not None:
                position = call["query_positions"][token]
            for rows, norm in ((query, "q_norm_weight"), (key, "k_norm_weight")):
                for head in range(rows.shape[1]):
                    if norm in as_double:
                        rows[token, head] = rms_norm(rows[token, head], as_double[norm], get("qk_norm_epsilon", 1e-6))
                    if get("do_rotary"):
                        cos, sin = as_double["cos_cache"][position], as_double["sin_cache"][position]
                        rows[token, head] = rotate(
                            rows[token, head], cos, sin, get("rotary_interleaved", 0), get("rotary_offset", 0)
                        )
            index = past[sequence] + token - offsets[sequence]
            slot = table[sequence, index // block_size] * block_size + index % block_size
            if get("slot_mapping") is not None:
                slot = call["slot_mapping"][token]
            if slot >= 0:
                key_cache[slot // block_size, slot % block_size] = key[token]
                value_cache[slot // block_size, slot % block_size] = value[token]

    for sequence in range(len(past)):
        first, last = offsets[sequence], offsets[sequence + 1]
        length = past[sequence] + last - first
        for token in range(first, last):
            position = past[sequence] + token - first
            if get("query_positions") is not None:
                position = call["query_positions"][token]
            window = get("local_window_size", -1)
            seen = [
                k
                for k in range(length)
                if (not get("is_causal", 1) or k <= position)
                and (window < 0 or k > position - window)
                and table[sequence, k // block_size] >= 0
            ]
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                at = [(table[sequence, k // block_size], k % block_size, kv_head) for k in seen]
                scores = scale * np.array([key_cache[slot] @ query[token, head] for slot in at])
                if get("softcap", 0.0) > 0:
                    scores = call["softcap"] * np.tanh(scores / call["softcap"])
                if "attention_bias" in as_double:
                    bias = as_double["attention_bias"]
                    scores = scores + bias[sequence % bias.shape[0], head % bias.shape[1], token - first, seen]
                if not seen:
                    continue
                peak = scores.max()
                weights = np.exp(scores - peak)
                lse[head, token] = peak + np.log(weights.sum())
                sink = np.exp(as_double["head_sink"][head] - peak) if "head_sink" in as_double else 0.0
                probabilities = weights / (weights.sum() + sink)
                output_qk[head, token, seen] = scores if get("qk_output") == 1 else probabilities
                output[token, head] = probabilities @ np.array([value_cache[slot] for slot in at])
    return output.reshape(tokens, -1), output_qk, lse, key_cache, value_cache
