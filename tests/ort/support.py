"""Cases, models and sessions for the tests of the ONNX Runtime edge."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import reference
from onnx import TensorProto, helper

INPUT_NAMES = (
    "query",
    "key",
    "value",
    "key_cache",
    "value_cache",
    "cumulative_sequence_length",
    "past_seqlens",
    "block_table",
    "cos_cache",
    "sin_cache",
    "slot_mapping",
    "head_sink",
    "q_norm_weight",
    "k_norm_weight",
    "k_scale",
    "v_scale",
    "attention_metadata",
    "query_positions",
    "attention_bias",
)
OUTPUT_NAMES = ("output", "key_cache_out", "value_cache_out", "output_qk")
FLOAT32, FLOAT16 = np.dtype(np.float32), np.dtype(np.float16)
BFLOAT16, FLOAT8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
INT8, UINT8 = np.dtype(np.int8), np.dtype(np.uint8)
ONNX_TYPES = {
    FLOAT32: TensorProto.FLOAT,
    FLOAT16: TensorProto.FLOAT16,
    BFLOAT16: TensorProto.BFLOAT16,
    FLOAT8: TensorProto.FLOAT8E4M3FN,
    INT8: TensorProto.INT8,
    UINT8: TensorProto.UINT8,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int64): TensorProto.INT64,
    np.dtype(np.float64): TensorProto.DOUBLE,
}
ROUNDOFF = {FLOAT32: 2.0**-24, FLOAT16: 2.0**-11, BFLOAT16: 2.0**-8}
SMALLEST = {FLOAT32: 2.0**-149, FLOAT16: 2.0**-24, BFLOAT16: 2.0**-133}  # positive number


@dataclass
class Case:
    """One call: the node's attributes and inputs, by the contract's names. Absent inputs are missing."""

    attributes: dict
    inputs: dict[str, np.ndarray]
    qk_type: np.dtype = FLOAT32
    head_size: int = 0

    @property
    def type(self) -> np.dtype:
        """T."""
        return self.inputs["query"].dtype

    @property
    def is_latent(self) -> bool:
        """Whether there is one cache, of latent rows."""
        return self.attributes.get("kv_cache_layout") == "LATENT"

    def output_shapes(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and type of every output that this case has."""
        expected = {"output": (self.expected_output_shape(), self.type)}
        expected["key_cache_out"] = (self.inputs["key_cache"].shape, self.inputs["key_cache"].dtype)
        if not self.is_latent:
            expected["value_cache_out"] = (self.inputs["value_cache"].shape, self.inputs["value_cache"].dtype)
        if self.attributes.get("qk_output", 0):
            context = self.inputs["block_table"].shape[1] * self.inputs["key_cache"].shape[1]
            metadata = self.inputs.get("attention_metadata")
            if metadata is not None and metadata[1] > 0:
                context = min(context, int(metadata[1]))
            shape = (self.attributes["num_heads"], self.inputs["query"].shape[0], context)
            expected["output_qk"] = (shape, self.qk_type)
        return expected

    def expected_output_shape(self) -> tuple[int, int]:
        """Of output 0."""
        width = (self.is_latent and self.attributes.get("v_head_size", 0)) or self.head_size
        return self.inputs["query"].shape[0], self.attributes["num_heads"] * width


def make_case(
    rng: np.random.Generator,
    *,
    tensor_type: np.dtype = FLOAT32,
    k_type: np.dtype | None = None,
    v_type: np.dtype | None = None,
    k_quant: str = "PER_TENSOR",
    v_quant: str = "PER_TENSOR",
    k_dtype: str = "",
    v_dtype: str = "",
    new_lens: tuple[int, ...] = (3, 1, 6),
    past_lens: tuple[int, ...] = (0, 20, 13),
    num_heads: int = 4,
    kv_num_heads: int = 2,
    head_size: int = 16,
    block_size: int = 16,
    packed: bool = False,
    latent_v_head_size: int | None = None,
    rotary_dim: int = 0,
    qk_norm: bool = False,
    sink: bool = False,
    slot_mapping: bool = False,
    bias_shape: tuple[bool, bool] | None = None,
    metadata: tuple[int, ...] | None = None,
    qk_type: np.dtype = FLOAT32,
    padding_tokens: int = 0,
    **attributes: object,
) -> Case:
    """A random legal call. Blocks lie in random order, every float outside the live tokens is NaN, spare table columns
    hold -1, and the codes of quantised caches are random everywhere."""
    n, g = num_heads, kv_num_heads
    k_type, v_type = k_type or tensor_type, v_type or tensor_type
    cu = np.concatenate([[0], np.cumsum(new_lens)]).astype(np.int32)
    past = np.array(past_lens, np.int32)
    tokens = int(cu[-1]) + padding_tokens
    latent = latent_v_head_size is not None
    a: dict = {"num_heads": n, "kv_num_heads": g, **attributes}
    inputs: dict[str, np.ndarray] = {}

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32).astype(tensor_type)

    if packed:
        inputs["query"] = normal(tokens, (n + 2 * g) * head_size)
    else:
        inputs["query"] = normal(tokens, n * head_size)
        inputs["key"] = normal(tokens, g * head_size)
        if not latent:
            inputs["value"] = normal(tokens, g * head_size)
    if latent:
        a |= {"kv_cache_layout": "LATENT", "v_head_size": latent_v_head_size}
        a.setdefault("scale", 0.2)

    totals = past + np.diff(cu)
    columns = int(max(-(-totals // block_size))) + 1
    num_blocks = len(new_lens) * columns + 2
    ids = rng.permutation(num_blocks)
    table = np.full((len(new_lens), columns), -1, np.int32)
    for b, total in enumerate(totals):
        used = -(-int(total) // block_size)
        table[b, :used], ids = ids[:used], ids[used:]
    inputs["cumulative_sequence_length"], inputs["past_seqlens"], inputs["block_table"] = cu, past, table

    for name, cache_type, quant, dtype in (("k", k_type, k_quant, k_dtype), ("v", v_type, v_quant, v_dtype)):
        if latent and name == "v":
            continue
        full_name = {"k": "key_cache", "v": "value_cache"}[name]
        stored = (head_size + 1) // 2 if cache_type == UINT8 else head_size
        shape = (num_blocks, block_size, g, stored)
        if dtype:
            a[f"{name}_cache_dtype"] = dtype
        if cache_type in (INT8, UINT8, FLOAT8):
            a[f"{name}_quant_type"] = quant
            step = {INT8: 0.03, FLOAT8: 0.02, UINT8: 0.5}[cache_type]
            spread = rng.uniform(0.7, 1.3, (g, 1, head_size) if quant == "PER_CHANNEL" else (1,))
            inputs[f"{name}_scale"] = (step * spread).astype(np.float32)
        if cache_type in (INT8, UINT8):
            low, high = (-128, 128) if cache_type == INT8 else (0, 256)
            inputs[full_name] = rng.integers(low, high, shape).astype(cache_type)
            continue
        cache = np.full(shape, np.nan, np.float32).astype(cache_type)
        unit = 40.0 if cache_type == FLOAT8 else 1.0
        for b in range(len(new_lens)):
            for position in range(int(past[b])):
                row = unit * rng.standard_normal((g, stored)).astype(np.float32)
                cache[table[b, position // block_size], position % block_size] = row.astype(cache_type)
        inputs[full_name] = cache

    if rotary_dim:
        angles = rng.uniform(0, 2 * np.pi, (int(max(totals)) + 8, rotary_dim // 2))
        inputs["cos_cache"] = np.cos(angles).astype(np.float32).astype(tensor_type)
        inputs["sin_cache"] = np.sin(angles).astype(np.float32).astype(tensor_type)
        a["do_rotary"] = 1
    if qk_norm:
        inputs["q_norm_weight"], inputs["k_norm_weight"] = normal(head_size), normal(head_size)
    if sink:
        inputs["head_sink"] = normal(n)
    if slot_mapping:
        slots = np.full(tokens, -1, np.int32)
        for t, b, j in reference.tokens_of(inputs):
            position = int(past[b]) + j
            slots[t] = table[b, position // block_size] * block_size + position % block_size
        inputs["slot_mapping"] = slots
    if bias_shape is not None:
        shape = (len(new_lens) if bias_shape[0] else 1, n if bias_shape[1] else 1, max(new_lens), int(max(totals)))
        bias = normal(*shape)
        bias[rng.uniform(size=shape) < 0.2] = -np.inf
        inputs["attention_bias"] = bias
    if metadata is not None:
        inputs["attention_metadata"] = np.array(metadata, np.int32)
    return Case(a, inputs, qk_type, head_size)


def make_model(case: Case, input_count: int | None = None, cache_outputs: bool = True) -> onnx.ModelProto:
    """A model of one PagedAttention node with the case's inputs, outputs and types. `input_count` is how many inputs
    the node lists, absent ones by empty names; by default the absent trailing ones are left out."""
    listed = [name if name in case.inputs else "" for name in INPUT_NAMES]
    if input_count is None:
        while listed[-1] == "":
            listed.pop()
    else:
        listed = listed[:input_count]
    outputs = case.output_shapes()
    if not cache_outputs:
        outputs = {name: value for name, value in outputs.items() if not name.endswith("_cache_out")}
    wanted = [name if name in outputs else "" for name in OUTPUT_NAMES]
    while wanted[-1] == "":
        wanted.pop()
    node = helper.make_node("PagedAttention", listed, wanted, "attention", domain="com.microsoft", **case.attributes)
    graph_inputs = [
        helper.make_tensor_value_info(name, ONNX_TYPES[value.dtype], symbolic_shape(name, value.shape))
        for name, value in case.inputs.items()
    ]
    graph_outputs = [
        helper.make_tensor_value_info(name, ONNX_TYPES[dtype], None) for name, (_, dtype) in outputs.items()
    ]
    return finish_model(helper.make_graph([node], "paged", graph_inputs, graph_outputs))


def symbolic_shape(name: str, shape: tuple[int, ...]) -> list[int | str]:
    """The first dimension by a name of its own; the token dimension shares one, so that shapes propagate."""
    if name in ("query", "key", "value", "slot_mapping", "query_positions"):
        return ["token_count", *shape[1:]]
    if name in ("key_cache", "value_cache"):
        return ["num_blocks", *shape[1:]]
    return [f"{name}_{axis}" for axis in range(len(shape))]


def finish_model(graph: onnx.GraphProto) -> onnx.ModelProto:
    """With the opset imports of models exported for stock ONNX Runtime."""
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def runtime_version() -> tuple[int, ...]:
    """Of the onnxruntime that runs: (1, 32, 0)."""
    return tuple(int(part) for part in onnxruntime.__version__.split(".")[:3])


def library_path() -> str:
    """liboctavo_ort.so: OCTAVO_ORT_LIBRARY, else the installed package's."""
    given = os.environ.get("OCTAVO_ORT_LIBRARY")
    if given:
        return given
    import octavo

    return str(octavo.get_library_path())


def make_session(
    model: onnx.ModelProto, config: dict[str, str] | None = None, threads: int = 0, library: bool = True
) -> onnxruntime.InferenceSession:
    """A session on the CPU with the library registered."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    for key, value in (config or {}).items():
        options.add_session_config_entry(key, value)
    if library:
        options.register_custom_ops_library(library_path())
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def bind(
    session: onnxruntime.InferenceSession, case: Case, in_place: bool = True
) -> tuple[onnxruntime.IOBinding, dict[str, np.ndarray]]:
    """A binding of every input and output, so that all element types pass, and the output buffers. The caches of `case`
    are updated when `in_place`; otherwise the cache outputs get buffers of their own."""
    binding = session.io_binding()
    case.inputs = {name: np.ascontiguousarray(value) for name, value in case.inputs.items()}
    for name, value in case.inputs.items():
        binding.bind_input(name, "cpu", 0, ONNX_TYPES[value.dtype], list(value.shape), value.ctypes.data)
    results = {}
    for output in session.get_outputs():
        shape, dtype = case.output_shapes()[output.name]
        if in_place and output.name.endswith("_cache_out"):
            results[output.name] = case.inputs[output.name.removesuffix("_out")]
        else:  # no value of a previous run, and no accidental zero, may look like a result
            results[output.name] = np.frombuffer(bytearray(b"\x7f" * (int(np.prod(shape)) * dtype.itemsize)), dtype)
            results[output.name] = results[output.name].reshape(shape)
        buffer = results[output.name]
        binding.bind_output(output.name, "cpu", 0, ONNX_TYPES[dtype], list(shape), buffer.ctypes.data)
    return binding, results


def run_bound(session: onnxruntime.InferenceSession, case: Case, in_place: bool = True) -> dict[str, np.ndarray]:
    """Runs the case with the buffers of bind(); returns the outputs."""
    binding, results = bind(session, case, in_place)
    session.run_with_iobinding(binding)
    return results


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float, what: str) -> None:
    """Relative above 1/4, absolute below; NaN never equals, -inf equals -inf."""
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    with np.errstate(invalid="ignore"):
        wrong = ~((np.abs(actual - expected) <= tolerance * np.maximum(0.25, np.abs(expected))) | (actual == expected))
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        first = f"first at {at}: {actual[at]} for {expected[at]}"
        raise AssertionError(f"{what}: {wrong.sum()} of {wrong.size} differ, {first}")


def assert_within(actual: np.ndarray, expected: np.ndarray, bound: np.ndarray, what: str) -> None:
    """|actual - expected| <= bound, element by element; NaN never equals, -inf equals -inf."""
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    with np.errstate(invalid="ignore"):
        wrong = ~((np.abs(actual - expected) <= bound) | (actual == expected))
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        first = f"first at {at}: {actual[at]} for {expected[at]} within {bound[at]:.3g}"
        raise AssertionError(f"{what}: {wrong.sum()} of {wrong.size} differ, {first}")


def rounded_bound(expected: np.ndarray, error: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The bound of a result that is off by `error` when it is rounded to `dtype`. Where the error is 0 the result is
    exact: a zero, or an infinity out of the bias."""
    magnitude = np.abs(np.where(np.isfinite(expected), expected, 0.0)) + error
    return np.where(error > 0, error + ROUNDOFF[dtype] * magnitude + SMALLEST[dtype] / 2, 0.0)


def assert_computed(
    results: dict[str, np.ndarray], expected: dict[str, np.ndarray], name: str, what: str | None = None
) -> None:
    """Output `name` against reference.attend()'s, within the error of float32 arithmetic and one rounding: octavo
    computes in float32 whatever T is on a CPU."""
    bound = rounded_bound(expected[name], expected[f"{name}_error"], results[name].dtype)
    assert_within(results[name], expected[name], bound, what or name)


def assert_cache(actual: np.ndarray, expected: np.ndarray, before: np.ndarray, kind: str, what: str) -> None:
    """Stored rows equal up to one step of the stored type (a float32 and a float64 prologue may round a value near a
    tie apart), rows that nobody wrote equal bit for bit."""
    untouched = (expected.view(np.uint8) == before.view(np.uint8)).reshape(*expected.shape[:2], -1).all(axis=-1)
    same = (actual.view(np.uint8) == before.view(np.uint8)).reshape(*expected.shape[:2], -1).all(axis=-1)
    changed = np.argwhere(untouched & ~same)[:4].tolist()
    assert not changed, f"{what}: rows changed that no token writes: {changed}"
    width = actual.shape[-1] * (2 if actual.dtype == UINT8 else 1)
    a = reference.decode(actual, kind, None, width)[~untouched]
    e = reference.decode(expected, kind, None, width)[~untouched]
    step = {"float32": 1e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7, "float8e4m3fn": 2.0**-3}.get(kind)
    bound = np.ones_like(e) if step is None else step * np.maximum(np.abs(e), 2.0**-6)
    if kind == "float4e2m1":
        bound = np.where(np.abs(e) >= 4, 2.0, 1.0)
    wrong = np.abs(a - e) > bound
    assert not wrong.any(), f"{what}: {wrong.sum()} of {wrong.size} stored values are off by more than a step"
    off = (a != e).mean() if a.size else 0.0
    assert kind == "float32" or off < 0.05, f"{what}: {off:.1%} of the stored values are off by a step"


def check(
    case: Case, session: onnxruntime.InferenceSession | None = None, in_place: bool = True
) -> dict[str, np.ndarray]:
    """Runs the case and compares every output with the reference."""
    before = {name: value.copy() for name, value in case.inputs.items()}
    expected_k, expected_v = reference.updated_caches(before, case.attributes)
    results = run_bound(session or make_session(make_model(case)), case, in_place)
    a = reference.with_defaults(case.attributes)
    key_cache = results.get("key_cache_out", case.inputs["key_cache"])
    value_cache = results.get("value_cache_out", case.inputs.get("value_cache"))
    kind = reference.logical_type(key_cache, a["k_cache_dtype"])
    assert_cache(key_cache, expected_k, before["key_cache"], kind, "key_cache")
    if expected_v is not None:
        kind = reference.logical_type(value_cache, a["v_cache_dtype"])
        assert_cache(value_cache, expected_v, before["value_cache"], kind, "value_cache")
    for name, value in before.items():
        if not (in_place and name.endswith("_cache")):
            assert case.inputs[name].tobytes() == value.tobytes(), f"input {name} was changed"
    # Judged on the cache that the operator wrote: a stored value that fell on the other side of a tie is no error here.
    expected = reference.attend(before, case.attributes, key_cache, value_cache)
    assert_computed(results, expected, "output")
    if "output_qk" in results:
        assert_computed(results, expected, "output_qk")
    return results


def separate_case(rng: np.random.Generator, tensor_type: np.dtype, k: tuple, v: tuple) -> Case:
    """K and V of these (element type, k_cache_dtype or v_cache_dtype), each with scales of a kind drawn at random."""
    quants = ("PER_TENSOR", "PER_CHANNEL")
    return make_case(
        rng,
        tensor_type=tensor_type,
        k_type=k[0],
        v_type=v[0],
        k_dtype=k[1],
        v_dtype=v[1],
        k_quant=quants[rng.integers(2)],
        v_quant=quants[rng.integers(2)],
    )


def in_threads(workers: list) -> None:
    """Runs callables at once and passes on what they raise."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(workers))

    def run(worker) -> None:
        try:
            barrier.wait()
            worker()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
