"""paged_attention(): com.microsoft::PagedAttention on arrays in CPU memory, under the operator's own names.

The rules of every argument are in docs/contract.md. N = num_heads, G = kv_num_heads, H = head_size, T = query's type.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from octavo.arrays import empty_float32_like, empty_like, native_view, require_importable
from octavo.openmp import sleeping_threads

with sleeping_threads():
    from octavo import _core

UnsupportedError = _core.UnsupportedError
ResourceExhaustedError = _core.ResourceExhaustedError
feature_names = _core.feature_names

QuantType = Literal["NONE", "PER_TENSOR", "PER_CHANNEL"]
CacheType = Literal["", "float32", "float16", "bfloat16", "int8", "float8e4m3fn", "int4", "float4e2m1"]

_INPUTS = (
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
_CACHES = ("key_cache", "value_cache")
_ATTRIBUTES = (
    "num_heads",
    "kv_num_heads",
    "scale",
    "softcap",
    "local_window_size",
    "is_causal",
    "do_rotary",
    "rotary_interleaved",
    "rotary_offset",
    "qk_norm_epsilon",
    "k_quant_type",
    "v_quant_type",
    "k_cache_dtype",
    "v_cache_dtype",
    "kv_cache_layout",
    "v_head_size",
    "qk_output",
)


class BackendVerdict(TypedDict):
    """One backend's answer to a call; an empty refusal means that it accepts."""

    backend: str
    description: str
    refusal: str


def paged_attention(
    query: Any,
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    cumulative_sequence_length: Any,
    past_seqlens: Any,
    block_table: Any,
    *,
    num_heads: int,
    kv_num_heads: int,
    cos_cache: Any = None,
    sin_cache: Any = None,
    slot_mapping: Any = None,
    head_sink: Any = None,
    q_norm_weight: Any = None,
    k_norm_weight: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    attention_metadata: Any = None,
    query_positions: Any = None,
    attention_bias: Any = None,
    scale: float = 0.0,
    softcap: float = 0.0,
    local_window_size: int = -1,
    is_causal: int = 1,
    do_rotary: int = 0,
    rotary_interleaved: int = 0,
    rotary_offset: int = 0,
    qk_norm_epsilon: float = 1e-6,
    k_quant_type: QuantType = "NONE",
    v_quant_type: QuantType = "NONE",
    k_cache_dtype: CacheType = "",
    v_cache_dtype: CacheType = "",
    kv_cache_layout: Literal["SEPARATE", "LATENT"] = "SEPARATE",
    v_head_size: int = 0,
    qk_output: Literal[0, 1, 2] = 0,
    output: Any = None,
    output_qk: Any = None,
    return_lse: bool = False,
    output_qk_limit_bytes: int = 1 << 30,
    threads: int | None = None,
    backend: str | None = None,
) -> Any:
    """Append the new tokens' K and V to the caches in place, and attend over the paged cache.

    Args:
        query: T (token_count, N*H), or packed QKV (token_count, (N+2G)*H) with key and value None. T is float32,
            float16 or bfloat16.
        key, value: T (token_count, G*H). In LATENT, key is the latent row and value is None.
        key_cache, value_cache: (num_blocks, block_size, G, H), or (..., H/2) bytes of a 4-bit type. Written in place.
            Any non-negative strides over the first three dimensions.
        cumulative_sequence_length: int32 (batch_size+1), offsets of each sequence's new tokens.
        past_seqlens: int32 (batch_size), tokens already in the cache.
        block_table: int32 or int64 (batch_size, max_blocks_per_sequence); -1 = unmapped.
        cos_cache ... attention_bias: the operator's optional inputs; k_scale and v_scale are float32, slot_mapping has
            block_table's type, attention_metadata and query_positions are int32, the rest T.
        scale ... qk_output: the operator's attributes with its defaults.
        output: T (token_count, N*v_head_size), written in place; None allocates it like `query`.
        output_qk: (N, token_count, max_context_len) of float32, float16 or bfloat16 for qk_output 1 and 2; None
            allocates float32, at most output_qk_limit_bytes.
        return_lse: also return the log-sum-exp of the attended scores, float32 (N, token_count).
        threads: how many threads, 1 to 4096; None takes the default of OpenMP. Results do not depend on it. Between
            calls they sleep, unless the environment says otherwise (OMP_WAIT_POLICY=active spares quick successions of
            calls on a quiet machine some time) or OpenMP was in the process before octavo.
        backend: force the backend of this name (see explain_call); None chooses.

    Returns:
        output; or a tuple (output, output_qk, lse) of those asked for, in that order.

    Raises:
        ValueError: an argument breaks a rule of the contract; nothing was written.
        TypeError: an attribute or option of another type; or no `output`, where `query` is neither of numpy nor of
            torch.
        octavo.UnsupportedError: no backend takes this call; the message says why for each.
        octavo.ResourceExhaustedError: output_qk would be larger than its limit.
    """
    call = _Call(locals())
    team = 0 if threads is None else _bounded("threads", threads, 1, _MAX_THREADS)
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend: must be a string or None, got {backend!r} of {type(backend)}; see explain_call")
    _core.run(call.tensors, call.attributes, team, backend or "", call.output_qk_limit_bytes)
    return call.results[0] if len(call.results) == 1 else tuple(call.results)


def explain_call(*args: Any, **kwargs: Any) -> list[BackendVerdict]:
    """What each backend says to the call paged_attention(*args, **kwargs), in order of preference. Writes nothing.

    The first backend without a refusal is the one that paged_attention takes.

    Raises:
        ValueError: an argument breaks a rule of the contract, so that no backend is asked.
    """
    call = _bind(*args, **kwargs)
    return _core.explain(call.tensors, call.attributes)


def requested_features(*args: Any, **kwargs: Any) -> list[str]:
    """The features (docs/support_matrix.md) that the call paged_attention(*args, **kwargs) asks for. Writes nothing.

    Raises:
        ValueError: an argument breaks a rule of the contract.
    """
    call = _bind(*args, **kwargs)
    return _core.requested_features(call.tensors, call.attributes)


_MAX_THREADS = 4096  # of octavo::make_executor
_MAX_INT64 = 2**63 - 1


def _bounded(name: str, value: Any, least: int, most: int) -> int:
    """`value` as an int. Raises TypeError where it is none, ValueError where it is out of bounds."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: must be an integer, got {value!r} of {type(value)}; convert it") from None
    if not least <= number <= most:
        raise ValueError(f"{name}: must be {least} to {most}, got {number}; choose a value within these bounds")
    return number


_SIGNATURE = inspect.signature(paged_attention)


def _bind(*args: Any, **kwargs: Any) -> _Call:
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return _Call(bound.arguments)


class _Call:
    """The arguments of paged_attention as the extension takes them, with the outputs allocated."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.attributes = {name: given[name] for name in _ATTRIBUTES}
        _core.validate_attributes(self.attributes)
        self.output_qk_limit_bytes = _bounded("output_qk_limit_bytes", given["output_qk_limit_bytes"], 0, _MAX_INT64)
        self.tensors: dict[str, tuple[Any, str]] = {}
        for name in _INPUTS:
            if given[name] is not None:
                self._add(name, given[name], written=name in _CACHES)
        query = given["query"]
        if not hasattr(query, "shape"):
            raise ValueError(
                "query: must be a readable array in CPU memory with DLPack or the buffer protocol (numpy, torch), got "
                f"{type(query)}; convert it, for example with numpy.asarray"
            )
        output = given["output"]
        if output is None:
            output = empty_like(query, self._output_shape(given))
        self._add("output", output, written=True)
        self.results = [output]
        # The other outputs are sized by arguments, not by query: only once these have been checked.
        shape = (0, 0, 0)
        if given["return_lse"] or (given["qk_output"] and given["output_qk"] is None):
            context = _core.max_context_len(self.tensors, self.attributes)
            shape = (operator.index(given["num_heads"]), query.shape[0], context)
        if given["qk_output"]:
            output_qk = self._new_output_qk(query, shape) if given["output_qk"] is None else given["output_qk"]
            self._add("output_qk", output_qk, written=True)
            self.results.append(output_qk)
        elif given["output_qk"] is not None:
            self._add("output_qk", given["output_qk"], written=True)
        if given["return_lse"]:
            lse = empty_float32_like(query, shape[:2])
            self._add("lse", lse, written=True)
            self.results.append(lse)

    def _add(self, name: str, array: Any, written: bool) -> None:
        require_importable(name, array, written)
        self.tensors[name] = native_view(array)

    def _new_output_qk(self, query: Any, shape: tuple[int, int, int]) -> Any:
        size = 4 * math.prod(shape)
        if size > self.output_qk_limit_bytes:
            raise _core.ResourceExhaustedError(
                f"output_qk: {shape} float32 takes {size} bytes, more than output_qk_limit_bytes = "
                f"{self.output_qk_limit_bytes}; raise it, or lower the max_kv_len bound in attention_metadata"
            )
        return empty_float32_like(query, shape)

    @staticmethod
    def _output_shape(given: Mapping[str, Any]) -> tuple[int, ...]:
        """(token_count, N*v_head_size), of legal attributes; of an illegal query, a shape that validation refuses."""
        shape = tuple(given["query"].shape)
        heads = operator.index(given["num_heads"])
        latent = given["kv_cache_layout"] == "LATENT"
        packed = given["key"] is None and given["value"] is None and not latent
        slices = heads + 2 * operator.index(given["kv_num_heads"]) if packed else heads
        if len(shape) != 2:
            return shape
        head_size = shape[1] // slices
        v_head_size = operator.index(given["v_head_size"]) if latent else 0
        # An illegal v_head_size must not decide how much is allocated.
        return (shape[0], heads * (v_head_size if 0 < v_head_size < head_size else head_size))
