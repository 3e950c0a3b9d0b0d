"""Attention by implementations that others wrote, one sequence at a time, on contiguous caches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from exported import ExportedCase
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

# Versions that have every feature of the Cases: `causal` and an int8 cache in GroupQueryAttention; a window, and
# softcap before the mask, in Attention.
ONNX_RUNTIME_NEEDED = (1, 32)
OPSET_NEEDED = 25

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
GQA_ATTRIBUTES = (
    "num_heads",
    "kv_num_heads",
    "scale",
    "softcap",
    "local_window_size",
    "do_rotary",
    "rotary_interleaved",
    "k_quant_type",
    "v_quant_type",
    "qk_output",
)


@dataclass(frozen=True)
class Attended:
    """What an implementation computed for the new tokens of one sequence. Keys and values are what the cache holds of
    those tokens, as numbers: codes of a quantised cache, without the scale."""

    output: np.ndarray  # (new, N, H)
    keys: np.ndarray  # (new, G, H)
    values: np.ndarray  # (new, G, H)
    scores: np.ndarray | None  # (N, new, total), as they enter softmax
    probabilities: np.ndarray | None  # (N, new, total)


def tensor_type(dtype: np.dtype) -> int:
    """The ONNX name of a numpy type."""
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def heads_first(x: np.ndarray) -> np.ndarray:
    """(tokens, heads, H) -> (1, heads, tokens, H)."""
    return np.ascontiguousarray(x.transpose(1, 0, 2)[None])


def tokens_first(x: np.ndarray) -> np.ndarray:
    """(1, heads, tokens, H) -> (tokens, heads, H)."""
    return x[0].transpose(1, 0, 2)


def cache_codes(
    case: ExportedCase, tensors: dict[str, np.ndarray], which: str, sequence: int, positions: range
) -> np.ndarray:
    """(len(positions), G, H) of the "key" or "value" cache, in a type that says what a code means."""
    stored = case.cache_rows(tensors, f"{which}_cache", sequence, positions)
    kind = case.attributes[f"{which[0]}_cache_dtype"]
    if stored.dtype != np.uint8:
        return stored
    pairs = np.stack([stored & 15, stored >> 4], axis=-1)
    nibbles = pairs.reshape(*stored.shape[:-1], 2 * stored.shape[-1])[..., : case.head_size]
    if kind == "int4":
        return (nibbles.astype(np.int8) - 8).astype(ml_dtypes.int4)
    return nibbles.view(ml_dtypes.float4_e2m1fn)


def group_query_attention(case: ExportedCase, sequence: int) -> Attended:
    """com.microsoft::GroupQueryAttention of ONNX Runtime, in the Case's own types, on the CPU."""
    i = case.inputs
    rows, past, total = case.tokens(sequence), case.past(sequence), case.total(sequence)
    feeds = {name: i[name][None, rows] for name in ("query", "key", "value") if name in i}
    for which in ("key", "value"):
        feeds[f"past_{which}"] = heads_first(cache_codes(case, i, which, sequence, range(past)))
    feeds["seqlens_k"] = np.array([total - 1], np.int32)
    feeds["total_sequence_length"] = np.array(total, np.int32)
    constants = ("cos_cache", "sin_cache", "head_sink", "k_scale", "v_scale")
    feeds |= {name: i[name] for name in constants if name in i}
    bias = case.bias(sequence)
    if bias is not None:
        feeds["attention_bias"] = bias
    attributes = {name: case.attributes[name] for name in GQA_ATTRIBUTES} | {"causal": case.attributes["is_causal"]}
    cache_type = i["key_cache"].dtype
    if cache_type == np.int8:
        attributes["kv_cache_bit_width"] = 8
    outputs = {"output": case.type, "present_key": cache_type, "present_value": cache_type}
    if attributes["qk_output"]:
        outputs["output_qk"] = case.type

    names = [name if name in feeds else "" for name in GQA_INPUTS]
    node = helper.make_node("GroupQueryAttention", names, list(outputs), domain="com.microsoft", **attributes)
    graph = helper.make_graph(
        [node],
        "group_query_attention",
        [helper.make_tensor_value_info(name, tensor_type(x.dtype), x.shape) for name, x in feeds.items()],
        [helper.make_tensor_value_info(name, tensor_type(t), None) for name, t in outputs.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    output, keys, values, *qk = (x.astype(np.float64) for x in session.run(None, feeds))

    # Where every visible position has a bias of -inf, GroupQueryAttention gives NaN; the contract says 0.
    seen = np.broadcast_to(case.visible(sequence), (case.attributes["num_heads"], total - past, total))
    if bias is not None:
        seen = seen & ~np.isneginf(bias[0].astype(np.float32))
    attends = seen.any(axis=-1)  # (N, new)
    output = output.reshape(total - past, -1, case.head_size)
    output[~attends.T] = 0.0
    if attributes["qk_output"] == 2:
        qk[0][0][~attends] = 0.0
    return Attended(
        output,
        tokens_first(keys)[past:],
        tokens_first(values)[past:],
        qk[0][0] if attributes["qk_output"] == 1 else None,
        qk[0][0] if attributes["qk_output"] == 2 else None,
    )


@cache
def evaluator(
    op: str, present: tuple[bool, ...], outputs: int, attributes: tuple[tuple[str, object], ...]
) -> ReferenceEvaluator:
    """ONNX's reference implementation of one operator."""
    inputs = [f"x{n}" if is_present else "" for n, is_present in enumerate(present)]
    node = helper.make_node(op, inputs, [f"y{n}" for n in range(outputs)], **dict(attributes))
    undefined = TensorProto.UNDEFINED
    graph = helper.make_graph(
        [node],
        op,
        [helper.make_tensor_value_info(name, undefined, None) for name in inputs if name],
        [helper.make_tensor_value_info(name, undefined, None) for name in node.output],
    )
    opset = helper.make_opsetid("", onnx.defs.onnx_opset_version())
    return ReferenceEvaluator(helper.make_model(graph, opset_imports=[opset]))


def evaluate(op: str, *inputs: np.ndarray | None, outputs: int = 1, **attributes: object) -> list[np.ndarray]:
    """The outputs of one operator of ONNX; None is an absent input."""
    run = evaluator(op, tuple(x is not None for x in inputs), outputs, tuple(sorted(attributes.items())))
    return run.run(None, {f"x{n}": x for n, x in enumerate(inputs) if x is not None})


def flat_scale(scale: np.ndarray) -> np.ndarray:
    """A scale as QuantizeLinear takes it for rows of G*H channels: a scalar, or one for each channel."""
    return scale.reshape(()) if scale.size == 1 else scale.reshape(-1)


def stored(x: np.ndarray, codes: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """What a cache of the type of `codes` holds of x (new, G, H), as codes."""
    to = tensor_type(codes.dtype)
    if scale is None:
        return evaluate("Cast", x, to=to)[0]
    flat = x.reshape(len(x), -1)
    return evaluate("QuantizeLinear", flat, flat_scale(scale), axis=1, output_dtype=to)[0].reshape(x.shape)


def restored(codes: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """The numbers that codes (tokens, G, H) stand for."""
    if scale is None:
        return evaluate("Cast", codes, to=TensorProto.FLOAT)[0]
    flat = codes.reshape(len(codes), codes.shape[1] * codes.shape[2])
    return evaluate("DequantizeLinear", flat, flat_scale(scale), axis=1)[0].reshape(codes.shape)


def prepared(case: ExportedCase, x: np.ndarray, which: str, sequence: int) -> np.ndarray:
    """Q or K (new, heads, H) after QK-norm and RoPE, by RMSNormalization and RotaryEmbedding, in float32."""
    a, i = case.attributes, case.inputs
    x = heads_first(x.astype(np.float32))
    if f"{which}_norm_weight" in i:
        weight = i[f"{which}_norm_weight"].astype(np.float32)
        x = evaluate("RMSNormalization", x, weight, axis=-1, epsilon=a["qk_norm_epsilon"])[0]
    if a["do_rotary"]:
        cos, sin = i["cos_cache"].astype(np.float32), i["sin_cache"].astype(np.float32)
        positions = case.query_positions(sequence)[None].astype(np.int64)
        width = 2 * cos.shape[1]
        x = evaluate(
            "RotaryEmbedding",
            x,
            cos,
            sin,
            positions,
            interleaved=a["rotary_interleaved"],
            rotary_embedding_dim=0 if width == case.head_size else width,
        )[0]
    return tokens_first(x)


def onnx_operators(case: ExportedCase, sequence: int) -> Attended:
    """ONNX's reference RMSNormalization, RotaryEmbedding, QuantizeLinear and Attention, in float32 whatever T is."""
    a, i = case.attributes, case.inputs
    past = range(case.past(sequence))
    q, k, v = case.query_key_value(sequence)
    q, k, v = prepared(case, q, "q", sequence), prepared(case, k, "k", sequence), v.astype(np.float32)
    history, new = {}, {}
    for which, x in (("key", k), ("value", v)):
        codes, scale = cache_codes(case, i, which, sequence, past), i.get(f"{which[0]}_scale")
        history[which] = restored(codes, scale)
        new[which] = stored(x, codes, scale)

    bias = case.bias(sequence)
    mask = np.zeros((1, 1, len(q), case.total(sequence)), np.float32) if bias is None else bias.astype(np.float32)
    attributes = {"scale": a["scale"] or 1.0 / np.sqrt(case.head_size), "softcap": a["softcap"]}
    if "query_positions" in i:  # Attention knows the order of the cache only
        mask = np.where(case.visible(sequence), mask, np.float32(-np.inf))
    else:
        attributes["is_causal"] = a["is_causal"]
        if a["local_window_size"] > 0:
            attributes["left_window_size"] = a["local_window_size"] - 1  # without the token itself
    tensors = [heads_first(x) for x in (q, *(restored(new[w], i.get(f"{w[0]}_scale")) for w in ("key", "value")))]
    tensors += [mask, heads_first(history["key"]), heads_first(history["value"])]
    output, _, _, scores = evaluate("Attention", *tensors, outputs=4, qk_matmul_output_mode=2, **attributes)
    probabilities = evaluate("Attention", *tensors, outputs=4, qk_matmul_output_mode=3, **attributes)[3]
    return Attended(
        tokens_first(output).astype(np.float64),
        new["key"].astype(np.float64),
        new["value"].astype(np.float64),
        scores[0].astype(np.float64),
        probabilities[0].astype(np.float64),
    )
