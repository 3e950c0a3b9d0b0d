"""Element types of the key-value cache: what each stores, how its scales are found, and putting one into a graph.

docs/contract.md has the arithmetic; all quantisation is symmetric. G = kv_num_heads, D = head_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .errors import OctavoError
from .onnx_model import INPUT_NAMES, is_paged_attention

# A float's rounding error depends on where values lie between two powers of two: a channel's largest magnitude gets
# its type's `largest` divided by one of these.
FLOAT8_ALIGNMENTS = np.linspace(1.0, 2.0, 8, endpoint=False)
_SCALE_INPUTS = {"k": INPUT_NAMES.index("k_scale"), "v": INPUT_NAMES.index("v_scale")}
_CACHE_INPUTS = {"k": INPUT_NAMES.index("key_cache"), "v": INPUT_NAMES.index("value_cache")}
_CACHE_OUTPUTS = {"k": 1, "v": 2}


@dataclass(frozen=True)
class ElementType:
    """One side of a cache. granularity: "NONE" or "PER_CHANNEL".

    largest: the code that the largest magnitude of the calibration text gets.
    """

    name: str
    onnx_type: int
    bits: int
    granularity: str = "NONE"
    largest: float = 0.0

    def row_bytes(self, channels: int) -> int:
        """Bytes of one head's channels of one token; the last byte of an odd 4-bit row is padded."""
        return -(-channels * self.bits // 8)


_FLOAT32 = ElementType("float32", TensorProto.FLOAT, 32)
# 127 / 1.25: other texts have larger keys and values than the calibration's, and clipping them costs more than a step
# that is a quarter wider (docs/kv_cache_types.md).
_INT8 = ElementType("int8", TensorProto.INT8, 8, "PER_CHANNEL", 101.6)
_INT4 = ElementType("int4", TensorProto.UINT8, 4, "PER_CHANNEL", 7.0)
_SAME = (
    _FLOAT32,
    ElementType("float16", TensorProto.FLOAT16, 16),
    ElementType("bfloat16", TensorProto.BFLOAT16, 16),
    _INT8,
    # The type reaches 448: room for twice the magnitude of the calibration text costs a float nothing.
    ElementType("float8e4m3fn", TensorProto.FLOAT8E4M3FN, 8, "PER_CHANNEL", 224.0),
    _INT4,
)
# Name -> (element type of K, of V).
CACHE_TYPES = {side.name: (side, side) for side in _SAME} | {"int8-int4": (_INT8, _INT4)}


def token_bytes(cache_type: str, kv_num_heads: int, head_size: int) -> int:
    """Bytes of one token's K and V in one layer."""
    return sum(kv_num_heads * side.row_bytes(head_size) for side in CACHE_TYPES[cache_type])


def needs_scales(cache_type: str) -> bool:
    return any(side.granularity != "NONE" for side in CACHE_TYPES[cache_type])


def choose_scale(values: np.ndarray, side: ElementType) -> np.ndarray:
    """Scales of one cache from values that it would hold.

    Args:
        values: float32 (tokens, G, D), finite.
        side: the element type; not one without scales.

    Returns float32 (G, 1, D), finite and above 0. The largest magnitude of an integer channel gets code `side.largest`:
    4-bit scales that clip outliers have a smaller squared error and a larger perplexity (docs/kv_cache_types.md). A
    float8 channel gets the alignment of FLOAT8_ALIGNMENTS with the least squared error. A channel of zeros has scale 1.
    """
    scale = _positive(np.abs(values).max(axis=0)[:, None, :] / side.largest)
    if side.name != "float8e4m3fn":
        return scale
    best, best_error = scale, np.full(scale.shape, np.inf)
    for alignment in FLOAT8_ALIGNMENTS:
        tried = scale * np.float32(alignment)
        spread = tried[None, :, 0, :]
        error = np.square(round_to_e4m3(values / spread) * spread - values, dtype=np.float64).sum(axis=0)[:, None, :]
        best = np.where(error < best_error, tried, best)
        best_error = np.minimum(error, best_error)
    return best


def round_to_e4m3(values: np.ndarray) -> np.ndarray:
    """The nearest float8e4m3fn of each value, to even where two are; beyond 448 it is 448."""
    exponent = np.frexp(values)[1] - 1  # of values in [2^exponent, 2^(exponent + 1))
    step = np.ldexp(np.float32(1), np.maximum(exponent, -6) - 3)  # 3 bits of mantissa; 2^-6 is the smallest normal one
    return np.clip(np.round(values / step) * step, -448, 448)


def choose_scales(
    caches: Sequence[tuple[np.ndarray, np.ndarray]], cache_type: str
) -> list[tuple[np.ndarray, np.ndarray]]:
    """choose_scale for K and V of every layer."""
    sides = CACHE_TYPES[cache_type]
    return [(choose_scale(key, sides[0]), choose_scale(value, sides[1])) for key, value in caches]


def cache_type_of(model: onnx.ModelProto) -> str | None:
    """The key of CACHE_TYPES that describes the caches of all PagedAttention nodes; None where none does."""
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    found = set()
    for node in _paged_nodes(model):
        attributes = {attribute.name: attribute for attribute in node.attribute}
        described = []
        for side in "kv":
            index = _CACHE_INPUTS[side]
            granularity = _text(attributes.get(f"{side}_quant_type")) or "NONE"
            packed = _text(attributes.get(f"{side}_cache_dtype"))
            described.append((types.get(node.input[index]), granularity != "NONE", packed))
        found.add(tuple(described))
    for name, sides in CACHE_TYPES.items():
        wanted = tuple((side.onnx_type, side.granularity != "NONE", _dtype_attribute(side)) for side in sides)
        if found == {wanted}:
            return name
    return None


def set_cache_type(
    model: onnx.ModelProto, cache_type: str, scales: Sequence[tuple[np.ndarray, np.ndarray]] = ()
) -> None:
    """Gives every PagedAttention node of a graph caches of another type, in place.

    Args:
        model: a graph of octavo convert, whatever its caches hold now. Its other weights are not looked at.
        cache_type: a key of CACHE_TYPES.
        scales: per node, in order, of K and V as choose_scale returns them; empty where the type has none.
    """
    sides = dict(zip("kv", CACHE_TYPES[cache_type], strict=True))
    values = {value.name: value for value in [*model.graph.input, *model.graph.output]}
    stale = set()
    for index, node in enumerate(_paged_nodes(model)):
        inputs = list(node.input) + [""] * (max(_SCALE_INPUTS.values()) + 1 - len(node.input))
        head_size = _head_size(values[inputs[_CACHE_INPUTS["k"]]], node)
        dropped = {f"{side}_{what}" for side in "kv" for what in ("quant_type", "cache_dtype")}
        attributes = [attribute for attribute in node.attribute if attribute.name not in dropped]
        for number, (letter, side) in enumerate(sides.items()):
            for name in (inputs[_CACHE_INPUTS[letter]], node.output[_CACHE_OUTPUTS[letter]]):
                tensor = values[name].type.tensor_type
                tensor.elem_type = side.onnx_type
                tensor.shape.dim[3].dim_value = side.row_bytes(head_size) if side.bits == 4 else head_size
            stale.add(inputs[_SCALE_INPUTS[letter]])
            inputs[_SCALE_INPUTS[letter]] = ""
            if side.granularity == "NONE":
                continue
            attributes.append(helper.make_attribute(f"{letter}_quant_type", side.granularity))
            if _dtype_attribute(side):
                attributes.append(helper.make_attribute(f"{letter}_cache_dtype", _dtype_attribute(side)))
            inputs[_SCALE_INPUTS[letter]] = f"blk.{index}.{letter}_scale"
            stale.discard(inputs[_SCALE_INPUTS[letter]])
            _set_initializer(model.graph, inputs[_SCALE_INPUTS[letter]], scales[index][number])
        del node.attribute[:], node.input[:]
        node.attribute.extend(attributes)
        node.input.extend(inputs)
    kept = [tensor for tensor in model.graph.initializer if tensor.name not in stale]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)


def _set_initializer(graph: onnx.GraphProto, name: str, values: np.ndarray) -> None:
    tensor = numpy_helper.from_array(np.ascontiguousarray(values, np.float32), name)
    for old in graph.initializer:
        if old.name == name:
            old.CopyFrom(tensor)
            return
    graph.initializer.append(tensor)


def _head_size(cache: onnx.ValueInfoProto, node: onnx.NodeProto) -> int:
    """D of a node, from the width of its K cache."""
    width = int(cache.type.tensor_type.shape.dim[3].dim_value)
    packed = any(a.name == "k_cache_dtype" and _text(a) in ("int4", "float4e2m1") for a in node.attribute)
    return width * (2 if packed else 1)  # head_size is a multiple of 8: no packed row is padded


def _paged_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    nodes = [node for node in model.graph.node if is_paged_attention(node)]
    if not nodes:
        raise OctavoError("the graph has no PagedAttention node; convert the model with octavo convert.")
    return nodes


def _dtype_attribute(side: ElementType) -> str:
    return side.name if side.bits == 4 else ""


def _text(attribute: onnx.AttributeProto | None) -> str:
    return "" if attribute is None else attribute.s.decode("utf-8", "replace")


def _positive(scale: np.ndarray) -> np.ndarray:
    """Zero would divide by zero (contract rules D14, D15); a subnormal would lose the quotient's precision."""
    return np.where(scale >= np.finfo(np.float32).tiny, scale, 1.0).astype(np.float32)
