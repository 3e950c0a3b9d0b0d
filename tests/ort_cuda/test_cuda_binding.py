"""Where the caches live on a GPU, what a session says about its choice, and nodes beside other operators."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import reference
from device import PROVIDER, check, compare, make_cuda_session, run_case, session_options
from onnx import helper, numpy_helper
from support import (
    FLOAT8,
    FLOAT16,
    FLOAT32,
    INT8,
    ONNX_TYPES,
    ROUNDOFF,
    Case,
    assert_within,
    finish_model,
    make_case,
    make_model,
)
from test_types import TENSOR_TYPES, name_of

PLAIN_INPUTS = ["query", "key", "value", "key_cache", "value_cache"]
LENGTHS = ["cumulative_sequence_length", "past_seqlens", "block_table"]


@pytest.mark.parametrize("cache_type", [FLOAT16, INT8, FLOAT8], ids=name_of)
def test_outputs_bound_elsewhere_leave_the_inputs_alone(rng: np.random.Generator, cache_type: np.dtype) -> None:
    """Risk: the output cache lacks the history (nothing copied, or copied behind the kernel that writes), or the input
    is written although another buffer was asked for."""
    case = make_case(rng, tensor_type=FLOAT16, k_type=cache_type, v_type=cache_type)
    check(case, in_place=False)
    check(case, in_place=True)


def test_absent_cache_outputs_update_the_inputs(rng: np.random.Generator) -> None:
    """Risk: without outputs 1 and 2 the new tokens are written nowhere."""
    for attributes in ({}, {"qk_output": 1}):  # the second with empty names before output 3
        case = make_case(rng, tensor_type=FLOAT16, **attributes)
        check(case, make_cuda_session(make_model(case, cache_outputs=False)))
    case = make_case(rng, tensor_type=FLOAT16, kv_num_heads=1, latent_v_head_size=8)
    check(case, make_cuda_session(make_model(case, cache_outputs=False)))


def test_plain_run_gives_fresh_caches(rng: np.random.Generator) -> None:
    """Risk: session.run(), which feeds from host memory and binds nothing, returns stale caches."""
    case = make_case(rng, tensor_type=FLOAT32)
    before = {name: value.tobytes() for name, value in case.inputs.items()}
    session = make_cuda_session(make_model(case))
    names = [output.name for output in session.get_outputs()]
    compare(case, dict(zip(names, session.run(None, case.inputs), strict=True)))
    assert {name: value.tobytes() for name, value in case.inputs.items()} == before


def paged_node(inputs: list[str], outputs: list[str], case: Case) -> onnx.NodeProto:
    """A PagedAttention node with the case's attributes."""
    return helper.make_node("PagedAttention", inputs, outputs, domain="com.microsoft", **case.attributes)


def graph_io(case: Case, outputs: list[str], dtype: np.dtype = FLOAT32) -> tuple[list, list]:
    """Graph inputs of the case, and graph outputs of one type and of unknown shape."""
    inputs = [
        helper.make_tensor_value_info(name, ONNX_TYPES[value.dtype], [f"{name}_0", *value.shape[1:]])
        for name, value in case.inputs.items()
    ]
    return inputs, [helper.make_tensor_value_info(name, ONNX_TYPES[dtype], None) for name in outputs]


def test_caches_flow_from_node_to_node(rng: np.random.Generator) -> None:
    """Risk: a chain does not load, the second node sees the old cache, or a copy runs beside the kernel that writes."""
    case = make_case(rng, new_lens=(2, 1), past_lens=(5, 20))
    nodes = [
        paged_node([*PLAIN_INPUTS, *LENGTHS], ["first", "k1", "v1"], case),
        helper.make_node("Add", ["past_seqlens", "added"], ["past_1"]),
        paged_node(
            ["query", "value", "key", "k1", "v1", LENGTHS[0], "past_1", LENGTHS[2]], ["second", "k2", "v2"], case
        ),
    ]
    inputs, outputs = graph_io(case, ["first", "second", "k2", "v2"])
    added = numpy_helper.from_array(np.array([2, 1], np.int32), "added")
    session = make_cuda_session(finish_model(helper.make_graph(nodes, "chain", inputs, outputs, [added])))
    first, second, k2, v2 = session.run(None, {name: value.copy() for name, value in case.inputs.items()})

    k1, v1 = reference.updated_caches(case.inputs, case.attributes)
    compare(case, {"output": first, "key_cache_out": k1, "value_cache_out": v1})
    later = {
        **case.inputs,
        "key": case.inputs["value"],
        "value": case.inputs["key"],
        "key_cache": k1,
        "value_cache": v1,
    }
    later["past_seqlens"] = case.inputs["past_seqlens"] + np.array([2, 1], np.int32)
    results = {"output": second, "key_cache_out": k2, "value_cache_out": v2}
    compare(Case(case.attributes, later, case.qk_type, case.head_size), results)


def test_a_later_reader_of_an_intermediate_cache_sees_the_old_one(rng: np.random.Generator) -> None:
    """Risk: sharing the buffer of an intermediate cache with the output changes it under a node that still reads it."""
    case = make_case(rng, new_lens=(2,), past_lens=(5,))
    nodes = [
        helper.make_node("Mul", ["key_cache", "one"], ["k0"]),
        helper.make_node("Mul", ["value_cache", "one"], ["v0"]),
        paged_node([*PLAIN_INPUTS[:3], "k0", "v0", *LENGTHS], ["output", "k1", "v1"], case),
        helper.make_node("ReduceSum", ["output"], ["after"], keepdims=0),  # orders the reader behind the operator
        helper.make_node("Mul", ["after", "zero"], ["nothing"]),
        helper.make_node("Add", ["k0", "nothing"], ["k0_later"]),
        helper.make_node("Neg", ["k1"], ["k1_negated"]),
    ]
    inputs, outputs = graph_io(case, ["k0_later", "k1_negated"])
    constants = [numpy_helper.from_array(np.float32(v), n) for n, v in (("one", 1), ("zero", 0))]
    model = finish_model(helper.make_graph(nodes, "reader", inputs, outputs, constants))
    k0_later, k1_negated = make_cuda_session(model).run(None, case.inputs)
    np.testing.assert_array_equal(k0_later, case.inputs["key_cache"])
    np.testing.assert_allclose(-k1_negated, reference.updated_caches(case.inputs, case.attributes)[0], rtol=1e-5)


def decoder_layer(rng: np.random.Generator) -> tuple[onnx.ModelProto, dict[str, np.ndarray], Case]:
    """A layer as exporters write it, in float16, 17 inputs: norm, 4-bit projection, attention, gate, another norm."""
    n, g, head_size, hidden = 4, 2, 64, 256
    width = (n + 2 * g) * head_size
    case = make_case(
        rng,
        tensor_type=FLOAT16,
        packed=True,
        rotary_dim=head_size,
        metadata=(6, 40, 1),
        num_heads=n,
        kv_num_heads=g,
        head_size=head_size,
        block_size=256,
    )
    tokens = case.inputs.pop("query").shape[0]
    for name in ("key_cache", "value_cache"):  # the built-in operator may read what nobody wrote
        case.inputs[name] = np.nan_to_num(case.inputs[name], nan=0.0)
    constants = {
        "gamma": rng.uniform(0.5, 1.5, hidden).astype(FLOAT16),
        "b": rng.integers(0, 256, (width, hidden // 32, 16)).astype(np.uint8),
        "scales": rng.uniform(0.01, 0.03, (width, hidden // 32)).astype(FLOAT16),
        "cos_cache": case.inputs.pop("cos_cache"),
        "sin_cache": case.inputs.pop("sin_cache"),
    }
    listed = [""] * 17
    for index, name in ((0, "qkv"), (3, "key_cache"), (4, "value_cache"), (8, "cos_cache"), (9, "sin_cache")):
        listed[index] = name
    listed[5:8], listed[16] = LENGTHS, "attention_metadata"
    norm = {"domain": "com.microsoft", "epsilon": 1e-5}
    four_bit = {"domain": "com.microsoft", "K": hidden, "N": width, "bits": 4, "block_size": 32}
    nodes = [
        helper.make_node("SkipSimplifiedLayerNormalization", ["x", "skip", "gamma"], ["normed"], **norm),
        helper.make_node("MatMulNBits", ["normed", "b", "scales"], ["qkv"], **four_bit),
        paged_node(listed, ["attended", "k_out", "v_out"], case),
        helper.make_node("QuickGelu", ["attended"], ["gated"], domain="com.microsoft", alpha=1.0),
        helper.make_node("SkipSimplifiedLayerNormalization", ["gated", "x", "gamma"], ["logits"], **norm),
    ]
    for name in ("x", "skip"):
        case.inputs[name] = rng.standard_normal((tokens, hidden)).astype(FLOAT16)
    inputs, outputs = graph_io(case, ["attended", "logits", "k_out", "v_out"], FLOAT16)
    for graph_input in inputs:
        if graph_input.name in ("x", "skip"):
            graph_input.type.tensor_type.shape.dim[0].dim_param = "num_tokens"
    initializers = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    return finish_model(helper.make_graph(nodes, "layer", inputs, outputs, initializers)), constants, case


def test_beside_other_operators_of_the_domain(rng: np.random.Generator) -> None:
    """Risk: a model exported for stock does not load (its other com.microsoft operators do not resolve beside ours), a
    node is given to a CPU, or our kernel runs on another stream than its neighbours."""
    model, constants, case = decoder_layer(rng)
    attended, logits, k_out, v_out = make_cuda_session(model).run(None, case.inputs)

    x, skip, gamma = (v.astype(np.float64) for v in (case.inputs["x"], case.inputs["skip"], constants["gamma"]))
    codes = np.stack([constants["b"] & 15, constants["b"] >> 4], -1).reshape(*constants["b"].shape[:2], 32)
    weight = ((codes.astype(np.float64) - 8) * constants["scales"].astype(np.float64)[..., None]).reshape(-1, 256)
    normed = (x + skip) / np.sqrt(((x + skip) ** 2).mean(-1, keepdims=True) + 1e-5) * gamma
    call = {**case.inputs, "query": normed @ weight.T, **constants}
    expected_k, expected_v = reference.updated_caches(call, case.attributes)
    expected = reference.attend(call, case.attributes, expected_k, expected_v)["output"]
    # The norm rounds to float16, the projection rounds again: rounding errors of a few elements of qkv, each at most
    # 2^-11 of the largest, in K, in V and, through softmax, in the weights. Eight of them are far below any mistake.
    bound = 8 * ROUNDOFF[FLOAT16] * np.abs(call["query"]).max()
    assert_within(attended, expected, np.full(expected.shape, bound), "attended")
    assert_within(k_out, expected_k, np.full(k_out.shape, bound), "k_out")
    assert_within(v_out, expected_v, np.full(v_out.shape, bound), "v_out")
    gated = attended.astype(np.float64) / (1 + np.exp(-attended.astype(np.float64))) + x
    expected = gated / np.sqrt((gated**2).mean(-1, keepdims=True) + 1e-5) * gamma
    assert_within(logits, expected, 8 * ROUNDOFF[FLOAT16] * np.maximum(1, np.abs(expected)), "logits")


@pytest.mark.parametrize("tensor_type", TENSOR_TYPES, ids=name_of)
def test_explain_names_node_and_backend(
    rng: np.random.Generator, capfd: pytest.CaptureFixture, tensor_type: np.dtype
) -> None:
    """Risk: nobody can tell which backend ran, or the built-in operator runs although ours was registered."""
    case = make_case(rng, tensor_type=tensor_type, sink=True)
    options = session_options({"octavo.explain": "1"})
    options.log_severity_level = 2
    model = make_model(case).SerializeToString()
    session = onnxruntime.InferenceSession(model, options, providers=[PROVIDER])
    run_case(session, case)
    run_case(session, case)
    log = capfd.readouterr().err
    assert log.count('octavo: node "attention" takes backend cuda_') == 1, log
    assert "head_sink" in log


SWITCH_SCRIPT = """
import sys
sys.path[:0] = {paths!r}
import numpy as np, onnxruntime
from device import PROVIDER, run_case, session_options
from support import make_case, make_model
case = make_case(np.random.default_rng(1))
options = session_options({config!r})
options.log_severity_level = 2
session = onnxruntime.InferenceSession(make_model(case).SerializeToString(), options, providers=[PROVIDER])
run_case(session, case)
"""


@pytest.mark.parametrize(
    ("value", "config", "reported"),
    [
        ("1", {}, True),
        ("0", {}, False),
        (None, {}, False),
        ("1", {"octavo.explain": "0"}, False),
        ("yes", {}, None),
    ],
)
def test_the_debug_switch_of_stock_attention(value: str | None, config: dict, reported: bool | None) -> None:
    """Risk: the switch under which stock reports the choice of its attention kernels leaves out ours."""
    name = "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"
    environment = {k: v for k, v in os.environ.items() if k != name} | ({name: value} if value else {})
    here = Path(__file__).resolve().parent
    script = SWITCH_SCRIPT.format(paths=[str(here), str(here.parent / "ort")], config=config)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    if reported is None:
        assert f'{name} must be "0" or "1", got "{value}"' in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert ("takes backend" in done.stderr) == reported, done.stderr


def test_a_session_with_both_providers(rng: np.random.Generator) -> None:
    """Risk: beside the CPU's provider the node goes there, or one library cannot serve both in one process."""
    for providers in ([PROVIDER, "CPUExecutionProvider"], ["CPUExecutionProvider"]):
        case = make_case(rng)
        options = session_options({"session.disable_cpu_ep_fallback": "0"})
        session = onnxruntime.InferenceSession(make_model(case).SerializeToString(), options, providers=providers)
        names = [output.name for output in session.get_outputs()]
        compare(case, dict(zip(names, session.run(None, case.inputs), strict=True)))
