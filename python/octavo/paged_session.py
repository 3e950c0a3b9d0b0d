"""One sequence through a paged graph in onnxruntime, without the engine: for calibration and perplexity."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from .errors import OctavoError, first_line, shown
from .onnx_model import describe_proto, load_proto, why_unreadable
from .runtime import register

# What octavo convert calls the head's part that keeps the last row of each sequence (graph.py).
_LAST_ROWS = "last_hidden"
_INPUTS = {
    "input_ids", "cumulative_sequence_lengths", "past_sequence_lengths", "block_table", "attention_metadata",
}  # fmt: skip


def load_graph(path: Path) -> onnx.ModelProto:
    """The graph of a model that octavo convert wrote, without its weights, with logits for every token.

    Raises OctavoError for another model, and where its weights cannot be read.
    """
    model = load_proto(path)
    for location in describe_proto(path, model).external_bytes:
        why = why_unreadable(path, location)
        if why:
            raise OctavoError(f"{shown(str(path.parent / location))} cannot be read: {why}.")
    graph = model.graph
    heads = [node for node in graph.node if list(node.output) == [_LAST_ROWS] and node.op_type == "Gather"]
    others = {value.name for value in graph.input if not value.name.startswith("past_key_values.")}
    if len(heads) != 1 or others != _INPUTS:
        raise OctavoError(f"{path} is not a graph that octavo convert wrote; only those can be measured.")
    rows = heads[0].input[0]
    heads[0].CopyFrom(helper.make_node("Identity", [rows], [_LAST_ROWS]))
    for value in graph.output:
        if value.name == "logits":
            value.type.tensor_type.shape.dim[0].dim_param = "num_tokens"
    return model


class PagedSession:
    """A session over one sequence of at most `capacity` tokens.

    Args:
        model: a graph of load_graph; its weights lie in `folder`.
        threads: of onnxruntime; 0 = its default.

    Raises OctavoError where onnxruntime or octavo's library refuses the graph.
    """

    def __init__(self, model: onnx.ModelProto, folder: str | os.PathLike[str], capacity: int, threads: int = 0) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # errors are raised; the constants that load_graph leaves behind are no news
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.fspath(folder))
        register(options)
        try:
            self._session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's classes have no common base of their own
            raise OctavoError(f"onnxruntime refused the model in {folder}: {first_line(error)}") from error
        self.caches: dict[str, ort.OrtValue] = {}
        self.token_bytes = 0  # of one token's K and V in all layers
        for value in model.graph.input:
            if value.name in _INPUTS:
                continue
            tensor = value.type.tensor_type
            block_size, heads, width = (int(dim.dim_value) for dim in tensor.shape.dim[1:])
            width_bytes = width * np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type)).itemsize
            self.token_bytes += heads * width_bytes
            blocks = -(-capacity // block_size)
            self.caches[value.name] = ort.OrtValue.ortvalue_from_shape_and_type(
                [blocks, block_size, heads, width], tensor.elem_type
            )
            self._table = np.arange(blocks, dtype=np.int32)[None, :]

    def feed(self, ids: np.ndarray, past: int) -> np.ndarray:
        """Logits, float32 (tokens, vocab), of tokens that follow the `past` tokens fed before."""
        total = past + len(ids)
        binding = self._session.io_binding()
        feeds = {
            "input_ids": ids.astype(np.int64),
            "cumulative_sequence_lengths": np.array([0, len(ids)], np.int32),
            "past_sequence_lengths": np.array([past], np.int32),
            "block_table": self._table,
            "attention_metadata": np.array([len(ids), total, total], np.int32),
        }
        for name, values in feeds.items():
            binding.bind_cpu_input(name, values)
        for name, cache in self.caches.items():
            binding.bind_ortvalue_input(name, cache)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), cache)
        binding.bind_output("logits")
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:
            raise OctavoError(f"the model fails: {first_line(error)}") from error
        return binding.get_outputs()[-1].numpy()  # in the order of binding

    def cached(self, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """K (rotated) and V of the first `count` tokens in every layer, each (count, G, D). For float caches."""
        flat = {}
        for name, cache in self.caches.items():
            values = cache.numpy()
            flat[name] = values.reshape(-1, *values.shape[2:])[:count]
        layers = len(flat) // 2
        names = [[f"past_key_values.{layer}.{kind}" for kind in ("key", "value")] for layer in range(layers)]
        return [(flat[key], flat[value]) for key, value in names]
