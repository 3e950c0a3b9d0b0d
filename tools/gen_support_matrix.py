"""Write docs/support_matrix.md, or check with --check that it is up to date. Run with the installed package.

Every cell is a call that validation accepts and that really asks for the row's feature; "yes" means that a backend
of this device accepts the call. A feature without a row is an error, so a new one cannot be forgotten.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from octavo.attention import explain_call, feature_names, requested_features

DOCUMENT = Path(__file__).resolve().parent.parent / "docs/support_matrix.md"

HEADS, KV_HEADS, HEAD_SIZE, BLOCKS, BLOCK_SIZE, TOKENS, BATCH, TABLE_WIDTH = 4, 2, 64, 8, 16, 5, 2, 3
ELEMENT_TYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

Call = dict[str, Any]


def basic_call(element_type: Any) -> Call:
    """Plain causal attention of T: two sequences with 4 and 1 new tokens."""
    cache = np.zeros((BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE), element_type)
    return {
        "query": np.zeros((TOKENS, HEADS * HEAD_SIZE), element_type),
        "key": np.zeros((TOKENS, KV_HEADS * HEAD_SIZE), element_type),
        "value": np.zeros((TOKENS, KV_HEADS * HEAD_SIZE), element_type),
        "key_cache": cache,
        "value_cache": cache.copy(),
        "cumulative_sequence_length": np.array([0, 4, 5], np.int32),
        "past_seqlens": np.array([0, 7], np.int32),
        "block_table": np.arange(BATCH * TABLE_WIDTH, dtype=np.int32).reshape(BATCH, TABLE_WIDTH),
        "num_heads": HEADS,
        "kv_num_heads": KV_HEADS,
    }


def packed_qkv(call: Call, element_type: Any) -> None:
    call["query"] = np.zeros((TOKENS, (HEADS + 2 * KV_HEADS) * HEAD_SIZE), element_type)
    call["key"] = call["value"] = None


def slot_mapping(call: Call, element_type: Any) -> None:
    call["slot_mapping"] = np.arange(TOKENS, dtype=np.int32)


def rope(call: Call, element_type: Any) -> None:
    table = np.zeros((BLOCK_SIZE * TABLE_WIDTH, HEAD_SIZE // 2), element_type)
    call.update(do_rotary=1, cos_cache=table, sin_cache=table)


def rope_interleaved_offset(call: Call, element_type: Any) -> None:
    table = np.zeros((BLOCK_SIZE * TABLE_WIDTH, HEAD_SIZE // 4), element_type)
    call.update(do_rotary=1, rotary_interleaved=1, rotary_offset=8, cos_cache=table, sin_cache=table)


def qk_norm(call: Call, element_type: Any) -> None:
    weight = np.ones(HEAD_SIZE, element_type)
    call.update(q_norm_weight=weight, k_norm_weight=weight)


def head_sink(call: Call, element_type: Any) -> None:
    call["head_sink"] = np.zeros(HEADS, element_type)


def softcap(call: Call, element_type: Any) -> None:
    call["softcap"] = 30.0


def local_window(call: Call, element_type: Any) -> None:
    call["local_window_size"] = 8


def non_causal(call: Call, element_type: Any) -> None:
    call["is_causal"] = 0


def attention_bias(call: Call, element_type: Any) -> None:
    call["attention_bias"] = np.zeros((BATCH, HEADS, TOKENS, BLOCK_SIZE * TABLE_WIDTH), element_type)


def query_positions(call: Call, element_type: Any) -> None:
    call["query_positions"] = np.array([0, 1, 2, 2, 7], np.int32)


def output_qk(call: Call, element_type: Any) -> None:
    call["qk_output"] = 2


def lse(call: Call, element_type: Any) -> None:
    call["return_lse"] = True


def latent(call: Call, element_type: Any) -> None:
    call["key"] = np.zeros((TOKENS, HEAD_SIZE), element_type)
    call["key_cache"] = np.zeros((BLOCKS, BLOCK_SIZE, 1, HEAD_SIZE), element_type)
    call["value"] = call["value_cache"] = None
    call.update(kv_cache_layout="LATENT", v_head_size=48, kv_num_heads=1, scale=0.125)


def cache_setter(storage: Any, name: str, scale_shape: tuple[int, ...] | None = (1,)) -> Callable[[Call, Any], None]:
    """A change that gives both caches this storage type, cache_dtype name ("" where the storage says it) and scales."""

    def change(call: Call, element_type: Any) -> None:
        width = HEAD_SIZE // 2 if name in ("int4", "float4e2m1") else HEAD_SIZE
        call["key_cache"] = np.zeros((BLOCKS, BLOCK_SIZE, KV_HEADS, width), storage)
        call["value_cache"] = call["key_cache"].copy()
        call.update(k_cache_dtype=name, v_cache_dtype=name)
        if scale_shape is not None:
            kind = "PER_TENSOR" if scale_shape == (1,) else "PER_CHANNEL"
            scales = np.ones(scale_shape, np.float32)
            call.update(k_scale=scales, v_scale=scales, k_quant_type=kind, v_quant_type=kind)

    return change


def strided_cache(call: Call, element_type: Any) -> None:
    pool = np.zeros((BLOCKS, 2, KV_HEADS, BLOCK_SIZE, HEAD_SIZE), element_type)
    call["key_cache"] = pool[:, 0].transpose(0, 2, 1, 3)
    call["value_cache"] = pool[:, 1].transpose(0, 2, 1, 3)


def int64_indices(call: Call, element_type: Any) -> None:
    call["block_table"] = call["block_table"].astype(np.int64)


def small_blocks(call: Call, element_type: Any) -> None:
    cache = np.zeros((BLOCKS, 3, KV_HEADS, HEAD_SIZE), element_type)
    call.update(key_cache=cache, value_cache=cache.copy())


def everything(call: Call, element_type: Any) -> None:
    packed_qkv(call, element_type)
    for change in (
        slot_mapping,
        rope_interleaved_offset,
        qk_norm,
        head_sink,
        softcap,
        local_window,
        attention_bias,
        query_positions,
        output_qk,
        lse,
        cache_setter(np.uint8, "int4", (KV_HEADS, 1, HEAD_SIZE)),
    ):
        change(call, element_type)


PER_CHANNEL = (KV_HEADS, 1, HEAD_SIZE)
INT8 = cache_setter(np.int8, "int8")
INT4 = cache_setter(np.uint8, "int4")

# (the Feature, what the row says, the change to the basic call that asks for it)
FEATURES: list[tuple[str, str, Callable[[Call, Any], None]]] = [
    ("packed_qkv", "packed QKV in `query`", packed_qkv),
    ("slot_mapping", "`slot_mapping`, -1 = do not write", slot_mapping),
    ("rope", "RoPE, halves rotated", rope),
    ("rope", "RoPE, interleaved pairs, `rotary_offset`, partial", rope_interleaved_offset),
    ("qk_norm", "QK-norm (RMS, per head)", qk_norm),
    ("head_sink", "`head_sink`", head_sink),
    ("softcap", "`softcap`", softcap),
    ("local_window", "`local_window_size`", local_window),
    ("non_causal", "`is_causal` = 0", non_causal),
    ("attention_bias", "`attention_bias`", attention_bias),
    ("query_positions", "`query_positions` (tree and speculative masks)", query_positions),
    ("output_qk", "`output_qk`, scores or probabilities", output_qk),
    ("lse", "log-sum-exp output (C++ and Python)", lse),
    ("latent", "`kv_cache_layout` = LATENT (MLA), `v_head_size`", latent),
    ("quantized_cache", "quantized caches, PER_TENSOR scales", INT8),
    ("per_channel_scale", "quantized caches, PER_CHANNEL scales", cache_setter(np.int8, "int8", PER_CHANNEL)),
    ("four_bit_cache", "4-bit caches, two elements a byte", INT4),
    ("strided_cache", "strided caches: head-major, K and V in one tensor", strided_cache),
    ("int64_indices", "int64 `block_table` and `slot_mapping` (C++ and Python)", int64_indices),
    ("small_blocks", "block sizes below 16 or no power of two", small_blocks),
    ("packed_qkv", "most of these in one call, over an int4 cache", everything),
]

CACHES: list[tuple[str, Callable[[Call, Any], None]]] = [
    ("float32", cache_setter(np.float32, "", None)),
    ("float16", cache_setter(np.float16, "", None)),
    ("bfloat16", cache_setter(ml_dtypes.bfloat16, "", None)),
    ("int8, PER_TENSOR", INT8),
    ("int8, PER_CHANNEL", cache_setter(np.int8, "int8", PER_CHANNEL)),
    ("float8e4m3fn, PER_TENSOR", cache_setter(ml_dtypes.float8_e4m3fn, "float8e4m3fn")),
    ("float8e4m3fn, PER_CHANNEL", cache_setter(ml_dtypes.float8_e4m3fn, "float8e4m3fn", PER_CHANNEL)),
    ("int4, PER_TENSOR", INT4),
    ("int4, PER_CHANNEL", cache_setter(np.uint8, "int4", PER_CHANNEL)),
    ("float4e2m1, PER_TENSOR", cache_setter(np.uint8, "float4e2m1")),
    ("float4e2m1, PER_CHANNEL", cache_setter(np.uint8, "float4e2m1", PER_CHANNEL)),
]


class Matrix:
    """The tables as text, with a footnote for each refusal."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def cell(self, change: Callable[[Call, Any], None], element_type: Any, feature: str | None) -> str:
        call = basic_call(element_type)
        change(call, element_type)
        try:
            verdicts = explain_call(**call)
        except ValueError as error:  # the operator itself does not have this combination
            if feature is not None:
                raise SystemExit(f"{feature}: the row's call is not legal: {error}") from error
            return "–"
        if feature is not None and feature not in (requested := requested_features(**call)):
            raise SystemExit(f"{feature}: the row's call does not ask for it, only for {requested}")
        if any(not verdict["refusal"] for verdict in verdicts):
            return "yes"
        note = "; ".join(f"{verdict['backend']}: {verdict['refusal']}" for verdict in verdicts)
        if note not in self.notes:
            self.notes.append(note)
        return f"no [{self.notes.index(note) + 1}]"

    def row(self, title: str, change: Callable[[Call, Any], None], feature: str | None) -> str:
        cells = [self.cell(change, element_type, feature) for element_type in ELEMENT_TYPES.values()]
        return f"| {title} | {' | '.join(cells)} |"

    def text(self) -> str:
        header = f"| {' | '.join(ELEMENT_TYPES)} |\n|---{'|---' * len(ELEMENT_TYPES)}|"
        lines = [
            "# Support matrix",
            "",
            "Generated by `tools/gen_support_matrix.py` from the built library: do not edit. A cell says what the",
            "backends answer to a call that asks for the row's feature: **yes** = one accepts it, **–** = the operator",
            "does not have this combination, **no** = every backend refuses, for the reason below the tables. Columns",
            "are the type of `query`.",
            "`tests/backends` runs every backend that accepts a case against the oracle.",
            "",
            "## CPU: features",
            "",
            f"| feature {header}",
            *(self.row(title, change, feature) for feature, title, change in FEATURES),
            "",
            "## CPU: cache types",
            "",
            f"| key_cache and value_cache {header}",
            *(self.row(title, change, None) for title, change in CACHES),
        ]
        lines += ["", *(f"{number}. {note}" for number, note in enumerate(self.notes, 1))] if self.notes else []
        return "\n".join(lines) + "\n"


def main() -> int:
    if missing := set(feature_names()) - {feature for feature, _, _ in FEATURES}:
        raise SystemExit(f"no row for the features {', '.join(sorted(missing))}: add one to FEATURES")
    text = Matrix().text()
    if "--check" not in sys.argv[1:]:
        DOCUMENT.write_text(text, encoding="utf-8")
        return 0
    if not DOCUMENT.exists() or DOCUMENT.read_text(encoding="utf-8") != text:
        print(f"{DOCUMENT.name} is out of date; run .venv/bin/python tools/gen_support_matrix.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
