"""octavo bench. Risks: a comparison of unlike work, a wrong result that is timed, a report in another form."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import octavo.cli
from octavo.errors import OctavoError

pytest.importorskip("octavo._core", reason="octavo's compiled extension is not installed")

from octavo import bench, console, processors
from octavo.bench import CACHE_TYPES, STOCK, Work

SMALL = ["--heads", "4", "--kv-heads", "2", "--head-size", "64", "--context", "40", "--seconds", "0", "--threads", "1"]


@pytest.fixture(autouse=True)
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "DISTINCT_BYTES", 1 << 16)


def test_work_names_and_bytes() -> None:
    fp16 = Work(CACHE_TYPES["float16"], 32, 8, 128, 4096, 8, 16)
    assert (fp16.name, fp16.byte_count) == ("fp16 32/8x128 4096x8", 2 * 8 * 4096 * 8 * 128 * 2)
    int4 = Work(CACHE_TYPES["int4"], 9, 3, 64, 1024, 1, 16)
    assert (int4.name, int4.byte_count) == ("int4 9/3x64 1024x1 fp32 Q", 1024 * 3 * 64)


def test_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every cache type, a context that ends within a block, two sequences; both results are right."""
    picture = tmp_path / "bench.png"
    assert octavo.cli.main(["bench", *SMALL, "--batch", "2", "--json", "--png", str(picture)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"version", "device", "date", "limit", "rows", "threads"} <= set(report)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [row["work"].split()[0] for row in report["rows"]] == ["fp32", "fp16", "int8", "fp8", "int4"]
    for row in report["rows"]:
        assert row["ring_bytes"] >= 1 << 16 and row["ring_bytes"] % row["bytes"] == 0
        assert row["ours_us"] > 0 and row["floor_us"] > 0 and row["error"] < 1e-3
        assert row["bytes"] == 2 * 2 * 40 * 2 * 64 * CACHE_TYPES_BITS[row["work"].split()[0]] // 8
        if row["work"].startswith("fp8"):
            assert row["peers"] == {} and row["bar_us"] is None and STOCK in row["peer_refusals"]
        else:
            assert (
                not row["peer_refusals"] and row["bar_us"] == row["peers"][STOCK] and row["peer_errors"][STOCK] < 1e-2
            )


CACHE_TYPES_BITS = {kind.short: kind.bits for kind in CACHE_TYPES.values()}


def test_rows_of_odd_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [
        "--heads",
        "1",
        "--kv-heads",
        "1",
        "--head-size",
        "8",
        "--context",
        "3",
        "--batch",
        "1",
        "--block-size",
        "2",
    ]
    assert (
        octavo.cli.main(["bench", *sizes, "--seconds", "0", "--threads", str(min(2, processors.processor_count()))])
        == 0
    )
    assert "int4 1/1x8 3x1" in capsys.readouterr().out


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert octavo.cli.main(["bench", *SMALL, "--batch", "1", "--kv-cache", "int8", "--kv-cache", "float8e4m3fn"]) == 0
    out = capsys.readouterr().out
    assert "int8 4/2x64 40x1 fp32 Q" in out and "no kernel" in out and "1 thread;" in out
    assert out.count("no kernel: ") == 1 and "*" not in out


def test_rows_that_a_processor_cache_may_hold_are_marked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "MAX_SETS", 1)
    assert octavo.cli.main(["bench", *SMALL, "--batch", "1", "--kv-cache", "int8"]) == 0
    out = capsys.readouterr().out
    assert "40x1 fp32 Q *" in out and "* goes round caches of 10.0 KiB" in out


def test_others_on_the_machine_are_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Risk: figures of a machine that was busy with something else are taken for octavo's."""
    share = processors.others_percent
    for percent, words in ((60.0, "up to 60 % of the processors"), (2.0, ""), (None, "")):
        monkeypatch.setattr(processors, "others_percent", lambda before, after, percent=percent: percent)
        assert octavo.cli.main(["bench", *SMALL, "--batch", "1", "--kv-cache", "int8"]) == 0
        out = capsys.readouterr().out
        assert words in out and ("Other processes" in out) == bool(words)
        assert "--threads 1" not in out  # given already
    # Two processors were busy for 3 of 2 x 2 seconds, this process had 1 of them: half was others'.
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert share((10.0, 5.0, 100.0), (13.0, 6.0, 102.0)) == 50.0
    assert share(None, (13.0, 6.0, 102.0)) is None


def test_small_works_go_round_as_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    work = Work(CACHE_TYPES["int4"], 9, 3, 64, 1024, 1, 16)
    assert bench.MAX_SETS * work.byte_count >= bench.DISTINCT_BYTES == 256 << 20


@pytest.mark.parametrize("error", [MemoryError, ValueError])
def test_other_failures_of_stock_are_no_refusals(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("onnxruntime.InferenceSession", fail)
    with pytest.raises(OctavoError if error is MemoryError else error):
        bench.run([Work(CACHE_TYPES["float32"], 4, 2, 64, 40, 1, 16)], threads=1, seconds=0)


@pytest.mark.parametrize(("cache", "value", "words"), [("float8e4m3fn", np.nan, "finite"), ("int8", 2.0, "off by")])
@pytest.mark.parametrize("last_set", [False, True])
def test_every_sequence_of_the_first_and_last_set_is_checked(
    monkeypatch: pytest.MonkeyPatch, cache: str, value: float, words: str, last_set: bool
) -> None:
    run_ours = bench._Calls.run_ours

    def spoilt(self: bench._Calls, index: int) -> None:
        run_ours(self, index)
        if index == (self.count - 1 if last_set else 0):
            self.ours_output[1, 3:] *= value

    monkeypatch.setattr(bench._Calls, "run_ours", spoilt)
    with pytest.raises(OctavoError, match=words):
        bench.run([Work(CACHE_TYPES[cache], 4, 2, 64, 40, 2, 16)], threads=1, seconds=0)


@pytest.mark.parametrize("side", ["ours", "stock"])
def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    exact = bench._Calls._exact
    work = Work(CACHE_TYPES["float32"], 4, 2, 64, 40, 1, 16)
    if side == "ours":
        monkeypatch.setattr(bench._Calls, "_exact", lambda self: exact(self) * 1.001)
    else:
        monkeypatch.setattr(bench, "STOCK_BOUND", 0.0)
    with pytest.raises(OctavoError, match="is off by"):
        bench.run([work], threads=1, seconds=0)


def test_no_memory_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "resize", fail)
    assert octavo.cli.main(["bench", *SMALL, "--batch", "1"]) == 1
    assert "shorter context or a smaller batch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["--context", "16777216", "--batch", "65536", "--kv-cache", "float32"], "16,512.8 TiB"),
        (["--context", "131072", "--batch", "32", "--kv-cache", "float32"], "67.0 GiB"),
    ],
)
def test_more_memory_than_there_is_is_refused_before_it_is_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], needed: str
) -> None:
    """Linux promises memory that it does not have; the refusal comes before the first row, too."""
    monkeypatch.setattr("octavo.memory.available_bytes", lambda: 23 << 30)
    monkeypatch.setattr(bench, "_measure", lambda *_: pytest.fail("measured"))
    assert octavo.cli.main(["bench", "--threads", "1", *arguments]) == 1
    err = capsys.readouterr().err
    assert f"needs {needed} of memory, and 23.0 GiB are available; choose a shorter context" in err


def test_memory_bytes_are_what_a_work_holds() -> None:
    """A block is longer than the context: the padding counts too."""
    work = Work(CACHE_TYPES["float32"], 4, 2, 64, 4000, 3, 4096)
    calls = bench._Calls(work, 1)
    held = sum(array.nbytes for array in (*calls.contiguous, *calls._pools, calls._table))
    assert held <= work.memory_bytes <= 2 * held


def test_more_threads_than_processors_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processors, "processor_count", lambda: 2)
    assert octavo.cli.main(["bench", "--threads", "4096"]) == 1
    assert "4,096 threads on 2 processors would wait for each other; give --threads 2" in capsys.readouterr().err


def test_others_advice_names_threads_that_were_not_given(capsys: pytest.CaptureFixture[str]) -> None:
    for threads, words in ((2, "Stop them, or give --threads 1."), (1, "Stop them.")):
        console._print_others(60.0, threads)
        assert capsys.readouterr().out.rstrip().endswith(words)


def test_a_picture_that_cannot_be_written_is_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "_measure", lambda *_: pytest.fail("measured"))
    for path in (tmp_path / "nope/x.png", tmp_path):
        assert octavo.cli.main(["bench", *SMALL, "--png", str(path)]) == 1
        assert f"{path} cannot be written" in capsys.readouterr().err
    bench.check_picture(tmp_path / "fine.png")
    assert not (tmp_path / "fine.png").exists()
    (tmp_path / "kept.png").write_bytes(b"old")
    bench.check_picture(tmp_path / "kept.png")
    assert (tmp_path / "kept.png").read_bytes() == b"old"


def test_the_table_is_printed_before_the_picture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise OctavoError("x.png cannot be written: No space left on device.")

    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "draw", fail)
    arguments = ["--batch", "1", "--kv-cache", "int8", "--png", str(tmp_path / "x.png")]
    assert octavo.cli.main(["bench", *SMALL, *arguments]) == 1
    assert "int8 4/2x64 40x1" in capsys.readouterr().out


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OctavoError, match="pip install matplotlib"):
        bench.draw({"rows": []}, tmp_path / "x.png")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--heads", "5", "--kv-heads", "2"], "not a multiple of --kv-heads"),
        (["--head-size", "20"], "not a multiple of 8"),
    ],
)
def test_wrong_usage(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert octavo.cli.main(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_picture_through_a_link_leaves_the_link(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    link = tmp_path / "link.png"
    link.symlink_to(tmp_path / "target.png")
    bench.check_picture(link)
    assert link.is_symlink() and not (tmp_path / "target.png").exists()
