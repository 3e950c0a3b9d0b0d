"""Streams, threads and memory: sessions beside each other, a stream of the caller's, and many runs."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from device import DeviceArray, DeviceCall, make_cuda_session
from support import FLOAT16, INT8, ONNX_TYPES, Case, in_threads, make_case, make_model

# Its workspace for a long_case() is above 2 MB: 72 tokens x 16 heads x 6 chunks x 64 sums of 4 bytes.
GENERAL = {"octavo.backend": "cuda_general"}
LIMIT = {"gpu_mem_limit": str(32 << 20), "arena_extend_strategy": "kSameAsRequested"}


def long_case(rng: np.random.Generator, **more: object) -> Case:
    """Long sequences: a call takes long enough for another one to overtake it."""
    keywords = {"new_lens": (12,) * 6, "past_lens": (3000, 2500, 2000, 1500, 99, 9), "num_heads": 16, "head_size": 64}
    return make_case(rng, tensor_type=FLOAT16, **(keywords | more))


def deep_model(case: Case, nodes: int = 8) -> onnx.ModelProto:
    """Several equal nodes in a row, which append the same tokens: a run has work on the GPU long after its first call
    returned. Outputs output, output_1, output_2, ..."""
    model = make_model(case, cache_outputs=False)
    for number in range(1, nodes):
        node = onnx.NodeProto()
        node.CopyFrom(model.graph.node[0])
        node.name, node.output[0] = f"attention_{number}", f"output_{number}"
        model.graph.node.append(node)
        value = onnx.ValueInfoProto()
        value.CopyFrom(model.graph.output[0])
        value.name = node.output[0]
        model.graph.output.append(value)
    return model


def repeat(session: onnxruntime.InferenceSession, case: Case, times: int):
    """A worker that runs a deep_model() again and again, on buffers of its own, and compares bits."""
    first = DeviceCall(session, case)
    first.run()
    expected = {name: value.tobytes() for name, value in first.results().items()}
    assert len(set(expected.values())) == 1, "equal nodes gave different results"

    def worker() -> None:
        call = DeviceCall(session, case)
        for number in range(times):
            call.run()
            for name, value in call.outputs.items():
                assert value.read().tobytes() == expected[name], f"run {number}: {name}"

    return worker


def test_two_sessions_on_two_streams(rng: np.random.Generator) -> None:
    """Risk: process-wide state, or work on the default stream instead of the session's."""
    cases = [long_case(rng), long_case(rng, k_type=INT8, v_type=INT8, num_heads=8)]
    in_threads([repeat(make_cuda_session(deep_model(case)), case, 40) for case in cases])


def test_one_session_in_three_threads(rng: np.random.Generator) -> None:
    """Risk: concurrent runs of one session are on different streams; a workspace that the kernels of one still use is
    given to another."""
    cases = [long_case(rng), long_case(rng, new_lens=(3, 1), past_lens=(2000, 4000)), long_case(rng)]
    session = make_cuda_session(deep_model(cases[0]), GENERAL)
    in_threads([repeat(session, case, 40) for case in cases])


def test_a_stream_of_the_callers(rng: np.random.Generator) -> None:
    """Risk: work beside the stream that the caller gave (user_compute_stream): it starts before the inputs are there,
    or the caller reads the output too early. Nothing here waits for the device but the last line."""
    torch = pytest.importorskip("torch")
    case = long_case(rng)
    expected = DeviceCall(make_cuda_session(make_model(case)), case)
    expected.run()

    stream = torch.cuda.Stream()
    provider = {"user_compute_stream": str(stream.cuda_stream)}
    session = make_cuda_session(make_model(case), provider=provider)
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    call = DeviceCall(session, case)
    binding = session.io_binding()
    for name, value in call.inputs.items():
        binding.bind_input(name, "cuda", 0, ONNX_TYPES[value.dtype], list(value.shape), value.pointer)
    query = torch.full(case.inputs["query"].shape, float("nan"), dtype=torch.float16, device="cuda")
    output = torch.full(case.expected_output_shape(), float("nan"), dtype=torch.float16, device="cuda")
    binding.bind_input("query", "cuda", 0, ONNX_TYPES[FLOAT16], list(query.shape), query.data_ptr())
    binding.bind_output("output", "cuda", 0, ONNX_TYPES[FLOAT16], list(output.shape), output.data_ptr())
    for name in ("key_cache", "value_cache"):
        value = call.inputs[name]
        binding.bind_output(f"{name}_out", "cuda", 0, ONNX_TYPES[value.dtype], list(value.shape), value.pointer)
    source = torch.from_numpy(case.inputs["query"]).pin_memory()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # some 25 ms
        query.copy_(source, non_blocking=True)
        session.run_with_iobinding(binding, options)
        doubled = output * 2
    stream.synchronize()
    assert doubled.cpu().numpy().tobytes() == (expected.outputs["output"].read() * 2).tobytes()


def test_device_memory_stays_over_1000_runs(rng: np.random.Generator) -> None:
    """Risk: workspaces that are never given back. The session's arena has 32 MiB, a call takes 2 of them; shapes
    change, and so do threads, each of which may have a stream of its own."""
    cases = [long_case(rng, new_lens=(n,) * 6) for n in (4, 12)]
    session = make_cuda_session(make_model(cases[0]), GENERAL, provider=LIMIT)
    calls = [DeviceCall(session, case) for case in cases]
    for i in range(900):
        calls[i // 3 % 2].run()
    for i in range(100):
        in_threads([calls[i % 2].run])


def test_two_threads_on_one_stream(rng: np.random.Generator) -> None:
    """Risk: sessions that share a stream share its workspace too; launches of one call between those of the other."""
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream()
    provider = {"user_compute_stream": str(stream.cuda_stream)}
    cases = [long_case(rng), long_case(rng, new_lens=(3, 1), past_lens=(2000, 4000))]
    sessions = [make_cuda_session(deep_model(cases[0]), GENERAL, provider=provider) for _ in range(2)]
    in_threads([repeat(session, case, 20) for session in sessions for case in cases])


def test_the_limit_of_device_memory_bites(rng: np.random.Generator) -> None:
    """Risk: the test above measures nothing; and a call without memory must say so, and leave the session usable."""
    case = long_case(rng)
    tiny = {**LIMIT, "gpu_mem_limit": str(64 << 10)}
    session = make_cuda_session(make_model(case), GENERAL, provider=tiny)
    call = DeviceCall(session, case)
    before = call.inputs["key_cache"].read().tobytes()
    for _ in range(2):
        with pytest.raises(Exception, match="allocating the workspace"):
            call.run()
    assert call.inputs["key_cache"].read().tobytes() == before


def resident_bytes() -> int:
    """Memory that this process itself has filled, free memory of its heap given back."""
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no RssAnon")


def test_host_memory_stays_over_1000_runs(rng: np.random.Generator) -> None:
    """Risk: statuses, plans or allocator handles that are never freed. Every tenth call is refused."""
    case = make_case(rng, tensor_type=FLOAT16, metadata=(6, 40))
    session = make_cuda_session(make_model(case))
    calls = [DeviceCall(session, case)]
    case.inputs["block_table"] = np.pad(case.inputs["block_table"], ((0, 0), (0, 1)), constant_values=-1)
    calls.append(DeviceCall(session, case))  # another plan

    def call(i: int) -> None:
        calls[i % 2].run()
        if i % 10 == 0:
            calls[0].update(attention_metadata=np.array([-1, 40], np.int32))
            with pytest.raises(Exception, match="attention_metadata"):
                calls[0].run()
            calls[0].update(attention_metadata=np.array([6, 40], np.int32))

    for i in range(300):
        call(i)
    before = resident_bytes()
    for i in range(1000):
        call(i)
    grown = resident_bytes() - before
    assert grown < 1 << 20, f"resident memory grew by {grown / 2**20:.1f} MiB over 1,000 calls"


def test_many_sessions_leave_no_memory(rng: np.random.Generator) -> None:
    """Risk: arenas or streams that a session's end does not give back, because a kernel holds on to them."""
    torch = pytest.importorskip("torch")
    case = long_case(rng)
    model = make_model(case)

    def session() -> None:
        DeviceCall(make_cuda_session(model), case).run()

    for _ in range(5):
        session()
    before, _ = torch.cuda.mem_get_info()
    for _ in range(20):
        session()
    after, _ = torch.cuda.mem_get_info()
    assert before - after < 32 << 20, f"{(before - after) >> 20} MiB less device memory after 20 sessions"


def test_a_device_array_can_be_read_back() -> None:
    """Risk: the tests' own tensors lose bytes."""
    values = np.arange(24, dtype=np.float16).reshape(2, 3, 4)
    array = DeviceArray(values)
    array.write(values + 1)
    assert (array.read() == values + 1).all()
