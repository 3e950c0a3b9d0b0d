"""Where the caches live: bound in place, copied, left out, passed from node to node; and models exported for stock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import reference
from onnx import TensorProto, helper, numpy_helper
from support import (
    FLOAT16,
    FLOAT32,
    INT8,
    Case,
    assert_close,
    check,
    finish_model,
    library_path,
    make_case,
    make_model,
    make_session,
    run_bound,
    runtime_version,
)


@pytest.mark.parametrize("cache_type", [FLOAT32, FLOAT16, INT8], ids=lambda t: t.name)
def test_outputs_bound_elsewhere_leave_the_inputs_alone(rng: np.random.Generator, cache_type: np.dtype) -> None:
    """Risk: the output cache lacks the history, or the input is written although another buffer was asked for."""
    check(make_case(rng, k_type=cache_type, v_type=cache_type), in_place=False)


def test_in_place_gives_the_same_pointers(rng: np.random.Generator) -> None:
    """Risk: a copy per step of a cache that was bound to be updated in place."""
    case = make_case(rng)
    session = make_session(make_model(case))
    binding = session.io_binding()
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(value) for name, value in case.inputs.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("output", "cpu")
    for name in ("key_cache", "value_cache"):
        binding.bind_ortvalue_output(f"{name}_out", values[name])
    session.run_with_iobinding(binding)
    outputs = dict(zip([o.name for o in session.get_outputs()], binding.get_outputs(), strict=True))
    for name in ("key_cache", "value_cache"):
        assert outputs[f"{name}_out"].data_ptr() == values[name].data_ptr()


def test_absent_cache_outputs_update_the_inputs(rng: np.random.Generator) -> None:
    """Risk: without outputs 1 and 2 the new tokens are written nowhere."""
    for attributes in ({}, {"qk_output": 1}):  # the second with empty names before output 3
        case = make_case(rng, **attributes)
        check(case, make_session(make_model(case, cache_outputs=False)))


def test_latent_without_cache_output(rng: np.random.Generator) -> None:
    """Risk: the both-or-neither rule of SEPARATE is applied to the one cache of LATENT."""
    case = make_case(rng, kv_num_heads=1, latent_v_head_size=8)
    check(case, make_session(make_model(case, cache_outputs=False)))
    check(make_case(rng, kv_num_heads=1, latent_v_head_size=8, qk_output=1), in_place=False)


def test_plain_run_gives_fresh_caches(rng: np.random.Generator) -> None:
    """Risk: session.run(), where nothing is bound, returns stale caches."""
    case = make_case(rng)
    expected_k, expected_v = reference.updated_caches(case.inputs, case.attributes)
    before = case.inputs["key_cache"].copy()
    _, key_cache, value_cache = make_session(make_model(case)).run(None, case.inputs)
    np.testing.assert_allclose(key_cache, expected_k, rtol=1e-5)
    np.testing.assert_allclose(value_cache, expected_v, rtol=1e-5)
    assert case.inputs["key_cache"].tobytes() == before.tobytes()


@pytest.mark.parametrize(
    ("key_cache_out", "value_cache_out", "text"),
    [
        ("value_cache", "key_cache", "key_cache_out: must not be bound to the buffer of value_cache"),
        ("value_cache", "spare", "key_cache_out: must not be bound to the buffer of value_cache"),
        ("key_cache", "key_cache", "value_cache_out: must not be bound to the buffer of key_cache"),
        ("spare", "key_cache", "value_cache_out: must not be bound to the buffer of key_cache"),
        ("spare", "spare", r"\[D16\]"),
    ],
)
def test_caches_bound_to_one_buffer_are_refused(
    rng: np.random.Generator, key_cache_out: str, value_cache_out: str, text: str
) -> None:
    """Risk: one cache overwrites the other, silently, or before the mistake is found."""
    case = make_case(rng)
    session = make_session(make_model(case))
    binding = session.io_binding()
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(value) for name, value in case.inputs.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("output", "cpu")
    values["spare"] = onnxruntime.OrtValue.ortvalue_from_numpy(np.full_like(case.inputs["key_cache"], 7))
    binding.bind_ortvalue_output("key_cache_out", values[key_cache_out])
    binding.bind_ortvalue_output("value_cache_out", values[value_cache_out])
    before = {name: value.numpy().tobytes() for name, value in values.items()}
    with pytest.raises(Exception, match=text):
        session.run_with_iobinding(binding)
    for name, value in values.items():
        assert value.numpy().tobytes() == before[name], f"{name} was written before the call was refused"


def paged_node(inputs: list[str], outputs: list[str], case: Case):
    """A PagedAttention node with the case's attributes."""
    return helper.make_node("PagedAttention", inputs, outputs, domain="com.microsoft", **case.attributes)


PLAIN_INPUTS = ["query", "key", "value", "key_cache", "value_cache"]
LENGTHS = ["cumulative_sequence_length", "past_seqlens", "block_table"]


def graph_io(case: Case, outputs: list[str]) -> tuple[list, list]:
    """Graph inputs of the case, and float32 graph outputs of unknown shape."""
    types = {FLOAT32: TensorProto.FLOAT, np.dtype(np.int32): TensorProto.INT32}
    inputs = [
        helper.make_tensor_value_info(name, types[value.dtype], [f"{name}_0", *value.shape[1:]])
        for name, value in case.inputs.items()
    ]
    return inputs, [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]


def test_caches_flow_from_node_to_node(rng: np.random.Generator) -> None:
    """Risk: a chain does not load (types of intermediate caches), or the second node sees the old cache."""
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
    session = make_session(finish_model(helper.make_graph(nodes, "chain", inputs, outputs, [added])))
    feeds = {name: value.copy() for name, value in case.inputs.items()}
    first, second, k2, v2 = session.run(None, feeds)

    k1, v1 = reference.updated_caches(feeds, case.attributes)
    assert_close(first, reference.attend(feeds, case.attributes, k1, v1)["output"], 1e-5, "first node")
    later = {**feeds, "key": feeds["value"], "value": feeds["key"], "key_cache": k1, "value_cache": v1}
    later["past_seqlens"] = feeds["past_seqlens"] + np.array([2, 1], np.int32)
    expected_k, expected_v = reference.updated_caches(later, case.attributes)
    expected = reference.attend(later, case.attributes, expected_k, expected_v)["output"]
    assert_close(second, expected, 1e-5, "second node")
    np.testing.assert_allclose(k2, expected_k, rtol=1e-5)
    np.testing.assert_allclose(v2, expected_v, rtol=1e-5)


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
    k0_later, k1_negated = make_session(model).run(None, case.inputs)
    np.testing.assert_array_equal(k0_later, case.inputs["key_cache"])
    np.testing.assert_allclose(-k1_negated, reference.updated_caches(case.inputs, case.attributes)[0], rtol=1e-5)


def test_a_model_exported_for_stock_runs_unchanged(rng: np.random.Generator) -> None:
    """Risk: other com.microsoft operators (SkipSimplifiedLayerNormalization, MatMulNBits) do not resolve beside ours.

    17 inputs, opset import com.microsoft 1, packed QKV, rotary and metadata, as exporters write it.
    """
    n, g, head_size, hidden = 4, 2, 16, 64
    width = (n + 2 * g) * head_size
    case = make_case(rng, packed=True, rotary_dim=head_size, metadata=(6, 40, 1), num_heads=n, kv_num_heads=g)
    tokens = case.inputs["query"].shape[0]
    codes = rng.integers(0, 16, (width, hidden // 32, 32)).astype(np.uint8)
    scales = rng.uniform(0.01, 0.03, (width, hidden // 32)).astype(np.float32)
    weight = ((codes.astype(np.float32) - 8) * scales[..., None]).reshape(width, hidden)
    constants = {
        "gamma": rng.uniform(0.5, 1.5, hidden).astype(np.float32),
        "b": (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8),
        "scales": scales,
        "cos_cache": case.inputs.pop("cos_cache"),
        "sin_cache": case.inputs.pop("sin_cache"),
    }
    empty = [""] * 17
    for index, name in ((0, "qkv"), (3, "key_cache"), (4, "value_cache"), (8, "cos_cache"), (9, "sin_cache")):
        empty[index] = name
    empty[5:8], empty[16] = LENGTHS, "attention_metadata"
    nodes = [
        helper.make_node(
            "SkipSimplifiedLayerNormalization", ["x", "skip", "gamma"], ["normed"], domain="com.microsoft", epsilon=1e-5
        ),
        helper.make_node(
            "MatMulNBits",
            ["normed", "b", "scales"],
            ["qkv"],
            domain="com.microsoft",
            K=hidden,
            N=width,
            bits=4,
            block_size=32,
        ),
        paged_node(empty, ["attended", "k_out", "v_out"], case),
        helper.make_node("Add", ["attended", "skip"], ["logits"]),
    ]
    del case.inputs["query"]
    case.inputs["x"] = rng.standard_normal((tokens, hidden)).astype(np.float32)
    case.inputs["skip"] = rng.standard_normal((tokens, hidden)).astype(np.float32)
    inputs, outputs = graph_io(case, ["logits", "k_out", "v_out"])
    for graph_input in inputs:  # one name for the tokens, as exporters write it
        if graph_input.name in ("x", "skip"):
            graph_input.type.tensor_type.shape.dim[0].dim_param = "num_tokens"
    initializers = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    session = make_session(finish_model(helper.make_graph(nodes, "exported", inputs, outputs, initializers)))
    logits, _, _ = session.run(None, case.inputs)

    total = (case.inputs["x"] + case.inputs["skip"]).astype(np.float64)
    normed = total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-5) * constants["gamma"]
    call = {**case.inputs, "query": normed @ weight.T.astype(np.float64), **constants}
    caches = reference.updated_caches(call, case.attributes)
    expected = reference.attend(call, case.attributes, *caches)["output"] + case.inputs["skip"]
    assert_close(logits, expected, 2e-4, "logits")


SHAPES: dict[str, tuple[dict, list]] = {
    "separate": ({}, ["token_count", 64]),
    "packed": ({"packed": True}, ["token_count", 64]),
    "latent": ({"kv_num_heads": 1, "head_size": 24, "latent_v_head_size": 16}, ["token_count", 64]),
    "latent_whole": ({"kv_num_heads": 1, "head_size": 24, "latent_v_head_size": 0}, ["token_count", 96]),
}


@pytest.mark.skipif(runtime_version() < (1, 28), reason="the library leaves it out there")
@pytest.mark.parametrize("form", SHAPES)
def test_shapes_are_inferred(rng: np.random.Generator, form: str) -> None:
    """Risk: a wrong width is propagated silently (packed QKV, LATENT), or symbols are lost."""
    attributes, expected = SHAPES[form]
    case = make_case(rng, k_type=INT8, v_type=FLOAT16, qk_output=1, **attributes)
    shapes = {o.name: (o.shape, o.type) for o in make_session(make_model(case)).get_outputs()}
    assert shapes["output"] == (expected, "tensor(float)")
    cache = ["num_blocks", *case.inputs["key_cache"].shape[1:]]
    assert shapes["key_cache_out"] == (cache, "tensor(int8)")
    if not case.is_latent:
        assert shapes["value_cache_out"] == (cache, "tensor(float16)")
    assert shapes["output_qk"][1] == "tensor(float)"


def test_unknown_dimensions_stay_unknown(rng: np.random.Generator) -> None:
    """Risk: a dimension without a name becomes -1, and every real shape contradicts it."""
    case = make_case(rng, packed=True)
    model = make_model(case)
    for graph_input in model.graph.input:
        for dimension in graph_input.type.tensor_type.shape.dim:
            dimension.Clear()
    session = make_session(model)
    for output in session.get_outputs():
        assert -1 not in output.shape
    check(case, session)


def test_two_sessions_with_other_settings_share_the_library(rng: np.random.Generator) -> None:
    """Risk: the settings of the session that registered last count for all."""
    case = make_case(rng, qk_output=1)
    model = make_model(case)
    limited = make_session(model, {"octavo.output_qk_limit_bytes": "64"})
    free = make_session(model)
    check(case, free)
    with pytest.raises(Exception, match=r"output_qk: at most 64 bytes.*octavo\.output_qk_limit_bytes"):
        run_bound(limited, case)
    check(case, free)


def test_forced_backend(rng: np.random.Generator) -> None:
    """Risk: octavo.backend is ignored."""
    case = make_case(rng)
    check(case, make_session(make_model(case), {"octavo.backend": "cpu_baseline"}))
    with pytest.raises(Exception, match=r"no_such_backend.*octavo\.backend"):
        run_bound(make_session(make_model(case), {"octavo.backend": "no_such_backend"}), case)


def test_explain_names_node_and_backend(rng: np.random.Generator, capfd: pytest.CaptureFixture) -> None:
    """Risk: nobody can tell which backend ran."""
    case = make_case(rng, sink=True)
    model = make_model(case)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("octavo.explain", "1")
    options.register_custom_ops_library(library_path())
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    run_bound(session, case)
    run_bound(session, case)
    log = capfd.readouterr().err
    assert log.count('octavo: node "attention" takes backend cpu_') == 1
    assert "head_sink" in log


SWITCH_SCRIPT = """
import sys
sys.path.insert(0, {path!r})
import numpy as np, onnxruntime
from support import library_path, make_case, make_model, run_bound
case = make_case(np.random.default_rng(1))
options = onnxruntime.SessionOptions()
for entry in {config!r}.items():
    options.add_session_config_entry(*entry)
options.register_custom_ops_library(library_path())
model = make_model(case).SerializeToString()
run_bound(onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]), case)
"""


@pytest.mark.parametrize(
    ("value", "config", "reported"),
    [
        ("1", {}, True),
        ("0", {}, False),
        (None, {}, False),
        ("1", {"octavo.explain": "0"}, False),
        ("0", {"octavo.explain": "1"}, True),
        ("yes", {}, None),
    ],
)
def test_the_debug_switch_of_stock_attention(value: str | None, config: dict, reported: bool | None) -> None:
    """Risk: the switch under which stock reports the choice of its attention kernels leaves out ours, or overrides the
    session's own setting. In a process of its own: ONNX Runtime's C library sees no change of os.environ."""
    name = "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"
    environment = {k: v for k, v in os.environ.items() if k != name} | ({name: value} if value else {})
    script = SWITCH_SCRIPT.format(path=str(Path(__file__).resolve().parent), config=config)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    if reported is None:
        assert done.returncode != 0
        assert f'{name} must be "0" or "1", got "{value}"' in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert ("takes backend cpu_" in done.stderr) == reported, done.stderr


def test_a_second_registration_does_nothing(rng: np.random.Generator) -> None:
    """Risk: a helper and a genai_config.json both register, and the session does not load."""
    case = make_case(rng)
    options = onnxruntime.SessionOptions()
    for _ in range(2):
        options.register_custom_ops_library(library_path())
    model = make_model(case).SerializeToString()
    check(case, onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]))


def test_a_constant_cache_needs_cache_outputs(rng: np.random.Generator) -> None:
    """Risk: without cache outputs every run changes a constant of the model."""
    case = make_case(rng)
    model = make_model(case, cache_outputs=False)
    for name in ("key_cache", "value_cache"):
        model.graph.initializer.append(numpy_helper.from_array(case.inputs[name], name))
    kept = [value for value in model.graph.input if value.name not in ("key_cache", "value_cache")]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    with pytest.raises(Exception, match="key_cache must not be an initializer in a node without cache outputs"):
        make_session(model)
