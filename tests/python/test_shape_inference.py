"""octavo.shape_inference on symbolic models. Risks: a wrong width, a symbol that is lost, a schema that disagrees."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import octavo.shape_inference
from octavo.explain import ATTRIBUTES
from octavo.onnx_model import INPUT_NAMES
from octavo.shape_inference import _DEFAULTS

HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 8, 2, 64, 16
INT32 = ("cumulative_sequence_length", "past_seqlens", "block_table", "slot_mapping", "attention_metadata")
INT32 += ("query_positions",)


@pytest.fixture(autouse=True)
def registered() -> None:
    octavo.shape_inference.register()
    octavo.shape_inference.register()


def model(
    without: tuple[str, ...] = ("key", "value"),
    outputs: int = 3,
    element: int = TensorProto.FLOAT16,
    cache: int | None = None,
    metadata: list[int] | None = None,
    dims: dict[str, list[Any]] | None = None,
    **attributes: Any,
) -> onnx.ModelProto:
    """PagedAttention on symbolic inputs, and a Cast of its output and an Identity of output_qk. Default: packed QKV."""
    rows = (HEADS + 2 * KV_HEADS if "key" in without else HEADS) * HEAD_SIZE
    shapes: dict[str, list[Any]] = {
        "query": ["tokens", rows],
        "key": ["tokens", KV_HEADS * HEAD_SIZE],
        "value": ["tokens", KV_HEADS * HEAD_SIZE],
        "key_cache": ["blocks", BLOCK, KV_HEADS, HEAD_SIZE],
        "value_cache": ["blocks", BLOCK, KV_HEADS, HEAD_SIZE],
        "cumulative_sequence_length": ["batch_plus_1"],
        "past_seqlens": ["batch"],
        "block_table": ["batch", "table_width"],
        **(dims or {}),
    }
    shapes = {name: shape for name, shape in shapes.items() if name not in without}
    types = {name: TensorProto.INT32 if name in INT32 else element for name in INPUT_NAMES}
    types |= dict.fromkeys(("key_cache", "value_cache"), element if cache is None else cache)
    names = [name if name in shapes else "" for name in INPUT_NAMES]
    initializers = []
    if metadata is not None:
        names[INPUT_NAMES.index("attention_metadata")] = "attention_metadata"
        initializers.append(numpy_helper.from_array(np.array(metadata, np.int32), "attention_metadata"))
    while not names[-1]:
        names.pop()
    made = ["output", "key_cache_out", "value_cache_out", "output_qk"][:outputs]
    if "value_cache" in without and outputs > 2:
        made[2] = ""
    attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, **attributes}
    attributes = {name: value for name, value in attributes.items() if value is not None}
    nodes = [
        helper.make_node("PagedAttention", names, made, domain="com.microsoft", **attributes),
        helper.make_node("Cast", ["output"], ["after"], to=TensorProto.FLOAT),
    ]
    values = [helper.make_tensor_value_info(name, types[name], shape) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "g", values, [onnx.ValueInfoProto(name="after")], initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def inferred(made: onnx.ModelProto) -> dict[str, tuple[int, list[Any]]]:
    """Value -> (element type, extents)."""
    graph = onnx.shape_inference.infer_shapes(made, strict_mode=True).graph
    found = {}
    for value in [*graph.value_info, *graph.output]:
        tensor = value.type.tensor_type
        found[value.name] = (tensor.elem_type, [d.dim_param or d.dim_value or None for d in tensor.shape.dim])
    return found


CACHE = ["blocks", BLOCK, KV_HEADS, HEAD_SIZE]


@pytest.mark.parametrize("without", [(), ("key", "value")])
@pytest.mark.parametrize("element", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_separate_and_packed(without: tuple[str, ...], element: int) -> None:
    made = model(without, element=element, cache=TensorProto.FLOAT8E4M3FN)
    assert len(made.graph.node[0].input) == 8
    found = inferred(made)
    assert found["output"] == (element, ["tokens", HEADS * HEAD_SIZE])
    assert found["after"] == (TensorProto.FLOAT, ["tokens", HEADS * HEAD_SIZE])
    assert found["key_cache_out"] == found["value_cache_out"] == (TensorProto.FLOAT8E4M3FN, CACHE)


def test_eighteen_and_nineteen_inputs() -> None:
    for name, shape in (("query_positions", ["tokens"]), ("attention_bias", [1, 1, "new", "context"])):
        made = model(dims={name: shape})
        assert len(made.graph.node[0].input) == INPUT_NAMES.index(name) + 1
        assert inferred(made)["output"] == (TensorProto.FLOAT16, ["tokens", HEADS * HEAD_SIZE])


@pytest.mark.parametrize(("v_head_size", "width"), [(0, HEADS * 576), (512, HEADS * 512)])
def test_latent(v_head_size: int, width: int) -> None:
    made = model(
        ("value", "value_cache"),
        outputs=4,
        dims={
            "query": ["tokens", HEADS * 576],
            "key": ["tokens", 576],
            "key_cache": ["blocks", BLOCK, 1, 576],
        },
        kv_num_heads=1,
        kv_cache_layout="LATENT",
        v_head_size=v_head_size,
        qk_output=2,
    )
    found = inferred(made)
    assert found["output"] == (TensorProto.FLOAT16, ["tokens", width])
    assert found["key_cache_out"] == (TensorProto.FLOAT16, ["blocks", BLOCK, 1, 576])
    assert found["output_qk"][1] == [HEADS, "tokens", "16*table_width"]


@pytest.mark.parametrize(
    ("dims", "metadata", "context"),
    [
        ({}, None, "16*table_width"),
        ({"block_table": ["batch", 20]}, None, 320),
        ({"block_table": ["batch", 20], "key_cache": ["blocks", "block", KV_HEADS, HEAD_SIZE]}, None, "20*block"),
        ({"block_table": ["batch", 20]}, [1, 100, 100], 100),
        ({"block_table": ["batch", 20]}, [1, 1000, 100], 320),
        ({"block_table": ["batch", 20]}, [0, 0, 0], 320),
        ({}, [1, 100, 100], None),
        ({"attention_metadata": [3]}, None, None),  # fed at run time
    ],
)
def test_output_qk(dims: dict[str, list[Any]], metadata: list[int] | None, context: int | str | None) -> None:
    found = inferred(model(outputs=4, dims=dims, metadata=metadata, qk_output=1))
    heads, tokens, length = found["output_qk"][1]
    assert (heads, tokens) == (HEADS, "tokens")
    assert length == context if context is not None else length.startswith("unk__")  # onnx's name for what is unknown


def test_output_qk_keeps_the_declared_type() -> None:
    made = model(outputs=4, qk_output=1)
    made.graph.output.append(helper.make_tensor_value_info("output_qk", TensorProto.BFLOAT16, None))
    assert inferred(made)["output_qk"] == (TensorProto.BFLOAT16, [HEADS, "tokens", "16*table_width"])


def test_symbolic_widths() -> None:
    separate = model((), dims={"query": ["tokens", "hidden"]})
    assert inferred(separate)["output"][1] == ["tokens", "hidden"]
    packed = model(dims={"query": ["tokens", "qkv"]})
    assert inferred(packed)["output"][1] == ["tokens", HEADS * HEAD_SIZE]
    int4 = {"query": ["tokens", "qkv"], "key_cache": ["blocks", BLOCK, KV_HEADS, HEAD_SIZE // 2]}
    quantised = model(cache=TensorProto.UINT8, dims=int4, k_cache_dtype="int4", k_quant_type="PER_TENSOR")
    assert inferred(quantised)["output"][1] == ["tokens", HEADS * HEAD_SIZE]
    unknown = {"query": ["tokens", "qkv"], "key_cache": ["blocks", BLOCK, KV_HEADS, "width"]}
    assert inferred(model(dims=unknown))["output"][1] == ["tokens", "8*width"]


def test_wrong_ranks_are_named() -> None:
    with pytest.raises(onnx.shape_inference.InferenceError, match="query must have 2 dimensions, it has 3"):
        inferred(model(dims={"query": ["batch", "tokens", 768]}))


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"num_heads": None}, "num_heads must be an integer from 1; it is missing"),
        ({"kv_num_heads": None}, "kv_num_heads must be an integer from 1; it is missing"),
        ({"num_heads": 0, "kv_num_heads": 0}, "num_heads must be an integer from 1; it is 0"),
        ({"kv_num_heads": -4}, "kv_num_heads must be an integer from 1; it is -4"),
        ({"num_heads": "8"}, "num_heads must be an integer from 1; it is '8'"),
        ({"kv_num_heads": [2]}, "kv_num_heads must be an integer from 1; it is "),
        ({"kv_cache_layout": "LATENT", "v_head_size": "512"}, "v_head_size must be an integer from 0; it is '512'"),
        ({"kv_cache_layout": "LATENT", "v_head_size": -1}, "v_head_size must be an integer from 0; it is -1"),
    ],
)
def test_wrong_attributes_are_named(attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(onnx.shape_inference.InferenceError, match=words):
        inferred(model(**attributes))


def test_wrong_metadata_is_no_traceback() -> None:
    made = model(outputs=4, metadata=[0, 0, 0], qk_output=1)
    table = numpy_helper.from_array(np.zeros((2, 3), np.int32), "attention_metadata")
    words = numpy_helper.from_array(np.array(["a", "b"], object), "attention_metadata")
    made.graph.initializer[0].CopyFrom(table)
    with pytest.raises(onnx.shape_inference.InferenceError, match="attention_metadata must have 1 dimensions"):
        inferred(made)
    made.graph.initializer[0].CopyFrom(words)
    assert inferred(made)["output_qk"][1][2].startswith("unk__")


def test_the_checker_knows_the_operator() -> None:
    whole = onnx.shape_inference.infer_shapes(model())
    onnx.checker.check_model(whole, full_check=True)
    whole.graph.node[0].attribute.append(helper.make_attribute("sotfcap", 30.0))
    with pytest.raises(onnx.checker.ValidationError, match="sotfcap"):
        onnx.checker.check_model(whole)
    del whole.graph.node[0].attribute[:]
    with pytest.raises(onnx.checker.ValidationError, match="num_heads"):
        onnx.checker.check_model(whole)


def test_attributes_and_defaults_are_the_operators() -> None:
    assert set(_DEFAULTS) == set(ATTRIBUTES)
    attention = pytest.importorskip("octavo.attention")
    parameters = inspect.signature(attention.paged_attention).parameters
    for name, default in _DEFAULTS.items():
        assert parameters[name].default == (inspect.Parameter.empty if default is None else default), name


def test_reached_from_the_package_alone() -> None:
    """Risk: the README's line works only after something else has imported the module."""
    subprocess.run([sys.executable, "-c", "import octavo; octavo.shape_inference.register()"], check=True)
