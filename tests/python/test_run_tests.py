"""tools/run_tests.py: what a report says was skipped, and why, reaches the last lines of `make test`."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import run_tests

REPORT = """<?xml version="1.0"?>
<testsuites><testsuite>
<testcase name="good" status="run"><system-out>skipped: not the word of a test that passed</system-out></testcase>
<testcase name="bad" status="fail"><failure message=""/><system-out>1 != 2</system-out></testcase>
<testcase name="cuda" status="notrun"><skipped message="SKIP_RETURN_CODE=77"/>
<system-out>noise
skipped: no usable CUDA device 0: no driver
</system-out></testcase>
<testcase name="googletest" status="notrun"><skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/>
<system-out>[ RUN      ] Backend.Runs
tests/backends/availability_test.cc:33: Skipped
cpu_avx512: needs AVX-512

[  SKIPPED ] Backend.Runs (0 ms)
</system-out></testcase>
<testcase name="silent" status="notrun"><skipped message="SKIP_RETURN_CODE=77"/><system-out/></testcase>
<testcase name="a"><skipped type="pytest.skip" message="no torch">file.py:3: no torch</skipped></testcase>
<testcase name="b"><skipped type="pytest.skip" message="no torch">file.py:9: no torch</skipped></testcase>
</testsuite></testsuites>
"""


def test_every_skip_is_counted_under_its_reason(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT, encoding="utf-8")
    counts, failures, skips = run_tests.read_reports((report,))
    assert str(counts) == "1 passed, 1 failed, 5 skipped"
    assert len(failures) == 1 and "1 != 2" in failures[0]
    assert skips == Counter(
        {
            "no usable CUDA device 0: no driver": 1,
            "cpu_avx512: needs AVX-512": 1,
            "silent: SKIP_RETURN_CODE=77": 1,
            "no torch": 2,
        }
    )


def test_an_absent_or_empty_report_is_a_failure(tmp_path: Path) -> None:
    empty = tmp_path / "empty.xml"
    empty.write_text("<testsuites/>", encoding="utf-8")
    counts, _, _ = run_tests.read_reports((empty, tmp_path / "absent.xml"))
    assert str(counts) == "0 passed, 2 failed, 0 skipped"


def test_a_step_without_its_compiler_is_one_skip_and_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDACXX", raising=False)
    step = run_tests.cuda_step()
    assert step.skip == "nvcc not found: CUDA not built"
    outcome = run_tests.run_step(step)
    assert str(outcome.counts) == "0 passed, 0 failed, 1 skipped"
    assert outcome.skips == Counter({step.skip: 1})
    (tmp_path / "nvcc").touch(mode=0o755)
    assert run_tests.cuda_step().skip == ""
