"""Every feature, type combination and number of inputs on the GPU, against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from device import check, make_cuda_session, run_case
from support import FLOAT8, FLOAT16, FLOAT32, INT8, UINT8, make_case, make_model, separate_case
from test_features import FEATURES
from test_types import TENSOR_TYPES, combinations, legal_caches, name_of


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("tensor_type", TENSOR_TYPES, ids=name_of)
def test_feature(rng: np.random.Generator, feature: str, tensor_type: np.dtype) -> None:
    """Risk: an attribute or input that the CUDA provider's kernel drops, misplaces or reads from the wrong memory."""
    check(make_case(rng, tensor_type=tensor_type, **FEATURES[feature]))


@pytest.mark.parametrize(("tensor_type", "k", "v"), combinations(), ids=name_of)
def test_separate_caches(rng: np.random.Generator, tensor_type: np.dtype, k: tuple, v: tuple) -> None:
    """Risk: a combination that is not registered for the provider, or whose V is read with K's type."""
    check(separate_case(rng, tensor_type, k, v))


@pytest.mark.parametrize(("tensor_type", "k"), [(t, k) for t in TENSOR_TYPES for k in legal_caches(t)], ids=name_of)
def test_latent_cache(rng: np.random.Generator, tensor_type: np.dtype, k: tuple) -> None:
    """Risk: with value_cache absent, several kernels of the provider match a node; all must do the same."""
    latent = {"kv_num_heads": 1, "head_size": 24, "latent_v_head_size": 16}
    check(make_case(rng, tensor_type=tensor_type, k_type=k[0], k_dtype=k[1], k_quant="PER_CHANNEL", **latent))


@pytest.mark.parametrize("qk_type", TENSOR_TYPES, ids=name_of)
@pytest.mark.parametrize("qk_output", [1, 2])
@pytest.mark.parametrize("tensor_type", TENSOR_TYPES, ids=name_of)
def test_output_qk_has_a_type_of_its_own(
    rng: np.random.Generator, tensor_type: np.dtype, qk_output: int, qk_type: np.dtype
) -> None:
    """Risk: output_qk is written in T whatever the graph declares."""
    check(make_case(rng, tensor_type=tensor_type, qk_type=qk_type, qk_output=qk_output))


@pytest.mark.parametrize("input_count", [17, 18, 19])
@pytest.mark.parametrize("tensor_type", TENSOR_TYPES, ids=name_of)
def test_input_counts(rng: np.random.Generator, tensor_type: np.dtype, input_count: int) -> None:
    """Risk: only nodes that list every input load."""
    case = make_case(rng, tensor_type=tensor_type, metadata=(6, 40, 1))
    check(case, make_cuda_session(make_model(case, input_count=input_count)))


@pytest.mark.parametrize("cache_type", [FLOAT16, INT8, FLOAT8, UINT8], ids=name_of)
def test_nineteen_inputs_at_once(rng: np.random.Generator, cache_type: np.dtype) -> None:
    """Risk: features that work alone meet: rotary, QK-norm, sink, slots, positions, bias and metadata in one node."""
    case = make_case(
        rng,
        tensor_type=FLOAT16,
        k_type=cache_type,
        v_type=cache_type,
        k_dtype="int4" if cache_type == UINT8 else "",
        v_dtype="int4" if cache_type == UINT8 else "",
        k_quant="PER_CHANNEL",
        rotary_dim=16,
        qk_norm=True,
        sink=True,
        slot_mapping=True,
        bias_shape=(True, True),
        metadata=(6, 48, 1),
        softcap=3.0,
        local_window_size=30,
        qk_output=1,
    )
    lengths = case.inputs["past_seqlens"] + np.diff(case.inputs["cumulative_sequence_length"])
    capacity = np.repeat(lengths, np.diff(case.inputs["cumulative_sequence_length"]))
    case.inputs["query_positions"] = rng.integers(0, capacity).astype(np.int32)
    check(case, make_cuda_session(make_model(case, input_count=19)))


def test_query_positions_move_rope_and_masks(rng: np.random.Generator) -> None:
    """Risk: positions are used for one of rotation, causal mask and window only."""
    for attributes in ({}, {"local_window_size": 4}, {"is_causal": 0}):
        case = make_case(rng, tensor_type=FLOAT16, rotary_dim=16, **attributes)
        new = np.diff(case.inputs["cumulative_sequence_length"])
        lengths = np.repeat(case.inputs["past_seqlens"] + new, new)
        case.inputs["query_positions"] = rng.integers(0, lengths).astype(np.int32)
        check(case)


def test_unmapped_blocks_are_masked(rng: np.random.Generator) -> None:
    """Risk: block -1 is followed; a row that attends to nothing gives NaN."""
    case = make_case(rng, new_lens=(2, 1), past_lens=(40, 17), qk_output=2, slot_mapping=True, tensor_type=FLOAT16)
    case.inputs["block_table"][0, 0] = -1
    case.inputs["block_table"][1, :] = -1
    case.inputs["slot_mapping"][2] = -1
    results = check(case)
    assert (results["output"][2] == 0).all()


@pytest.mark.parametrize("tensor_type", [FLOAT32, FLOAT16], ids=name_of)
def test_no_tokens_at_all(rng: np.random.Generator, tensor_type: np.dtype) -> None:
    """Risk: zero-size tensors reach a launch with an empty grid."""
    case = make_case(rng, tensor_type=tensor_type, new_lens=(0, 0, 0), past_lens=(0, 0, 0))
    case.inputs["block_table"] = np.zeros((3, 0), np.int32)
    results = check(case, make_cuda_session(make_model(case)))
    assert results["output"].shape == (0, 64)


def test_an_empty_attention_metadata_gives_no_bounds(rng: np.random.Generator) -> None:
    """Risk: an empty attention_metadata, which some engines feed for "no bounds", is refused."""
    case = make_case(rng, packed=True, rotary_dim=16, tensor_type=FLOAT16)
    case.inputs["attention_metadata"] = np.zeros(0, np.int32)
    session = make_cuda_session(make_model(case, input_count=17))
    check(case, session)


def test_long_contexts_are_split_and_merged(rng: np.random.Generator) -> None:
    """Risk: a plan with a workspace takes too little of it, or one that is not aligned."""
    for tensor_type in TENSOR_TYPES:
        case = make_case(rng, tensor_type=tensor_type, new_lens=(1, 2), past_lens=(2500, 700), num_heads=2, sink=True)
        check(case)


def test_results_do_not_depend_on_company_or_bounds(rng: np.random.Generator) -> None:
    """Risk: a split of the work that follows the batch or attention_metadata changes bits."""
    case = make_case(rng, tensor_type=FLOAT16, new_lens=(1, 1, 5, 1), past_lens=(1500, 12, 33, 1300), num_heads=2)
    outputs = []
    for metadata in (None, (5, 1501), (10, 4000, 1)):
        case.inputs.pop("attention_metadata", None)
        if metadata:
            case.inputs["attention_metadata"] = np.array(metadata, np.int32)
        outputs.append(run_case(make_cuda_session(make_model(case)), case)["output"])
    assert outputs[0].tobytes() == outputs[1].tobytes() == outputs[2].tobytes()
    case.inputs.pop("attention_metadata")
    for name in ("query", "key", "value"):
        case.inputs[name] = case.inputs[name][:1]
    case.inputs["cumulative_sequence_length"] = np.array([0, 1], np.int32)
    case.inputs["past_seqlens"] = case.inputs["past_seqlens"][:1]
    case.inputs["block_table"] = case.inputs["block_table"][:1]
    alone = run_case(make_cuda_session(make_model(case)), case)["output"]
    assert alone.tobytes() == outputs[0][:1].tobytes()
