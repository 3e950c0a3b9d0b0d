"""What the CUDA provider's kernel refuses: everything that the host can see, with the same texts as on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
from device import DeviceCall, make_cuda_session
from support import FLOAT16, make_case, make_model
from test_errors import REFUSED_AT_RUN

# Values in device memory, which the host does not read on CUDA (test_cuda_hostile.py has what becomes of them).
SEEN_ON_A_CPU_ONLY = {
    "lengths_not_from_0",
    "lengths_fall",
    "lengths_past_the_tokens",
    "past_negative",
    "past_the_capacity",
    "block_id_too_large",
    "block_id_below_minus_1",
    "slot_too_large",
    "position_negative",
    "position_past_cos_cache",
}
MISTAKES = [name for name in REFUSED_AT_RUN if name not in SEEN_ON_A_CPU_ONLY]


def test_the_list_of_values_is_true() -> None:
    """Risk: a mistake that was renamed is silently left out below, or tried on a GPU that cannot see it."""
    assert set(REFUSED_AT_RUN) >= SEEN_ON_A_CPU_ONLY


@pytest.mark.parametrize("caches", ["no_outputs", "in_place", "elsewhere"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_refused_at_run(rng: np.random.Generator, mistake: str, caches: str) -> None:
    """Risk: a crash, another text than on a CPU, or caches copied or written before the mistake is found."""
    keywords, change, text = REFUSED_AT_RUN[mistake]
    case = make_case(rng, **keywords)
    change(case)
    session = make_cuda_session(make_model(case, cache_outputs=caches != "no_outputs"))
    call = DeviceCall(session, case, in_place=caches != "elsewhere")
    before = call.results()
    with pytest.raises(Exception, match=text):
        call.run()
    for name, value in call.inputs.items():
        assert value.read().tobytes() == np.ascontiguousarray(case.inputs[name]).tobytes(), f"{name} was written"
    for name, value in call.results().items():
        assert value.tobytes() == before[name].tobytes(), f"{name} was written before the call was refused"


def test_a_session_is_refused_with_the_reason(rng: np.random.Generator) -> None:
    """Risk: attributes and outputs are checked for the CPU's kernels only."""
    case = make_case(rng, tensor_type=FLOAT16, kv_cache_layout="STRIPED")
    with pytest.raises(Exception, match=r'INVALID_ARGUMENT: PagedAttention node "attention".*kv_cache_layout'):
        make_cuda_session(make_model(case))
    case = make_case(rng, tensor_type=FLOAT16, num_heads=4)
    case.attributes["num_heads"] = 4.0
    with pytest.raises(Exception, match="num_heads: must be an int, got a float"):
        make_cuda_session(make_model(case))


def test_a_backend_of_another_device_is_refused(rng: np.random.Generator) -> None:
    """Risk: octavo.backend is ignored, or names a CPU's backend for a node on the GPU."""
    case = make_case(rng, tensor_type=FLOAT16)
    session = make_cuda_session(make_model(case), {"octavo.backend": "cpu_baseline"})
    with pytest.raises(Exception, match=r"cpu_baseline.*cuda_general.*octavo\.backend"):
        DeviceCall(session, case).run()


def test_a_large_output_qk_is_refused(rng: np.random.Generator) -> None:
    """Risk: the limit of a session is not the plan's on CUDA."""
    case = make_case(rng, tensor_type=FLOAT16, qk_output=1)
    session = make_cuda_session(make_model(case), {"octavo.output_qk_limit_bytes": "64"})
    with pytest.raises(Exception, match=r"output_qk: at most 64 bytes.*octavo\.output_qk_limit_bytes"):
        DeviceCall(session, case).run()


def test_caches_bound_to_each_other_are_refused(rng: np.random.Generator) -> None:
    """Risk: one cache overwrites the other, silently."""
    case = make_case(rng, tensor_type=FLOAT16)
    session = make_cuda_session(make_model(case))
    call = DeviceCall(session, case)
    for output, cache in (("key_cache_out", "value_cache"), ("value_cache_out", "key_cache")):
        value = call.inputs[cache]
        call.binding.bind_output(output, "cuda", 0, 10, list(value.shape), value.pointer)
    with pytest.raises(Exception, match="key_cache_out: must not be bound to the buffer of value_cache"):
        call.run()
    for name in ("key_cache", "value_cache"):
        assert call.inputs[name].read().tobytes() == case.inputs[name].tobytes()
