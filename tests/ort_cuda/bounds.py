"""How far a result on a GPU may be from the oracle's, element by element.

Tensor cores take Q and the weights of V in the 16-bit type T: each element of a Q that was normalised, rotated or
multiplied by K's channel scales is rounded once more, and so is each weight. Independent roundings add up like the root
of the sum of their squares; four times the largest one is seven standard deviations (`Arithmetic` in
tests/reference/reference.h). float32 has neither; its bound is that of tests/ort, which all types have on top.
"""

from __future__ import annotations

import numpy as np
import reference
from support import FLOAT32, ROUNDOFF, SMALLEST, Case, rounded_bound

ROUNDINGS = 4.0


def error_bounds(
    case: Case, key_cache: np.ndarray, value_cache: np.ndarray | None, rounded_cache: bool = False
) -> dict[str, np.ndarray]:
    """Bounds of output (tokens, N*Hv) and output_qk (N, tokens, context), for attention over these caches.
    `rounded_cache`: the implementation rounds a dequantised K and V to T, and every Q, as stock ONNX Runtime does."""
    a = reference.with_defaults(case.attributes)
    inputs = {name: value for name, value in case.inputs.items() if name != "attention_metadata"}
    of_probabilities = reference.attend(inputs, {**case.attributes, "qk_output": 2}, key_cache, value_cache)
    of_logits = reference.attend(inputs, {**case.attributes, "qk_output": 1}, key_cache, value_cache)
    output, weights, scores = of_probabilities["output"], of_probabilities["output_qk"], of_logits["output_qk"]

    q, _, _ = reference.prologue(inputs, case.attributes)
    tokens, n, head_size = q.shape
    group = n // a["kv_num_heads"]
    keys = reference.decode(
        key_cache, reference.logical_type(key_cache, a["k_cache_dtype"]), inputs.get("k_scale"), head_size
    )
    if value_cache is None:
        values = keys[..., : a["v_head_size"] or head_size]
    else:
        kind = reference.logical_type(value_cache, a["v_cache_dtype"])
        values = reference.decode(value_cache, kind, inputs.get("v_scale"), head_size)
    scale = a["scale"] or 1.0 / np.sqrt(head_size)
    altered = rounded_cache or a["do_rotary"] or "q_norm_weight" in inputs or a["k_quant_type"] == "PER_CHANNEL"
    roundoff = 0.0 if case.type == FLOAT32 else ROUNDOFF[case.type]
    roundings = ROUNDINGS * (2.0 if rounded_cache else 1.0)

    output = output.reshape(tokens, n, values.shape[-1])
    of_output = of_probabilities["output_error"].reshape(output.shape)
    of_scores, of_weights = of_logits["output_qk_error"], of_probabilities["output_qk_error"]
    block_size = key_cache.shape[1]
    for t, b, _ in reference.tokens_of(inputs):
        for h in range(n):
            seen = np.flatnonzero(weights[h, t] > 0)
            slots = inputs["block_table"][b, seen // block_size], seen % block_size
            k, v, w = keys[slots][:, h // group], values[slots][:, h // group], weights[h, t, seen]
            of_score = roundings * roundoff * abs(scale) * np.sqrt(((q[t, h] * k) ** 2).sum(-1)) if altered else 0.0 * w
            of_scores[h, t, seen] += of_score
            of_weights[h, t, seen] += w * (of_score + (w * of_score).sum())
            relative = np.sqrt(((w[:, None] * v) ** 2).sum(0))
            floor = SMALLEST[case.type] / 2 * w.max(initial=0.0) * np.sqrt((v**2).sum(0))
            of_output[t, h] += (w[:, None] * of_score[:, None] * np.abs(v - output[t, h])).sum(0)
            if roundoff:
                of_output[t, h] += roundings * (roundoff * relative + floor)
    of_output = rounded_bound(output, of_output, case.type)
    context = case.output_shapes().get("output_qk", ((0, 0, 0), None))[0][2]
    shown, of_shown = (scores, of_scores) if a["qk_output"] == 1 else (weights, of_weights)
    of_qk = rounded_bound(shown, of_shown, case.qk_type)[..., :context]
    return {"output": of_output.reshape(tokens, n * values.shape[-1]), "output_qk": of_qk}
