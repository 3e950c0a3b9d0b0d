"""`octavo explain`: what each PagedAttention node of a model asks for, which backend would run it here, and sizes."""

from __future__ import annotations

import difflib
import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import TensorProto, helper

from .errors import OctavoError, counted, quoted, shown
from .model_folder import CONFIG_FILE, graph_file, read_json
from .onnx_model import INPUT_NAMES, OnnxModel, PagedNode, ValueType, read_model
from .sizes import DEFAULT_BLOCK_SIZE, Sizes, measure

if TYPE_CHECKING:
    from .attention import BackendVerdict

# Sizes of the call that stands for a node: one token, one sequence, room for a few more.
TOKENS, BATCH, BLOCKS, TABLE_WIDTH, CONTEXT = 1, 1, 2, 2, 8
MAX_ELEMENTS = 1 << 28  # of one array of the call: far more than any model's, and no danger to the memory
_INT32_INPUTS = {
    "cumulative_sequence_length": (BATCH + 1,),
    "past_seqlens": (BATCH,),
    "block_table": (BATCH, TABLE_WIDTH),
    "slot_mapping": (TOKENS,),
    "query_positions": (TOKENS,),
    "attention_metadata": (3,),
}
_INT_ATTRIBUTES = (
    "num_heads",
    "kv_num_heads",
    "local_window_size",
    "is_causal",
    "do_rotary",
    "rotary_interleaved",
    "rotary_offset",
    "v_head_size",
    "qk_output",
)
_FLOAT_ATTRIBUTES = ("scale", "softcap", "qk_norm_epsilon")
_STRING_ATTRIBUTES = ("k_quant_type", "v_quant_type", "k_cache_dtype", "v_cache_dtype", "kv_cache_layout")
ATTRIBUTES = (*_INT_ATTRIBUTES, *_FLOAT_ATTRIBUTES, *_STRING_ATTRIBUTES)
_FLOAT_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True)
class NodeReport:
    """What one node asks for, and every backend's answer.

    problem: why the rest is empty. refused: the contract's sentence. ignored: attributes that the operator does not
    have -> the nearest that it has, or "".
    """

    ignored: dict[str, str]
    problem: str = ""
    num_heads: int = 0
    kv_num_heads: int = 0
    query_type: str = ""
    cache_type: str = ""
    block_size: int = 0
    refused: str = ""
    features: list[str] = field(default_factory=list)
    backends: list[BackendVerdict] = field(default_factory=list)

    @property
    def refusal(self) -> str:
        """Why the node does not run here; empty where a backend takes it."""
        if self.problem or self.refused:
            return self.problem or self.refused
        return "" if self.taken else "no backend takes it here: " + "; ".join(v["refusal"] for v in self.backends)

    @property
    def taken(self) -> BackendVerdict | None:
        return next((verdict for verdict in self.backends if not verdict["refusal"]), None)

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"backend": self.taken["backend"] if self.taken else None}

    def text(self) -> str:
        ignored = [
            f"  ignored     {shown(name)}: "
            "PagedAttention has no such attribute, and ONNX Runtime drops it without a word"
            + (f"; did you mean {nearest}?" if nearest else "")
            for name, nearest in self.ignored.items()
        ]
        if self.problem:
            return "\n".join([f"  cannot be explained: {shown(self.problem)}", *ignored])
        lines = [
            f"  heads       {self.num_heads} query, {self.kv_num_heads} KV",
            f"  types       {self.query_type} with a cache of {shown(self.cache_type)}",
            f"  blocks      {counted(self.block_size, 'token')} each",
            *ignored,
        ]
        if self.refused:
            return "\n".join([*lines, f"  refused     {shown(self.refused)}"])
        lines.append(f"  features    {', '.join(self.features) or 'none beyond plain causal attention'}")
        taken = self.taken
        lines.append(
            f"  backend     {taken['backend']}: {taken['description']}" if taken else "  backend     none takes it"
        )
        lines += [f"  not taken   {v['backend']}: {v['refusal']}" for v in self.backends if v["refusal"]]
        spare = [v["backend"] for v in self.backends if not v["refusal"] and v is not taken]
        return "\n".join([*lines, f"  would do    {', '.join(spare)}"] if spare else lines)


@dataclass(frozen=True)
class Report:
    """Of one file. groups: names of nodes that are alike, and what holds for each. sizes: None where sizes_problem."""

    path: Path
    groups: list[tuple[list[str], NodeReport]]
    sizes: Sizes | None
    sizes_problem: str

    @property
    def refusals(self) -> list[str]:
        """A sentence for every group of nodes that does not run here."""
        refused = [(names, report.refusal) for names, report in self.groups if report.refusal]
        return [
            shown(reason if reason.startswith(names[0]) else f"{names[0]}: {reason}").rstrip(".")
            + (f" ({len(names)} nodes alike)." if len(names) > 1 else ".")
            for names, reason in refused
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "model": str(self.path),
            "nodes": [{"names": names, **report.as_json()} for names, report in self.groups],
            "sizes": None if self.sizes is None else self.sizes.as_json(),
        } | ({"sizes_problem": self.sizes_problem} if self.sizes is None else {})

    def text(self) -> str:
        count = sum(len(names) for names, _ in self.groups)
        parts = [f"{self.path}: {counted(count, 'PagedAttention node')}"]
        for names, report in self.groups:
            first, last = shown(names[0]), shown(names[-1])
            title = first if len(names) == 1 else f"{len(names)} nodes alike, {first} to {last}"
            parts.append(f"{title}\n{report.text()}")
        sizes = f"  unknown: {shown(self.sizes_problem)}" if self.sizes is None else self.sizes.text()
        parts.append(f"sizes\n{sizes}")
        return "\n\n".join(parts)


def describe(path: str | os.PathLike[str], context: int | None = None, batch: int = 1) -> Report:
    """The report for one ONNX file, or the graph of a model folder. context, batch: as in sizes.measure.

    Raises OctavoError where the file is no ONNX model or has no PagedAttention.
    """
    folder = Path(path)
    try:
        file = folder
        if folder.is_dir():
            config = read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
            file = graph_file(folder, config)
    except OSError as error:
        raise OctavoError(f"{folder} cannot be read: {error.strerror or error}.") from error
    model = read_model(file)
    if not model.nodes:
        raise OctavoError(f"{model.path} has no com.microsoft::PagedAttention nodes.")
    groups: list[tuple[list[str], NodeReport]] = []
    for node in model.nodes:
        report = _node_report(model, node)
        alike = next((names for names, other in groups if other == report), None)
        if alike is None:
            groups.append(([node.name], report))
        else:
            alike.append(node.name)
    sizes, problem = None, ""
    try:
        for node in model.nodes:
            if "key_cache" not in node.inputs:
                raise OctavoError(f"{node.name}: the node has no key_cache.")
        sizes = measure(model, context, batch)
    except OctavoError as error:
        problem = str(error)
    return Report(model.path, groups, sizes, problem)


def unknown_attributes(node: PagedNode) -> dict[str, str]:
    """Attributes that PagedAttention does not have -> the nearest that it has, or "".

    ONNX Runtime shows a custom operator only the attributes that it asks for by name: a misspelt one is dropped without
    a word, and the default is used.
    """
    unknown = [name for name in node.attributes if name not in ATTRIBUTES]
    return {name: next(iter(difflib.get_close_matches(name, ATTRIBUTES, 1)), "") for name in unknown}


def call_arguments(model: OnnxModel, node: PagedNode) -> dict[str, Any]:
    """Arguments of octavo.paged_attention that stand for `node`: types and static sizes from the file, the rest small.

    Raises OctavoError where the file does not tell a size that the call needs.
    """
    _check_attribute_types(node)
    cache = _require(model, node, "key_cache")
    num_heads, kv_num_heads = (_attribute(node, name) for name in ("num_heads", "kv_num_heads"))
    is_four_bit = cache.element_type == TensorProto.UINT8
    width = _static(cache, 3)
    if width is None:
        raise OctavoError(
            f"{node.name}: the graph does not tell key_cache's head size; export it as a fixed dimension."
        )
    head_size = 2 * width if is_four_bit else width
    block_size = _static(cache, 1) or DEFAULT_BLOCK_SIZE
    element = _numpy_type(node, "query", _tensor_type(model, node))
    packed = "key" not in node.inputs and "value" not in node.inputs
    shapes: dict[str, tuple[int, ...]] = {
        "query": (TOKENS, (num_heads + 2 * kv_num_heads if packed else num_heads) * head_size),
        "key": (TOKENS, kv_num_heads * head_size),
        "value": (TOKENS, kv_num_heads * head_size),
        "cos_cache": (CONTEXT, head_size // 2),
        "sin_cache": (CONTEXT, head_size // 2),
        "head_sink": (num_heads,),
        "q_norm_weight": (head_size,),
        "k_norm_weight": (head_size,),
        "attention_bias": (1, 1, TOKENS, TABLE_WIDTH * block_size),
    }
    arguments: dict[str, Any] = dict.fromkeys(INPUT_NAMES[:8])
    for name in node.inputs:
        known = model.type_of(node.inputs[name])
        if name in ("key_cache", "value_cache"):
            of_cache = known or cache
            dtype = _numpy_type(node, name, of_cache.element_type)
            last = _static(of_cache, 3) or width
            arguments[name] = _filled(node, name, 0, (BLOCKS, block_size, kv_num_heads, last), dtype)
        elif name in _INT32_INPUTS:
            shape = _metadata_shape(known) if name == "attention_metadata" else _INT32_INPUTS[name]
            arguments[name] = _filled(node, name, 0, shape, np.int32)
        elif name in ("k_scale", "v_scale"):
            per_channel = node.attributes.get(name[0] + "_quant_type") == "PER_CHANNEL"
            shape = (kv_num_heads, 1, head_size) if per_channel else (1,)
            arguments[name] = _filled(node, name, 1, shape, np.float32)
        elif name in ("cos_cache", "sin_cache"):
            columns = None if known is None else _static(known, 1)
            arguments[name] = _filled(node, name, 0, (CONTEXT, columns or head_size // 2), element)
        else:
            arguments[name] = _filled(node, name, 0, shapes[name], element)
    if arguments["cumulative_sequence_length"] is not None:
        arguments["cumulative_sequence_length"][1:] = TOKENS
    return arguments | {name: value for name, value in node.attributes.items() if name in ATTRIBUTES}


def _numpy_type(node: PagedNode, name: str, element_type: int) -> np.dtype:
    if element_type not in helper.get_all_tensor_dtypes():
        raise OctavoError(f"{node.name}: {name} has element type {element_type}, which is none of ONNX.")
    try:
        return np.dtype(helper.tensor_dtype_to_np_dtype(element_type))
    except (KeyError, TypeError) as error:
        raise OctavoError(f"{node.name}: {name} has element type {element_type}, which holds no numbers.") from error


def _filled(node: PagedNode, name: str, value: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    if math.prod(shape) > MAX_ELEMENTS:
        extents = " x ".join(map(str, shape))
        raise OctavoError(f"{node.name}: {name} would have {extents} elements, which no model has; correct the graph.")
    return np.full(shape, value, dtype) if value else np.zeros(shape, dtype)


def _node_report(model: OnnxModel, node: PagedNode) -> NodeReport:
    ignored = unknown_attributes(node)
    try:
        arguments = call_arguments(model, node)
    except OctavoError as error:
        return NodeReport(ignored, problem=str(error))
    try:
        from .attention import explain_call, requested_features
    except ImportError as error:
        raise OctavoError(f"octavo's compiled extension is not installed ({error}); run `pip install .`.") from error

    known = NodeReport(
        ignored,
        num_heads=arguments["num_heads"],
        kv_num_heads=arguments["kv_num_heads"],
        query_type=str(arguments["query"].dtype),
        cache_type=_cache_type(arguments),
        block_size=arguments["key_cache"].shape[1],
    )
    try:
        return replace(known, features=requested_features(**arguments), backends=explain_call(**arguments))
    except (TypeError, ValueError) as error:
        return replace(known, refused=str(error))


def _cache_type(arguments: dict[str, Any]) -> str:
    names = []
    for side in "kv":
        cache = arguments["key_cache" if side == "k" else "value_cache"]
        if cache is not None:
            quant = arguments.get(f"{side}_quant_type", "NONE")
            logical = arguments.get(f"{side}_cache_dtype") or str(cache.dtype)
            names.append(logical if quant == "NONE" else f"{logical} ({quant})")
    return " and ".join(dict.fromkeys(names))


def _tensor_type(model: OnnxModel, node: PagedNode) -> int:
    """T. The query is often an intermediate of unknown type; any other input of type T, or a float cache, tells too."""
    for name in (
        "query",
        "key",
        "value",
        "cos_cache",
        "sin_cache",
        "head_sink",
        "q_norm_weight",
        "attention_bias",
        "key_cache",
    ):
        known = model.type_of(node.inputs.get(name))
        if known is not None and known.element_type in _FLOAT_TYPES:
            return known.element_type
    return TensorProto.FLOAT


def _require(model: OnnxModel, node: PagedNode, name: str) -> ValueType:
    known = model.type_of(node.inputs.get(name))
    if known is None or known.shape is None or len(known.shape) != 4:
        raise OctavoError(f"{node.name}: the graph does not tell the type and the four dimensions of {name}.")
    return known


def _check_attribute_types(node: PagedNode) -> None:
    for name, value in node.attributes.items():
        if name not in ATTRIBUTES:
            continue
        wanted = float if name in _FLOAT_ATTRIBUTES else str if name in _STRING_ATTRIBUTES else int
        if not isinstance(value, wanted):
            raise OctavoError(
                f"{node.name}: attribute {name} must be of type {wanted.__name__}; it is {quoted(value)}."
            )


def _attribute(node: PagedNode, name: str) -> int:
    value = node.attributes.get(name)
    if not isinstance(value, int) or not 1 <= value <= 65_536:
        raise OctavoError(f"{node.name}: attribute {name} must be a positive number; the node has {quoted(value)}.")
    return value


def _static(value: ValueType, axis: int) -> int | None:
    if value.shape is None or axis >= len(value.shape):
        return None
    extent = value.shape[axis]
    return extent if isinstance(extent, int) and 0 < extent <= 1 << 20 else None


def _metadata_shape(known: ValueType | None) -> tuple[int, ...]:
    count = None if known is None else _static(known, 0)
    return (count or 3,)
