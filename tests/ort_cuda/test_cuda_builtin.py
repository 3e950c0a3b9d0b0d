"""Our results against the PagedAttention that the same onnxruntime has built in, as an oracle that others wrote.

Both append the tokens: the caches agree up to a step of the stored type. Then the built-in operator attends over the
caches that ours left (its slots say -1: write nothing), so that such a step is not counted again: the outputs agree
within what both may round (bounds.py).
"""

from __future__ import annotations

import numpy as np
import pytest
import reference
from bounds import error_bounds
from device import make_cuda_session, run_case
from support import BFLOAT16, FLOAT8, FLOAT16, INT8, ROUNDOFF, Case, assert_within, make_case, make_model

LATENT = {"kv_num_heads": 1, "head_size": 192, "latent_v_head_size": 128, "scale": 0.08}
FEATURES: dict[str, dict] = {
    "plain": {},
    "decode": {"new_lens": (1,) * 5, "past_lens": (0, 3, 255, 256, 700)},
    "packed": {"packed": True},
    "rotary": {"rotary_dim": 64},
    "rotary_interleaved": {"rotary_dim": 64, "rotary_interleaved": 1},
    "rotary_part": {"rotary_dim": 32},
    "qk_norm": {"qk_norm": True},
    "packed_rotary_qk_norm": {"packed": True, "rotary_dim": 64, "qk_norm": True},
    "sink": {"sink": True},
    "sink_decode": {"sink": True, "new_lens": (1,) * 4, "past_lens": (3, 30, 300, 100)},
    "window": {"local_window_size": 20},
    "window_sink_decode": {"local_window_size": 100, "sink": True, "new_lens": (1, 1), "past_lens": (300, 90)},
    "softcap": {"softcap": 5.0},
    "scale": {"scale": 0.2},
    "slot_mapping": {"slot_mapping": True},
    "group_of_8": {"num_heads": 8, "kv_num_heads": 1},
    "head_size_128": {"head_size": 128},
    "small_blocks": {"block_size": 16},
    "int8": {"k_type": INT8, "v_type": INT8},
    "int8_decode": {"k_type": INT8, "v_type": INT8, "new_lens": (1,) * 4, "past_lens": (3, 30, 300, 700)},
    "int8_per_channel": {"k_type": INT8, "v_type": INT8, "k_quant": "PER_CHANNEL", "v_quant": "PER_CHANNEL"},
    "int8_rotary_sink": {"k_type": INT8, "v_type": INT8, "rotary_dim": 64, "sink": True},
    "float8": {"k_type": FLOAT8, "v_type": FLOAT8},
    "float8_decode": {"k_type": FLOAT8, "v_type": FLOAT8, "new_lens": (1,) * 4, "past_lens": (3, 30, 300, 700)},
    "float8_per_channel": {"k_type": FLOAT8, "v_type": FLOAT8, "k_quant": "PER_CHANNEL", "v_quant": "PER_CHANNEL"},
    "not_causal": {"is_causal": 0},
    "latent": LATENT,
    "latent_decode": {**LATENT, "new_lens": (1,) * 4, "past_lens": (3, 30, 300, 700)},
    "latent_rotary": {**LATENT, "rotary_dim": 64, "rotary_offset": 128},
}


def builtin_case(rng: np.random.Generator, tensor_type: np.dtype, features: dict) -> Case:
    """A case in the sizes that the built-in operator takes; memory that nobody wrote holds 0, which it may read."""
    keywords = {
        "new_lens": (5, 1, 9),
        "past_lens": (0, 270, 33),
        "num_heads": 8,
        "kv_num_heads": 2,
        "head_size": 64,
        "block_size": 256,
    }
    keywords |= features
    case = make_case(rng, tensor_type=tensor_type, **keywords)
    for name in ("key_cache", "value_cache"):
        if name in case.inputs and case.inputs[name].dtype != INT8:
            values = np.nan_to_num(case.inputs[name].astype(np.float32), nan=0.0)
            case.inputs[name] = values.astype(case.inputs[name].dtype)
    new = np.diff(case.inputs["cumulative_sequence_length"])
    longest = int((case.inputs["past_seqlens"] + new).max())
    case.inputs["attention_metadata"] = np.array([new.max(), longest, longest], np.int32)
    return case


def assert_stored_alike(case: Case, name: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    """The same rows were written, and what is in them differs by no more than both may round: to T after the norm,
    after the rotation, and to the stored type (a step of int8; float8 has 3 bits behind the leading one)."""
    before = case.inputs[name]

    def written(cache: np.ndarray) -> np.ndarray:
        return (cache.view(np.uint8) != before.view(np.uint8)).reshape(*before.shape[:2], -1).any(axis=-1)

    np.testing.assert_array_equal(written(ours), written(theirs), f"rows of {name} that were written")
    a = reference.with_defaults(case.attributes)
    kind = reference.logical_type(before, a[f"{name[0]}_cache_dtype"])
    scale = case.inputs.get(f"{name[0]}_scale")
    x, y = (reference.decode(cache, kind, scale, case.head_size) for cache in (ours, theirs))
    largest = np.abs(y).max(axis=-1, keepdims=True)
    bound = 4 * ROUNDOFF[case.type] * largest + np.zeros_like(y)
    if kind == "int8":
        bound += 1.001 * reference.decode(np.ones_like(before), kind, scale, case.head_size)
    if kind == "float8e4m3fn":
        bound += 2.0**-3 * np.maximum(np.abs(y), largest * 2.0**-6)
    assert_within(x, y, bound, name)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("tensor_type", [FLOAT16, BFLOAT16], ids=lambda t: t.name)
def test_equals_the_built_in_operator(rng: np.random.Generator, tensor_type: np.dtype, feature: str) -> None:
    """Risk: the oracle of these tests and the kernels share a misunderstanding of the operator."""
    case = builtin_case(rng, tensor_type, FEATURES[feature])
    model = make_model(case, input_count=17)
    ours = run_case(make_cuda_session(model), case)
    theirs = run_case(make_cuda_session(model, library=False), case)
    for name in ("key_cache", "value_cache"):
        if name in case.inputs:
            assert_stored_alike(case, name, ours[f"{name}_out"], theirs[f"{name}_out"])

    tokens = case.inputs["query"].shape[0]
    caches = {name: ours[f"{name}_out"] for name in ("key_cache", "value_cache") if name in case.inputs}
    reading = {**case.inputs, **caches, "slot_mapping": np.full(tokens, -1, np.int32)}
    reader = Case(case.attributes, reading, case.qk_type, case.head_size)
    theirs = run_case(make_cuda_session(make_model(reader, input_count=17), library=False), reader)
    for name, cache in caches.items():
        assert theirs[f"{name}_out"].tobytes() == cache.tobytes(), f"the built-in operator wrote {name}"
    pair = caches["key_cache"], caches.get("value_cache")
    both = error_bounds(case, *pair)["output"] + error_bounds(case, *pair, rounded_cache=True)["output"]
    assert_within(ours["output"], theirs["output"], both, "output")
    assert np.abs(theirs["output"].astype(np.float32)).max() > 0.01, "the built-in operator gave nothing to compare"
