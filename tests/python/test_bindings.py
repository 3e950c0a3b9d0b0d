"""octavo.paged_attention against a plain numpy reference: every tensor and attribute reaches the right place."""

from __future__ import annotations

import copy
import os
import re
import signal
import threading
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from paged_reference import reference

import octavo
from octavo import _core, arrays

TOKENS, HEADS, KV_HEADS, HEAD_SIZE, BLOCKS, BLOCK_SIZE, WIDTH = 6, 4, 2, 16, 9, 16, 3
OFFSETS = np.array([0, 4, 5, 6], np.int32)
PAST = np.array([0, 20, 33], np.int32)
TABLE = np.array([[4, 8, -1], [1, 7, -1], [5, 0, 2]], np.int32)
CONTEXT = WIDTH * BLOCK_SIZE

Call = dict[str, Any]


def make_call(seed: int, dtype: Any = np.float32) -> Call:
    """Three sequences with 4, 1 and 1 new tokens, random data."""
    rng = np.random.default_rng(seed)

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    return {
        "query": random(TOKENS, HEADS * HEAD_SIZE),
        "key": random(TOKENS, KV_HEADS * HEAD_SIZE),
        "value": random(TOKENS, KV_HEADS * HEAD_SIZE),
        "key_cache": random(BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE),
        "value_cache": random(BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE),
        "cumulative_sequence_length": OFFSETS,
        "past_seqlens": PAST,
        "block_table": TABLE,
        "num_heads": HEADS,
        "kv_num_heads": KV_HEADS,
    }


def random_floats(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rotary_tables(dimension: int) -> Call:
    angles = np.arange(CONTEXT)[:, None] * 10000.0 ** (-np.arange(dimension // 2) / (dimension / 2))
    return {"cos_cache": np.cos(angles).astype(np.float32), "sin_cache": np.sin(angles).astype(np.float32)}


# What each adds to the plain call. A tensor or attribute under a wrong name would leave the result unchanged.
VARIANTS: dict[str, Call] = {
    "plain": {},
    "scale": {"scale": 0.5},
    "softcap": {"softcap": 0.75},
    "window": {"local_window_size": 5},
    "non_causal": {"is_causal": 0},
    "rotary": {"do_rotary": 1, **rotary_tables(HEAD_SIZE)},
    "rotary_interleaved": {"do_rotary": 1, "rotary_interleaved": 1, **rotary_tables(HEAD_SIZE)},
    "rotary_offset": {"do_rotary": 1, "rotary_offset": 8, **rotary_tables(8)},
    "sink": {"head_sink": random_floats(1, HEADS) * 3},
    "qk_norm": {
        "q_norm_weight": random_floats(2, HEAD_SIZE),
        "k_norm_weight": random_floats(3, HEAD_SIZE),
        "qk_norm_epsilon": 0.5,
    },
    "bias": {"attention_bias": random_floats(4, 3, HEADS, 4, CONTEXT)},
    "query_positions": {"query_positions": np.array([0, 1, 1, 2, 20, 30], np.int32)},
    "slot_mapping": {"slot_mapping": np.array([64, -1, 66, 67, 16 * 7 + 4, 33], np.int32)},
    "scores": {"qk_output": 1},
    "probabilities": {"qk_output": 2},
    "int64_table": {"block_table": TABLE.astype(np.int64)},
}


def assert_close(got: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", VARIANTS)
def test_matches_reference(name: str) -> None:
    call = make_call(seed=7) | VARIANTS[name]
    output, output_qk, lse, key_cache, value_cache = reference(call)
    got = octavo.paged_attention(**call, return_lse=True)
    assert_close(got[0], output, 2e-5)
    if call.get("qk_output"):
        assert got[1].shape == (HEADS, TOKENS, CONTEXT)
        assert_close(got[1], output_qk, 2e-5)
    assert_close(got[-1], lse, 2e-5)
    assert_close(call["key_cache"], key_cache, 1e-5)
    assert_close(call["value_cache"], value_cache, 1e-5)


@pytest.mark.parametrize(
    "name", [name for name in VARIANTS if name not in ("plain", "int64_table", "scores", "probabilities")]
)
def test_variant_has_an_effect(name: str) -> None:
    """Guards the test above: an ignored argument must not be able to pass it."""
    plain, changed = make_call(seed=7), make_call(seed=7) | VARIANTS[name]
    assert np.abs(octavo.paged_attention(**plain) - octavo.paged_attention(**changed)).max() > 1e-3


def test_packed_qkv() -> None:
    call = make_call(seed=8)
    separate = octavo.paged_attention(**call)
    again = make_call(seed=8)
    again["query"] = np.concatenate([again["query"], again["key"], again["value"]], axis=1)
    again["key"] = again["value"] = None
    np.testing.assert_array_equal(octavo.paged_attention(**again), separate)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float16, 4e-3), (ml_dtypes.bfloat16, 3e-2)])
def test_half_types(dtype: Any, tolerance: float) -> None:
    call = make_call(seed=9, dtype=dtype)
    expected = reference(call)[0]
    output = octavo.paged_attention(**call)
    assert output.dtype == dtype
    assert_close(output, expected, tolerance)


def test_int8_cache_with_channel_scales() -> None:
    """K and V scales are different, so that a swap shows."""
    call = make_call(seed=10)
    rng = np.random.default_rng(10)
    scales = {name: rng.uniform(0.01, 0.05, (KV_HEADS, 1, HEAD_SIZE)).astype(np.float32) for name in ("k", "v")}
    shape = call["key_cache"].shape
    stored = {name: rng.integers(-128, 128, shape).astype(np.int8) for name in ("k", "v")}

    def quantised(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        rows = x.reshape(TOKENS, KV_HEADS, HEAD_SIZE) / scale[:, 0]
        return (np.clip(np.rint(rows), -128, 127) * scale[:, 0]).reshape(TOKENS, -1)

    meant = call | {
        "key": quantised(call["key"], scales["k"]),
        "value": quantised(call["value"], scales["v"]),
        "key_cache": stored["k"] * scales["k"][:, 0],
        "value_cache": stored["v"] * scales["v"][:, 0],
    }
    call |= {"key_cache": stored["k"], "value_cache": stored["v"], "k_scale": scales["k"], "v_scale": scales["v"]}
    call |= {
        "k_quant_type": "PER_CHANNEL",
        "v_quant_type": "PER_CHANNEL",
        "k_cache_dtype": "int8",
        "v_cache_dtype": "int8",
    }
    assert_close(octavo.paged_attention(**call), reference(meant)[0], 1e-4)


def test_float8_cache_through_ml_dtypes() -> None:
    call = make_call(seed=11)
    for name in ("key_cache", "value_cache"):
        call[name] = call[name].astype(ml_dtypes.float8_e4m3fn)
    one = np.ones(1, np.float32)
    rounded = {name: call[name].astype(ml_dtypes.float8_e4m3fn).astype(np.float32) for name in ("key", "value")}
    expected, _, _, key_cache, _ = reference(call | rounded)
    call |= {"k_scale": one, "v_scale": one, "k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
    call |= {"k_cache_dtype": "float8e4m3fn", "v_cache_dtype": "float8e4m3fn"}
    assert_close(octavo.paged_attention(**call), expected, 1e-4)
    np.testing.assert_array_equal(call["key_cache"].astype(np.float64), key_cache)


def test_latent() -> None:
    """LATENT: K is the latent row, V its leading channels, and value and value_cache are absent."""
    call = make_call(seed=12)
    call |= {
        "key": call["key"][:, :HEAD_SIZE].copy(),
        "key_cache": call["key_cache"][:, :, :1].copy(),
        "kv_num_heads": 1,
    }
    expected = reference(call | {"value": call["key"], "value_cache": call["key_cache"], "scale": 0.25})[0]
    expected = expected.reshape(TOKENS, HEADS, HEAD_SIZE)[:, :, :8].reshape(TOKENS, -1)
    call |= {"value": None, "value_cache": None, "kv_cache_layout": "LATENT", "v_head_size": 8, "scale": 0.25}
    assert_close(octavo.paged_attention(**call), expected, 2e-5)


def test_strided_caches_are_updated_in_place() -> None:
    """K and V interleaved in one head-major pool, as vLLM lays it out: same bits as contiguous caches."""
    call, strided = make_call(seed=13), make_call(seed=13)
    pool = np.zeros((BLOCKS, 2, KV_HEADS, BLOCK_SIZE, HEAD_SIZE), np.float32)
    for index, name in enumerate(("key_cache", "value_cache")):
        view = pool[:, index].transpose(0, 2, 1, 3)
        view[...] = strided[name]
        strided[name] = view
    np.testing.assert_array_equal(octavo.paged_attention(**strided), octavo.paged_attention(**call))
    np.testing.assert_array_equal(strided["key_cache"], call["key_cache"])
    np.testing.assert_array_equal(pool[:, 1].transpose(0, 2, 1, 3), call["value_cache"])


def test_output_buffers_are_used() -> None:
    call = make_call(seed=14) | {"qk_output": 2}
    expected = octavo.paged_attention(**call)
    output = np.full((TOKENS, HEADS * HEAD_SIZE), np.nan, np.float32)
    output_qk = np.full((HEADS, TOKENS, CONTEXT), np.nan, np.float16)
    got = octavo.paged_attention(**call, output=output, output_qk=output_qk)
    assert got[0] is output and got[1] is output_qk
    np.testing.assert_array_equal(output, expected[0])
    np.testing.assert_array_equal(output_qk, expected[1].astype(np.float16))


def test_read_only_inputs_are_accepted() -> None:
    call = make_call(seed=15)
    for name in ("query", "key", "value"):
        call[name].flags.writeable = False
    octavo.paged_attention(**call)


def test_results_do_not_depend_on_threads() -> None:
    """Risk: where the keys are cut follows the number of threads. Contexts of many ranges of keys and two KV heads, so
    that there is nothing else to share out."""
    rng = np.random.default_rng(16)
    past, blocks = np.array([6500, 7300], np.int32), 2 * 460
    call = {
        "query": rng.standard_normal((2, 4 * 8), np.float32),
        "key": rng.standard_normal((2, 2 * 8), np.float32),
        "value": rng.standard_normal((2, 2 * 8), np.float32),
        "key_cache": rng.standard_normal((blocks, 16, 2, 8), np.float32),
        "value_cache": rng.standard_normal((blocks, 16, 2, 8), np.float32),
        "cumulative_sequence_length": np.array([0, 1, 2], np.int32),
        "past_seqlens": past,
        "block_table": rng.permutation(blocks).astype(np.int32).reshape(2, -1),
        "num_heads": 4,
        "kv_num_heads": 2,
    }
    results = [octavo.paged_attention(**call, threads=threads) for threads in (1, 2, 3, 16, None)]
    assert_close(results[0], reference(call)[0], 2e-5)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_metadata_bounds_output_qk() -> None:
    call = make_call(seed=17) | {"qk_output": 2, "attention_metadata": np.array([4, 40], np.int32)}
    assert octavo.paged_attention(**call)[1].shape == (HEADS, TOKENS, 40)


def test_gil_is_released() -> None:
    """Another Python thread goes on while a call runs."""
    tokens, context = 512, 4096
    rng = np.random.default_rng(18)
    call = {
        "query": rng.standard_normal((tokens, 8 * 64), np.float32),
        "key": rng.standard_normal((tokens, 8 * 64), np.float32),
        "value": rng.standard_normal((tokens, 8 * 64), np.float32),
        "key_cache": np.zeros((context // 16, 16, 8, 64), np.float32),
        "value_cache": np.zeros((context // 16, 16, 8, 64), np.float32),
        "cumulative_sequence_length": np.array([0, tokens], np.int32),
        "past_seqlens": np.array([context - tokens], np.int32),
        "block_table": np.arange(context // 16, dtype=np.int32)[None],
        "num_heads": 8,
        "kv_num_heads": 8,
    }
    started, finished = threading.Event(), threading.Event()
    ticks_during_call = 0

    def run() -> None:
        started.set()
        octavo.paged_attention(**call, threads=1)
        finished.set()

    worker = threading.Thread(target=run)
    worker.start()
    started.wait()
    while not finished.is_set():
        ticks_during_call += 1
        time.sleep(0.001)
    worker.join()
    assert ticks_during_call >= 3


def test_explain_names_every_backend_and_writes_nothing() -> None:
    call = make_call(seed=19)
    before = call["key_cache"].copy()
    rows = octavo.explain_call(**call)
    assert {"backend", "description", "refusal"} == set(rows[0])
    assert any(not row["refusal"] for row in rows)
    np.testing.assert_array_equal(call["key_cache"], before)


@pytest.mark.parametrize(
    "backend", [None, *(row["backend"] for row in octavo.explain_call(**make_call(0)) if not row["refusal"])]
)
def test_backend_can_be_forced(backend: str | None) -> None:
    call = make_call(seed=20)
    expected = reference(call)[0]
    assert_close(octavo.paged_attention(**call, backend=backend), expected, 2e-5)


def test_float32_is_a_name_for_a_float32_cache() -> None:
    """Rule A13. Risk: a vocabulary of the bindings that lacks one of the contract's."""
    named = make_call(seed=24) | {"k_cache_dtype": "float32", "v_cache_dtype": "float32"}
    np.testing.assert_array_equal(octavo.paged_attention(**named), octavo.paged_attention(**make_call(seed=24)))


def test_version_of_the_extension() -> None:
    """Risk: a stale compiled extension beside newer Python files."""
    assert _core.version() == octavo.__version__


BAD_CALLS: dict[str, tuple[Call, type[Exception], str]] = {
    "unknown backend": ({"backend": "abacus"}, ValueError, "backend: must name a backend"),
    "wrong table type": (
        {"block_table": TABLE.astype(np.int16)},
        ValueError,
        "block_table: type must be int32 or int64, got int16; cast it [T4]",
    ),
    "float64 query": (
        {"query": np.zeros((TOKENS, HEADS * HEAD_SIZE))},
        ValueError,
        "query: type must be float32, float16 or bfloat16, got float64; cast it [T1]",
    ),
    "complex query": ({"query": np.zeros((TOKENS, HEADS * HEAD_SIZE), np.complex64)}, ValueError, "got complex64;"),
    "boolean lengths": ({"past_seqlens": PAST > 0}, ValueError, "past_seqlens: type must be int32, got bool;"),
    "float64 scale": ({"k_scale": np.ones(1)}, ValueError, "k_scale: type must be float32, got float64; cast it [T6]"),
    "float64 cache": (
        {"key_cache": np.zeros((BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE))},
        ValueError,
        "key_cache: type must be query's, int8, float8e4m3fn or uint8, got float64; cast it [T8]",
    ),
    "big-endian lengths": (
        {"past_seqlens": PAST.astype(">i4")},
        ValueError,
        "past_seqlens: must have the byte order of this machine, got '>i4'",
    ),
    "objects": ({"past_seqlens": PAST.astype(object)}, ValueError, "past_seqlens: no octavo type has elements of type"),
    "structures": ({"past_seqlens": np.zeros(3, [("a", "<i4")])}, ValueError, "past_seqlens: no octavo type has"),
    "read-only output": (
        {"output": np.broadcast_to(np.float32(0), (TOKENS, HEADS * HEAD_SIZE))},
        ValueError,
        "output: is read-only",
    ),
    "a list": ({"past_seqlens": [0, 20, 33]}, ValueError, "past_seqlens: must be a readable array"),
    "read-only cache": (
        {"key_cache": np.broadcast_to(np.float32(0), (BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE))},
        ValueError,
        "key_cache: is read-only, and it is written in place; pass a writable array",
    ),
    "transposed key": (
        {"key": np.zeros((KV_HEADS * HEAD_SIZE, TOKENS), np.float32).T},
        ValueError,
        "key: must be contiguous, row-major, got shape (6, 32) with strides (1, 6)",
    ),
    "a list as query": ({"query": [[0.0] * HEADS * HEAD_SIZE]}, ValueError, "query: must be a readable array"),
    "a list as cache": ({"key_cache": [0.0]}, ValueError, "key_cache: must be a writable array"),
    "string for an int": ({"num_heads": "4"}, TypeError, "num_heads: must be an integer of at most 64 bits, got '4'"),
    "float for an int": ({"is_causal": 0.5}, TypeError, "is_causal: must be an integer"),
    "large int": ({"v_head_size": 1 << 80}, TypeError, "v_head_size: must be an integer of at most 64 bits"),
    "None for an int": ({"kv_num_heads": None}, TypeError, "kv_num_heads: must be an integer"),
    "string for a float": ({"softcap": "1"}, TypeError, "softcap: must be a number, got '1'"),
    "int for a string": ({"k_quant_type": 0}, TypeError, "k_quant_type: must be a string, got 0"),
    "block id": ({"block_table": TABLE + 100}, ValueError, "block_table"),
    "no sin": ({"do_rotary": 1, "cos_cache": rotary_tables(16)["cos_cache"]}, ValueError, "sin_cache"),
    "quant type": ({"k_quant_type": "PER_TOKEN"}, ValueError, 'k_quant_type: must be one of "NONE", "PER_TENSOR"'),
    "layout": ({"kv_cache_layout": "latent"}, ValueError, 'got "latent"; use one of these spellings [A14]'),
    "cache dtype": ({"v_cache_dtype": "int3"}, ValueError, "v_cache_dtype: must be one of"),
    "heads": ({"num_heads": 3}, ValueError, "num_heads"),
    "no heads": ({"num_heads": 0}, ValueError, "num_heads"),
    "no threads": ({"threads": 0}, ValueError, "threads: must be 1 to 4096, got 0"),
    "many threads": ({"threads": 4097}, ValueError, "threads: must be 1 to 4096, got 4097"),
    "half a thread": ({"threads": 1.5}, TypeError, "threads: must be an integer, got 1.5"),
    "backend by number": ({"backend": 5}, TypeError, "backend: must be a string or None, got 5"),
    "large limit": ({"output_qk_limit_bytes": 2**63}, ValueError, "output_qk_limit_bytes: must be 0 to"),
    "text as limit": ({"output_qk_limit_bytes": "1"}, TypeError, "output_qk_limit_bytes: must be an integer"),
    "negative v_head_size": (
        {"kv_cache_layout": "LATENT", "value": None, "value_cache": None, "v_head_size": -(10**12)},
        ValueError,
        "v_head_size: must not be negative",
    ),
    # Risk: what an illegal attribute asks for is allocated before anything is checked.
    "huge v_head_size": (
        {"kv_cache_layout": "LATENT", "kv_num_heads": 1, "value": None, "value_cache": None, "v_head_size": 10**12}
        | {"key": random_floats(1, TOKENS, HEAD_SIZE), "key_cache": random_floats(1, BLOCKS, BLOCK_SIZE, 1, HEAD_SIZE)},
        ValueError,
        "v_head_size: ",
    ),
    "huge num_heads": ({"num_heads": 10**12, "return_lse": True}, ValueError, "num_heads"),
    "output type": ({"output": np.zeros((TOKENS, HEADS * HEAD_SIZE), np.float16)}, ValueError, "output"),
    "large output_qk": ({"qk_output": 1, "output_qk_limit_bytes": 100}, octavo.ResourceExhaustedError, "output_qk"),
    "rank 5": ({"key_cache": np.zeros((1, 1, 1, 1, 1), np.float32)}, ValueError, "key_cache"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_are_refused_and_write_nothing(name: str) -> None:
    changes, exception, text = BAD_CALLS[name]
    call = make_call(seed=21) | changes
    value_cache = copy.deepcopy(call["value_cache"])
    with pytest.raises(exception, match=re.escape(text)):
        octavo.paged_attention(**call)
    np.testing.assert_array_equal(call["value_cache"], value_cache)


def test_one_thread_works_after_a_fork() -> None:
    """Risk: OpenMP's threads do not exist in a forked child, so that a team of them waits for ever."""
    octavo.paged_attention(**make_call(seed=25), threads=4)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        octavo.paged_attention(**make_call(seed=25), threads=4)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_unsupported_error_is_an_octavo_name() -> None:
    assert octavo.UnsupportedError.__module__ == "octavo"
    assert issubclass(octavo.UnsupportedError, RuntimeError)


def test_native_view_shares_memory() -> None:
    """A bfloat16 cache is updated in place, so its view must not be a copy."""
    array = np.zeros(4, ml_dtypes.bfloat16)
    view, name = arrays.native_view(array)
    view[1] = 0x3F80
    assert name == "bfloat16" and array[1] == 1


class DlpackOnly:
    """An array of a library that octavo does not know: DLPack and a shape, nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.shape, self.ndim = array.shape, array.ndim

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_any_dlpack_array() -> None:
    """Caches are written through DLPack, not into a copy; without an output buffer the message asks for one."""
    call, wrapped = make_call(seed=23), make_call(seed=23)
    caches = wrapped["key_cache"]
    wrapped = {name: DlpackOnly(value) if isinstance(value, np.ndarray) else value for name, value in wrapped.items()}
    with pytest.raises(TypeError, match="pass output="):
        octavo.paged_attention(**wrapped)
    output = np.empty((TOKENS, HEADS * HEAD_SIZE), np.float32)
    octavo.paged_attention(**wrapped, output=DlpackOnly(output))
    np.testing.assert_array_equal(output, octavo.paged_attention(**call))
    np.testing.assert_array_equal(caches, call["key_cache"])


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    call = make_call(seed=22)
    expected = octavo.paged_attention(**make_call(seed=22))
    tensors = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in call.items()
    }
    output = octavo.paged_attention(**tensors)
    assert isinstance(output, torch.Tensor)
    np.testing.assert_array_equal(output.numpy(), expected)


def test_errors_have_one_base() -> None:
    """Risk: a caller has to know two families of exceptions."""
    for name in ("UnsupportedError", "ResourceExhaustedError"):
        assert issubclass(getattr(octavo, name), octavo.OctavoError)
        assert issubclass(getattr(octavo, name), RuntimeError)
