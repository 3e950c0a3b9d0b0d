"""The operator against implementations that others wrote: stock GroupQueryAttention and ONNX's reference Attention.

Both work on one padded sequence, so every sequence of a case is run through them alone.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import reference
from onnx import helper
from onnx.reference import ReferenceEvaluator
from support import (
    FLOAT32,
    INT8,
    ONNX_TYPES,
    Case,
    assert_close,
    finish_model,
    make_case,
    make_model,
    make_session,
    run_bound,
    runtime_version,
)

GQA_INPUTS = (
    "query",
    "key",
    "value",
    "past_key",
    "past_value",
    "seqlens_k",
    "total_sequence_length",
    "cos_cache",
    "sin_cache",
    "position_ids",
    "attention_bias",
    "head_sink",
    "k_scale",
    "v_scale",
)
SHARED_ATTRIBUTES = (
    "num_heads",
    "kv_num_heads",
    "scale",
    "softcap",
    "local_window_size",
    "do_rotary",
    "rotary_interleaved",
    "qk_output",
    "k_quant_type",
    "v_quant_type",
)


def single_node(op: str, names: list[str], feeds: dict, outputs: dict, domain: str, opset: int, **attributes: object):
    """A model of one node; `outputs` maps names to types."""
    listed = [n if n in feeds else "" for n in names]
    while listed[-1] == "":
        listed.pop()
    node = helper.make_node(op, listed, list(outputs), domain=domain, **attributes)
    inputs = [helper.make_tensor_value_info(n, ONNX_TYPES[v.dtype], v.shape) for n, v in feeds.items()]
    graph = helper.make_graph(
        [node], op, inputs, [helper.make_tensor_value_info(n, ONNX_TYPES[t], None) for n, t in outputs.items() if n]
    )
    model = finish_model(graph)
    model.opset_import[0].version = opset
    return model


def paged_history(case: Case, cache_name: str, b: int) -> np.ndarray:
    """(past, G, H): what the cache holds of sequence b."""
    cache, table = case.inputs[cache_name], case.inputs["block_table"]
    size = cache.shape[1]
    rows = [cache[table[b, p // size], p % size] for p in range(case.inputs["past_seqlens"][b])]
    return np.array(rows, cache.dtype).reshape(len(rows), *cache.shape[2:])


def run_gqa(case: Case, b: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Output (new, N*H) and output_qk (N, new, total) of sequence b by stock GroupQueryAttention."""
    i = case.inputs
    first, last = i["cumulative_sequence_length"][b : b + 2]
    past = int(i["past_seqlens"][b])
    total = past + int(last - first)
    feeds = {n: i[n][None, first:last] for n in ("query", "key", "value") if n in i}
    feeds["past_key"] = paged_history(case, "key_cache", b).transpose(1, 0, 2)[None].copy()
    feeds["past_value"] = paged_history(case, "value_cache", b).transpose(1, 0, 2)[None].copy()
    feeds["seqlens_k"] = np.array([total - 1], np.int32)
    feeds["total_sequence_length"] = np.array(total, np.int32)
    feeds |= {n: i[n] for n in ("cos_cache", "sin_cache", "head_sink", "k_scale", "v_scale") if n in i}
    if "attention_bias" in i:
        feeds["attention_bias"] = i["attention_bias"][b : b + 1, :, : last - first, :total].copy()
    attributes = {n: v for n, v in case.attributes.items() if n in SHARED_ATTRIBUTES}
    cache_type = i["key_cache"].dtype
    if cache_type == INT8:
        attributes["kv_cache_bit_width"] = 8
    outputs = {"output": FLOAT32, "present_key": cache_type, "present_value": cache_type}
    if attributes.get("qk_output"):
        outputs["output_qk"] = FLOAT32
    model = single_node("GroupQueryAttention", list(GQA_INPUTS), feeds, outputs, "com.microsoft", 21, **attributes)
    results = make_session(model, library=False).run(None, feeds)
    return results[0][0], results[3][0] if len(results) > 3 else None


GQA_FEATURES: dict[str, dict] = {
    "plain": {},
    "packed": {"packed": True},
    "group_of_3": {"num_heads": 6, "kv_num_heads": 2},
    "rope": {"rotary_dim": 16},
    "rope_interleaved": {"rotary_dim": 16, "rotary_interleaved": 1},
    "packed_rope": {"packed": True, "rotary_dim": 16},
    "sink": {"sink": True},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": 0.6},
    "window": {"local_window_size": 4},
    "window_1": {"local_window_size": 1},
    "window_sink_softcap_rope": {"local_window_size": 6, "sink": True, "softcap": 2.0, "rotary_dim": 16},
    "bias": {"bias_shape": (True, True)},
    "bias_softcap": {"bias_shape": (True, True), "softcap": 1.5},
    "scores": {"qk_output": 1},
    "scores_softcap_bias": {"qk_output": 1, "softcap": 1.5, "bias_shape": (True, True)},
    "probabilities": {"qk_output": 2},
    "probabilities_sink_window": {"qk_output": 2, "sink": True, "local_window_size": 5},
    "int8": {"k_type": INT8, "v_type": INT8},
    "int8_per_channel_sink": {
        "k_type": INT8,
        "v_type": INT8,
        "k_quant": "PER_CHANNEL",
        "v_quant": "PER_CHANNEL",
        "sink": True,
    },
}


@pytest.mark.skipif(runtime_version() < (1, 30), reason="older GroupQueryAttention has no int8 cache and other windows")
@pytest.mark.parametrize("feature", GQA_FEATURES)
def test_equals_stock_group_query_attention(rng: np.random.Generator, feature: str) -> None:
    """Risk: the reference and the kernel share a misreading of the contract."""
    case = make_case(rng, new_lens=(5, 1, 3), past_lens=(0, 20, 13), **GQA_FEATURES[feature])
    if "attention_bias" in case.inputs:
        case.inputs["attention_bias"][..., 0] = (
            0.5  # a row that attends to nothing is NaN in stock; the contract says 0
        )
    expected = [run_gqa(case, b) for b in range(3)]
    cu, past = case.inputs["cumulative_sequence_length"], case.inputs["past_seqlens"]
    results = run_bound(make_session(make_model(case)), case)
    for b, (output, scores) in enumerate(expected):
        assert_close(results["output"][cu[b] : cu[b + 1]], output, 1e-5, f"output of sequence {b}")
        if scores is None:
            continue
        for j in range(cu[b + 1] - cu[b]):
            seen = past[b] + j + 1  # past the causal limit stock leaves its mask value in the scores; ours are 0
            ours = results["output_qk"][:, cu[b] + j]
            window = case.attributes.get("local_window_size", -1)
            start = max(0, seen - window) if window > 0 else 0
            assert_close(ours[:, start:seen], scores[:, j, start:seen], 1e-5, f"output_qk of sequence {b}, token {j}")
            assert (ours[:, seen:] == 0).all() and (ours[:, :start] == 0).all()


ATTENTION_FEATURES: dict[str, dict] = {
    "plain": {},
    "group_of_4": {"num_heads": 8, "kv_num_heads": 2},
    "scale": {"scale": 0.6},
    "not_causal": {"is_causal": 0},
    "softcap": {"softcap": 1.5},
    "mask": {"bias_shape": (True, True)},
    "softcap_and_mask": {"bias_shape": (True, True), "softcap": 1.5},
    "mask_not_causal": {"bias_shape": (True, True), "is_causal": 0},
}


@pytest.mark.parametrize("feature", ATTENTION_FEATURES)
def test_equals_onnx_reference_attention(rng: np.random.Generator, feature: str) -> None:
    """Risk: softcap and mask in the wrong order, so that a masked column leaks (the standard: softcap first)."""
    opset = onnx.defs.onnx_opset_version()
    if opset < 25:
        pytest.skip("this onnx has softcap after the mask, as Attention had until opset 25")
    case = make_case(rng, new_lens=(5, 1, 3), past_lens=(0, 20, 13), **ATTENTION_FEATURES[feature])
    inputs = {name: value.copy() for name, value in case.inputs.items()}
    results = run_bound(make_session(make_model(case)), case)
    a = reference.with_defaults(case.attributes)
    q, k, v = reference.prologue(inputs, case.attributes)
    cu = inputs["cumulative_sequence_length"]
    case.inputs = inputs
    for b in range(3):
        new = slice(cu[b], cu[b + 1])
        keys = np.concatenate([paged_history(case, "key_cache", b), k[new]])
        values = np.concatenate([paged_history(case, "value_cache", b), v[new]])
        heads_first = {"Q": q[new], "K": keys, "V": values}
        feeds = {n: x.transpose(1, 0, 2)[None].astype(np.float32) for n, x in heads_first.items()}
        feeds["attn_mask"] = np.zeros((1, 1, cu[b + 1] - cu[b], len(keys)), np.float32)
        if "attention_bias" in inputs:
            feeds["attn_mask"] = inputs["attention_bias"][b : b + 1, :, : cu[b + 1] - cu[b], : len(keys)].copy()
        if a["is_causal"]:  # spelt out in the mask: the operator's own causal mode knows no history outside of past_key
            ahead = np.arange(len(keys))[None, :] > (inputs["past_seqlens"][b] + np.arange(cu[b + 1] - cu[b]))[:, None]
            feeds["attn_mask"] = np.where(ahead, np.float32(-np.inf), feeds["attn_mask"])
        scale = a["scale"] or 1.0 / np.sqrt(case.head_size)
        model = single_node(
            "Attention",
            ["Q", "K", "V", "attn_mask"],
            feeds,
            {"Y": FLOAT32},
            "",
            opset,
            scale=scale,
            softcap=a["softcap"],
        )
        expected = ReferenceEvaluator(model).run(None, feeds)[0][0].transpose(1, 0, 2)
        ours = results["output"][new].reshape(expected.shape)
        assert_close(ours, expected, 1e-5, f"sequence {b}")
