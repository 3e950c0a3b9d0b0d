"""PagedAttention in plain numpy and float64, written from docs/contract.md alone: the oracle of these tests.

Loops over tokens and heads, no cleverness. Arrays carry the names of the operator's inputs; an absent one is None or
missing. 4-bit caches are uint8 with element 2i in the low nibble of byte i.

Beside each result stands a bound of the error that float32 arithmetic makes on the way to it, in the same units: that
of the oracle of the C++ tests (tests/reference), which is calibrated there. Rounding to a result's type comes on top.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
ROUNDOFF = 2.0**-24  # of float32
UNDERFLOW = 2.0**-125  # below its smallest normal number float32 arithmetic may flush to 0
DEFAULTS = {
    "scale": 0.0,
    "softcap": 0.0,
    "local_window_size": -1,
    "is_causal": 1,
    "do_rotary": 0,
    "rotary_interleaved": 0,
    "rotary_offset": 0,
    "qk_norm_epsilon": 1e-6,
    "k_quant_type": "NONE",
    "v_quant_type": "NONE",
    "k_cache_dtype": "",
    "v_cache_dtype": "",
    "kv_cache_layout": "SEPARATE",
    "v_head_size": 0,
    "qk_output": 0,
}


def with_defaults(attributes: dict) -> dict:
    """The attributes with the schema's defaults filled in."""
    return {**DEFAULTS, **attributes}


def logical_type(cache: np.ndarray, dtype_attribute: str) -> str:
    """What an element of the cache means: the attribute's name, or the tensor's own type where that is empty."""
    return dtype_attribute or cache.dtype.name.replace("float8_e4m3fn", "float8e4m3fn")


def decode(cache: np.ndarray, kind: str, scale: np.ndarray | None, head_size: int) -> np.ndarray:
    """A cache (blocks, block_size, G, stored) -> float64 (blocks, block_size, G, head_size)."""
    if kind in ("int4", "float4e2m1"):
        codes = np.stack([cache & 15, cache >> 4], axis=-1).reshape(*cache.shape[:-1], -1)[..., :head_size]
        values = codes.astype(np.int64) - 8.0 if kind == "int4" else E2M1[codes & 7] * np.where(codes & 8, -1.0, 1.0)
    else:
        values = cache.astype(np.float64)
    if scale is None:
        return values
    return values * (float(scale.reshape(-1)[0]) if scale.size == 1 else scale[:, 0, :].astype(np.float64))


def encode(rows: np.ndarray, kind: str, scale: np.ndarray | None, storage: np.dtype) -> np.ndarray:
    """float64 rows (tokens, G, head_size) -> stored elements (tokens, G, stored)."""
    if scale is not None:
        rows = rows / (float(scale.reshape(-1)[0]) if scale.size == 1 else scale[:, 0, :].astype(np.float64))
    if kind == "int8":
        return np.clip(np.rint(rows), -128, 127).astype(np.int8)
    if kind == "float8e4m3fn":
        return np.clip(rows, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    if kind in ("int4", "float4e2m1"):
        if kind == "int4":
            codes = (np.clip(np.rint(rows), -8, 7) + 8).astype(np.uint8)
        else:
            codes = nearest_e2m1(np.abs(rows)) | np.where(np.signbit(rows), 8, 0).astype(np.uint8)
        if codes.shape[-1] % 2:
            codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], 1), np.uint8)], axis=-1)
        return codes[..., 0::2] | (codes[..., 1::2] << 4)
    return rows.astype(storage)


def nearest_e2m1(magnitudes: np.ndarray) -> np.ndarray:
    """Codes of the nearest e2m1 magnitudes; ties go to the even code, everything above 6 to 6."""
    distance = np.abs(np.minimum(magnitudes, 6.0)[..., None] - E2M1)
    best = distance.min(axis=-1, keepdims=True)
    odd_code_penalty = np.arange(8) % 2
    return np.where(distance == best, odd_code_penalty, 2).argmin(axis=-1).astype(np.uint8)


def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    """Per head over the channels."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * weight.astype(np.float64)


def rope(x: np.ndarray, positions: np.ndarray, cos_cache: np.ndarray, sin_cache: np.ndarray, a: dict) -> np.ndarray:
    """Rotates channels [rotary_offset, rotary_offset + rotary_dim) of (tokens, heads, head_size)."""
    half = cos_cache.shape[1]
    cos = cos_cache[positions].astype(np.float64)[:, None, :]
    sin = sin_cache[positions].astype(np.float64)[:, None, :]
    start = a["rotary_offset"]
    x = x.copy()
    part = x[..., start : start + 2 * half]
    if a["rotary_interleaved"]:
        first, second = part[..., 0::2].copy(), part[..., 1::2].copy()
        part[..., 0::2], part[..., 1::2] = first * cos - second * sin, second * cos + first * sin
    else:
        first, second = part[..., :half].copy(), part[..., half:].copy()
        part[..., :half], part[..., half:] = first * cos - second * sin, second * cos + first * sin
    return x


def query_error(inputs: dict, attributes: dict, q: np.ndarray) -> np.ndarray:
    """How far each element of the prologue's Q may be off in float32."""
    a = with_defaults(attributes)
    error = np.zeros_like(q)
    x = inputs["query"].astype(np.float64)[:, : q[0].size].reshape(q.shape) if len(q) else q
    if inputs.get("q_norm_weight") is not None:
        x = rms_norm(x, inputs["q_norm_weight"], a["qk_norm_epsilon"])
        error = 8 * ROUNDOFF * np.abs(x)
    if a["do_rotary"]:
        positions = token_positions(inputs)
        cos, sin = np.abs(inputs["cos_cache"]), np.abs(inputs["sin_cache"])

        def sum_of_magnitudes(v: np.ndarray) -> np.ndarray:
            """|v1 cos| + |v2 sin| of each rotated pair: one of the two directions adds them."""
            return np.maximum(rope(v, positions, cos, sin, a), rope(v, positions, cos, -sin, a))

        error = sum_of_magnitudes(error) + 2 * ROUNDOFF * sum_of_magnitudes(np.abs(x))
    return error


def exponential_error(score: np.ndarray | float, top: float) -> np.ndarray | float:
    """Relative error of exp(score - top), beside that of the score: of the subtraction and of the exponential."""
    return ROUNDOFF * (4 + 2 * np.abs(score - top))


def tokens_of(inputs: dict) -> list[tuple[int, int, int]]:
    """(token, sequence, offset in its sequence's new tokens) of every token that is no padding."""
    cu = inputs["cumulative_sequence_length"]
    return [(t, b, t - cu[b]) for b in range(len(cu) - 1) for t in range(cu[b], cu[b + 1])]


def prologue(inputs: dict, attributes: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Q (tokens, N, H), K (tokens, G, H) and V (tokens, G, H; None in LATENT), normalised and rotated, in float64."""
    a = with_defaults(attributes)
    n, g = a["num_heads"], a["kv_num_heads"]
    query, key, value = inputs["query"].astype(np.float64), inputs.get("key"), inputs.get("value")
    token_count = query.shape[0]
    if a["kv_cache_layout"] == "SEPARATE" and key is None:
        head_size = query.shape[1] // (n + 2 * g)
        query, key, value = np.split(query, [n * head_size, (n + g) * head_size], axis=1)
    head_size = query.shape[1] // n
    q = query.reshape(token_count, n, head_size)
    k = key.astype(np.float64).reshape(token_count, g, head_size)
    v = None if value is None else value.astype(np.float64).reshape(token_count, g, head_size)
    if inputs.get("q_norm_weight") is not None:
        q = rms_norm(q, inputs["q_norm_weight"], a["qk_norm_epsilon"])
        k = rms_norm(k, inputs["k_norm_weight"], a["qk_norm_epsilon"])
    if a["do_rotary"]:
        positions = token_positions(inputs)
        q = rope(q, positions, inputs["cos_cache"], inputs["sin_cache"], a)
        k = rope(k, positions, inputs["cos_cache"], inputs["sin_cache"], a)
    return q, k, v


def token_positions(inputs: dict) -> np.ndarray:
    """Logical position of every token; 0 for padding, which nobody looks at."""
    positions = np.zeros(inputs["query"].shape[0], np.int64)
    for t, b, j in tokens_of(inputs):
        given = inputs.get("query_positions")
        positions[t] = inputs["past_seqlens"][b] + j if given is None else given[t]
    return positions


def updated_caches(inputs: dict, attributes: dict) -> tuple[np.ndarray, np.ndarray | None]:
    """The caches after the call."""
    a = with_defaults(attributes)
    _, k, v = prologue(inputs, attributes)
    results = []
    for rows, name, quant in ((k, "key_cache", "k"), (v, "value_cache", "v")):
        if rows is None:
            results.append(None)
            continue
        cache = inputs[name].copy()
        block_size = cache.shape[1]
        kind = logical_type(cache, a[f"{quant}_cache_dtype"])
        stored = encode(rows, kind, inputs.get(f"{quant}_scale"), cache.dtype)
        for t, b, j in tokens_of(inputs):
            if inputs.get("slot_mapping") is not None:
                slot = int(inputs["slot_mapping"][t])
                block, offset = (slot // block_size, slot % block_size) if slot >= 0 else (-1, 0)
            else:
                position = int(inputs["past_seqlens"][b]) + j
                block, offset = int(inputs["block_table"][b, position // block_size]), position % block_size
            if block >= 0:
                cache[block, offset] = stored[t]
        results.append(cache)
    return results[0], results[1]


def attend(
    inputs: dict, attributes: dict, key_cache: np.ndarray, value_cache: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Attention over caches that hold the new tokens: output (tokens, N*Hv), output_qk (N, tokens, context), and the
    bounds of their errors, output_error and output_qk_error, of the same shapes."""
    a = with_defaults(attributes)
    q, _, _ = prologue(inputs, attributes)
    q_error = query_error(inputs, attributes, q)
    token_count, n, head_size = q.shape
    g = a["kv_num_heads"]
    keys = decode(key_cache, logical_type(key_cache, a["k_cache_dtype"]), inputs.get("k_scale"), head_size)
    if a["kv_cache_layout"] == "LATENT":
        v_head_size = a["v_head_size"] or head_size
        values = keys[..., :v_head_size]
    else:
        v_head_size = head_size
        values = decode(value_cache, logical_type(value_cache, a["v_cache_dtype"]), inputs.get("v_scale"), head_size)
    scale = a["scale"] or 1.0 / np.sqrt(head_size)
    table = inputs["block_table"]
    block_size = key_cache.shape[1]
    context = table.shape[1] * block_size
    metadata = inputs.get("attention_metadata")
    if metadata is not None and len(metadata) and metadata[1] > 0:
        context = min(context, int(metadata[1]))
    output = np.zeros((token_count, n, v_head_size))
    output_qk = np.zeros((n, token_count, context))
    output_error, output_qk_error = np.zeros_like(output), np.zeros_like(output_qk)
    bias = inputs.get("attention_bias")
    positions = token_positions(inputs)
    cu, past = inputs["cumulative_sequence_length"], inputs["past_seqlens"]
    for t, b, j in tokens_of(inputs):
        length = int(past[b] + cu[b + 1] - cu[b])
        seen = []
        for position in range(length):
            if a["is_causal"] and position > positions[t]:
                continue
            if a["local_window_size"] > 0 and position <= positions[t] - a["local_window_size"]:
                continue
            block = int(table[b, position // block_size])
            if block >= 0:
                seen.append((position, block, position % block_size))
        for h in range(n):
            group = h // (n // g)
            k = np.array([keys[block, offset, group] for _, block, offset in seen]).reshape(len(seen), head_size)
            scores = scale * (k @ q[t, h])
            # Of a sum of products, relative to the sum of their magnitudes: errors of either sign add up like a root.
            of_dot = (2 + np.sqrt(head_size)) * ROUNDOFF
            score_error = abs(scale) * (np.abs(k) @ (q_error[t, h] + of_dot * np.abs(q[t, h])))
            if a["softcap"] > 0:
                scores = a["softcap"] * np.tanh(scores / a["softcap"])
                score_error += 4 * ROUNDOFF * np.abs(scores)
            if bias is not None:
                plane = bias[b if bias.shape[0] > 1 else 0, h if bias.shape[1] > 1 else 0, j].astype(np.float64)
                scores = scores + np.array([plane[position] for position, _, _ in seen])
            score_error = np.where(np.isfinite(scores), score_error + 2 * ROUNDOFF * np.abs(scores), 0)
            sink = inputs.get("head_sink")
            logits = scores if sink is None else np.append(scores, float(sink[h]))
            top = logits.max(initial=-np.inf)
            weights = np.zeros(len(seen)) if top == -np.inf else np.exp(scores - top)
            total = weights.sum() + (0.0 if sink is None else np.exp(float(sink[h]) - top))
            probabilities = weights / total if total > 0 else weights
            for p, (_, block, offset) in zip(probabilities, seen, strict=True):
                if p > 0:  # an excluded value may be anything, NaN included
                    output[t, h] += p * values[block, offset, group]

            live = np.flatnonzero(probabilities > 0)
            p = probabilities[live]
            sink_weight = 0.0 if sink is None or total == 0 else np.exp(float(sink[h]) - top) / total
            sink_error = sink_weight and sink_weight * exponential_error(float(sink[h]), top)
            # The derivative of the output with respect to a score is p * (value - output). The sum over positions is
            # off by up to three times the root of their number.
            of_weight = score_error[live] + exponential_error(scores[live], top)
            of_sum = ROUNDOFF * (4 + 3 * np.sqrt(len(seen)))
            v = np.array([values[seen[i][1], seen[i][2], group] for i in live]).reshape(len(live), v_head_size)
            output_error[t, h] = sink_error * np.abs(output[t, h]) + (p * of_weight) @ np.abs(v - output[t, h])
            output_error[t, h] += (p * of_sum + UNDERFLOW) @ np.abs(v)
            shown, shown_error = scores, score_error
            if a["qk_output"] != 1:
                shown, shown_error = probabilities, np.zeros(len(seen))
                shown_error[live] = p * (of_weight + p @ of_weight + sink_error + of_sum) + UNDERFLOW
            for s, e, (position, _, _) in zip(shown, shown_error, seen, strict=True):
                if position < context:
                    output_qk[h, t, position], output_qk_error[h, t, position] = s, e
    return {
        "output": output.reshape(token_count, n * v_head_size),
        "output_error": output_error.reshape(token_count, n * v_head_size),
        "output_qk": output_qk,
        "output_qk_error": output_qk_error,
    }
