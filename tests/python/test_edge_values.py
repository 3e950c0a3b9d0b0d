"""Values and memory at the edge of what is legal: infinite sinks, huge scales, overlapping arrays, forked processes."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import octavo

HEADS, KV_HEADS, HEAD_SIZE, BLOCKS, BLOCK_SIZE = 4, 2, 16, 8, 4


def make_call(tokens: int = 6, cache_type: type = np.float32, **more: Any) -> dict[str, Any]:
    """One sequence of `tokens` new tokens in a float32 call, in the operator's names."""
    rng = np.random.default_rng(7)
    cache = (BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    return {
        "query": rng.standard_normal((tokens, HEADS * HEAD_SIZE)).astype(np.float32),
        "key": rng.standard_normal((tokens, KV_HEADS * HEAD_SIZE)).astype(np.float32),
        "value": rng.standard_normal((tokens, KV_HEADS * HEAD_SIZE)).astype(np.float32),
        "key_cache": np.zeros(cache, cache_type),
        "value_cache": np.zeros(cache, cache_type),
        "cumulative_sequence_length": np.array([0, tokens], np.int32),
        "past_seqlens": np.zeros(1, np.int32),
        "block_table": np.arange(BLOCKS, dtype=np.int32)[None],
        "num_heads": HEADS,
        "kv_num_heads": KV_HEADS,
        **more,
    }


def test_an_infinite_sink_takes_all_the_weight() -> None:
    """Risk: exp(inf - inf) is NaN where the limit is 0."""
    assert not octavo.paged_attention(**make_call(head_sink=np.full(HEADS, np.inf, np.float32))).any()
    plain = octavo.paged_attention(**make_call())
    absent = octavo.paged_attention(**make_call(head_sink=np.full(HEADS, -np.inf, np.float32)))
    assert plain.tobytes() == absent.tobytes()


@pytest.mark.parametrize("cache", ["float8e4m3fn", "float4e2m1", "int8", "int4"])
def test_large_scales_stay_finite(cache: str) -> None:
    """Risk: a constant of the decoder joins a large legal scale and overflows before the small code comes in."""
    scale = np.array([2e36], np.float32)
    storage: Any = np.int8
    width = HEAD_SIZE
    names = {}
    if cache == "float8e4m3fn":
        storage = pytest.importorskip("ml_dtypes").float8_e4m3fn
    elif cache != "int8":
        storage, width, names = np.uint8, HEAD_SIZE // 2, {"k_cache_dtype": cache, "v_cache_dtype": cache}
    call = make_call(k_scale=np.ones(1, np.float32), v_scale=scale)
    call |= dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_TENSOR") | names
    call["value"] = (np.sign(call["value"]) * scale).astype(np.float32)  # code 1 or -1
    call["key_cache"] = np.zeros((BLOCKS, BLOCK_SIZE, KV_HEADS, width), storage)
    call["value_cache"] = np.zeros((BLOCKS, BLOCK_SIZE, KV_HEADS, width), storage)
    output = octavo.paged_attention(**call)
    first = call["value"][0].reshape(KV_HEADS, HEAD_SIZE).repeat(HEADS // KV_HEADS, axis=0).reshape(-1)
    np.testing.assert_allclose(output[0], first, rtol=1e-6)  # the first token sees itself alone
    assert np.isfinite(output).all()


def test_output_in_place_of_query() -> None:
    """Risk: the second pass of output_qk reads queries that the output has overwritten."""
    expected, expected_qk = octavo.paged_attention(**make_call(qk_output=2))
    call = make_call(qk_output=2)
    output, output_qk = octavo.paged_attention(**call, output=call["query"])
    assert output.tobytes() == expected.tobytes()
    assert output_qk.tobytes() == expected_qk.tobytes()


def test_overlapping_memory_is_refused() -> None:
    """Risk: V overwrites K, or an output overwrites a cache, without a word."""
    size = BLOCKS * BLOCK_SIZE * KV_HEADS * HEAD_SIZE
    shape = (BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    pool = np.zeros(size + HEAD_SIZE, np.float32)
    caches = {"key_cache": pool[:size].reshape(shape), "value_cache": pool[HEAD_SIZE:].reshape(shape)}
    with pytest.raises(ValueError, match=r"value_cache: must not share memory with key_cache.*\[D16\]"):
        octavo.paged_attention(**make_call() | caches)
    assert not pool.any()
    call = make_call()
    output = call["key_cache"].reshape(-1)[: call["query"].size].reshape(call["query"].shape)
    with pytest.raises(ValueError, match=r"output: must not share memory with key_cache.*\[D17\]"):
        octavo.paged_attention(**call, output=output)
    interleaved = np.zeros((BLOCKS, 2, BLOCK_SIZE, KV_HEADS, HEAD_SIZE), np.float32)
    strided = {"key_cache": interleaved[:, 0], "value_cache": interleaved[:, 1]}
    assert octavo.paged_attention(**make_call() | strided).tobytes() == octavo.paged_attention(**make_call()).tobytes()


@pytest.mark.parametrize("threads", [None, 3])
def test_a_forked_child_computes(threads: int | None) -> None:
    """Risk: OpenMP's threads are not there after fork(), and the child waits for them for ever."""
    call = make_call(tokens=BLOCKS * BLOCK_SIZE)
    expected = octavo.paged_attention(**call, threads=threads)
    child = os.fork()
    if child == 0:
        right = octavo.paged_attention(**call, threads=threads).tobytes() == expected.tobytes()
        os._exit(0 if right else 3)
    deadline = time.monotonic() + 30
    status = None
    while status is None and time.monotonic() < deadline:
        pid, code = os.waitpid(child, os.WNOHANG)
        status = code if pid == child else None
        time.sleep(0.01)
    if status is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert status == 0, "the child hung" if status is None else f"the child ended with status {status}"
