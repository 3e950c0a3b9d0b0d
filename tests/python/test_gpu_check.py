"""tools/gpu_check.py's list of allowed hazards. Risk: it lets another fault through."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import gpu_check

REASON = "two warps share the keys of a slot"
ARGUMENTS = "(octavo::cuda::Call, octavo::cuda::decode::Work, octavo::cuda::decode::Maps)"


@pytest.fixture(autouse=True)
def one_allowed_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = r"decode::decode<\(octavo::CacheType\)\d, \(int\)\d+, \(int\)4>"
    monkeypatch.setattr(gpu_check, "RACECHECK_ALLOWED", ((pattern, REASON),))


def hazard(tiles: int) -> str:
    kernel = f"void octavo::cuda::decode::decode<(octavo::CacheType)2, (int)64, (int){tiles}>{ARGUMENTS}"
    return (
        f"========= Error: Race reported between Write access at {kernel}+0x10\n"
        f"=========     and Read access at {kernel}+0x20 [112 hazards]\n"
    )


def test_an_allowed_hazard_has_its_reason() -> None:
    assert gpu_check.allowed_hazards(hazard(4)) == [REASON]


@pytest.mark.parametrize(
    "more",
    [
        hazard(1),
        "========= Error: Race reported between Write access at void octavo::cuda::prologue<__half>(int)+0x10\n",
        "========= Error: Invalid __global__ read of size 4 bytes\n",
        "[  FAILED  ] 1 test, listed below:\n",
    ],
    ids=["another instance", "another kernel", "no hazard", "a failed test"],
)
def test_nothing_else_passes_beside_it(more: str) -> None:
    assert gpu_check.allowed_hazards(hazard(4) + more) == []
    assert gpu_check.allowed_hazards(more) == []


def test_a_clean_log_needs_no_reason() -> None:
    assert gpu_check.allowed_hazards("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n") == []
