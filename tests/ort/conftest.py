"""Fixtures of the ONNX Runtime tests.

OCTAVO_ORT_LIBRARY names liboctavo_ort.so; without it, octavo.get_library_path() is taken.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers of the test's own; OCTAVO_TEST_SEED repeats a run, and a failure prints the seed."""
    seed = int(os.environ.get("OCTAVO_TEST_SEED", np.random.SeedSequence().entropy % 2**32))
    request.node.add_report_section("setup", "seed", f"OCTAVO_TEST_SEED={seed}")
    return np.random.default_rng(seed)
