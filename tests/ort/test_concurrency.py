"""Sessions and threads beside each other, and memory over many calls."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest
from support import Case, in_threads, make_case, make_model, make_session, run_bound


def repeat(session, case: Case, times: int):
    """A worker that runs one case again and again, on caches of its own, and compares bits."""
    start = {name: value.copy() for name, value in case.inputs.items()}
    expected = {name: value.copy() for name, value in run_bound(session, case).items()}

    def worker() -> None:
        for _ in range(times):
            mine = Case(case.attributes, {n: v.copy() for n, v in start.items()}, case.qk_type, case.head_size)
            for name, value in run_bound(session, mine).items():
                assert value.tobytes() == expected[name].tobytes(), name

    return worker


def test_one_session_in_two_threads(rng: np.random.Generator) -> None:
    """Risk: calls of one kernel share a plan or scratch memory. The two have different shapes, so their plans fight."""
    cases = [
        make_case(rng, new_lens=(1, 1, 1), past_lens=(40, 7, 90), num_heads=8, head_size=64),
        make_case(rng, new_lens=(40, 3), past_lens=(0, 30), num_heads=8, head_size=64),
    ]
    session = make_session(make_model(cases[0]), threads=2)
    in_threads([repeat(session, case, 40) for case in cases])


def test_two_sessions_in_parallel_threads(rng: np.random.Generator) -> None:
    """Risk: process-wide state."""
    case = make_case(rng, new_lens=(5, 1), past_lens=(30, 200), num_heads=8, head_size=64)
    workers = [
        repeat(make_session(make_model(case), {"octavo.concurrency": str(n)}, threads=n), case, 30) for n in (1, 2)
    ]
    in_threads(workers)


def test_sessions_made_in_parallel(rng: np.random.Generator) -> None:
    """Risk: registration from several threads at once."""
    case = make_case(rng)
    model = make_model(case)

    def worker(n: int) -> None:
        for i in range(5):
            session = make_session(model, {"octavo.output_qk_limit_bytes": str(1 + (n + i) % 3)})
            inputs = {name: value.copy() for name, value in case.inputs.items()}
            mine = Case(case.attributes, inputs, head_size=case.head_size)
            run_bound(session, mine)

    in_threads([lambda n=n: worker(n) for n in range(4)])


exact_memory = pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="ASan keeps freed memory")


def resident_bytes() -> int:
    """Memory that this process itself has filled (pages of files come and go with their cache), free memory of its heap
    given back: earlier tests leave megabytes in which a leak would hide."""
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no RssAnon")


@exact_memory
def test_memory_stays_over_many_calls(rng: np.random.Generator) -> None:
    """Risk: scratch memory, statuses or plans that are never freed. Every tenth call is refused."""
    case = make_case(rng, new_lens=(20, 1), past_lens=(0, 30), num_heads=8, head_size=64)
    bad = {**case.inputs, "past_seqlens": np.array([0, -1], np.int32)}
    session = make_session(make_model(case, cache_outputs=False))

    def call(i: int) -> None:
        columns = 3 + i % 2  # another plan each time
        session.run(None, {**case.inputs, "block_table": case.inputs["block_table"][:, :columns].copy()})
        if i % 10 == 0:
            try:
                session.run(None, bad)
            except Exception as error:
                assert "past_seqlens" in str(error)

    for i in range(300):
        call(i)
    before = resident_bytes()
    for i in range(2000):
        call(i)
    grown = resident_bytes() - before
    assert grown < 1 << 20, f"resident memory grew by {grown / 2**20:.1f} MiB over 2,000 calls"


@exact_memory
def test_memory_stays_over_many_sessions(rng: np.random.Generator) -> None:
    """Risk: operators are made anew for every session and never freed."""
    case = make_case(rng)
    model = make_model(case)
    for _ in range(20):
        make_session(model)
    before = resident_bytes()
    for _ in range(150):
        make_session(model)
    grown = resident_bytes() - before
    assert grown < 1 << 20, f"resident memory grew by {grown / 2**20:.1f} MiB over 150 sessions"
