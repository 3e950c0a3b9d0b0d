"""The paged ONNX graph of a model of one of the ARCHITECTURES.

Per layer: RMSNorm, one packed QKV projection, com.microsoft::PagedAttention (QK-norm, RoPE, window, softcap and sinks
inside), output projection, RMSNorm, gated feed-forward or mixture of experts. Inputs and outputs carry the names
onnxruntime-genai's engine uses by default. T = num_tokens of all sequences of a step, one after the other; only the
last token of each sequence reaches the head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from onnx import TensorProto

from . import weights
from .architectures import OPTIONAL_BIASES, ModelConfig, half_rotation_order, rope_caches
from .errors import OctavoError, quoted
from .gguf_reader import GGUFFile
from .onnx_writer import OnnxWriter
from .weights import Blockwise, Dense, Weight

MS = "com.microsoft"
# Attributes of a mixture by Architecture.activation. swiglu_fusion 1: rows of gate and up by turns.
EXPERT_ACTIVATIONS: dict[str, dict[str, Any]] = {
    "swiglu_oai": {
        "activation_type": "swiglu",
        "activation_alpha": 1.702,
        "activation_beta": 1.0,
        "swiglu_limit": 7.0,
        "swiglu_fusion": 1,
        "normalize_routing_weights": 1,
    },
}


@dataclass(frozen=True)
class GraphOptions:
    """How the graph is written.

    weight_form: of weights.WEIGHT_FORMS. block_size: tokens of a cache block.
    cache_type: a key of kv_cache.CACHE_TYPES, which convert() gives the finished graph.
    accuracy_level: MatMulNBits' arithmetic; 4 = int8 activations, quick; 1 = float32, exact, several times slower.
    """

    weight_form: str = "int4"
    block_size: int = 16
    cache_type: str = "float32"
    accuracy_level: int = 4


def write_graph(
    file: GGUFFile,
    config: ModelConfig,
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
        _Graph(file, config, options, writer, progress).build()
        progress("graph")
        writer.finish(version)
    finally:
        writer.close()


def _rope_name(name: str, local: bool) -> str:
    return name + ("_local" if local else "")


def _no_activation(activation: str, of: str) -> OctavoError:
    return OctavoError(f"the graph has no {quoted(activation)} in {of}; add it to octavo/graph.py.")


def _is_symmetric_int8(weight: Weight | None) -> TypeGuard[Blockwise]:
    """8-bit codes times scales, as QMoE and GatherBlockQuantized take them."""
    return isinstance(weight, Blockwise) and weight.bits == 8 and weight.offsets is None


def step_count(config: ModelConfig) -> int:
    return config.layers + 3  # embedding, layers, head, graph


class _Graph:
    def __init__(
        self,
        file: GGUFFile,
        config: ModelConfig,
        options: GraphOptions,
        writer: OnnxWriter,
        progress: Callable[[str], None],
    ) -> None:
        self.file = file
        self.config = config
        self.options = options
        self.writer = writer
        self.progress = progress
        self._block_sums: dict[tuple[str, int], str] = {}  # value, block -> its sums over blocks of so many columns

    def build(self) -> None:
        writer, config = self.writer, self.config
        writer.input("input_ids", TensorProto.INT64, ["num_tokens"])
        writer.input("cumulative_sequence_lengths", TensorProto.INT32, ["batch_size_plus_1"])
        writer.input("past_sequence_lengths", TensorProto.INT32, ["batch_size"])
        writer.input("block_table", TensorProto.INT32, ["batch_size", "max_blocks"])
        writer.input("attention_metadata", TensorProto.INT32, [3])
        for local in sorted({config.has_local_rope(layer) for layer in range(config.layers)}):
            cos, sin = rope_caches(self.file, config, local)
            writer.constant(_rope_name("cos_cache", local), cos)
            writer.constant(_rope_name("sin_cache", local), sin)

        hidden, embedding = self._embed()
        self.progress("embedding")
        normed = self._rms_norm(hidden, "blk.0.attn_norm")
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
        if _is_symmetric_int8(weight):
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
        if self.config.traits.embedding_scale:
            scale = writer.constant("embedding_scale", np.sqrt(np.array(self.config.hidden_size, np.float32)))
            hidden = writer.node("Mul", [hidden, scale], "token_embd.scaled")
        return hidden, weight

    def _layer(self, layer: int, normed: str, residual: str) -> tuple[str, str]:
        """normed, residual: (T, H). Returns the next layer's (or the head's) normed input, and the new residual."""
        config, prefix = self.config, f"blk.{layer}."
        added = self._linear(prefix + "attn_output", self._attention(layer, normed))
        if config.traits.post_norms:
            added = self._rms_norm(added, prefix + "post_attention_norm")
        normed, residual = self._add_and_norm(added, residual, prefix + config.traits.ffn_norm)
        added = self._experts(prefix, normed) if config.traits.experts else self._feed_forward(prefix, normed)
        if config.traits.post_norms:
            added = self._rms_norm(added, prefix + "post_ffw_norm")
        last = layer + 1 == config.layers
        return self._add_and_norm(added, residual, "output_norm" if last else f"blk.{layer + 1}.attn_norm")

    def _feed_forward(self, prefix: str, normed: str) -> str:
        gate, up = self._gate_and_up(prefix, normed)
        activation = self.config.traits.activation
        if activation == "gelu":
            gate = self.writer.node("Gelu", [gate], prefix + "ffn_gate.gelu", approximate="tanh")
        elif activation == "silu":
            sigmoid = self.writer.node("Sigmoid", [gate], prefix + "ffn_gate.sigmoid")
            gate = self.writer.node("Mul", [gate, sigmoid], prefix + "ffn_gate.swish")
        else:
            raise _no_activation(activation, "a dense feed-forward")
        gated = self.writer.node("Mul", [gate, up], prefix + "ffn_gated")
        return self._linear(prefix + "ffn_down", gated)

    def _gate_and_up(self, prefix: str, normed: str) -> tuple[str, str]:
        if not self.config.traits.fused:
            return self._linear(prefix + "ffn_gate", normed), self._linear(prefix + "ffn_up", normed)
        both, bias, width = self._load(prefix + "ffn_up"), self._bias(prefix + "ffn_up"), self.config.feed_forward_size
        rows = np.arange(2 * width).reshape(2, width)
        gate, up = (
            self._multiply(prefix + name, normed, both.rows(part), None if bias is None else bias[part])
            for name, part in zip(("ffn_gate", "ffn_up"), rows, strict=True)
        )
        return gate, up

    def _experts(self, prefix: str, normed: str) -> str:
        """Mixture of experts: the softmax of the best few of the router's logits weighs their outputs.

        QMoE has 8-bit activations and no offsets; other forms, and exact arithmetic, get MoE with float32 weights.
        """
        config = self.config
        router = Dense(self.file.dequantised(prefix + "ffn_gate_inp.weight"))
        router_bias = weights.vector(self.file, prefix + "ffn_gate_inp.bias")
        logits = self._multiply(prefix + "ffn_gate_inp", normed, router, router_bias)
        gate, up, down = (self._load(prefix + f"ffn_{part}_exps") for part in ("gate", "up", "down"))
        biases = (self.file.dequantised(f"{prefix}ffn_{part}_exps.bias") for part in ("gate", "up", "down"))
        gate_bias, up_bias, down_bias = biases
        gate_up = weights.stack([gate, up])
        rows = config.expert_count * config.feed_forward_size
        by_turns = np.stack([np.arange(rows), np.arange(rows, 2 * rows)], axis=1).reshape(-1)
        both_biases = np.stack([gate_bias, up_bias], axis=2).reshape(config.expert_count, -1)

        if config.traits.activation not in EXPERT_ACTIVATIONS:
            raise _no_activation(config.traits.activation, "a mixture of experts")
        attributes: dict[str, Any] = EXPERT_ACTIVATIONS[config.traits.activation] | {"k": config.experts_used}
        if (
            self.options.accuracy_level == 4
            and _is_symmetric_int8(gate_up)
            and _is_symmetric_int8(down)
            and gate_up.block == down.block
        ):
            attributes |= {"expert_weight_bits": 8, "block_size": down.block}
        else:
            gate_up, down = Dense(np.concatenate([gate.dequantised(), up.dequantised()])), Dense(down.dequantised())
        inputs = [normed, logits]
        inputs += self._expert_inputs(prefix + "ffn_gate_up_exps", gate_up.rows(by_turns), both_biases)
        inputs += self._expert_inputs(prefix + "ffn_down_exps", down, down_bias)
        op = "QMoE" if isinstance(down, Blockwise) else "MoE"
        return self.writer.node(op, inputs, prefix + "ffn_exps.out", MS, **attributes)

    def _expert_inputs(self, name: str, weight: Weight, bias: np.ndarray) -> list[str]:
        """Three inputs of QMoE or two of MoE; the first extent of each is the expert."""
        count = self.config.expert_count
        if isinstance(weight, Dense):
            values = [("weight", weight.values)]
        else:
            values = [("codes", weight.codes.reshape(weight.shape)), ("scales", weight.scales)]
        named = [(part, v.reshape(count, -1, v.shape[-1])) for part, v in values]
        return [self.writer.constant(f"{name}.{part}", v) for part, v in [*named, ("bias", bias)]]

    def _attention(self, layer: int, normed: str) -> str:
        config, prefix = self.config, f"blk.{layer}."
        caches, cache_outputs = [], []
        shape = ["num_blocks", self.options.block_size, config.kv_num_heads, config.head_size]
        for kind in ("key", "value"):
            caches.append(self.writer.input(f"past_key_values.{layer}.{kind}", TensorProto.FLOAT, shape))
            cache_outputs.append(self.writer.output(f"present.{layer}.{kind}", TensorProto.FLOAT, shape))
        sinks, norms, local = "", ["", ""], config.has_local_rope(layer)
        attributes: dict[str, float | int] = {}
        if config.traits.sinks:
            sinks = self._vector(prefix + "attn_sinks")
        if config.traits.qk_norm:
            norms = [self._vector(prefix + name) for name in ("attn_q_norm", "attn_k_norm")]
            attributes["qk_norm_epsilon"] = config.norm_epsilon
        if config.windows[layer] > 0:
            attributes["local_window_size"] = config.windows[layer]
        if config.attention_scale:
            attributes["scale"] = config.attention_scale
        if config.attention_softcap:
            attributes["softcap"] = config.attention_softcap
        return self.writer.node(
            "PagedAttention",
            [
                *self._query_key_value(prefix, normed),
                *caches,
                "cumulative_sequence_lengths",
                "past_sequence_lengths",
                "block_table",
                _rope_name("cos_cache", local),
                _rope_name("sin_cache", local),
                "",  # slot_mapping
                sinks,
                *norms,
                "",  # scales, which a quantised cache gets later
                "",
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
        if config.traits.fused:
            return [self._linear(prefix + "attn_qkv", normed), "", ""]
        orders = {"attn_q": None, "attn_k": None, "attn_v": None}
        if config.traits.interleaved_rows:
            for name, heads in (("attn_q", config.num_heads), ("attn_k", config.kv_num_heads)):
                orders[name] = half_rotation_order(heads, config.head_size, config.rotary_dim)
        parts = [self._load(prefix + name, order) for name, order in orders.items()]
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
        head = embedding
        if not config.tied_head:
            head = weights.load(self.file, "output.weight", self.options.weight_form, is_head=True)
        if not config.final_softcap:
            self._multiply("output", rows, head, None, out="logits")
            return
        logits = self._multiply("output", rows, head, None)
        cap = writer.constant("final_softcap", np.array(config.final_softcap, np.float32))
        bounded = writer.node("Tanh", [writer.node("Div", [logits, cap], "output.scaled")], "output.bounded")
        writer.node("Mul", [bounded, cap], "logits")

    # --- building blocks ---

    def _vector(self, name: str) -> str:
        return self.writer.constant(name + ".weight", weights.vector(self.file, name + ".weight"))

    def _rms_norm(self, value: str, name: str) -> str:
        return self.writer.node(
            "SimplifiedLayerNormalization",
            [value, self._vector(name)],
            name + ".out",
            epsilon=self.config.norm_epsilon,
            axis=-1,
            stash_type=1,
        )

    def _add_and_norm(self, value: str, residual: str, name: str) -> tuple[str, str]:
        """The norm `name` of value + residual, and that sum."""
        out, total = name + ".out", name + ".out.residual"
        self.writer.node(
            "SkipSimplifiedLayerNormalization",
            [value, residual, self._vector(name)],
            [out, "", "", total],
            MS,
            epsilon=self.config.norm_epsilon,
        )
        return out, total

    def _load(self, name: str, order: np.ndarray | None = None) -> Weight:
        weight = weights.load(self.file, name + ".weight", self.options.weight_form)
        return weight if order is None else weight.rows(order)

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
        if (value, block) not in self._block_sums:
            writer = self.writer
            shape = writer.constant(f"{block}_of_{columns}", np.array([-1, columns // block, block], np.int64))
            blocks = writer.node("Reshape", [value, shape], f"{value}.blocks_of_{block}")
            axis = writer.constant("axis_last", np.array([-1], np.int64))
            sums = writer.node("ReduceSum", [blocks, axis], f"{value}.sums_over_{block}", keepdims=0)
            self._block_sums[value, block] = sums
        return self._block_sums[value, block]
