"""The decode table of bench/gpu: names of works, floors, bars, peers, the command over a stand-in for its binary."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "bench/gpu"
sys.path.insert(0, str(GPU))

import rows  # noqa: E402
import run  # noqa: E402
import table  # noqa: E402
import work  # noqa: E402

LIMIT = {"32 MiB": 9.0, "64 MiB": 16.0, "128 MiB": 31.0}
MIB = 1 << 20


def record(name: str, ours: float = 20.0, call: float = 24.0, size: int = 64 * MIB) -> dict[str, Any]:
    """A row as octavo_gpu_bench reports it."""
    return {"work": name, "ours_us": ours, "call_us": call, "bytes": size, "error": 3e-4, "backend": "cuda_general"}


def test_work_names_say_what_is_read() -> None:
    plain = work.parse("int8 64/8x64 1024x32")
    assert (plain.num_heads, plain.kv_num_heads, plain.head_size, plain.page) == (64, 8, 64, 256)
    assert (plain.q_type, plain.bytes) == ("fp16", 32 * MIB)
    assert work.parse("bf16 32/8x128 4096x32").q_type == "bf16"
    assert work.parse("int8 32/8x128 4096x32 bf16 Q page 16").page == 16
    assert work.parse("int4 32/8x128 4096x32 PER_CHANNEL").bytes == 128 * MIB
    assert work.parse("fp16 64/8x64 1024x31+131072x1").lengths == (1024,) * 31 + (131072,)
    spread = work.parse("int8 32/8x128 64..16384x32").lengths
    assert (spread[0], spread[-1], len(spread)) == (64, 16384, 32) and list(spread) == sorted(spread)
    # A window reads W positions for its last token, and one more for each token before it.
    assert work.parse("int8 32/8x128 16384x8 window 1024 4 tokens").bytes == 8 * 1027 * 8 * 2 * 128


@pytest.mark.parametrize("name", ["int8 64/8x64", "int7 64/8x64 1x1", "int8 64/8x64 1024x32 page", "int8 64x64 1x1"])
def test_malformed_work_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="work "):
        work.parse(name)


def test_cpp_reads_the_same_names(tmp_path: Path) -> None:
    """work.cc and work.py must agree on every row of the table, else ours and the peers' are different works."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    main = tmp_path / "main.cc"
    main.write_text(
        '#include <cstdio>\n#include "work.h"\nint main(int argc, char** argv) {\n'
        "  for (int i = 1; i < argc; ++i) {\n"
        "    const auto w = octavo::bench::parse_work(argv[i]);\n"
        '    std::printf("%lld %lld %lld %lld %d", (long long)w.bytes(), (long long)w.block_size,\n'
        "                (long long)w.new_tokens, (long long)w.window, w.type == octavo::ElementType::kBFloat16);\n"
        '    for (auto n : w.lengths) std::printf(" %lld", (long long)n);\n'
        '    std::printf("\\n");\n  }\n}\n'
    )
    binary = tmp_path / "names"
    sources = [str(main), str(GPU / "work.cc"), f"-I{GPU}", f"-I{ROOT / 'include'}"]
    subprocess.run([compiler, "-std=c++20", "-O0", *sources, "-o", str(binary)], check=True)
    names = list(dict.fromkeys(row.measured for row in rows.all_rows()))
    got = subprocess.run([str(binary), *names], check=True, capture_output=True, text=True).stdout.splitlines()
    expected = []
    for name in names:
        w = work.parse(name)
        numbers = (w.bytes, w.page, w.new_tokens, w.window, int(w.q_type == "bf16"), *w.lengths)
        expected.append(" ".join(str(number) for number in numbers))
    assert got == expected


def test_rows_are_distinct_and_their_bars_refer_to_rows() -> None:
    table_rows = rows.all_rows()
    names = [row.work for row in table_rows]
    assert len(set(names)) == len(names)
    for row in table_rows:
        work.parse(row.measured)
        assert not row.bar.of or row.bar.of in names, row
        assert row.whole_call == (row.bar.kind == "over"), row


def test_selection_brings_the_rows_that_bars_refer_to() -> None:
    chosen = [row.work for row in rows.select(rows.all_rows(), ["int8 64/8x64 1024x32 PER_CHANNEL"])]
    assert chosen == ["int8 64/8x64 1024x32", "int8 64/8x64 1024x32 PER_CHANNEL"]


@pytest.mark.parametrize(
    ("size", "us"), [(32 * MIB, 9.0), (48 * MIB, 12.5), (128 * MIB, 31.0), (256 * MIB, 62.0), (16 * MIB, 4.5)]
)
def test_floor_lies_on_the_lines_between_measured_sizes(size: int, us: float) -> None:
    assert table.floor_us(LIMIT, size) == pytest.approx(us)
    # The file's order of sizes must not matter.
    assert table.floor_us(dict(reversed(LIMIT.items())), size) == pytest.approx(us)


def test_no_read_limit_is_an_error() -> None:
    with pytest.raises(ValueError, match="not measured"):
        table.floor_us({}, MIB)


def test_bars_of_every_kind() -> None:
    ours = {"a": 100.0}
    assert table.bar_us(rows.Bar("us", 12.5), 9.0, ours) == 12.5
    assert table.bar_us(rows.Bar("percent", 75), 9.0, ours) == 12.0
    assert table.bar_us(rows.Bar("ratio", 1.03, "a"), 9.0, ours) == pytest.approx(103)
    assert table.bar_us(rows.Bar("over", 3, "a"), 9.0, ours) == 103
    assert table.bar_us(rows.Bar("ratio", 1.03, "b"), 9.0, ours) is None


def test_rows_are_judged_by_their_own_time() -> None:
    base = "int8 64/8x64 1024x32"
    table_rows = [
        rows.Row(base, rows.Bar("us", 20.0)),
        rows.Row(f"{base} call", rows.Bar("over", 3, base)),
        rows.Row("fp8 64/8x64 1024x32", rows.Bar("us", 19.9)),
        rows.Row("int4 64/8x64 1024x32", rows.Bar("us", 1.0)),
        rows.Row("fp16 64/8x64 1024x32", rows.Bar("us", 1.0)),
    ]
    failed = {"work": "int4 64/8x64 1024x32", "failure": "wrong output"}
    peers = {base: {"stock": {"us": 30.0, "error": 1e-3}, "stock (call)": {"us": 40.0, "error": 1e-3}}}
    got = table.evaluate(table_rows, LIMIT, [record(base), record("fp8 64/8x64 1024x32"), failed], peers)
    plain, call, missed, wrong = got  # fp16 was not measured: no row
    assert plain["holds"] and plain["ours_us"] == 20.0 and plain["percent_of_limit"] == 80.0
    assert plain["peers"] == {"stock": 30.0} and call["peers"] == {"stock": 40.0}
    assert call["ours_us"] == 24.0 and call["bar_us"] == 23.0 and not call["holds"]
    assert not missed["holds"]
    assert wrong["failure"] == "wrong output" and "ours_us" not in wrong
    text = table.format_table(got)
    assert "FAILED: wrong output" in text and "1 of 4 bars hold" in text
    assert [line.split()[-1] for line in text.splitlines()[1:3]] == ["30.0", "40.0"]


def test_a_row_of_nan_never_holds() -> None:
    name = "int8 64/8x64 1024x32"
    got = table.evaluate([rows.Row(name, rows.Bar("us", 20.0))], LIMIT, [record(name, ours=float("nan"))], {})
    assert not got[0]["holds"]


def test_earlier_peers_fill_in_for_those_not_measured_now() -> None:
    name = "int8 64/8x64 1024x32"
    row = {"work": name, "peers": {"old": 5.0, "both": 6.0}, "peer_errors": {"old": 1e-3, "both": 1e-3}}
    call = {"work": f"{name} call", "peers": {"old": 9.0}, "peer_errors": {"old": 1e-3}}
    peers = {"fp8 64/8x64 1024x32": {"both": {"us": 7.0, "error": 2e-3}}}
    table.take_over(peers, [row, call])
    # "both" ran now, though not on this work: its earlier figure there is of another run, and stays away.
    assert {work: {peer: facts["us"] for peer, facts in of.items()} for work, of in peers.items()} == {
        name: {"old": 5.0, "old (call)": 9.0},
        "fp8 64/8x64 1024x32": {"both": 7.0},
    }


def test_peers_reports_are_collected() -> None:
    reports = {
        "a": {"peer": "A", "version": "1", "date": "2026-01-01", "rows": [
            {"work": "w", "us": {"A": 5.0, "A (call)": 8.0}, "error": 0.000123456},
            {"work": "v", "refusal": "no"},
        ]},
        "b": {"absent": "not installed"},
    }  # fmt: skip
    peers, about = run.collect(reports)
    assert peers == {"w": {"A": {"us": 5.0, "error": 0.00012}, "A (call)": {"us": 8.0, "error": 0.00012}}}
    assert about["a"]["refusals"] == {"v": "no"} and about["a"]["date"] == "2026-01-01"
    assert about["b"] == {"absent": "not installed"}


STAND_IN = """#!{python}
import json, sys
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
works = open(arguments["--works"]).read().split("\\n")[:-1]
rows = [{{"work": w, "ours_us": 20.0, "call_us": 24.0, "bytes": 1 << 26, "error": 3e-4, "backend": "b"}} for w in works]
if {broken}:
    rows[0] = {{"work": works[0], "failure": "wrong output"}}
limit = [{{"bytes": 1 << 26, "us": 16.0, "kernel": "k"}}]
json.dump({{"device": "a device", "limit": limit, "rows": rows}}, open(arguments["--json"], "w"))
sys.exit({broken})
"""


@pytest.mark.parametrize("broken", [0, 1])
def test_the_command_from_end_to_end(tmp_path: Path, broken: int) -> None:
    pytest.importorskip("matplotlib", reason="the command draws its table with matplotlib")
    binary, output = tmp_path / "octavo_gpu_bench", tmp_path / "decode.json"
    binary.write_text(STAND_IN.format(python=sys.executable, broken=broken))
    binary.chmod(0o755)
    command = [sys.executable, str(GPU / "run.py"), "--binary", str(binary), "--peers", "--commit", "abc"]
    done = subprocess.run([*command, "--output", str(output)], capture_output=True, text=True)
    assert done.returncode == broken, done.stderr
    report = json.loads(output.read_text())
    assert (report["commit"], report["device"], report["limit"]) == ("abc", "a device", {"64 MiB": 16.0})
    assert [row["work"] for row in report["rows"]] == [row.work for row in rows.all_rows()]
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert ("FAILED" in done.stdout) == bool(broken)
