"""Reading what an ONNX file says about its PagedAttention nodes, without its weights."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from onnx import TensorProto, helper

from .errors import OctavoError, shown

MAX_GRAPH_BYTES = 2 << 30  # protobuf's own limit
MAX_NODES = 1 << 18  # with those of functions at every call: a few functions that call each other can make billions
MAX_DEPTH = 64  # graphs within graphs
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
    """One PagedAttention node. inputs: name of the operator's input -> key of the value; absent ones are left out."""

    name: str
    attributes: dict[str, Any]
    inputs: dict[str, str]
    output_count: int
    prefix: str = ""  # of a graph inside another: a branch, a loop's body, a function


@dataclass(frozen=True)
class Weight:
    """An initializer or a constant. place: where its bytes lie; those that share them have the same."""

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
    types: dict[str, ValueType]  # key of a value -> type: of graph inputs, initializers and inferred values
    inputs: dict[str, ValueType]
    outputs: dict[str, ValueType]
    external_bytes: dict[str, int] = field(default_factory=dict)  # data file -> bytes that it must have
    weights: dict[str, Weight] = field(default_factory=dict)
    users: dict[str, list[User]] = field(default_factory=dict)  # value -> the nodes that take it

    def type_of(self, value: str | None) -> ValueType | None:
        return None if value is None else self.types.get(value)


def read_model(path: str | os.PathLike[str]) -> OnnxModel:
    """Reads an ONNX file. Raises OctavoError where it is not one."""
    return describe_proto(path, load_proto(path))


def describe_proto(path: str | os.PathLike[str], model: onnx.ModelProto) -> OnnxModel:
    """What load_proto has read from `path`."""
    return _Reader(Path(path), model).described


ABSOLUTE = "the graph names it by an absolute path, which onnx and onnxruntime refuse"
OUTSIDE = "it is outside the graph's folder, which onnx and onnxruntime refuse"


def why_unreadable(graph: Path, location: str) -> str:
    """Why a file of weights cannot be read, for a message; empty where it can. onnxruntime gives a bare number.

    location: as the graph names it, relative to the folder of the graph's own file, and inside it. Where links lead is
    not looked at: versions of onnxruntime differ in what they take.
    """
    if os.path.isabs(location):
        return ABSOLUTE
    if Path(os.path.normpath(location)).parts[:1] == (os.pardir,):
        return OUTSIDE
    file = graph.parent / location
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # opening a pipe would wait for its other end
            return "it is not a file"
        file.open("rb").close()
    except OSError as error:
        return error.strerror or str(error)
    except ValueError:  # a NUL in the name
        return "no file can have this name"
    return ""


def load_proto(path: str | os.PathLike[str]) -> onnx.ModelProto:
    """An ONNX file without its external data, its names as UTF-8. Raises OctavoError where it is not one."""
    file = Path(path)
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OctavoError(f"{file} is not a file; give the .onnx file itself.")
        if status.st_size > MAX_GRAPH_BYTES:
            raise OctavoError(f"{file} is larger than 2 GiB, which no ONNX graph file can be.")
        # Without `format`, onnx chooses a text format by the file's name.
        model = onnx.load(file, format="protobuf", load_external_data=False)
    except OSError as error:
        raise OctavoError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (DecodeError, UnicodeDecodeError, ValueError) as error:
        raise OctavoError(f"{file} is not an ONNX file, or is damaged: {error}.") from None
    if not model.graph.node:
        raise OctavoError(f"{file} is not an ONNX file, or is damaged: it has no nodes.")
    _make_text(model)
    return model


def _make_text(message: Message) -> None:
    """Escapes what is not UTF-8 in a message's strings, in place: protobuf gives such a string as bytes."""
    for descriptor, value in message.ListFields():
        if descriptor.type == FieldDescriptor.TYPE_MESSAGE:
            for part in [value] if isinstance(value, Message) else value:
                _make_text(part)
        elif descriptor.type == FieldDescriptor.TYPE_STRING:
            if isinstance(value, bytes):
                setattr(message, descriptor.name, value.decode("utf-8", "backslashreplace"))
            elif not isinstance(value, str):
                for index, text in enumerate(value):
                    if isinstance(text, bytes):
                        value[index] = text.decode("utf-8", "backslashreplace")


@dataclass(frozen=True)
class _Scope:
    """Where the names of a graph are looked up.

    prefix: of the keys of values that it defines; none in the main graph. where: the graph, in words, for a node's
    name. source: as prefix, but the same for all calls of a function, whose bytes are in the file once.
    keys: name -> key of what is visible beside the main graph's values, whose names are their keys.
    """

    prefix: str = ""
    where: str = ""
    source: str = ""
    keys: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, onnx.AttributeProto] = field(default_factory=dict)  # of the function's call
    calls: tuple[str, ...] = ()  # functions that are being read
    depth: int = 0

    def key(self, name: str) -> str:
        return self.keys.get(name, name)

    def attribute(self, attribute: onnx.AttributeProto) -> onnx.AttributeProto | None:
        """Itself, or what the function's call gives for it, under its own name; None where that is nothing."""
        if not attribute.ref_attr_name:
            return attribute
        found = self.attributes.get(attribute.ref_attr_name)
        if found is None:
            return None
        given = onnx.AttributeProto()
        given.CopyFrom(found)
        given.name = attribute.name
        return given


class _Reader:
    """Walks a model's graph, the branches and bodies of its control flow, and its functions at every call."""

    def __init__(self, path: Path, model: onnx.ModelProto) -> None:
        graph = model.graph
        self._path, self._left = path, MAX_NODES
        self._functions = {(f.domain, f.name, f.overload): f for f in model.functions}
        inputs = {value.name: _value_type(value) for value in graph.input}
        outputs = {value.name: _value_type(value) for value in graph.output}
        self.described = OnnxModel(path, [], dict(inputs), inputs, outputs)
        self._read_graph(graph, _Scope())

    def _read_graph(self, graph: onnx.GraphProto, scope: _Scope) -> None:
        for tensor in graph.initializer:
            self._add_weight(tensor.name, tensor, scope)
        for sparse in graph.sparse_initializer:
            self._add_weight(sparse.values.name, sparse.values, scope)
            self._add_weight(f"{sparse.values.name} indices", sparse.indices, scope)
        self._add_types(graph.value_info, scope)
        self._read_nodes(graph.node, scope)

    def _read_nodes(self, nodes: Iterable[onnx.NodeProto], scope: _Scope) -> None:
        for index, node in enumerate(nodes):
            self._left -= 1
            if self._left < 0:
                raise OctavoError(f"{self._path}: calls of its functions make more than {MAX_NODES:,} nodes.")
            attributes = [found for a in node.attribute if (found := scope.attribute(a)) is not None]
            if node.op_type == "Constant" and node.domain in ("", "ai.onnx") and node.output:
                self._add_constant(node.output[0], attributes, scope)
            function = self._functions.get((node.domain, node.op_type, node.overload))
            if function is not None:
                self._read_function(function, node, index, scope)
                continue
            used = next((a.i for a in attributes if a.name == "k"), 1)
            for value in node.input:
                self.described.users.setdefault(scope.key(value), []).append(User(node.op_type, used))
            if is_paged_attention(node):
                self.described.nodes.append(_paged_node(node, index, scope))
            for attribute in attributes:
                bodies = [attribute.g, *attribute.graphs] if attribute.HasField("g") else attribute.graphs
                for number, body in enumerate(bodies):
                    what = attribute.name + (f" {number}" if number else "")
                    self._read_body(body, node, f"{what} of {_node_name(node, index)}", index, scope)

    def _read_body(self, body: onnx.GraphProto, node: onnx.NodeProto, where: str, index: int, scope: _Scope) -> None:
        """The body of a loop whose input has no type of its own takes the value that the loop starts with."""
        inner = self._inside(scope, where, index, scope.source)
        defined = [
            *(value.name for value in body.input),
            *(tensor.name for tensor in body.initializer),
            *(sparse.values.name for sparse in body.sparse_initializer),
            *(output for part in body.node for output in part.output),
        ]
        inner.keys.update(scope.keys | {name: inner.prefix + name for name in defined})
        self._add_types(body.input, inner)
        if node.op_type == "Loop":
            for value, given in zip(body.input, node.input, strict=False):
                known = self.described.type_of(scope.key(given))
                if known is not None and _value_type(value).shape is None:
                    self.described.types[inner.key(value.name)] = known
        self._read_graph(body, inner)

    def _read_function(self, function: onnx.FunctionProto, node: onnx.NodeProto, index: int, scope: _Scope) -> None:
        name = ":".join(filter(None, (f"{function.domain}::{function.name}", function.overload)))
        if name in scope.calls:
            raise OctavoError(f"{self._path}: function {shown(name)} calls itself.")
        inner = self._inside(scope, f"{function.name} called by {_node_name(node, index)}", index, f"{name}/")
        inner = replace(inner, calls=(*scope.calls, name), attributes={a.name: a for a in function.attribute_proto})
        for attribute in node.attribute:
            given = scope.attribute(attribute)
            if given is not None:
                inner.attributes[attribute.name] = given
        inner.keys.update({output: inner.prefix + output for part in function.node for output in part.output})
        inner.keys.update({formal: scope.key(a) for formal, a in zip(function.input, node.input, strict=False)})
        self._add_types(function.value_info, inner)
        self._read_nodes(function.node, inner)

    def _add_types(self, values: Iterable[onnx.ValueInfoProto], scope: _Scope) -> None:
        self.described.types |= {scope.key(value.name): _value_type(value) for value in values}

    def _add_constant(self, output: str, attributes: list[onnx.AttributeProto], scope: _Scope) -> None:
        for attribute in attributes:
            if attribute.name == "value":
                self._add_weight(output, attribute.t, scope)
            elif attribute.name == "sparse_value":
                self._add_weight(output, attribute.sparse_tensor.values, scope)
                self._add_weight(f"{output} indices", attribute.sparse_tensor.indices, scope)
            elif attribute.name in ("value_float", "value_floats", "value_int", "value_ints"):
                kind = TensorProto.FLOAT if "float" in attribute.name else TensorProto.INT64
                count = len(attribute.floats) + len(attribute.ints) or 1
                dims = [count] if attribute.name.endswith("s") else []
                self._add_weight(output, TensorProto(data_type=kind, dims=dims), scope)

    def _add_weight(self, name: str, tensor: TensorProto, scope: _Scope) -> None:
        key, weight = scope.key(name), _weight(tensor, scope.source + name)
        self.described.types[key] = ValueType(tensor.data_type, tuple(tensor.dims))
        self.described.weights[key] = weight
        if tensor.data_location == TensorProto.EXTERNAL:
            location, offset = weight.place
            external = self.described.external_bytes
            external[location] = max(external.get(location, 0), offset + weight.byte_count)

    def _inside(self, scope: _Scope, where: str, index: int, source: str) -> _Scope:
        """The scope of a graph inside a node of another, with no names yet."""
        if scope.depth == MAX_DEPTH:
            raise OctavoError(f"{self._path}: more than {MAX_DEPTH} branches, bodies and calls within each other.")
        prefix = f"{scope.prefix}{index} {where}/"
        place = source if source != scope.source else f"{source}{index} {where}/"
        full = where + (f" in {scope.where}" if scope.where else "")
        return replace(scope, prefix=prefix, where=full, source=place, keys={}, depth=scope.depth + 1)


def _node_name(node: onnx.NodeProto, index: int) -> str:
    return f"{node.op_type} {node.name or f'node {index}'}"


def is_paged_attention(node: onnx.NodeProto) -> bool:
    return node.op_type == "PagedAttention" and node.domain == "com.microsoft"


def _paged_node(node: onnx.NodeProto, index: int, scope: _Scope) -> PagedNode:
    attributes = {}
    for attribute in node.attribute:
        given = scope.attribute(attribute)
        if given is None:
            continue  # the operator's default
        value = helper.get_attribute_value(given)
        attributes[attribute.name] = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    inputs = {name: scope.key(value) for name, value in zip(INPUT_NAMES, node.input, strict=False) if value}
    name = node.name or f"node {index}"
    inside = f" (in {scope.where})" if scope.where else ""
    return PagedNode(name + inside, attributes, inputs, len(node.output), scope.prefix)


def _weight(tensor: onnx.TensorProto, place: str) -> Weight:
    dims = tuple(tensor.dims)
    if tensor.data_location == TensorProto.EXTERNAL:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        where = (str(entries.get("location", "")), _number(entries.get("offset")))
        return Weight(dims, _number(entries.get("length")) or _dense_bytes(tensor), where)  # length is optional
    return Weight(dims, len(tensor.raw_data) or _dense_bytes(tensor), place)


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
