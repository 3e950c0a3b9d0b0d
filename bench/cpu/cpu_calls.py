"""One work as calls of ours and of stock on the same numbers, and attention in float64 to judge both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import ml_dtypes
import numpy as np
import onnxruntime
from cpu_rows import PAGE, Work
from onnx import TensorProto, helper

ONNX_TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(ml_dtypes.float8_e4m3fn): TensorProto.FLOAT8E4M3FN,
    np.dtype(np.int8): TensorProto.INT8,
    np.dtype(np.uint8): TensorProto.UINT8,
    np.dtype(np.int32): TensorProto.INT32,
}
TYPES = {"fp32": np.float32, "fp16": np.float16}
# Steps between neighbouring codes, such that 256 values of a normal distribution (up to 2.9) fill the range.
SCALES = {"int8": np.float32(0.023), "fp8": np.float32(0.0065), "int4": np.float32(0.4)}
DISTINCT_BYTES = 256 << 20  # calls go round caches of at least so many bytes, which no last-level cache holds
MAX_CACHES = 64

PAGED_INPUTS = ("query", "key", "value", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens",
                "block_table", "", "", "", "", "", "", "k_scale", "v_scale")  # fmt: skip
GQA_INPUTS = ("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length",
              "", "", "", "", "", "k_scale", "v_scale")  # fmt: skip

Session = onnxruntime.InferenceSession
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Settings:
    """Of every session alike, but for the library."""

    threads: int
    library: str
    backend: str = ""


def values() -> np.ndarray:
    """256 float32 values at equal steps of probability of a normal distribution: all numbers are drawn from them."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / 256) for i in range(256)], np.float32)


def codes(cache: str) -> tuple[np.ndarray, np.ndarray]:
    """What a cache stores for each of values(), one element a code even where it packs two, and what that stands for
    in float32."""
    v = values()
    if cache in TYPES:
        stored = v.astype(TYPES[cache])
        return stored, stored.astype(np.float32)
    scale = SCALES[cache]
    if cache == "fp8":
        stored = (v / scale).astype(ml_dtypes.float8_e4m3fn)
        return stored, stored.astype(np.float32) * scale
    low, high = (-128, 127) if cache == "int8" else (-8, 7)
    whole = np.clip(np.rint(v / scale), low, high).astype(np.int8)
    stored = whole if cache == "int8" else (whole + 8).astype(np.uint8)
    return stored, whole.astype(np.float32) * scale


def encode(cache: str, drawn: np.ndarray) -> np.ndarray:
    """Indices into values(), (..., H), as the cache stores them: (..., H), or (..., H/2) bytes of int4."""
    stored = codes(cache)[0]
    if cache != "int4":
        return stored[drawn]
    pairs = drawn.view("<u2")  # two neighbours at a time, the first in the low byte
    both = np.arange(1 << 16)
    return (stored[both & 255] | stored[both >> 8] << 4).astype(np.uint8)[pairs]


def make_session(
    op: str,
    names: tuple[str, ...],
    inputs: Arrays,
    outputs: Arrays,
    attributes: dict[str, int | str],
    settings: Settings,
    *,
    domain: str = "com.microsoft",
    ours: bool = False,
) -> Session:
    """A session of one node on the CPU, ours or stock. inputs, outputs: arrays of the types and shapes."""
    listed = [name if name in inputs else "" for name in names]
    while not listed[-1]:
        listed.pop()
    node = helper.make_node(op, listed, list(outputs), domain=domain, **attributes)
    graph = helper.make_graph(
        [node],
        op,
        [helper.make_tensor_value_info(name, ONNX_TYPES[x.dtype], x.shape) for name, x in inputs.items()],
        [helper.make_tensor_value_info(name, ONNX_TYPES[x.dtype], x.shape) for name, x in outputs.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = settings.threads
    # The pools of two sessions share the processors: one that still spins after its call would slow the other's down.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if ours:
        options.add_session_config_entry("octavo.concurrency", str(settings.threads))
        if settings.backend:
            options.add_session_config_entry("octavo.backend", settings.backend)
        options.register_custom_ops_library(settings.library)
    return Session(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def bind(session: Session, inputs: Arrays, outputs: Arrays) -> onnxruntime.IOBinding:
    """Bound to these very buffers, which the caller keeps alive."""
    binding = session.io_binding()
    for name, x in inputs.items():
        binding.bind_input(name, "cpu", 0, ONNX_TYPES[x.dtype], list(x.shape), x.ctypes.data)
    for name, x in outputs.items():
        binding.bind_output(name, "cpu", 0, ONNX_TYPES[x.dtype], list(x.shape), x.ctypes.data)
    return binding


def product_call(settings: Settings, size: int) -> tuple[Callable[[], None], int]:
    """A float32 matrix product of size x size by the same runtime, and its floating-point operations."""
    rng = np.random.default_rng(1)
    inputs = {name: rng.standard_normal((size, size), np.float32) for name in ("a", "b")}
    outputs = {"c": np.empty((size, size), np.float32)}
    session = make_session("MatMul", ("a", "b"), inputs, outputs, {}, settings, domain="")
    binding = bind(session, inputs, outputs)

    def run(_kept: tuple[Arrays, Arrays] = (inputs, outputs)) -> None:
        session.run_with_iobinding(binding)

    return run, 2 * size**3


class Calls:
    """The calls of one work: `count` sets of distinct caches, gone round by calls, so that none is found in the
    processor's own caches.

    Both operators append the same new tokens at the end of every sequence, in place and at each call anew.
    """

    def __init__(self, work: Work, settings: Settings, with_stock: bool) -> None:
        self.work = work
        self.count = min(MAX_CACHES, -(-DISTINCT_BYTES // work.bytes)) if work.is_decode else 1
        rng = np.random.default_rng(7)
        sequences, shape = self.count * work.batch, (work.kv_num_heads, work.context, work.head_size)
        self._drawn = [np.frombuffer(rng.bytes(sequences * int(np.prod(shape))), np.uint8).reshape(sequences, *shape)
                       for _ in range(2)]  # fmt: skip
        dtype = TYPES[work.type]
        tokens = work.batch * work.new_tokens
        query = values()[rng.integers(0, 256, (tokens, work.num_heads, work.head_size))]
        self._query = query.astype(dtype)
        # What the caches hold of a new token, exactly: quantised, it falls on its code again.
        past = work.context - work.new_tokens
        self._new = [np.ascontiguousarray(codes(work.cache)[1][drawn[:, :, past:]].transpose(0, 2, 1, 3)).astype(dtype)
                     for drawn in self._drawn]  # (sequences, new, G, H)  # fmt: skip
        # (count, batch, G, context, row): stock's caches, which the read loop reads too. New tokens are not there yet.
        self.contiguous = [encode(work.cache, drawn).reshape(self.count, work.batch, *shape[:2], -1)
                           for drawn in self._drawn]  # fmt: skip
        for cache in self.contiguous:
            cache[:, :, :, past:] = np.zeros((), cache.dtype)
        self._attributes = {"num_heads": work.num_heads, "kv_num_heads": work.kv_num_heads}
        self._scales: Arrays = {}
        if work.cache in SCALES:
            self._attributes |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
            self._scales = {name: np.array([SCALES[work.cache]]) for name in ("k_scale", "v_scale")}
        self.ours_output = np.empty((tokens, work.num_heads * work.head_size), dtype)
        self.stock_output = np.empty((work.batch, work.new_tokens, work.num_heads * work.head_size), dtype)
        self.run_ours = self._bind_ours(settings, rng)
        self.run_stock = self._bind_stock(settings) if with_stock else None

    def _new_tokens(self, i: int, rank_two: bool) -> Arrays:
        """Q, K and V of the new tokens of set i, in ours' or in stock's shape."""
        work = self.work
        batch = slice(i * work.batch, (i + 1) * work.batch)
        lead = (work.batch * work.new_tokens,) if rank_two else (work.batch, work.new_tokens)
        return {"query": self._query.reshape(*lead, -1)} | {
            name: new[batch].reshape(*lead, -1) for name, new in zip(("key", "value"), self._new, strict=True)
        }

    def _bind_ours(self, settings: Settings, rng: np.random.Generator) -> Callable[[int], None]:
        work, attributes = self.work, dict(self._attributes)
        pages = work.context // PAGE
        ids = rng.permutation(self.count * work.batch * pages).astype(np.int32)
        pools = []
        for cache in self.contiguous:
            paged = cache.reshape(self.count * work.batch, work.kv_num_heads, pages, PAGE, -1).transpose(0, 2, 3, 1, 4)
            pool = np.empty((ids.size, *paged.shape[2:]), cache.dtype)
            pool[ids] = paged.reshape(pool.shape)
            pools.append(pool)
        if work.cache == "int4":
            attributes |= {"k_cache_dtype": "int4", "v_cache_dtype": "int4"}
        table = ids.reshape(self.count, work.batch, pages)
        offsets = (np.arange(work.batch + 1) * work.new_tokens).astype(np.int32)
        past = np.full(work.batch, work.context - work.new_tokens, np.int32)
        fixed = {"key_cache": pools[0], "value_cache": pools[1], "cumulative_sequence_length": offsets,
                 "past_seqlens": past}  # fmt: skip
        outputs = {"output": self.ours_output, "key_cache_out": pools[0], "value_cache_out": pools[1]}
        fixed |= self._scales
        feeds = [self._new_tokens(i, True) | fixed | {"block_table": table[i]} for i in range(self.count)]
        session = make_session("PagedAttention", PAGED_INPUTS, feeds[0], outputs, attributes, settings, ours=True)
        bindings = [bind(session, feed, outputs) for feed in feeds]
        self._kept = [feeds, outputs]

        def run(i: int) -> None:
            session.run_with_iobinding(bindings[i])

        return run

    def _bind_stock(self, settings: Settings) -> Callable[[int], None]:
        work, attributes = self.work, dict(self._attributes)
        if work.cache in ("int8", "int4"):
            attributes["kv_cache_bit_width"] = 8 if work.cache == "int8" else 4
        lengths = {"seqlens_k": np.full(work.batch, work.context - 1, np.int32),
                   "total_sequence_length": np.array([work.context], np.int32)}  # fmt: skip
        feeds, outputs = [], []
        for i in range(self.count):
            k, v = (cache[i] for cache in self.contiguous)
            feeds.append(self._new_tokens(i, False) | {"past_key": k, "past_value": v} | lengths | self._scales)
            outputs.append({"output": self.stock_output, "present_key": k, "present_value": v})
        session = make_session("GroupQueryAttention", GQA_INPUTS, feeds[0], outputs[0], attributes, settings)
        bindings = [bind(session, feed, output) for feed, output in zip(feeds, outputs, strict=True)]
        self._kept_by_stock = [feeds, outputs]

        def run(i: int) -> None:
            session.run_with_iobinding(bindings[i])

        return run

    def exact(self, i: int) -> tuple[slice, np.ndarray]:
        """Attention in float64 of the last sequence of set i: which tokens of the output (at most the last 4 of that
        sequence), and their rows, (tokens, N*H)."""
        work = self.work
        sequence, group = (i + 1) * work.batch - 1, work.num_heads // work.kv_num_heads
        decoded = codes(work.cache)[1].astype(np.float64)
        k, v = (decoded[drawn[sequence]] for drawn in self._drawn)
        count = min(4, work.new_tokens)
        tokens = slice(len(self._query) - count, len(self._query))
        rows = np.empty((count, work.num_heads, work.head_size))
        for j, q in enumerate(self._query[tokens].astype(np.float64)):
            seen = work.context - count + 1 + j
            q = q.reshape(work.kv_num_heads, group, work.head_size)
            scores = np.einsum("ghd,gnd->ghn", q, k[:, :seen], optimize=True) / np.sqrt(work.head_size)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            attended = np.einsum("ghn,gnd->ghd", weights, v[:, :seen], optimize=True)
            rows[j] = attended.reshape(work.num_heads, work.head_size)
        return tokens, rows.reshape(count, -1)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """|actual - expected| / |expected| in the 2-norm; NaN where `actual` has one."""
    expected = expected.astype(np.float64)
    apart = actual.astype(np.float64).reshape(expected.shape) - expected
    return float(np.linalg.norm(apart) / np.linalg.norm(expected))
