"""The CPU table of bench/cpu: rows and bars, what calls store, what counts as wrong, the command from end to end."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
CPU = ROOT / "bench/cpu"
sys.path.insert(0, str(CPU))
sys.path.insert(0, str(ROOT / "bench/gpu"))  # before bench/cpu: both have a run.py, and the imported one is the GPU's

import cpu_calls  # noqa: E402
import cpu_rows  # noqa: E402
import machine  # noqa: E402
from cpu_rows import Row, Work  # noqa: E402
from read_loop import ReadLoop  # noqa: E402
from rows import Bar  # noqa: E402

SPEC = importlib.util.spec_from_file_location("cpu_bench_run", CPU / "run.py")
command = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(command)

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None, reason="the read loop needs a C++ compiler"
)


def record(ours: float, stock: float | None = 100.0, floor: float = 10.0, others: float = 0.0) -> dict[str, Any]:
    """What the command measured of a row."""
    errors = {"error": 1e-7, "stock_error": stock and 1e-7}
    return {"ours_us": ours, "stock_us": stock, "floor_us": floor, "others_percent": others, **errors}


def test_work_names_and_sizes() -> None:
    decode = Work("fp32", 32, 8, 128, 16384, 8)
    assert (decode.name, decode.type, decode.bytes) == ("fp32 32/8x128 16384x8", "fp32", 1 << 30)
    assert Work("int4", 9, 3, 64, 16384, 1).name == "int4 9/3x64 16384x1 fp32 Q"
    assert Work("int4", 9, 3, 64, 16384, 1).bytes == 16384 * 3 * 64
    prefill = Work("fp16", 9, 3, 64, 4, 1, 4)
    assert prefill.name == "fp16 9/3x64 1x4+0 page 16"
    assert prefill.flops == 4 * 9 * 64 * (1 + 2 + 3 + 4)


def test_rows_are_distinct_and_their_bars_refer_to_rows() -> None:
    rows = cpu_rows.all_rows()
    names = {row.work.name for row in rows}
    assert len(names) == len(rows)
    for row in rows:
        assert row.bars
        for bar in row.bars:
            assert not bar.of or bar.of.removeprefix("stock ") in names, row


def test_selection_brings_the_rows_that_bars_refer_to() -> None:
    chosen = [row.work.name for row in cpu_rows.select(cpu_rows.all_rows(), ["int8 9/3x64 16384x1"])]
    assert chosen == ["fp32 9/3x64 16384x1", "int8 9/3x64 16384x1 fp32 Q"]


def test_every_bar_of_a_row_is_judged() -> None:
    base, int8 = Work("fp32", 9, 3, 64, 16384, 1), Work("int8", 9, 3, 64, 16384, 1)
    bars = (Bar("ratio", 0.6, base.name), Bar("ratio", 0.4, cpu_rows.stock_name(int8)), Bar("percent", 80))
    rows = [Row(base, (Bar("ratio", 0.5, cpu_rows.stock_name(base)),)), Row(int8, bars)]
    got = cpu_rows.evaluate(rows, {base.name: record(50.0), int8.name: record(24.0, stock=50.0, floor=19.0)})
    assert got[0]["holds"] and got[0]["bar_us"] == 50.0 and got[0]["of_stock"] == 0.5
    asked = [(bar["asks"], bar["us"], bar["holds"]) for bar in got[1]["bars"]]
    of_rate = ("80% of read rate", 23.8, False)
    assert asked == [("0.6 of fp32", 30.0, True), ("0.4 of stock", 20.0, False), of_rate]
    assert not got[1]["holds"] and got[1]["bar_us"] == 20.0 and got[1]["percent_of_limit"] == 79.2
    assert "2 of 4 bars hold" in cpu_rows.format_table(got)


@pytest.mark.parametrize("ours", [float("nan"), 51.0])
def test_no_time_or_a_long_one_misses(ours: float) -> None:
    work = Work("fp32", 9, 3, 64, 1024, 1)
    row = Row(work, (Bar("ratio", 0.5, cpu_rows.stock_name(work)),))
    assert not cpu_rows.evaluate([row], {work.name: record(ours)})[0]["holds"]


def test_a_failed_row_has_no_time_and_bars_on_it_do_not_hold() -> None:
    base, int8 = Work("fp32", 9, 3, 64, 16384, 1), Work("int8", 9, 3, 64, 16384, 1)
    rows = [Row(base, (Bar("percent", 80),)), Row(int8, (Bar("ratio", 0.6, base.name),))]
    got = cpu_rows.evaluate(rows, {base.name: {"failure": "wrong"}, int8.name: record(1.0)})
    assert got[0]["failure"] == "wrong" and "ours_us" not in got[0]
    assert got[1]["bars"] == [{"asks": "0.6 of fp32", "us": None, "holds": False}] and not got[1]["holds"]
    assert "FAILED: wrong" in cpu_rows.format_table(got)


def test_resuming_keeps_undisturbed_rows_alone(tmp_path: Path) -> None:
    quiet, disturbed, wrong = (Work("fp32", 9, 3, 64, context, 1) for context in (1024, 4096, 16384))
    rows = [Row(work, (Bar("ratio", 0.5, cpu_rows.stock_name(work)),)) for work in (quiet, disturbed, wrong)]
    measured = {quiet.name: record(50.0), disturbed.name: record(60.0, others=3.5), wrong.name: {"failure": "wrong"}}
    facts = {"commit": "abc", "device": "d", "threads": 2}
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps(facts | {"rows": cpu_rows.evaluate(rows, measured)}))
    kept = command.resume(path, facts)
    assert kept == {quiet.name: record(50.0)}
    assert cpu_rows.evaluate(rows, kept) == cpu_rows.evaluate(rows[:1], measured)
    with pytest.raises(ValueError, match="another commit and threads"):
        command.resume(path, facts | {"commit": "def", "threads": 1})


@pytest.mark.parametrize("cache", ["int8", "fp8", "int4"])
def test_new_tokens_fall_on_their_codes_again(cache: str) -> None:
    """Else the cache that the float64 attention assumes is not what the operators store."""
    stored, meant = cpu_calls.codes(cache)
    again = meant / cpu_calls.SCALES[cache]
    if cache == "fp8":
        assert np.array_equal(again.astype(stored.dtype).view(np.uint8), stored.view(np.uint8))
        assert np.isfinite(meant).all()
    else:
        assert np.array_equal(np.rint(again) + (8 if cache == "int4" else 0), stored)
    assert np.abs(meant - cpu_calls.values()).max() < 0.6 * cpu_calls.SCALES[cache] * (32 if cache == "fp8" else 1)


def test_int4_packs_the_first_of_two_in_the_low_nibble() -> None:
    drawn = np.array([[0, 255, 128, 127]], np.uint8)
    stored = cpu_calls.codes("int4")[0][drawn[0]]
    assert cpu_calls.encode("int4", drawn).tolist() == [[stored[0] | stored[1] << 4, stored[2] | stored[3] << 4]]


@pytest.mark.parametrize("work", [Work("fp32", 4, 2, 16, 64, 3), Work("int4", 4, 2, 16, 64, 2),
                                  Work("fp8", 4, 2, 16, 64, 2), Work("fp16", 4, 2, 16, 64, 1, 64)],
                         ids=lambda work: work.name)  # fmt: skip
def test_wrong_output_is_an_error(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_calls, "DISTINCT_BYTES", 3 * work.bytes)
    settings = cpu_calls.Settings(2, command.library_path(os.environ.get("OCTAVO_ORT_LIBRARY")))
    calls = cpu_calls.Calls(work, settings, with_stock=work.cache != "fp8")
    ours, stock = command.verify(calls)
    assert ours <= command.OURS_BOUND[work.type] and (stock is None) == (work.cache == "fp8")

    right = calls.run_ours
    for head in (0, work.num_heads - 1):  # one head that sees a neighbour's values

        def run(i: int, head: int = head) -> None:
            right(i)
            rows = calls.ours_output.reshape(-1, work.num_heads, work.head_size)
            rows[:, head] = rows[:, (head + 1) % work.num_heads].copy()

        calls.run_ours = run
        with pytest.raises(ValueError, match="ours"):
            command.verify(calls)
    calls.run_ours = lambda i: None
    with pytest.raises(ValueError, match="ours is off by nan"):
        command.verify(calls)


def test_an_error_of_stock_is_reported_as_its_own() -> None:
    exact = np.ones((1, 8))
    calls = SimpleNamespace(work=Work("fp32", 1, 1, 8, 1, 1), count=1, exact=lambda i: (slice(0, 1), exact),
                            ours_output=np.empty((1, 8)), stock_output=np.empty((1, 1, 8)))  # fmt: skip
    calls.run_ours = lambda i: calls.ours_output.fill(1.0)
    calls.run_stock = lambda i: calls.stock_output.fill(1.1)
    with pytest.raises(ValueError, match=r"stock is off by 0\.1"):
        command.verify(calls)


def test_others_are_noticed() -> None:
    """A figure from a busy machine must not pass for one from a quiet machine."""
    others = machine.Others()
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(1)
        share = others.share()
    finally:
        busy.kill()
        busy.wait()
    assert machine.QUIET < share <= 1.1

    work = Work("fp32", 9, 3, 64, 1024, 1)
    rows = [Row(work, (Bar("percent", 80),))]
    text = cpu_rows.format_table(cpu_rows.evaluate(rows, {work.name: record(50.0, others=41.0)}))
    assert "others took 41 % of the machine" in text


def test_waiting_ends_when_patience_does(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(machine.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(machine.Others, "share", lambda self: 0.5)
    assert machine.wait_until_quiet(5.0) == 6.0
    monkeypatch.setattr(machine.Others, "share", lambda self: 0.0)
    assert machine.wait_until_quiet(5.0) == 0.0


@needs_compiler
@pytest.mark.parametrize("threads", [1, 3])
def test_the_read_loop_reads_every_word(tmp_path: Path, threads: int) -> None:
    """A floor that skips memory would make every row look slow."""
    loop = ReadLoop(threads, tmp_path)
    try:
        for count in (1, 33, 8192, 3 * 8192 + 5):
            array = np.zeros(count, np.uint64)
            assert loop.read(array) == 0
            for at in {0, count // 2, count - 1}:
                array[:] = 0
                array[at] = 1 << 63 | at
                assert loop.read(array) == 1 << 63 | at
        with pytest.raises(ValueError, match="contiguous"):
            loop.read(np.zeros((4, 4))[:, ::2])
    finally:
        loop.close()


@needs_compiler
def test_the_command_from_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the command draws its table with matplotlib")
    output = tmp_path / "cpu.json"
    arguments = ["--only", "fp32 9/3x64 1x512", "fp16 9/3x64 1024x1", "--seconds", "0.01", "--patience", "0"]
    arguments += ["--commit", "abc"]
    if library := os.environ.get("OCTAVO_ORT_LIBRARY"):
        arguments += ["--library", library]
    done = subprocess.run(
        [sys.executable, str(CPU / "run.py"), *arguments, "--output", str(output)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(output.read_text())
    assert report["commit"] == "abc" and report["limit"].keys() == {"float32 product GFLOP/s", "read GB/s"}
    decode, prefill = report["rows"]
    assert (decode["work"], prefill["work"]) == ("fp16 9/3x64 1024x1", "fp32 9/3x64 1x512+0 page 16")
    for row in (decode, prefill):
        assert row["ours_us"] > 0 and row["floor_us"] > 0 and row["peers"].keys() == {cpu_rows.STOCK}
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_list_needs_no_library() -> None:
    done = subprocess.run([sys.executable, str(CPU / "run.py"), "--list"], capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == len(cpu_rows.all_rows())
