"""Every feature of the contract through a stock session, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from support import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT8,
    assert_close,
    check,
    make_case,
    make_model,
    make_session,
)

FEATURES: dict[str, dict] = {
    "plain": {},
    "packed": {"packed": True},
    "group_of_5": {"num_heads": 5, "kv_num_heads": 1},
    "head_size_80": {"head_size": 80},
    "qk_norm": {"qk_norm": True, "qk_norm_epsilon": 1e-5},
    "rope_half": {"rotary_dim": 16},
    "rope_partial": {"rotary_dim": 8},
    "rope_interleaved": {"rotary_dim": 16, "rotary_interleaved": 1},
    "rope_offset": {"rotary_dim": 8, "rotary_offset": 8},
    "rope_offset_interleaved": {"rotary_dim": 8, "rotary_offset": 8, "rotary_interleaved": 1},
    "packed_rope_norm": {"packed": True, "rotary_dim": 16, "qk_norm": True},
    "sink": {"sink": True},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": 0.71},
    "window_1": {"local_window_size": 1},
    "window_of_a_block": {"local_window_size": 16},
    "window_wider_than_context": {"local_window_size": 1000},
    "window_sink_softcap": {"local_window_size": 5, "sink": True, "softcap": 2.0},
    "not_causal": {"is_causal": 0},
    "bias_shared": {"bias_shape": (False, False)},
    "bias_of_heads": {"bias_shape": (False, True)},
    "bias_of_sequences": {"bias_shape": (True, False)},
    "bias_full_softcap": {"bias_shape": (True, True), "softcap": 1.5},
    "slot_mapping": {"slot_mapping": True},
    "metadata_2": {"metadata": (6, 40)},
    "metadata_3": {"metadata": (6, 40, 21)},
    "metadata_unknown": {"metadata": (0, 0)},
    "scores": {"qk_output": 1},
    "probabilities": {"qk_output": 2, "sink": True},
    "scores_with_everything": {"qk_output": 1, "softcap": 2.0, "bias_shape": (True, True), "local_window_size": 7},
    "probabilities_bounded": {"qk_output": 2, "metadata": (6, 30, 0)},
    "padding": {"padding_tokens": 3},
    "padding_probabilities": {"padding_tokens": 2, "qk_output": 2},
    "block_size_1": {"block_size": 1},
    "block_size_8": {"block_size": 8},
    "block_size_12": {"block_size": 12},
    "block_size_256": {"block_size": 256},
    "latent": {"kv_num_heads": 1, "head_size": 24, "latent_v_head_size": 16},
    "latent_rope_at_the_end": {
        "kv_num_heads": 1,
        "head_size": 24,
        "latent_v_head_size": 16,
        "rotary_dim": 8,
        "rotary_offset": 16,
    },
    "latent_whole_row": {"kv_num_heads": 1, "latent_v_head_size": 0},
    "latent_probabilities": {"kv_num_heads": 1, "head_size": 24, "latent_v_head_size": 8, "qk_output": 2},
    "int8_sink_prefill": {"k_type": INT8, "v_type": INT8, "sink": True, "past_lens": (0, 0, 0)},
    "decode": {"new_lens": (1,) * 5, "past_lens": (0, 3, 15, 16, 40), "rotary_dim": 16},
    "one_long_of_many_empty": {"new_lens": (10, 0, 0, 0), "past_lens": (4, 0, 9, 0)},
    "no_new_tokens": {"new_lens": (0, 0), "past_lens": (4, 0)},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("tensor_type", [FLOAT32, FLOAT16, BFLOAT16], ids=lambda t: t.name)
def test_feature(rng: np.random.Generator, feature: str, tensor_type: np.dtype) -> None:
    """Risk: an attribute or input that the edge drops, misplaces or reads with a wrong default."""
    check(make_case(rng, tensor_type=tensor_type, **FEATURES[feature]))


def test_query_positions_move_rope_and_masks(rng: np.random.Generator) -> None:
    """Risk: positions are used for one of rotation, causal mask and window only."""
    for attributes in ({}, {"local_window_size": 4}, {"is_causal": 0}):
        case = make_case(rng, rotary_dim=16, **attributes)
        totals = case.inputs["past_seqlens"] + np.diff(case.inputs["cumulative_sequence_length"])
        lengths = np.repeat(totals, np.diff(case.inputs["cumulative_sequence_length"]))
        case.inputs["query_positions"] = rng.integers(0, lengths).astype(np.int32)
        check(case)


def test_unmapped_blocks_are_masked(rng: np.random.Generator) -> None:
    """Risk: block -1 is followed; a row that attends to nothing gives NaN."""
    case = make_case(rng, new_lens=(2, 1), past_lens=(40, 17), qk_output=2, slot_mapping=True)
    case.inputs["block_table"][0, 0] = -1
    case.inputs["block_table"][1, :] = -1
    case.inputs["slot_mapping"][2] = -1
    results = check(case)
    assert (results["output"][2] == 0).all()


def test_slots_rule_writes_and_the_table_rules_reads(rng: np.random.Generator) -> None:
    """Risk: with slot_mapping -1 the token is read as if it had been written."""
    case = make_case(rng, new_lens=(4,), past_lens=(14,), slot_mapping=True)
    table, slots = case.inputs["block_table"], case.inputs["slot_mapping"]
    for position in range(14, 18):  # the cache already holds something there
        for cache in ("key_cache", "value_cache"):
            case.inputs[cache][table[0, position // 16], position % 16] = rng.standard_normal((2, 16))
    slots[1] = -1
    check(case)


def test_shared_blocks(rng: np.random.Generator) -> None:
    """Risk: entries of the table assumed unique (prefix caching shares them)."""
    case = make_case(rng, new_lens=(1, 1), past_lens=(33, 40))
    case.inputs["block_table"][1, :2] = case.inputs["block_table"][0, :2]
    check(case)


@pytest.mark.parametrize("input_count", [17, 18, 19])
def test_input_counts(rng: np.random.Generator, input_count: int) -> None:
    """Risk: only nodes that list every input load."""
    case = make_case(rng, metadata=(6, 40, 1))
    check(case, make_session(make_model(case, input_count=input_count)))


def test_seventeen_inputs_of_a_stock_export(rng: np.random.Generator) -> None:
    """Risk: an empty attention_metadata, which some engines feed for "no bounds", is refused."""
    case = make_case(rng, packed=True, rotary_dim=16)
    case.inputs["attention_metadata"] = np.zeros(0, np.int32)
    session = make_session(make_model(case, input_count=17))
    metadata = case.inputs.pop("attention_metadata")
    case.inputs["attention_metadata"] = metadata
    check(case, session)


@pytest.mark.parametrize("tensor_type", [FLOAT32, FLOAT16], ids=lambda t: t.name)
def test_no_tokens_at_all(rng: np.random.Generator, tensor_type: np.dtype) -> None:
    """Risk: zero-size tensors and a (batch, 0) table reach a division or a null pointer."""
    case = make_case(rng, tensor_type=tensor_type, new_lens=(0, 0, 0), past_lens=(0, 0, 0), qk_output=1)
    case.inputs["block_table"] = np.zeros((3, 0), np.int32)
    session = make_session(make_model(case))
    results = check(case, session)
    assert results["output"].shape == (0, 64)
    case = make_case(rng, tensor_type=tensor_type, new_lens=(0,), past_lens=(0,), qk_output=1)  # and no sequence
    case.inputs["cumulative_sequence_length"] = np.zeros(1, np.int32)
    case.inputs["past_seqlens"] = np.zeros(0, np.int32)
    case.inputs["block_table"] = np.zeros((0, 0), np.int32)
    check(case, session)


def test_results_do_not_depend_on_threads_or_company(rng: np.random.Generator) -> None:
    """Risk: a split of the work that follows the pool's size or the batch changes bits. One KV head and a few long
    sequences, so that with more lanes than that the ranges of keys themselves are split."""
    case = make_case(rng, new_lens=(1, 1, 17, 1), past_lens=(6500, 12, 33, 7300), num_heads=2, kv_num_heads=1)
    model = make_model(case)
    inputs = {name: value.copy() for name, value in case.inputs.items()}
    outputs = []
    for threads, config in ((1, {"octavo.concurrency": "1"}), (2, {}), (4, {"octavo.concurrency": "16"})):
        case.inputs = {name: value.copy() for name, value in inputs.items()}
        outputs.append(check(case, make_session(model, config, threads))["output"])
    assert outputs[0].tobytes() == outputs[1].tobytes() == outputs[2].tobytes()
    alone = {name: value.copy() for name, value in inputs.items()}
    for name in ("query", "key", "value"):
        alone[name] = inputs[name][:1]
    alone["cumulative_sequence_length"] = np.array([0, 1], np.int32)
    alone["past_seqlens"], alone["block_table"] = inputs["past_seqlens"][:1], inputs["block_table"][:1]
    case.inputs = alone
    assert check(case, make_session(model))["output"].tobytes() == outputs[0][:1].tobytes()


def test_decode_steps_equal_one_prefill(rng: np.random.Generator) -> None:
    """Risk: state carried between calls of one kernel (a kept plan) is used for a call of other shapes."""
    whole = make_case(rng, new_lens=(9, 9), past_lens=(0, 0), rotary_dim=16)
    session = make_session(make_model(whole))
    empty = {name: whole.inputs[name].copy() for name in ("key_cache", "value_cache")}
    expected = check(whole, session)["output"].reshape(2, 9, -1)
    whole.inputs |= empty
    for step in range(9):
        part = make_case(rng, new_lens=(1, 1), past_lens=(step, step), rotary_dim=16)
        part.inputs |= {
            name: value for name, value in whole.inputs.items() if name not in part.inputs or "cache" in name
        }
        part.inputs["block_table"] = whole.inputs["block_table"]
        for name in ("query", "key", "value"):
            part.inputs[name] = np.ascontiguousarray(whole.inputs[name].reshape(2, 9, -1)[:, step])
        result = check(part, session)["output"]
        whole.inputs |= {name: part.inputs[name] for name in empty}
        assert_close(result, expected[:, step], 1e-5, f"step {step}")
