"""The paged ONNX graph of a llama-architecture model.

Per layer: RMSNorm, one packed QKV projection, com.microsoft::PagedAttention (RoPE inside), output projection, RMSNorm,
SwiGLU. Inputs and outputs carry the names onnxruntime-genai's engine uses by default. T = num_tokens of all sequences
of a step, one after the other; only the last token of each sequence reaches the head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import TensorProto

from . import weights
from .gguf_reader import GGUFFile
from .llama import OPTIONAL_BIASES, LlamaConfig, half_rotation_order, rope_caches
from .onnx_writer import OnnxWriter
from .weights import Blockwise, Dense, Weight

MS = "com.microsoft"


@dataclass(frozen=True)
class GraphOptions:
    """How the graph is written.

    weight_form: of weights.WEIGHT_FORMS. block_size: tokens of a cache block. cache_type: a key of kv_cache.CACHE_TYPES,
    which convert() gives the finished graph.
    accuracy_level: MatMulNBits' arithmetic; 4 = int8 activations, quick; 1 = float32, exact, several times slower.
    """

    weight_form: str = "int4"
    block_size: int = 16
    cache_type: str = "float32"
    accuracy_level: int = 4


def write_graph(
    file: GGUFFile,
    config: LlamaConfig,
    options: GraphOptions,
    folder: Path,
    version: str,
    progress: Callable[[str], None] = lambda step: None,
) -> None:
    """Writes model.onnx and model.onnx.data into `folder`, with float32 caches.

    Calls `progress` once a step, step_count(config) times.
    """
    writer = OnnxWriter(folder)
    try:
        _LlamaGraph(file, config, options, writer, progress).build()
        progress("graph")
        writer.finish(version)
    finally:
        writer.close()


def step_count(config: LlamaConfig) -> int:
    return config.layers + 3  # embedding, layers, head, graph


class _LlamaGraph:
    def __init__(
        self,
        file: GGUFFile,
        config: LlamaConfig,
        options: GraphOptions,
        writer: OnnxWriter,
        progress: Callable[[str], None],
    ) -> None:
        self.file = file
        self.config = config
        self.options = options
        self.writer = writer
        self.progress = progress
        self._block_sums: dict[str, str] = {}  # value -> its sums over blocks of 32 columns

    def build(self) -> None:
        writer, config = self.writer, self.config
        writer.input("input_ids", TensorProto.INT64, ["num_tokens"])
        writer.input("cumulative_sequence_lengths", TensorProto.INT32, ["batch_size_plus_1"])
        writer.input("past_sequence_lengths", TensorProto.INT32, ["batch_size"])
        writer.input("block_table", TensorProto.INT32, ["batch_size", "max_blocks"])
        writer.input("attention_metadata", TensorProto.INT32, [3])
        cos, sin = rope_caches(self.file, config)
        writer.constant("cos_cache", cos)
        writer.constant("sin_cache", sin)

        hidden, embedding = self._embed()
        self.progress("embedding")
        normed = writer.node(
            "SimplifiedLayerNormalization",
            [hidden, self._norm("blk.0.attn_norm.weight")],
            "blk.0.attn_norm.out",
            epsilon=config.norm_epsilon,
            axis=-1,
            stash_type=1,
        )
        for layer in range(config.layers):
            normed, hidden = self._layer(layer, normed, hidden)
            self.progress(f"layer {layer + 1} of {config.layers}")
        self._head(normed, embedding)
        self.progress("head")

    # --- parts of the model ---

    def _embed(self) -> tuple[str, Weight]:
        """Returns the value hidden (T, H) and the embedding matrix, which a tied head uses again."""
        weight = weights.load(self.file, "token_embd.weight", self.options.weight_form, is_head=True)
        writer = self.writer
        if isinstance(weight, Blockwise) and weight.bits == 8 and weight.offsets is None:
            writer.share(weight.codes)
            writer.share(weight.scales)
            codes = writer.constant("token_embd.codes", weight.codes.reshape(weight.shape))
            scales = writer.constant("token_embd.scales", weight.scales)
            hidden = writer.node(
                "GatherBlockQuantized",
                [codes, "input_ids", scales],
                "token_embd.out",
                MS,
                bits=8,
                block_size=weight.block,
                gather_axis=0,
                quantize_axis=1,
            )
        else:
            table = weight.dequantised()
            if isinstance(weight, Dense):
                writer.share(table)
            hidden = writer.node(
                "Gather", [writer.constant("token_embd", table), "input_ids"], "token_embd.out", axis=0
            )
        return hidden, weight

    def _layer(self, layer: int, normed: str, residual: str) -> tuple[str, str]:
        """normed, residual: (T, H). Returns the next layer's (or the head's) normed input, and the new residual."""
        prefix = f"blk.{layer}."
        attended = self._attention(layer, normed)
        projected = self._linear(prefix + "attn_output", attended)
        normed, residual = self._add_and_norm(projected, residual, prefix + "ffn_norm.weight", prefix + "ffn_norm.out")
        gate = self._linear(prefix + "ffn_gate", normed)
        up = self._linear(prefix + "ffn_up", normed)
        sigmoid = self.writer.node("Sigmoid", [gate], prefix + "ffn_gate.sigmoid")
        swish = self.writer.node("Mul", [gate, sigmoid], prefix + "ffn_gate.swish")
        gated = self.writer.node("Mul", [swish, up], prefix + "ffn_gated")
        down = self._linear(prefix + "ffn_down", gated)
        last = layer + 1 == self.config.layers
        norm = "output_norm.weight" if last else f"blk.{layer + 1}.attn_norm.weight"
        return self._add_and_norm(down, residual, norm, norm.replace(".weight", ".out"))

    def _attention(self, layer: int, normed: str) -> str:
        config, prefix = self.config, f"blk.{layer}."
        caches, cache_outputs = [], []
        shape = ["num_blocks", self.options.block_size, config.kv_num_heads, config.head_size]
        for kind in ("key", "value"):
            caches.append(self.writer.input(f"past_key_values.{layer}.{kind}", TensorProto.FLOAT, shape))
            cache_outputs.append(self.writer.output(f"present.{layer}.{kind}", TensorProto.FLOAT, shape))
        attributes = {"local_window_size": config.local_window_size} if config.local_window_size > 0 else {}
        return self.writer.node(
            "PagedAttention",
            [
                *self._query_key_value(prefix, normed),
                *caches,
                "cumulative_sequence_lengths",
                "past_sequence_lengths",
                "block_table",
                "cos_cache",
                "sin_cache",
                *[""] * 6,  # slot_mapping, head_sink, norm weights, scales
                "attention_metadata",
            ],
            [prefix + "attn.out", *cache_outputs],
            MS,
            num_heads=config.num_heads,
            kv_num_heads=config.kv_num_heads,
            do_rotary=1,
            rotary_interleaved=0,
            **attributes,
        )

    def _query_key_value(self, prefix: str, normed: str) -> list[str]:
        """Inputs 0 to 2: packed QKV where the three matrices have one form, else three values."""
        config = self.config
        orders = {
            "attn_q": half_rotation_order(config.num_heads, config.head_size, config.rotary_dim),
            "attn_k": half_rotation_order(config.kv_num_heads, config.head_size, config.rotary_dim),
            "attn_v": np.arange(config.kv_rows),
        }
        parts = [self._load(prefix + name).rows(order) for name, order in orders.items()]
        biases = [self._bias(prefix + name, order) for name, order in orders.items()]
        packed = weights.stack(parts)
        if packed is None:
            named = zip(orders, parts, biases, strict=True)
            return [self._multiply(prefix + name, normed, part, bias) for name, part, bias in named]
        bias = None
        if any(b is not None for b in biases):
            bias = np.concatenate(
                [np.zeros(p.shape[0], np.float32) if b is None else b for p, b in zip(parts, biases, strict=True)]
            )
        return [self._multiply(prefix + "attn_qkv", normed, packed, bias), "", ""]

    def _head(self, normed: str, embedding: Weight) -> None:
        """Logits of the last token of every sequence: row cumulative_sequence_lengths[1:] - 1."""
        writer, config = self.writer, self.config
        one, end, axis = (
            writer.constant(name, np.array([value], np.int64))
            for name, value in (("one", 1), ("end", np.iinfo(np.int64).max), ("axis_0", 0))
        )
        ends = writer.node("Slice", ["cumulative_sequence_lengths", one, end, axis], "sequence_ends")
        last = writer.node("Sub", [ends, writer.constant("one_int32", np.array(1, np.int32))], "last_tokens")
        rows = writer.node("Gather", [normed, last], "last_hidden", axis=0)
        writer.output("logits", TensorProto.FLOAT, ["batch_size", config.vocab_size])
        if config.tied_head:
            self._multiply("output", rows, embedding, None, out="logits")
        else:
            head = weights.load(self.file, "output.weight", self.options.weight_form, is_head=True)
            self._multiply("output", rows, head, None, out="logits")

    # --- building blocks ---

    def _norm(self, name: str) -> str:
        return self.writer.constant(name, weights.vector(self.file, name))

    def _add_and_norm(self, value: str, residual: str, norm: str, out: str) -> tuple[str, str]:
        total = out + ".residual"
        self.writer.node(
            "SkipSimplifiedLayerNormalization",
            [value, residual, self._norm(norm)],
            [out, "", "", total],
            MS,
            epsilon=self.config.norm_epsilon,
        )
        return out, total

    def _load(self, name: str) -> Weight:
        return weights.load(self.file, name + ".weight", self.options.weight_form)

    def _bias(self, name: str, order: np.ndarray | None = None) -> np.ndarray | None:
        if name.rsplit(".", 1)[1] not in OPTIONAL_BIASES or name + ".bias" not in self.file.tensors:
            return None
        values = weights.vector(self.file, name + ".bias")
        return values if order is None else values[order]

    def _linear(self, name: str, value: str) -> str:
        return self._multiply(name, value, self._load(name), self._bias(name))

    def _multiply(self, name: str, value: str, weight: Weight, bias: np.ndarray | None, out: str | None = None) -> str:
        """value (T, columns) times weight (rows, columns) transposed, plus bias (rows): (T, rows)."""
        out = out or name + ".out"
        if isinstance(weight, Dense):
            inputs = [value, self.writer.constant(name + ".weight", weight.values)]
            if bias is not None:
                inputs.append(self.writer.constant(name + ".bias", bias))
            return self.writer.node("Gemm", inputs, out, transB=1)
        return self._multiply_blockwise(name, value, weight, bias, out)

    def _multiply_blockwise(self, name: str, value: str, weight: Blockwise, bias: np.ndarray | None, out: str) -> str:
        writer = self.writer
        rows, columns = weight.shape
        inputs = [
            value,
            writer.constant(name + ".codes", weight.codes),
            writer.constant(name + ".scales", weight.scales),
        ]
        if bias is not None:
            inputs += ["", "", writer.constant(name + ".bias", bias)]
        corrected = weight.offsets is not None
        product = writer.node(
            "MatMulNBits",
            inputs,
            name + ".symmetric" if corrected else out,
            MS,
            K=columns,
            N=rows,
            bits=weight.bits,
            block_size=weight.block,
            accuracy_level=self.options.accuracy_level,
        )
        if not corrected:
            return product
        offsets = writer.constant(name + ".offsets", weight.offsets)
        return writer.node(
            "Gemm", [self._sums_over_blocks(value, columns, weight.block), offsets, product], out, transB=1
        )

    def _sums_over_blocks(self, value: str, columns: int, block: int) -> str:
        if value not in self._block_sums:  # every type with offsets has blocks of 32
            writer = self.writer
            shape = writer.constant(f"blocks_of_{columns}", np.array([-1, columns // block, block], np.int64))
            blocks = writer.node("Reshape", [value, shape], value + ".blocks")
            axis = writer.constant("axis_last", np.array([-1], np.int64))
            self._block_sums[value] = writer.node("ReduceSum", [blocks, axis], value + ".block_sums", keepdims=0)
        return self._block_sums[value]
