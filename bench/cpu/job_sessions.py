"""The converted model in bare sessions: its own graph, and the same nodes with GroupQueryAttention in ONNX Runtime.

Both keep float32 caches in place, bind every buffer once, and take the logits of each sequence's last token.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from cpu_calls import ONNX_TYPES
from onnx import TensorProto, helper, numpy_helper

import octavo
from octavo.kv_cache import set_cache_type
from octavo.model_folder import read_config

PAGE = 16
CACHE_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8}
# ONNX Runtime's workers then sleep between nodes: waiting would count as processor time.
NO_SPINNING = {"session.intra_op.allow_spinning": "0"}


def load_graph(folder: Path, accuracy_level: int | None = None, cache: str = "") -> onnx.ModelProto:
    """model.onnx without its weights; with an accuracy_level, all its MatMulNBits have that one.

    cache: a type without scales that replaces the key-value cache's own.
    """
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    if cache:
        set_cache_type(model, cache)
    if accuracy_level is not None:
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "accuracy_level":
                    attribute.i = accuracy_level
    return model


def to_stock(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with every PagedAttention replaced, in place; all other nodes and the weights stay.

    GroupQueryAttention takes (batch, tokens, heads*size) and contiguous caches (batch, KV heads, capacity, size): a
    Reshape, which moves nothing, stands on either side of it. Raises ValueError for a node that has more than packed
    QKV, RoPE and a float32 cache.
    """
    graph = model.graph
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        if node.op_type != "PagedAttention":
            graph.node.append(node)
            continue
        query, key, value, key_cache, value_cache, *_lengths, cos, sin = node.input[:10]
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        extra = set(attributes) - {"num_heads", "kv_num_heads", "do_rotary", "rotary_interleaved"}
        if key or value or extra or any(node.input[10:16]):
            raise ValueError(f"{node.name} has more than stock's node is built for here")
        out = node.output[0]
        graph.node.append(helper.make_node("Reshape", [query, "to_batch"], [out + ".packed"]))
        inputs = [out + ".packed", "", "", key_cache, value_cache, "seqlens_k", "total_sequence_length", cos, sin]
        outputs = [out + ".batched", *node.output[1:]]
        graph.node.append(
            helper.make_node("GroupQueryAttention", inputs, outputs, node.name, domain="com.microsoft", **attributes)
        )
        graph.node.append(helper.make_node("Reshape", [out + ".batched", "to_tokens"], [out]))
    caches = [v for v in graph.input if v.name.startswith("past_key_values.")]
    _, _, kv_heads, size = (dim.dim_value for dim in caches[0].type.tensor_type.shape.dim)
    made = [v for v in graph.output if v.name.startswith("present.")]
    for value in [*caches, *made]:
        element = value.type.tensor_type.elem_type
        shape = ["batch_size", kv_heads, "capacity", size]
        value.CopyFrom(helper.make_tensor_value_info(value.name, element, shape))
    width = attributes["num_heads"] * size
    graph.initializer.append(numpy_helper.from_array(np.array([-1, width], np.int64), "to_tokens"))
    kept = [v for v in graph.input if v.name in ("input_ids", "cumulative_sequence_lengths")]
    added = [
        helper.make_tensor_value_info("to_batch", TensorProto.INT64, [3]),
        helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, ["batch_size"]),
        helper.make_tensor_value_info("total_sequence_length", TensorProto.INT32, [1]),
    ]
    inputs = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in [*kept, *caches, *added]]
    del graph.input[:]
    graph.input.extend(inputs)
    return model


def open_session(model: onnx.ModelProto, folder: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    for name, value in NO_SPINNING.items():
        options.add_session_config_entry(name, value)
    octavo.register(options)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class _Job:
    """Sequences of one length in a session. feed() appends tokens to some of them and gives their logits."""

    def __init__(self, model: onnx.ModelProto, folder: Path, threads: int, batch: int, capacity: int) -> None:
        decoder = read_config(folder)["model"]["decoder"]
        self.heads, self.kv_heads = decoder["num_attention_heads"], decoder["num_key_value_heads"]
        self.size, self.vocabulary = decoder["head_size"], read_config(folder)["model"]["vocab_size"]
        self.batch, self.capacity = batch, capacity
        self.session = open_session(model, folder, threads)
        shape = self._cache_shape()
        self.caches = {
            value.name: np.zeros(shape, CACHE_TYPES[value.type])
            for value in self.session.get_inputs()
            if value.name.startswith("past_key_values.")
        }
        self._bound: tuple[tuple[int, int, int], onnxruntime.IOBinding, dict[str, np.ndarray]] | None = None

    def feed(self, ids: np.ndarray, past: int, first: int = 0) -> np.ndarray:
        """Logits (sequences, vocabulary), float32, valid until the next call.

        ids: (sequences, tokens), for the sequences from `first` on, each of which has `past` tokens.
        """
        shape = (first, *ids.shape)
        if self._bound is None or self._bound[0] != shape:
            self._bound = (shape, *self._bind(first, *ids.shape))
        _, binding, arrays = self._bound
        arrays["input_ids"][:] = ids.reshape(-1)
        self._set_lengths(arrays, past, ids.shape[1])
        self.session.run_with_iobinding(binding)
        return arrays["logits"]

    def _bind(self, first: int, count: int, tokens: int) -> tuple[onnxruntime.IOBinding, dict[str, np.ndarray]]:
        arrays = {
            "input_ids": np.empty(count * tokens, np.int64),
            "cumulative_sequence_lengths": (np.arange(count + 1) * tokens).astype(np.int32),
            **self._lengths(first, count, tokens),
        }
        binding = self.session.io_binding()
        for name, array in [*arrays.items(), *self._cache_views(first, count).items()]:
            binding.bind_input(
                name, "cpu", 0, ONNX_TYPES.get(array.dtype, TensorProto.INT64), array.shape, array.ctypes.data
            )
        for name, array in self._cache_views(first, count).items():
            made = name.replace("past_key_values", "present")
            binding.bind_output(made, "cpu", 0, ONNX_TYPES[array.dtype], array.shape, array.ctypes.data)
        arrays["logits"] = np.empty((count, self.vocabulary), np.float32)
        logits = arrays["logits"]
        binding.bind_output("logits", "cpu", 0, TensorProto.FLOAT, logits.shape, logits.ctypes.data)
        return binding, arrays


class PagedJob(_Job):
    """Ours: pages in random order."""

    def _cache_shape(self) -> tuple[int, ...]:
        self._pages = -(-self.capacity // PAGE)
        ids = np.random.default_rng(3).permutation(self.batch * self._pages)
        self._table = ids.astype(np.int32).reshape(self.batch, self._pages)
        return (self.batch * self._pages, PAGE, self.kv_heads, self.size)

    def _cache_views(self, first: int, count: int) -> dict[str, np.ndarray]:
        return self.caches

    def _lengths(self, first: int, count: int, tokens: int) -> dict[str, np.ndarray]:
        return {
            "past_sequence_lengths": np.empty(count, np.int32),
            "block_table": self._table[first : first + count],
            "attention_metadata": np.empty(3, np.int32),
        }

    @staticmethod
    def _set_lengths(arrays: dict[str, np.ndarray], past: int, tokens: int) -> None:
        arrays["past_sequence_lengths"][:] = past
        arrays["attention_metadata"][:] = (tokens, past + tokens, past + tokens)


class StockJob(_Job):
    """Stock's: a contiguous buffer for each sequence."""

    def _cache_shape(self) -> tuple[int, ...]:
        return (self.batch, self.kv_heads, self.capacity, self.size)

    def _cache_views(self, first: int, count: int) -> dict[str, np.ndarray]:
        return {name: cache[first : first + count] for name, cache in self.caches.items()}

    def _lengths(self, first: int, count: int, tokens: int) -> dict[str, np.ndarray]:
        return {
            "seqlens_k": np.empty(count, np.int32),
            "total_sequence_length": np.empty(1, np.int32),
            "to_batch": np.array([count, tokens, (self.heads + 2 * self.kv_heads) * self.size], np.int64),
        }

    @staticmethod
    def _set_lengths(arrays: dict[str, np.ndarray], past: int, tokens: int) -> None:
        arrays["seqlens_k"][:] = past + tokens - 1
        arrays["total_sequence_length"][:] = past + tokens
