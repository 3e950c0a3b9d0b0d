"""Every type combination of the contract loads, runs and is right."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, INT8, UINT8, check, make_case, separate_case

TENSOR_TYPES = (FLOAT32, FLOAT16, BFLOAT16)
# (storage, what k_cache_dtype says): the 4-bit types share uint8.
CACHES = (
    (FLOAT32, ""),
    (FLOAT16, ""),
    (BFLOAT16, ""),
    (INT8, ""),
    (FLOAT8, ""),
    (UINT8, "int4"),
    (UINT8, "float4e2m1"),
)


def legal_caches(tensor_type: np.dtype) -> list[tuple[np.dtype, str]]:
    """Under T = float32 every cache, else T's own and the quantised ones."""
    return [c for c in CACHES if tensor_type == FLOAT32 or c[0] in (tensor_type, INT8, FLOAT8, UINT8)]


def combinations() -> list[tuple]:
    """(T, K cache, V cache), K and V independent."""
    return [(t, k, v) for t in TENSOR_TYPES for k, v in itertools.product(legal_caches(t), repeat=2)]


def name_of(value: object) -> str:
    """Short test ids."""
    return value.name if isinstance(value, np.dtype) else (value[1] or value[0].name)


@pytest.mark.parametrize(("tensor_type", "k", "v"), combinations(), ids=name_of)
def test_separate_caches(rng: np.random.Generator, tensor_type: np.dtype, k: tuple, v: tuple) -> None:
    """Risk: a combination that is not registered, or whose V is read with K's type."""
    check(separate_case(rng, tensor_type, k, v))


@pytest.mark.parametrize(("tensor_type", "k"), [(t, k) for t in TENSOR_TYPES for k in legal_caches(t)], ids=name_of)
def test_latent_cache(rng: np.random.Generator, tensor_type: np.dtype, k: tuple) -> None:
    """Risk: with value_cache absent, several kernels match a node; all must do the same."""
    case = make_case(
        rng,
        tensor_type=tensor_type,
        k_type=k[0],
        k_dtype=k[1],
        k_quant="PER_CHANNEL",
        kv_num_heads=1,
        head_size=24,
        latent_v_head_size=16,
    )
    check(case)


@pytest.mark.parametrize("dtype", ["int8", "float8e4m3fn", "float16", "bfloat16"])
def test_cache_dtype_may_name_the_tensor_type(rng: np.random.Generator, dtype: str) -> None:
    """Risk: only the two 4-bit names are understood."""
    storage = {"int8": INT8, "float8e4m3fn": FLOAT8, "float16": FLOAT16, "bfloat16": BFLOAT16}[dtype]
    check(make_case(rng, k_type=storage, v_type=storage, k_dtype=dtype, v_dtype=dtype))


@pytest.mark.parametrize("qk_type", TENSOR_TYPES, ids=name_of)
@pytest.mark.parametrize("tensor_type", TENSOR_TYPES, ids=name_of)
def test_output_qk_has_a_type_of_its_own(rng: np.random.Generator, tensor_type: np.dtype, qk_type: np.dtype) -> None:
    """Risk: output_qk is written in T whatever the graph declares."""
    check(make_case(rng, tensor_type=tensor_type, qk_type=qk_type, qk_output=1))
