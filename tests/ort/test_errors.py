"""What is refused: every rejection is INVALID_ARGUMENT with a text that names the input, the rule, and what it got.

While a session is being made, ONNX Runtime reports every failure of a kernel as RUNTIME_EXCEPTION; there the text says
INVALID_ARGUMENT itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from support import FLOAT16, FLOAT32, INT8, Case, bind, library_path, make_case, make_model, make_session


def int32(*values: int) -> np.ndarray:
    """An index tensor."""
    return np.array(values, np.int32)


def set_attribute(**changes: object) -> Callable[[Case], None]:
    """Changes attributes after the inputs were made for others."""
    return lambda case: case.attributes.update(changes)


def set_input(name: str, make: Callable[[dict], np.ndarray]) -> Callable[[Case], None]:
    """Replaces an input by a function of the inputs."""

    def change(case: Case) -> None:
        case.inputs[name] = make(case.inputs)

    return change


def drop(*names: str) -> Callable[[Case], None]:
    """Leaves inputs out."""
    return lambda case: [case.inputs.pop(name) for name in names] and None


def set_element(name: str, index: object, value: float) -> Callable[[Case], None]:
    """Changes one value of an input."""

    def change(case: Case) -> None:
        case.inputs[name][index] = value

    return change


# name -> (keywords of a legal case, what is changed, what the message must hold)
REFUSED_AT_RUN: dict[str, tuple[dict, Callable[[Case], None], str]] = {
    "rotary_past_the_head": ({"rotary_dim": 16}, set_attribute(rotary_offset=8), r"rotary"),
    "v_head_size_in_separate": ({}, set_attribute(v_head_size=8, scale=0.1), r"v_head_size"),
    "latent_without_scale": (
        {"kv_num_heads": 1, "latent_v_head_size": 8, "scale": 0.1},
        lambda case: case.attributes.pop("scale") and None,
        r"scale",
    ),
    "rope_without_caches": ({}, set_attribute(do_rotary=1), r"cos_cache"),
    "cos_without_sin": ({"rotary_dim": 16}, drop("sin_cache"), r"sin_cache"),
    "key_without_value": ({}, drop("value"), r"value"),
    "q_norm_alone": ({"qk_norm": True}, drop("k_norm_weight"), r"k_norm_weight"),
    "quantised_without_scale": ({"k_type": INT8, "v_type": INT8}, drop("k_scale"), r"k_scale"),
    "scale_without_quant_type": ({}, set_input("k_scale", lambda i: np.ones(1, np.float32)), r"k_scale|k_quant_type"),
    "int8_with_quant_none": ({"k_type": INT8, "v_type": INT8}, set_attribute(k_quant_type="NONE"), r"k_quant_type"),
    "cache_dtype_of_another": ({}, set_attribute(k_cache_dtype="int8"), r"k_cache_dtype.*int8"),
    "per_channel_scale_shape": (
        {"k_type": INT8, "k_quant": "PER_CHANNEL"},
        set_input("k_scale", lambda i: np.ones((2, 16), np.float32)),
        r"k_scale.*\(2, 16\)",
    ),
    "table_of_rank_1": ({}, set_input("block_table", lambda i: i["block_table"].reshape(-1)), r"block_table.*got"),
    "table_of_another_batch": ({}, set_input("block_table", lambda i: i["block_table"][:2]), r"block_table"),
    "past_of_another_batch": ({}, set_input("past_seqlens", lambda i: int32(0, 1)), r"past_seqlens.*\(2\)"),
    "slot_mapping_too_short": (
        {"slot_mapping": True},
        set_input("slot_mapping", lambda i: i["slot_mapping"][:-1]),
        r"slot_mapping.*\(10\).*\(9\)",
    ),
    "sink_of_other_heads": ({"sink": True}, set_input("head_sink", lambda i: i["head_sink"][:2]), r"head_sink.*\(2\)"),
    "value_cache_of_fewer_blocks": (
        {},
        set_input("value_cache", lambda i: i["value_cache"][1:].copy()),
        r"value_cache",
    ),
    "rank_of_query": ({}, set_input("query", lambda i: i["query"][None]), r"query: rank must be 2, got rank 3"),
    "cache_of_rank_5": ({}, set_input("key_cache", lambda i: i["key_cache"][None]), r"key_cache.*rank|key_cache.*got"),
    "head_size_12": ({"head_size": 12}, lambda case: None, r"head_size.*12|multiple of 8"),
    "bias_of_3_sequences_and_2": (
        {"bias_shape": (True, True)},
        set_input("attention_bias", lambda i: i["attention_bias"][:2].copy()),
        r"attention_bias",
    ),
    "metadata_of_4": ({"metadata": (6, 40)}, set_input("attention_metadata", lambda i: int32(1, 2, 3, 4)), r"\(4\)"),
    "metadata_negative": ({"metadata": (6, 40)}, set_element("attention_metadata", 1, -3), r"attention_metadata.*-3"),
    "metadata_lower_above_upper": (
        {"metadata": (6, 40, 1)},
        set_element("attention_metadata", 2, 41),
        r"attention_metadata",
    ),
    # values, which a CPU can see: with index and value
    "lengths_not_from_0": ({}, set_element("cumulative_sequence_length", 0, 1), r"cumulative_sequence_length.*0.*1"),
    "lengths_fall": ({}, set_element("cumulative_sequence_length", 1, 9), r"cumulative_sequence_length"),
    "lengths_past_the_tokens": ({}, set_element("cumulative_sequence_length", 3, 11), r"cumulative_sequence_length"),
    "past_negative": ({}, set_element("past_seqlens", 1, -2), r"past_seqlens.*1.*-2"),
    "past_the_capacity": ({}, set_element("past_seqlens", 2, 500), r"past_seqlens|block_table"),
    "block_id_too_large": ({}, set_element("block_table", (1, 0), 999), r"block_table.*999"),
    "block_id_below_minus_1": ({}, set_element("block_table", (1, 0), -7), r"block_table.*-7"),
    "slot_too_large": ({"slot_mapping": True}, set_element("slot_mapping", 3, 70000), r"slot_mapping.*3.*70000"),
    "position_negative": (
        {"rotary_dim": 16},
        set_input("query_positions", lambda i: np.full(10, -1, np.int32)),
        r"query_positions.*-1",
    ),
    "position_past_cos_cache": (
        {"rotary_dim": 16},
        set_input("query_positions", lambda i: np.full(10, 5000, np.int32)),
        r"query_positions.*5000",
    ),
}


@pytest.mark.parametrize("caches", ["no_outputs", "in_place", "elsewhere", "unbound"])
@pytest.mark.parametrize("mistake", REFUSED_AT_RUN)
def test_refused_at_run(rng: np.random.Generator, mistake: str, caches: str) -> None:
    """Risk: a crash, a wrong code, a message of somebody else, or caches half written before the mistake is found:
    with the caches updated in the inputs, in outputs bound there, in other buffers, or in what ONNX Runtime makes."""
    keywords, change, text = REFUSED_AT_RUN[mistake]
    case = make_case(rng, **keywords)
    change(case)
    session = make_session(make_model(case, cache_outputs=caches != "no_outputs"))
    binding, buffers = bind(session, case, in_place=caches != "elsewhere")
    before = {name: value.copy() for name, value in (case.inputs | buffers).items()}
    if caches in ("in_place", "elsewhere"):  # onnxruntime's IOBinding passes the text on, but not the code
        with pytest.raises(RuntimeError, match=f"PagedAttention node.*{text}"):
            session.run_with_iobinding(binding)
    else:
        with pytest.raises(InvalidArgument, match=f"INVALID_ARGUMENT.*PagedAttention node.*{text}"):
            session.run(None, case.inputs)
    for name, value in (case.inputs | buffers).items():
        assert value.tobytes() == before[name].tobytes(), f"{name} was written before the call was refused"


def edit_outputs(*names: str) -> Callable[[onnx.ModelProto], None]:
    """Gives the node other outputs."""

    def change(model: onnx.ModelProto) -> None:
        node = model.graph.node[0]
        del node.output[:], model.graph.output[:]
        node.output.extend(names)
        model.graph.output.extend(helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names if n)

    return change


def drop_attribute(name: str) -> Callable[[onnx.ModelProto], None]:
    """Removes an attribute of the node."""

    def change(model: onnx.ModelProto) -> None:
        kept = [a for a in model.graph.node[0].attribute if a.name != name]
        del model.graph.node[0].attribute[:]
        model.graph.node[0].attribute.extend(kept)

    return change


def qk_of_type(model: onnx.ModelProto) -> None:
    """Declares output_qk as int32."""
    model.graph.output[-1].type.tensor_type.elem_type = TensorProto.INT32


REFUSED_AT_LOAD: dict[str, tuple[dict, Callable[[onnx.ModelProto], None], str]] = {
    "no_num_heads": ({}, drop_attribute("num_heads"), r"num_heads: is required .*\[A1\]"),
    "no_kv_num_heads": ({}, drop_attribute("kv_num_heads"), r"kv_num_heads: is required .*\[A2\]"),
    "unknown_quant_type": (
        {"k_quant_type": "PER_ROW"},
        lambda model: None,
        r'k_quant_type: must be one of "NONE", "PER_TENSOR", "PER_CHANNEL", got "PER_ROW"; .*\[A12\]',
    ),
    "unsigned_cache_dtype": (
        {"v_cache_dtype": "uint4"},
        lambda model: None,
        r'v_cache_dtype: must be one of .* got "uint4"; .*\[A13\]',
    ),
    "unknown_layout": (
        {"kv_cache_layout": "latent"},
        lambda model: None,
        r'kv_cache_layout: .*"LATENT", got "latent"; .*A14',
    ),
    "int_for_a_float": ({"softcap": 1}, lambda model: None, r"softcap: must be a float, got an int; "),
    "float_for_an_int": ({"do_rotary": 1.0}, lambda model: None, r"do_rotary: must be an int, got a float; "),
    "string_for_an_int": ({"qk_output": "1"}, lambda model: None, r"qk_output: must be an int, got a string; "),
    "list_for_an_int": ({"is_causal": [1, 1]}, lambda model: None, r"is_causal: must be an int, got a list of ints; "),
    "negative_softcap": ({"softcap": -1.0}, lambda model: None, r"softcap: .*got -1"),
    "window_of_0": ({"local_window_size": 0}, lambda model: None, r"local_window_size: .*got 0"),
    "window_not_causal": (
        {"local_window_size": 4, "is_causal": 0},
        lambda model: None,
        r"local_window_size.*is_causal",
    ),
    "is_causal_2": ({"is_causal": 2}, lambda model: None, r"is_causal: .*got 2"),
    "epsilon_0": ({"qk_norm_epsilon": 0.0}, lambda model: None, r"qk_norm_epsilon: .*got 0"),
    "rotary_offset_4": ({"rotary_offset": 4}, lambda model: None, r"rotary_offset: .*got 4"),
    "heads_not_divisible": ({"num_heads": 5}, lambda model: None, r"kv_num_heads: .* 5, got 2"),
    "kv_heads_negative": ({"num_heads": -4}, lambda model: None, r"num_heads: .*got -4"),
    "only_the_key_cache": ({}, edit_outputs("output", "key_cache_out"), r"got only key_cache_out"),
    "only_the_value_cache": ({}, edit_outputs("output", "", "value_cache_out"), r"got only value_cache_out"),
    "qk_without_attribute": (
        {},
        edit_outputs("output", "", "", "output_qk"),
        r"output_qk present with qk_output = 0; .*M13",
    ),
    "attribute_without_qk": ({"qk_output": 2}, edit_outputs("output"), r"output_qk absent with qk_output = 2; .*M13"),
    "two_caches_in_latent": (
        {"kv_num_heads": 1, "latent_v_head_size": 8},
        edit_outputs("output", "key_cache_out", "value_cache_out"),
        r"value_cache_out: must be absent with kv_cache_layout = LATENT",
    ),
    "qk_of_int": (
        {"qk_output": 1},
        qk_of_type,
        r"output_qk: must be declared as float32, float16 or bfloat16, got int32; .*T7",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED_AT_LOAD)
def test_refused_at_load(rng: np.random.Generator, mistake: str) -> None:
    """Risk: a model that can never run loads, or an attribute of another type counts as absent, its default taken."""
    keywords, change, text = REFUSED_AT_LOAD[mistake]
    legal = {k: v for k, v in keywords.items() if k in ("kv_num_heads", "latent_v_head_size")}
    case = make_case(rng, **legal)
    if keywords.get("qk_output") == 1:
        case.attributes["qk_output"] = 1
    model = make_model(case)
    for name, value in keywords.items():
        if name not in legal:
            drop_attribute(name)(model)
            model.graph.node[0].attribute.append(helper.make_attribute(name, value))
    change(model)
    with pytest.raises(Exception, match=f'INVALID_ARGUMENT: PagedAttention node "attention": .*{text}'):
        make_session(model)


@pytest.mark.parametrize(
    ("keywords", "attributes", "text"),
    [
        ({"packed": True}, {"num_heads": 2**63 - 1}, "num_heads: .*got 9223372036854775807"),
        ({"packed": True}, {"kv_num_heads": 2**62}, "kv_num_heads: .*got 4611686018427387904"),
        ({"packed": True}, {"num_heads": -(2**63), "kv_num_heads": -(2**63)}, "num_heads: .*got -9223372036854775808"),
        ({"kv_num_heads": 1, "latent_v_head_size": 8}, {"v_head_size": 2**62}, "v_head_size: .*4611686018427387904"),
        ({"kv_num_heads": 1, "latent_v_head_size": 8}, {"v_head_size": -8}, "v_head_size: .*got -8"),
    ],
)
def test_attributes_beyond_every_limit(rng: np.random.Generator, keywords: dict, attributes: dict, text: str) -> None:
    """Risk: shapes are inferred before any rule is checked, so the products of a foreign model's attributes overflow
    (undefined behaviour: to be seen under UBSan)."""
    case = make_case(rng, **keywords)
    case.attributes |= attributes
    model = make_model(case)
    with pytest.raises(Exception, match=f"INVALID_ARGUMENT.*{text}"):
        make_session(model).run(None, case.inputs)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("octavo.explain", "yes", r'octavo\.explain must be "0" or "1", got "yes"; '),
        ("octavo.concurrency", "0", r'octavo\.concurrency must be a whole number from 1 to \d+, got "0"; '),
        ("octavo.output_qk_limit_bytes", "1GB", r'octavo\.output_qk_limit_bytes must be .*, got "1GB"; '),
    ],
)
def test_refused_settings(rng: np.random.Generator, key: str, value: str, text: str) -> None:
    """Risk: a mistyped setting counts as its default."""
    with pytest.raises(InvalidArgument, match=f"INVALID_ARGUMENT.*{text}"):
        make_session(make_model(make_case(rng)), {key: value})


def test_a_bad_call_does_not_spoil_the_session(rng: np.random.Generator) -> None:
    """Risk: after a refusal the kernel keeps a plan or a lock."""
    case = make_case(rng)
    session = make_session(make_model(case))
    good = session.run(None, case.inputs)
    bad = {**case.inputs, "past_seqlens": int32(0, -1, 2)}
    for _ in range(3):
        with pytest.raises(InvalidArgument):
            session.run(None, bad)
    for expected, actual in zip(good, session.run(None, case.inputs), strict=True):
        assert expected.tobytes() == actual.tobytes()


def test_types_that_no_kernel_takes_do_not_load(rng: np.random.Generator) -> None:
    """Risk: float16 queries over a float32 cache are computed as something else."""
    case = make_case(rng, tensor_type=FLOAT16, k_type=FLOAT32, v_type=FLOAT32)
    with pytest.raises(Exception, match="PagedAttention"):
        make_session(make_model(case))


def test_an_old_runtime_is_refused_by_version() -> None:
    """Risk: an onnxruntime before 1.23 crashes. OCTAVO_OLD_ONNXRUNTIME names a folder that has one (pip --target)."""
    folder = os.environ.get("OCTAVO_OLD_ONNXRUNTIME")
    if not folder:
        pytest.skip("OCTAVO_OLD_ONNXRUNTIME names no old onnxruntime")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\nimport onnxruntime\n"
        "onnxruntime.SessionOptions().register_custom_ops_library(sys.argv[2])"
    )
    path = str(Path(library_path()).resolve())
    done = subprocess.run([sys.executable, "-c", script, folder, path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "octavo needs onnxruntime 1.23 or later, this is 1." in done.stderr
