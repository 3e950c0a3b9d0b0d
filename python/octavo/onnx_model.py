"""Reading what an ONNX file says about its PagedAttention nodes, without its weights."""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper

from .errors import OctavoError

MAX_GRAPH_BYTES = 2 << 30  # protobuf's own limit
# Types of which a byte holds several elements, and how many.
_PACKED = {"INT4": 2, "UINT4": 2, "FLOAT4E2M1": 2, "INT2": 4, "UINT2": 4}

# Indices of PagedAttention's inputs; names as octavo.paged_attention has them.
INPUT_NAMES = (
    "query", "key", "value", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens", "block_table",
    "cos_cache", "sin_cache", "slot_mapping", "head_sink", "q_norm_weight", "k_norm_weight", "k_scale", "v_scale",
    "attention_metadata", "query_positions", "attention_bias",
)  # fmt: skip

Shape = tuple[int | str | None, ...]


@dataclass(frozen=True)
class ValueType:
    """Element type (a TensorProto number) and shape of a value; a dimension is a number, a symbol, or None."""

    element_type: int
    shape: Shape | None


@dataclass(frozen=True)
class PagedNode:
    """One PagedAttention node. inputs: name of the operator's input -> name of the value; absent ones are left out."""

    name: str
    attributes: dict[str, Any]
    inputs: dict[str, str]
    output_count: int


@dataclass(frozen=True)
class Weight:
    """An initializer. place: where its bytes lie; initializers that share them have the same."""

    dims: tuple[int, ...]
    byte_count: int
    place: object


@dataclass(frozen=True)
class User:
    """A node that takes a value. experts_used: its attribute k, where it is a mixture of experts."""

    op_type: str
    experts_used: int


@dataclass
class OnnxModel:
    """The parts of an ONNX file that the tools look at."""

    path: Path
    nodes: list[PagedNode]
    types: dict[str, ValueType]  # of graph inputs, initializers and inferred values
    inputs: dict[str, ValueType]
    outputs: dict[str, ValueType]
    external_bytes: dict[str, int] = field(default_factory=dict)  # data file -> bytes that it must have
    weights: dict[str, Weight] = field(default_factory=dict)
    users: dict[str, list[User]] = field(default_factory=dict)  # value -> the nodes that take it

    def type_of(self, value: str | None) -> ValueType | None:
        return None if value is None else self.types.get(value)


def read_model(path: str | os.PathLike[str]) -> OnnxModel:
    """Reads an ONNX file. Raises OctavoError where it is not one."""
    file = Path(path)
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OctavoError(f"{file} is not a file; give the .onnx file itself.")
        if status.st_size > MAX_GRAPH_BYTES:
            raise OctavoError(f"{file} is larger than 2 GiB, which no ONNX graph file can be.")
        model = onnx.load(file, load_external_data=False)
    except OSError as error:
        raise OctavoError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (DecodeError, UnicodeDecodeError, ValueError) as error:
        raise OctavoError(f"{file} is not an ONNX file, or is damaged: {error}.") from None
    if not model.graph.node:
        raise OctavoError(f"{file} is not an ONNX file, or is damaged: it has no nodes.")
    return _describe(file, model)


def _describe(path: Path, model: onnx.ModelProto) -> OnnxModel:
    graph = model.graph
    inputs = {value.name: _value_type(value) for value in graph.input}
    types = dict(inputs)
    external: dict[str, int] = {}
    weights: dict[str, Weight] = {}
    for tensor in graph.initializer:
        types[tensor.name] = ValueType(tensor.data_type, tuple(tensor.dims))
        weights[tensor.name] = _weight(tensor)
        if tensor.data_location == TensorProto.EXTERNAL:
            location, offset = weights[tensor.name].place
            external[location] = max(external.get(location, 0), offset + weights[tensor.name].byte_count)
    users: dict[str, list[User]] = {}
    for node in graph.node:
        used = next((a.i for a in node.attribute if a.name == "k"), 1)
        for value in node.input:
            users.setdefault(value, []).append(User(node.op_type, used))
    types |= {value.name: _value_type(value) for value in graph.value_info}
    nodes = [_paged_node(node, index) for index, node in enumerate(graph.node) if is_paged_attention(node)]
    outputs = {value.name: _value_type(value) for value in graph.output}
    return OnnxModel(path, nodes, types, inputs, outputs, external, weights, users)


def is_paged_attention(node: onnx.NodeProto) -> bool:
    return node.op_type == "PagedAttention" and node.domain == "com.microsoft"


def _paged_node(node: onnx.NodeProto, index: int) -> PagedNode:
    attributes = {}
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        attributes[attribute.name] = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    inputs = {name: value for name, value in zip(INPUT_NAMES, node.input, strict=False) if value}
    return PagedNode(node.name or f"node {index}", attributes, inputs, len(node.output))


def _weight(tensor: onnx.TensorProto) -> Weight:
    dims = tuple(tensor.dims)
    if tensor.data_location == TensorProto.EXTERNAL:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        place = (str(entries.get("location", "")), _number(entries.get("offset")))
        return Weight(dims, _number(entries.get("length")) or _dense_bytes(tensor), place)  # length is optional
    return Weight(dims, len(tensor.raw_data) or _dense_bytes(tensor), tensor.name)


def _dense_bytes(tensor: onnx.TensorProto) -> int:
    """What a tensor's elements take; 0 where its type is unknown."""
    if tensor.data_type not in helper.get_all_tensor_dtypes() or any(extent < 0 for extent in tensor.dims):
        return 0
    width = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return -(-width * math.prod(tensor.dims) // _PACKED.get(TensorProto.DataType.Name(tensor.data_type), 1))


def _value_type(value: onnx.ValueInfoProto) -> ValueType:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return ValueType(tensor.elem_type, None)
    dims = tensor.shape.dim
    return ValueType(
        tensor.elem_type,
        tuple(d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in dims),
    )


def _number(text: str | None) -> int:
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 20 else 0
