"""com.microsoft::PagedAttention for the package onnx: its schema, with inference of types and symbolic shapes.

    octavo.shape_inference.register()
    model = onnx.shape_inference.infer_shapes(model)

Afterwards the outputs of PagedAttention, and what follows from them, have types and shapes in terms of the model's own
symbols. onnx.checker.check_model then knows the operator, too: it refuses misspelt attributes and wrong types, where
ONNX Runtime drops or fails late. Graphs with other operators of onnxruntime's, as octavo convert writes them, are for
onnxruntime.tools.symbolic_shape_infer, which knows these and PagedAttention's first three outputs.

docs/contract.md has the shapes; N = num_heads, G = kv_num_heads.
"""

from __future__ import annotations

from typing import Any

import onnx
from onnx import TensorProto, TypeProto, defs, helper, numpy_helper
from onnx.shape_inference import InferenceContext, InferenceError

from .onnx_model import INPUT_NAMES

DOMAIN, OPERATOR, VERSION = "com.microsoft", "PagedAttention", 1

_REQUIRED_INPUTS = ("query", "key_cache", "cumulative_sequence_length", "past_seqlens", "block_table")
_INPUT_TYPES = {
    **dict.fromkeys(INPUT_NAMES, "T"),
    **dict.fromkeys(("key_cache", "value_cache"), "T_CACHE"),
    **dict.fromkeys(("k_scale", "v_scale"), "tensor(float)"),
    **dict.fromkeys(
        (
            "cumulative_sequence_length",
            "past_seqlens",
            "block_table",
            "slot_mapping",
            "attention_metadata",
            "query_positions",
        ),
        "S",
    ),
}
_OUTPUTS = (("output", "T"), ("key_cache_out", "T_CACHE"), ("value_cache_out", "T_CACHE"), ("output_qk", "QK"))
_FLOATS = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
_CONSTRAINTS = [
    ("T", _FLOATS, "Query, key, value and what is computed of them."),
    ("T_CACHE", [*_FLOATS, "tensor(int8)", "tensor(uint8)", "tensor(float8e4m3fn)"], "Elements of the caches."),
    ("S", ["tensor(int32)"], "Lengths, tables and positions."),
    ("QK", _FLOATS, "Scores or probabilities."),
]
# None: required.
_DEFAULTS: dict[str, int | float | str | None] = {
    "num_heads": None,
    "kv_num_heads": None,
    "scale": 0.0,
    "softcap": 0.0,
    "local_window_size": -1,
    "is_causal": 1,
    "do_rotary": 0,
    "rotary_interleaved": 0,
    "rotary_offset": 0,
    "qk_norm_epsilon": 1e-6,
    "k_quant_type": "NONE",
    "v_quant_type": "NONE",
    "k_cache_dtype": "",
    "v_cache_dtype": "",
    "kv_cache_layout": "SEPARATE",
    "v_head_size": 0,
    "qk_output": 0,
}

Dim = int | str | None  # a number, a symbol or an expression of one, or unknown


def register() -> None:
    """Makes the package onnx know the operator, in this process. Does nothing the second time."""
    if defs.has(OPERATOR, VERSION, DOMAIN):
        return
    option = defs.OpSchema.FormalParameterOption
    inputs = [
        defs.OpSchema.FormalParameter(
            name,
            _INPUT_TYPES[name],
            param_option=option.Single if name in _REQUIRED_INPUTS else option.Optional,
        )
        for name in INPUT_NAMES
    ]
    outputs = [
        defs.OpSchema.FormalParameter(name, kind, param_option=option.Optional if index else option.Single)
        for index, (name, kind) in enumerate(_OUTPUTS)
    ]
    schema = defs.OpSchema(
        OPERATOR,
        DOMAIN,
        VERSION,
        "Attention over a paged key-value cache; the contract is octavo's docs/contract.md.",
        inputs=inputs,
        outputs=outputs,
        type_constraints=_CONSTRAINTS,
        attributes=[_attribute(name, default) for name, default in _DEFAULTS.items()],
    )
    schema.set_type_and_shape_inference_function(_infer)
    defs.register_schema(schema)


def _attribute(name: str, default: int | float | str | None) -> defs.OpSchema.Attribute:
    if default is None:
        return defs.OpSchema.Attribute(name, defs.OpSchema.AttrType.INT, required=True)
    return defs.OpSchema.Attribute(name, helper.make_attribute(name, default))


class _Call:
    """One node's inputs and attributes, by name."""

    def __init__(self, context: InferenceContext) -> None:
        self._context = context

    def attribute(self, name: str) -> Any:
        given = self._context.get_attribute(name)
        if given is None or given.type == onnx.AttributeProto.UNDEFINED:
            return _DEFAULTS[name]
        value = helper.get_attribute_value(given)
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    def count(self, name: str, least: int = 1) -> int:
        """An attribute that counts something. Raises InferenceError where it is missing, no integer, or too small."""
        value = self.attribute(name)
        if not isinstance(value, int) or not least <= value < 1 << 31:
            got = "missing" if value is None else f"{value!r:.80}"
            raise InferenceError(f"PagedAttention: {name} must be an integer from {least}; it is {got}.")
        return value

    def has(self, name: str) -> bool:
        index = INPUT_NAMES.index(name)
        return index < self._context.get_num_inputs() and self._context.has_input(index)

    def type(self, name: str) -> TypeProto | None:
        return self._context.get_input_type(INPUT_NAMES.index(name)) if self.has(name) else None

    def dims(self, name: str, rank: int) -> list[Dim]:
        """`rank` extents, all unknown where the graph does not tell. Raises InferenceError for another rank."""
        known = self.type(name)
        if known is None or not known.tensor_type.HasField("shape"):
            return [None] * rank
        found: list[Dim] = [
            dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or None)
            for dim in known.tensor_type.shape.dim
        ]
        if len(found) != rank:
            raise InferenceError(f"PagedAttention: {name} must have {rank} dimensions, it has {len(found)}.")
        return found

    def constant(self, name: str) -> Any:
        """The value of an input that is an initializer, else None."""
        data = self._context.get_input_data(INPUT_NAMES.index(name)) if self.has(name) else None
        return None if data is None else numpy_helper.to_array(data)


def _infer(context: InferenceContext) -> None:
    call = _Call(context)
    query, token_count = call.type("query"), call.dims("query", 2)[0]
    if query is not None:
        _set(context, 0, query.tensor_type.elem_type, [token_count, _output_width(call)])
    for index, name in ((1, "key_cache"), (2, "value_cache")):
        cache = call.type(name)
        call.dims(name, 4)
        if cache is not None and context.get_num_outputs() > index and context.has_output(index):
            context.set_output_type(index, cache)
    if context.get_num_outputs() > 3 and context.has_output(3):
        # Its type follows from no input: the model declares it.
        shape: list[Dim] = [call.count("num_heads"), token_count, _context_length(call)]
        _set(context, 3, TensorProto.UNDEFINED, shape)


def _output_width(call: _Call) -> Dim:
    """N * effective_v_head_size."""
    heads, kv_heads = call.count("num_heads"), call.count("kv_num_heads")
    width = call.dims("query", 2)[1]
    latent = call.attribute("kv_cache_layout") == "LATENT"
    if latent and (v_head_size := call.count("v_head_size", 0)):
        return heads * v_head_size
    if latent or call.has("key"):
        return width if width is not None else _times(_head_size(call), heads)
    if isinstance(width, int):
        return heads * (width // (heads + 2 * kv_heads))
    return _times(_head_size(call), heads)


def _head_size(call: _Call) -> Dim:
    """From the cache's rows, which hold two elements a byte where they are of a 4-bit type."""
    width = call.dims("key_cache", 4)[3]
    return _times(width, 2) if call.attribute("k_cache_dtype") in ("int4", "float4e2m1") else width


def _context_length(call: _Call) -> Dim:
    """The table's capacity, or the bound in attention_metadata where that is smaller; unknown where it is fed."""
    capacity = _times(call.dims("block_table", 2)[1], call.dims("key_cache", 4)[1])
    if not call.has("attention_metadata"):
        return capacity
    call.dims("attention_metadata", 1)
    metadata = call.constant("attention_metadata")
    if metadata is None or metadata.dtype.kind != "i" or metadata.size < 2:
        return None
    bound = int(metadata[1])
    if bound == 0:
        return capacity
    return min(bound, capacity) if isinstance(capacity, int) else None


def _times(left: Dim, right: Dim) -> Dim:
    """The product; of a symbol and a number as an expression, which onnxruntime's symbolic tool reads as one."""
    if left is None or right is None:
        return None
    if isinstance(left, int) and isinstance(right, int):
        return left * right
    if right == 1:
        return left
    return f"{right}*{left}" if isinstance(right, int) else f"{left}*{right}"


def _set(context: InferenceContext, index: int, element_type: int, dims: list[Dim]) -> None:
    context.set_output_type(index, helper.make_tensor_type_proto(element_type, dims))
