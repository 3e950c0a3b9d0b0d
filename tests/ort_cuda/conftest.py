"""Fixtures of the tests on a GPU. Without onnxruntime's CUDA provider, or without a device, all of them are skipped.

They share cases, models and the oracle with tests/ort. OCTAVO_ORT_LIBRARY names a liboctavo_ort.so that was built with
OCTAVO_CUDA; without it, octavo.get_library_path() is taken.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "ort")]

from device import make_rng, missing_device  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips this folder's tests, with the reason, where nothing can run them."""
    mine = [item for item in items if HERE in item.path.parents]
    reason = missing_device() if mine else ""
    for item in mine:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def rng(request: pytest.FixtureRequest):
    """Random numbers of the test's own; OCTAVO_TEST_SEED repeats a run, and a failure prints the seed."""
    generator, seed = make_rng()
    request.node.add_report_section("setup", "seed", f"OCTAVO_TEST_SEED={seed}")
    return generator
