"""CUDA graphs (the provider option enable_cuda_graph): one capture, then replays while the sequences live on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnxruntime
import pytest
from device import DeviceCall, make_cuda_session
from support import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, INT8, UINT8, Case, make_case, make_model

BLOCK, COLUMNS, HEADS, KV_HEADS, WIDTH = 16, 6, 4, 2, 32
STEPS = 40
BATCH = 4


def steps(rng: np.random.Generator, case: Case, tokens_each: int) -> Iterator[dict[str, np.ndarray]]:
    """The inputs of every step: sequences grow by `tokens_each`, take blocks when they need them, finish when their
    table is full or by chance (no tokens, no blocks: the batch's last tokens become padding), and begin anew."""
    count = case.inputs["key_cache"].shape[0]
    free = list(rng.permutation(count))
    owned: list[list[int]] = [[] for _ in range(BATCH)]
    past = np.array([0, 5, 30, 60])
    idle = np.zeros(BATCH, int)
    for _ in range(STEPS):
        for b in range(BATCH):
            full = past[b] + tokens_each > COLUMNS * BLOCK
            if idle[b] == 0 and (full or rng.uniform() < 0.04):
                free += owned[b]
                owned[b], past[b], idle[b] = [], 0, rng.integers(1, 4)
        new = np.where(idle > 0, 0, tokens_each)
        table = np.full((BATCH, COLUMNS), -1, np.int32)
        for b in range(BATCH):
            while new[b] and len(owned[b]) * BLOCK < past[b] + new[b]:
                owned[b].append(free.pop(0))
            table[b, : len(owned[b])] = owned[b]
        step = {
            name: rng.standard_normal(case.inputs[name].shape).astype(np.float32).astype(case.type)
            for name in ("query", "key", "value")
        }
        step["cumulative_sequence_length"] = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        step["past_seqlens"], step["block_table"] = past.astype(np.int32), table
        yield step
        past = past + new
        idle = np.maximum(idle - 1, 0)


def graph_case(rng: np.random.Generator, tensor_type: np.dtype, cache_type: np.dtype, tokens_each: int, **more) -> Case:
    """Shapes for all steps: every sequence with its tokens, a table with room to grow, a pool that is full of codes."""
    case = make_case(
        rng,
        tensor_type=tensor_type,
        k_type=cache_type,
        v_type=cache_type,
        k_dtype="int4" if cache_type == UINT8 else "",
        v_dtype="int4" if cache_type == UINT8 else "",
        new_lens=(tokens_each,) * BATCH,
        past_lens=(0, 5, 30, 60),
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        head_size=WIDTH,
        block_size=BLOCK,
        **more,
    )
    case.inputs["block_table"] = np.full((BATCH, COLUMNS), -1, np.int32)
    for name in ("key_cache", "value_cache"):
        pool = np.resize(case.inputs[name], (BATCH * COLUMNS + 3, *case.inputs[name].shape[1:]))
        if pool.dtype not in (INT8, UINT8):  # sequences start in blocks that hold something
            pool = rng.standard_normal(pool.shape).astype(np.float32).astype(pool.dtype)
        case.inputs[name] = pool
    return case


def replays(graph: int) -> onnxruntime.RunOptions:
    """Options of a run that captures or replays the graph of this number."""
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph))
    return options


VARIANTS: dict[str, tuple[np.dtype, np.dtype, int, dict]] = {
    "float16_decode": (FLOAT16, FLOAT16, 1, {}),
    "float16_three_tokens": (FLOAT16, FLOAT16, 3, {}),
    "float16_window_sink": (FLOAT16, FLOAT16, 1, {"local_window_size": 20, "sink": True}),
    "bfloat16_decode": (BFLOAT16, BFLOAT16, 1, {}),
    "float32_decode": (FLOAT32, FLOAT16, 1, {}),
    "int8_decode": (FLOAT16, INT8, 1, {"k_quant": "PER_CHANNEL"}),
    "float8_five_tokens": (BFLOAT16, FLOAT8, 5, {}),
    "int4_decode": (FLOAT16, UINT8, 1, {}),
}


@pytest.mark.parametrize("metadata", ["absent", "given"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_replays_equal_plain_runs(rng: np.random.Generator, variant: str, metadata: str) -> None:
    """Risk: something of a step (a length, a grid, a workspace address) is frozen into the graph; an allocation or a
    wait breaks the capture. Bit for bit at every step, caches too."""
    tensor_type, cache_type, tokens_each, more = VARIANTS[variant]
    case = graph_case(rng, tensor_type, cache_type, tokens_each, **more)
    if metadata == "given":
        case.inputs["attention_metadata"] = np.array([tokens_each, COLUMNS * BLOCK, 1], np.int32)
    model = make_model(case)
    plain = DeviceCall(make_cuda_session(model), case)
    captured = DeviceCall(make_cuda_session(model, provider={"enable_cuda_graph": "1"}), case)
    for number, step in enumerate(steps(rng, case, tokens_each)):
        for call in (plain, captured):
            call.update(**step)
            call.run()
        expected = plain.results()
        for name, value in captured.results().items():
            assert value.tobytes() == expected[name].tobytes(), f"step {number}: {name}"
        live = step["cumulative_sequence_length"][-1]
        assert not expected["output"][live:].any(), f"step {number}: padding is not 0"
        assert np.abs(expected["output"][:live].astype(np.float32)).sum() > 0 or live == 0


def test_a_replay_does_not_call_the_operator(rng: np.random.Generator) -> None:
    """Risk: the test above compares plain runs with plain runs. A call would refuse this metadata; a replay never sees
    it."""
    case = graph_case(rng, FLOAT16, FLOAT16, 1)
    case.inputs["attention_metadata"] = np.array([1, COLUMNS * BLOCK], np.int32)
    model = make_model(case)
    plain = DeviceCall(make_cuda_session(model), case)
    captured = DeviceCall(make_cuda_session(model, provider={"enable_cuda_graph": "1"}), case)
    for call in (plain, captured):
        call.run()
        call.run()
        call.run()
    for call in (plain, captured):
        call.update(attention_metadata=np.array([-5, -5], np.int32))
    captured.run()
    with pytest.raises(Exception, match="attention_metadata"):
        plain.run()


def test_two_graphs_of_one_session(rng: np.random.Generator) -> None:
    """Risk: the plan of one shape serves the graph of another."""
    cases = {1: graph_case(rng, FLOAT16, FLOAT16, 1), 7: graph_case(rng, FLOAT16, FLOAT16, 7)}
    model = make_model(cases[1])
    plain, captured = make_cuda_session(model), make_cuda_session(model, provider={"enable_cuda_graph": "1"})
    # One pair of buffers a graph: it holds the addresses of its capture.
    calls = {n: (DeviceCall(plain, case), DeviceCall(captured, case)) for n, case in cases.items()}
    for tokens_each in (1, 7, 1, 7):
        for step in list(steps(rng, cases[tokens_each], tokens_each))[:10]:
            for call, options in zip(calls[tokens_each], (None, replays(tokens_each)), strict=True):
                call.update(**step)
                call.run(options)
            expected, results = (call.results() for call in calls[tokens_each])
            for name, value in results.items():
                assert value.tobytes() == expected[name].tobytes(), name


def test_a_graph_outlives_a_larger_call(rng: np.random.Generator) -> None:
    """Risk: a workspace that had to grow after the capture is given to somebody else, and a replay writes there."""
    shape = {"tensor_type": FLOAT16, "past_lens": (2500, 1700, 900, 90), "num_heads": 8, "head_size": 64}
    small = make_case(rng, new_lens=(1,) * 4, **shape)
    large = make_case(rng, new_lens=(12,) * 4, **shape)
    model = make_model(small)
    plain = make_cuda_session(model)
    captured = make_cuda_session(model, provider={"enable_cuda_graph": "1"})
    calls = [(DeviceCall(captured, case), DeviceCall(plain, case), number) for number, case in ((1, small), (2, large))]
    for mine, theirs, number in [*calls, *calls]:
        for _ in range(4):
            query = rng.standard_normal(mine.inputs["query"].shape).astype(FLOAT16)
            for call, options in ((mine, replays(number)), (theirs, None)):
                call.update(query=query)
                call.run(options)
            assert mine.outputs["output"].read().tobytes() == theirs.outputs["output"].read().tobytes()
