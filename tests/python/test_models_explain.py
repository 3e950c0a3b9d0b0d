"""octavo explain on graphs of other makers. Risk: a feature is overlooked, or an odd graph ends in a traceback."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import octavo
from octavo.doctor import Finding
from octavo.errors import OctavoError
from octavo.explain import ATTRIBUTES, describe, unknown_attributes
from octavo.onnx_model import read_model
from octavo.sizes import DEFAULT_BLOCK_SIZE, shown_bytes

pytest.importorskip("octavo._core", reason="octavo's compiled extension is not installed")

FLOAT_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 8, 2, 64, 32


def graph(
    path: Path,
    *,
    element: int = TensorProto.FLOAT,
    cache: int | None = None,
    cache_width: int = HEAD_SIZE,
    inputs: dict[str, list[int | str]] | None = None,
    without: tuple[str, ...] = (),
    **attributes: Any,
) -> Path:
    """Writes a model of one PagedAttention node. inputs: optional input -> shape; absent: packed QKV, cache of T."""
    from octavo.onnx_model import INPUT_NAMES

    rows = attributes.pop("query_rows", HEADS + 2 * KV_HEADS) * HEAD_SIZE
    shapes: dict[str, list[int | str] | None] = {
        "query": ["tokens", rows],
        "key_cache": ["blocks", BLOCK_SIZE, KV_HEADS, cache_width],
        "value_cache": ["blocks", BLOCK_SIZE, KV_HEADS, cache_width],
        "cumulative_sequence_length": ["batch_plus_1"],
        "past_seqlens": ["batch"],
        "block_table": ["batch", "width"],
        **(inputs or {}),
    }
    types = dict.fromkeys(shapes, element)
    types |= dict.fromkeys(("key_cache", "value_cache"), element if cache is None else cache)
    types |= dict.fromkeys(("k_scale", "v_scale"), TensorProto.FLOAT)
    integers = ("cumulative_sequence_length", "past_seqlens", "block_table", "slot_mapping", "query_positions")
    types |= dict.fromkeys((*integers, "attention_metadata"), TensorProto.INT32)
    present = [name for name in shapes if name not in without]
    values = [helper.make_tensor_value_info(name, types[name], shapes[name]) for name in present]
    names = [name if name in present else "" for name in INPUT_NAMES]
    while not names[-1]:
        names.pop()
    attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, **attributes}
    node = helper.make_node("PagedAttention", names, ["output"], "attn", domain="com.microsoft", **attributes)
    output = helper.make_tensor_value_info("output", element, ["tokens", HEADS * HEAD_SIZE])
    model = helper.make_model(helper.make_graph([node], "g", values, [output]))
    path.write_bytes(model.SerializeToString())
    return path


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": ({}, ["float32 with a cache of float32", "blocks      32 tokens", "packed_qkv"]),
    "half": ({"element": TensorProto.FLOAT16}, ["float16 with a cache of float16"]),
    "separate": (
        {"query_rows": HEADS, "inputs": {name: ["tokens", KV_HEADS * HEAD_SIZE] for name in ("key", "value")}},
        ["features    none"],
    ),
    "window, softcap, sink": (
        {"local_window_size": 128, "softcap": 30.0, "inputs": {"head_sink": [HEADS]}},
        ["head_sink", "softcap", "local_window"],
    ),
    "rotation, norms, slots, positions, metadata": (
        {
            "do_rotary": 1,
            "inputs": {
                "cos_cache": [128, HEAD_SIZE // 2],
                "sin_cache": [128, HEAD_SIZE // 2],
                "slot_mapping": ["tokens"],
                "q_norm_weight": [HEAD_SIZE],
                "k_norm_weight": [HEAD_SIZE],
                "attention_metadata": [2],
                "query_positions": ["tokens"],
            },
        },
        ["rope", "qk_norm", "slot_mapping", "query_positions"],
    ),
    "int8 and bias": (
        {
            "cache": TensorProto.INT8,
            "k_quant_type": "PER_CHANNEL",
            "v_quant_type": "PER_TENSOR",
            "k_cache_dtype": "int8",
            "v_cache_dtype": "int8",
            "inputs": {"k_scale": [KV_HEADS, 1, HEAD_SIZE], "v_scale": [1], "attention_bias": ["b", "n", "q", "c"]},
        },
        ["int8 (PER_CHANNEL) and int8 (PER_TENSOR)", "quantized_cache", "per_channel_scale", "attention_bias"],
    ),
    "four bits": (
        {
            "cache": TensorProto.UINT8,
            "cache_width": HEAD_SIZE // 2,
            "k_quant_type": "PER_TENSOR",
            "v_quant_type": "PER_TENSOR",
            "k_cache_dtype": "int4",
            "v_cache_dtype": "int4",
            "inputs": {"k_scale": [1], "v_scale": [1]},
        },
        ["int4 (PER_TENSOR)", "four_bit_cache"],
    ),
    "latent": (
        {
            "query_rows": HEADS,
            "inputs": {"key": ["tokens", KV_HEADS * HEAD_SIZE]},
            "without": ("value_cache",),
            "kv_cache_layout": "LATENT",
            "v_head_size": 48,
            "scale": 0.125,
        },
        ["latent"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_features_are_named_and_a_backend_is_taken(tmp_path: Path, name: str) -> None:
    options, words = CASES[name]
    found = describe(graph(tmp_path / "m.onnx", **options))
    assert not found.refusals
    report = found.text()
    for word in ("8 query, 2 KV", "backend     cpu", *words):
        assert word in report, report


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"softcap": -1.0}, "softcap"),
        ({"local_window_size": 0}, "local_window_size"),
        ({"do_rotary": 1}, "cos_cache"),
        ({"num_heads": 7}, "num_heads"),
        ({"num_heads": 0}, "num_heads must be a positive number"),
        ({"softcap": 1}, "softcap must be of type float"),
        ({"cache_width": 0}, "head size"),
    ],
)
def test_what_octavo_would_refuse_is_said(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    found = describe(graph(tmp_path / "m.onnx", **options))
    report = found.text()
    assert words in report and ("refused" in report or "cannot be explained" in report), report
    (refusal,) = found.refusals
    assert words in refusal


def test_the_error_class_is_public(tmp_path: Path) -> None:
    with pytest.raises(octavo.OctavoError):
        describe(tmp_path / "absent.onnx")


def test_misspelt_attributes_are_listed(tmp_path: Path) -> None:
    """ONNX Runtime drops them without a word; the rest of the node is explained as it will run."""
    path = graph(tmp_path / "m.onnx", sotfcap=30.0, zebra=[1], softcap=20.0)
    report = describe(path).text()
    assert "ignored     sotfcap" in report and "did you mean softcap?" in report
    assert "ignored     zebra" in report and report.count("did you mean") == 1
    assert "features" in report and "backend     cpu" in report
    assert unknown_attributes(read_model(path).nodes[0]) == {"sotfcap": "softcap", "zebra": ""}


def test_names_cannot_steer_a_terminal(tmp_path: Path) -> None:
    model = onnx.load(graph(tmp_path / "m.onnx", k_cache_dtype="in\x1bt4"))
    node = model.graph.node[0]
    node.name = "attn\x1b[2J"
    node.attribute.append(helper.make_attribute("zebra\x1b]0;x\x07\nnext", 1))
    onnx.save(model, tmp_path / "m.onnx")
    report = describe(tmp_path / "m.onnx")
    assert all(line.isprintable() for line in report.text().splitlines())
    assert "\nattn\\x1b[2J\n" in report.text() and "ignored     zebra\\x1b]0;x\\x07\\nnext: " in report.text()
    assert report.groups[0][0] == ["attn\x1b[2J"]  # JSON escapes by itself
    assert Finding("attributes", False, "zebra\x1b[2J", "remove it").rich_text() == (
        "zebra\\x1b[2J\n[bold]remove it[/]"
    )


@pytest.mark.parametrize("number", [*range(30), 99, -1])
def test_every_element_type_of_a_cache_is_answered(tmp_path: Path, number: int) -> None:
    """Risk: a type that ONNX does not have, or that holds no numbers, ends in a traceback."""
    text = describe(graph(tmp_path / "m.onnx", cache=number)).text()
    assert ("backend     cpu" in text) == (number in FLOAT_TYPES), text
    if number in (0, 99, -1):
        assert f"cannot be explained: attn: key_cache has element type {number}, which is none of ONNX." in text


def test_a_node_without_key_cache(tmp_path: Path) -> None:
    report = describe(graph(tmp_path / "m.onnx", without=("key_cache",)))
    assert "the graph does not tell the type and the four dimensions of key_cache" in report.text()
    assert report.sizes is None and report.sizes_problem == "attn: the node has no key_cache."


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_heads": 65_536, "cache_width": 1 << 20}, "query would have 1 x 68723671040 elements"),
        ({"kv_num_heads": 65_536, "cache_width": 128}, "key_cache would have 2 x 32 x 65536 x 128 elements"),
        ({"num_heads": 65_537}, "num_heads must be a positive number; the node has 65537."),
    ],
)
def test_sizes_beyond_memory(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    assert words in describe(graph(tmp_path / "m.onnx", **options)).text()


@pytest.mark.parametrize("name", ["local_window_size", "v_head_size", "rotary_offset", "qk_output", "do_rotary"])
@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), 2**31])
def test_huge_attributes_are_answered(tmp_path: Path, name: str, value: int) -> None:
    text = describe(graph(tmp_path / "m.onnx", **{name: value})).text()
    assert "refused" in text or "cannot be explained" in text or "backend" in text


def test_every_attribute_of_the_operator_is_known() -> None:
    assert set(ATTRIBUTES) < set(inspect.signature(octavo.paged_attention).parameters)
    assert len(ATTRIBUTES) == 17


def test_models_without_paged_attention(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    node = helper.make_node("Identity", ["x"], ["y"])
    model = helper.make_model(helper.make_graph([node], "g", [value], [out]))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(OctavoError, match=r"no com\.microsoft::PagedAttention"):
        describe(tmp_path / "m.onnx")


def test_unlike_nodes_are_told_apart(tmp_path: Path) -> None:
    one = onnx.load(graph(tmp_path / "m.onnx"))
    other = onnx.load(graph(tmp_path / "w.onnx", local_window_size=64)).graph.node[0]
    other.name, other.output[0] = "windowed", "output2"
    one.graph.node.append(other)
    (tmp_path / "m.onnx").write_bytes(one.SerializeToString())
    report = describe(tmp_path / "m.onnx").text()
    assert "2 PagedAttention nodes" in report and "\nattn\n" in report and "\nwindowed\n" in report


def test_sizes_follow_windows_and_experts(tmp_path: Path) -> None:
    """A step reads the window's tokens of a windowed layer, and of experts those that its tokens may choose."""
    model = onnx.load(graph(tmp_path / "m.onnx", local_window_size=100))
    stacked = onnx.numpy_helper.from_array(np.zeros((8, 16, 4), np.float32), "experts")
    table = onnx.numpy_helper.from_array(np.zeros((50, 4), np.float16), "table")
    model.graph.initializer.extend([stacked, table])
    model.graph.node.append(helper.make_node("MoE", ["x", "r", "experts"], ["y"], domain="com.microsoft", k=2))
    model.graph.node.append(helper.make_node("Gather", ["table", "ids"], ["z"]))
    onnx.save(model, tmp_path / "m.onnx")
    row = 2 * KV_HEADS * HEAD_SIZE * 4
    for batch, share in ((1, 2), (3, 6), (5, 8)):
        sizes = describe(tmp_path / "m.onnx", context=1000, batch=batch).sizes
        assert sizes.weights == 8 * 16 * 4 * 4 + 50 * 4 * 2 and sizes.weights_read == share * 16 * 4 * 4
        assert (sizes.cache_token, sizes.cache_sequence) == (row, 32 * 32 * row)
        assert (sizes.cache_read, sizes.cache_written) == (batch * 100 * row, batch * row)


@pytest.mark.parametrize(
    ("element", "length", "expected"),
    [
        (TensorProto.FLOAT16, None, 30),
        (TensorProto.INT4, None, 8),
        (TensorProto.FLOAT16, 64, 64),
        (TensorProto.UNDEFINED, None, 0),
    ],
)
def test_external_data_without_a_length(tmp_path: Path, element: int, length: int | None, expected: int) -> None:
    model = onnx.load(graph(tmp_path / "m.onnx"))
    tensor = model.graph.initializer.add(name="w", data_type=element, dims=[3, 5], data_location=TensorProto.EXTERNAL)
    entries = {"location": "m.data", "offset": "4096"} | ({} if length is None else {"length": str(length)})
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    found = read_model(tmp_path / "m.onnx")
    assert found.weights["w"].byte_count == expected and found.external_bytes == {"m.data": 4096 + expected}


def test_an_unknown_block_size_is_the_default(tmp_path: Path) -> None:
    model = onnx.load(graph(tmp_path / "m.onnx"))
    for value in model.graph.input[1:3]:
        value.type.tensor_type.shape.dim[1].dim_param = "block"
    onnx.save(model, tmp_path / "m.onnx")
    report = describe(tmp_path / "m.onnx", context=17)
    assert report.groups[0][1].block_size == DEFAULT_BLOCK_SIZE
    assert report.sizes.cache_sequence == 2 * DEFAULT_BLOCK_SIZE * report.sizes.cache_token


def test_unknown_sizes_are_said(tmp_path: Path) -> None:
    model = onnx.load(graph(tmp_path / "m.onnx"))
    model.graph.input[1].type.tensor_type.shape.dim[2].dim_param = "heads"
    onnx.save(model, tmp_path / "m.onnx")
    report = describe(tmp_path / "m.onnx")
    assert report.sizes is None and "unknown: attn: the graph does not tell" in report.text()
    assert report.as_json()["sizes_problem"]


@pytest.mark.parametrize(
    ("count", "text"), [(512, "512 bytes"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3.0 TiB")]
)
def test_shown_bytes(count: int, text: str) -> None:
    assert shown_bytes(count) == text


def inner_model(tmp_path: Path, kind: str) -> Path:
    """A model whose PagedAttention lies inside an If (in both branches), a Loop or a function that is called twice.

    It reads a weight of 6 floats from a Constant beside it, and one of 10 floats from the main graph.
    """
    outer = onnx.load(graph(tmp_path / "plain.onnx"))
    attention = outer.graph.node[0]
    weight = onnx.numpy_helper.from_array(np.zeros(6, np.float32), "")
    constant = helper.make_node("Constant", [], ["inner_weight"], value=weight)
    reader = helper.make_node("Add", ["inner_weight", "outer_weight"], ["sum"])
    parts = [constant, reader, attention]
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, None)
    body = helper.make_graph(parts, "body", [], [output])
    del outer.graph.node[:]
    outer.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(10, np.float32), "outer_weight"))
    if kind == "If":
        node = helper.make_node("If", ["cond"], ["output"], "choice", then_branch=body, else_branch=body)
        outer.graph.node.append(node)
    elif kind == "Loop":
        outer.graph.node.append(helper.make_node("Loop", ["count", "cond"], ["output"], "rounds", body=body))
    else:
        attention.input[0] = "q"
        attention.attribute[0].ref_attr_name = "heads"
        attention.attribute[0].ClearField("i")
        formal = ["q", *attention.input[1:], "outer_weight"]
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        function = helper.make_function(
            "local", "layer", [f for f in formal if f], ["output"], parts, opsets, ["heads"]
        )
        outer.functions.append(function)
        actual = ["query", *(f for f in formal[1:] if f)]
        for name in ("first", "second"):
            outer.graph.node.append(helper.make_node("layer", actual, [name], name, domain="local", heads=HEADS))
    path = tmp_path / "m.onnx"
    path.write_bytes(outer.SerializeToString())
    return path


@pytest.mark.parametrize(
    ("kind", "names", "constants"),
    [
        ("If", ["attn (in then_branch of If choice)", "attn (in else_branch of If choice)"], 2),
        ("Loop", ["attn (in body of Loop rounds)"], 1),
        ("function", ["attn (in layer called by layer first)", "attn (in layer called by layer second)"], 1),
    ],
)
def test_nodes_and_weights_inside_others(tmp_path: Path, kind: str, names: list[str], constants: int) -> None:
    """Risk: what control flow and functions hold is left out, and a function's bytes count at every call."""
    report = describe(inner_model(tmp_path, kind), context=100)
    assert sorted(report.groups[0][0]) == sorted(names) and len(report.groups) == 1 and not report.refusals
    assert report.groups[0][1].num_heads == HEADS
    assert report.sizes.weights == report.sizes.weights_read == (6 * constants + 10) * 4
    assert report.sizes.cache_token == 2 * KV_HEADS * HEAD_SIZE * 4  # both branches and calls name one cache


def test_functions_that_call_without_end(tmp_path: Path) -> None:
    model = onnx.load(graph(tmp_path / "m.onnx"))
    opsets = [helper.make_opsetid("local", 1)]
    for name, called in (("a", "b"), ("b", "a")):
        node = helper.make_node(called, [], ["y"], domain="local")
        model.functions.append(helper.make_function("local", name, [], ["y"], [node], opsets))
    model.graph.node.append(helper.make_node("a", [], ["z"], domain="local"))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(OctavoError, match="function local::a calls itself"):
        describe(tmp_path / "m.onnx")
    del model.functions[:]
    for level in range(60):
        nodes = [helper.make_node(f"f{level + 1}", [], [name], domain="local") for name in "xy"]
        model.functions.append(helper.make_function("local", f"f{level}", [], ["y"], nodes, opsets))
    model.graph.node[-1].op_type = "f0"
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(OctavoError, match="more than 262,144 nodes"):
        describe(tmp_path / "m.onnx")


def test_functions_within_functions_end(tmp_path: Path) -> None:
    """Risks: Python's own limit, as a traceback; an overload that calls another, taken for one that calls itself."""
    model = onnx.load(graph(tmp_path / "m.onnx"))
    opsets = [helper.make_opsetid("local", 1)]
    for level in range(70):
        called = helper.make_node("f", [], ["y"], domain="local", overload=str(level + 1))
        model.functions.append(helper.make_function("local", "f", [], ["y"], [called], opsets, overload=str(level)))
    model.graph.node.append(helper.make_node("f", [], ["z"], domain="local", overload="40"))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert len(describe(tmp_path / "m.onnx").groups) == 1
    model.graph.node[-1].overload = "0"
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(OctavoError, match="more than 64 branches, bodies and calls"):
        describe(tmp_path / "m.onnx")


def test_attributes_that_a_call_names_otherwise(tmp_path: Path) -> None:
    """Risk: a weight given by a function's call is not counted, since it has the caller's name there."""
    model = onnx.load(graph(tmp_path / "m.onnx"))
    constant = helper.make_node("Constant", [], ["y"])
    constant.attribute.add(name="value", ref_attr_name="w", type=onnx.AttributeProto.TENSOR)
    opsets = [helper.make_opsetid("", 21)]
    model.functions.append(helper.make_function("local", "f", [], ["y"], [constant], opsets, ["w"]))
    weight = onnx.numpy_helper.from_array(np.zeros(6, np.float32), "")
    model.graph.node.append(helper.make_node("f", [], ["z"], domain="local", w=weight))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert describe(tmp_path / "m.onnx").sizes.weights == 6 * 4


def test_weights_of_every_kind_count(tmp_path: Path) -> None:
    model = onnx.load(graph(tmp_path / "m.onnx"))
    model.graph.node.append(helper.make_node("Constant", [], ["a"], value_floats=[1.0, 2.0, 3.0]))
    model.graph.node.append(helper.make_node("Constant", [], ["b"], value_int=7))
    values = onnx.numpy_helper.from_array(np.ones(4, np.float16), "sparse")
    indices = onnx.numpy_helper.from_array(np.arange(4), "")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [100]))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert describe(tmp_path / "m.onnx").sizes.weights == 3 * 4 + 8 + 4 * 2 + 4 * 8


@pytest.mark.parametrize("name", ["tokenizer.json", "m.onnxjson", "m.textproto", "m.pbtxt", "m.onnxtxt", "m.txt"])
def test_the_format_does_not_follow_from_the_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"graph": 3')
    with pytest.raises(OctavoError, match="is not an ONNX file, or is damaged"):
        describe(tmp_path / name)
    assert not describe(graph(tmp_path / name)).refusals


@pytest.mark.parametrize("what", [b"zebra", b"attn", b"query"])
def test_names_that_are_not_utf8(tmp_path: Path, what: bytes) -> None:
    """Protobuf gives them as bytes, where everything else is text."""
    path = graph(tmp_path / "m.onnx", zebra=1)
    path.write_bytes(path.read_bytes().replace(what, what[:-1] + b"\xff"))
    report = describe(path)
    text = report.text()
    shown = what.decode()[:-1] + r"\xff"
    assert (shown in text) == (what != b"query") and not report.refusals
    assert all(isinstance(name, str) for name in unknown_attributes(read_model(path).nodes[0]))
