"""Bad values in device memory, which nobody can refuse without a wait: nothing is read or written out of bounds, what
is broken gives 0, and everything else is what it would be without it (docs/contract.md)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from device import DeviceCall, check, make_cuda_session
from support import FLOAT16, INT8, Case, make_case, make_model

NEW, PAST = (3, 1, 6), (0, 20, 13)
FIRST = (0, 3, 4, 10)  # of each sequence, and the end


def hostile_case(rng: np.random.Generator, **more: object) -> Case:
    """Three sequences in float16; blocks outside every table hold NaN."""
    return make_case(rng, tensor_type=FLOAT16, new_lens=NEW, past_lens=PAST, **more)


def run_twice(case: Case, change: Callable[[dict], None]) -> tuple[dict, dict, DeviceCall]:
    """Results of the case with and without the change, and the call, whose next run is sane again."""
    session = make_cuda_session(make_model(case))
    sane = DeviceCall(session, case)
    sane.run()
    expected = sane.results()
    broken_inputs = {name: value.copy() for name, value in case.inputs.items()}
    change(broken_inputs)
    call = DeviceCall(session, Case(case.attributes, broken_inputs, case.qk_type, case.head_size))
    call.run()
    results = call.results()
    call.update(**case.inputs)  # a fault on the device would surface here at the latest
    call.run()
    for name, value in call.results().items():
        assert value.tobytes() == expected[name].tobytes(), f"{name} of the next call"
    return results, expected, call


def assert_only(case: Case, results: dict, expected: dict, broken: set[int]) -> None:
    """The sequences in `broken` give 0 and write nothing, the others are as expected."""
    before = {name: case.inputs[name] for name in ("key_cache", "value_cache")}
    owners = {int(block): b for b, row in enumerate(case.inputs["block_table"]) for block in row if block >= 0}
    for b in range(len(NEW)):
        rows = slice(FIRST[b], FIRST[b + 1])
        want = np.zeros_like(expected["output"][rows]) if b in broken else expected["output"][rows]
        assert results["output"][rows].tobytes() == want.tobytes(), f"sequence {b}"
    for name, cache in before.items():
        for block in range(cache.shape[0]):
            good = expected[f"{name}_out"] if owners.get(block) not in broken else cache
            assert results[f"{name}_out"][block].tobytes() == good[block].tobytes(), f"{name}, block {block}"


LENGTHS: dict[str, tuple[str, object, int, set[int]]] = {
    "past_negative": ("past_seqlens", 1, -2, {1}),
    "past_lowest": ("past_seqlens", 2, -(2**31), {2}),
    "past_beyond_the_table": ("past_seqlens", 2, 500, {2}),
    "past_highest": ("past_seqlens", 0, 2**31 - 1, {0}),
}


@pytest.mark.parametrize("cache_type", [FLOAT16, INT8], ids=lambda t: t.name)
@pytest.mark.parametrize("mistake", LENGTHS)
def test_a_broken_length_stops_its_sequence_only(rng: np.random.Generator, mistake: str, cache_type: np.dtype) -> None:
    """Risk: out-of-bounds addresses from a length; a neighbour that suffers."""
    name, index, value, broken = LENGTHS[mistake]
    case = hostile_case(rng, k_type=cache_type, v_type=cache_type)
    results, expected, _ = run_twice(case, lambda inputs: inputs[name].__setitem__(index, value))
    assert_only(case, results, expected, broken)


@pytest.mark.parametrize("value", [999, -7, 2**31 - 1, -(2**31)])
def test_a_wild_block_id_counts_as_unmapped(rng: np.random.Generator, value: int) -> None:
    """Risk: the id is followed. Equal bits to -1 in the same place, for reading and for writing."""
    for place in ((1, 0), (2, 1), (0, 0)):  # past only; past and new tokens; new tokens only
        case = hostile_case(rng)
        unmapped = {name: v.copy() for name, v in case.inputs.items()}
        unmapped["block_table"][place] = -1
        as_unmapped = check(Case(case.attributes, unmapped, case.qk_type, case.head_size))
        results, _, _ = run_twice(case, lambda inputs, at=place: inputs["block_table"].__setitem__(at, value))
        for name, expected in as_unmapped.items():
            assert results[name].tobytes() == expected.tobytes(), f"{name}, {place}"


@pytest.mark.parametrize("value", [70000, -7, 2**31 - 1, -(2**31)])
def test_a_wild_slot_is_not_written(rng: np.random.Generator, value: int) -> None:
    """Risk: a write outside the cache. Equal bits to -1 in the same place."""
    case = hostile_case(rng, slot_mapping=True)
    for name in ("key_cache", "value_cache"):  # what the token then reads at its position
        case.inputs[name] = np.nan_to_num(case.inputs[name], nan=0.5)
    skipped = {name: v.copy() for name, v in case.inputs.items()}
    skipped["slot_mapping"][5] = -1
    as_skipped = check(Case(case.attributes, skipped, case.qk_type, case.head_size))
    results, _, _ = run_twice(case, lambda inputs: inputs["slot_mapping"].__setitem__(5, value))
    for name, expected in as_skipped.items():
        assert results[name].tobytes() == expected.tobytes(), name


def test_a_position_beyond_the_rotary_caches_stops_its_sequence(rng: np.random.Generator) -> None:
    """Risk: cos_cache is read beyond its end."""
    case = hostile_case(rng, rotary_dim=16)
    positions = np.array([0, 1, 2, 20, 13, 14, 15, 16, 17, 18], np.int32)
    case.inputs["query_positions"] = positions
    for value in (5000, -1, 2**31 - 1):
        results, expected, _ = run_twice(case, lambda inputs, v=value: inputs["query_positions"].__setitem__(5, v))
        assert_only(case, results, expected, {2})


@pytest.mark.parametrize("lengths", [(0, 3, 1, 10), (0, 30, 4, 10), (0, 3, 4, 11), (0, 3, 4, -1), (0, -(2**31), 4, 10)])
def test_lengths_that_contradict_each_other(rng: np.random.Generator, lengths: tuple[int, ...]) -> None:
    """Risk: a token range that runs backwards or past the tokens. No NaN, no fault; the next call is right."""
    case = hostile_case(rng)
    results, _, _ = run_twice(
        case, lambda inputs: inputs["cumulative_sequence_length"].__setitem__(slice(None), lengths)
    )
    assert np.isfinite(results["output"].astype(np.float32)).all()


def test_tokens_outside_every_sequence_give_zero(rng: np.random.Generator) -> None:
    """Risk: padding before the first or behind the last sequence keeps what was in the output's memory."""
    case = hostile_case(rng)
    results, expected, _ = run_twice(
        case, lambda inputs: inputs["cumulative_sequence_length"].__setitem__(slice(None), (0, 3, 4, 4))
    )
    assert results["output"][:4].tobytes() == expected["output"][:4].tobytes()
    assert not results["output"][4:].any()


def test_bounds_that_are_too_small(rng: np.random.Generator) -> None:
    """Risk: attention_metadata below the real lengths makes launches or workspaces too small for what they hold."""
    case = hostile_case(rng, metadata=(6, 40, 1))
    for bounds in ((1, 1, 1), (1, 40, 0), (6, 2, 0)):
        run_twice(case, lambda inputs, b=bounds: inputs["attention_metadata"].__setitem__(slice(None), b))


def test_garbage(rng: np.random.Generator) -> None:
    """Risk: a combination of bad values that no list holds. 150 calls with random words in every index input; then a
    sane one is right."""
    case = hostile_case(rng, slot_mapping=True, rotary_dim=16, k_type=INT8, v_type=INT8)
    session = make_cuda_session(make_model(case))
    call = DeviceCall(session, case)
    names = ("cumulative_sequence_length", "past_seqlens", "block_table", "slot_mapping")
    for _ in range(150):
        garbage = {}
        for name in names:
            wild = rng.integers(-(2**31), 2**31, case.inputs[name].shape)
            near = rng.integers(-3, 70, case.inputs[name].shape)
            pick = rng.uniform(size=wild.shape)
            mixed = np.where(pick < 0.3, wild, np.where(pick < 0.6, near, case.inputs[name]))
            garbage[name] = mixed.astype(np.int32)
        call.update(**garbage)
        call.run()
    check(case, session)
