"""Threads that sleep between calls. Risks: a processor taken from others, a user's choice overruled or leaked."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

pytest.importorskip("octavo._core", reason="octavo's compiled extension is not installed")

DECIDED_BY = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def spin_count(program: str, **given: str) -> str:
    """What GCC's OpenMP says of itself, loaded by `program`. OMP_WAIT_POLICY would say PASSIVE by default too."""
    environment = {name: value for name, value in os.environ.items() if name not in DECIDED_BY}
    environment |= {"OMP_DISPLAY_ENV": "verbose", **given}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = [line.split("'")[1] for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    if not counts:
        pytest.skip("this build has no OpenMP of GCC's")
    assert len(counts) == 1, done.stderr
    return counts[0]


@pytest.mark.parametrize("name", ["paged_attention", "explain_call", "UnsupportedError", "ResourceExhaustedError"])
def test_threads_sleep_whichever_name_loads_openmp(name: str) -> None:
    assert spin_count(f"import octavo; octavo.{name}") == "0"


def test_the_benchmark() -> None:
    """Risk: onnxruntime, which it loads too, or the custom-op library brings OpenMP first; octavo then looks slow."""
    small = "--heads 4 --kv-heads 2 --head-size 64 --context 40 --seconds 0 --threads 1 --batch 1 --kv-cache int8"
    assert spin_count(f"import octavo.cli; assert octavo.cli.main('bench {small}'.split()) == 0") == "0"


def test_the_environment_is_as_before() -> None:
    """Risk: child processes inherit it, other programs among them."""
    program = "import os; before = dict(os.environ); import octavo.attention; assert dict(os.environ) == before"
    assert spin_count(program + "; assert os.system('test -z \"$OMP_WAIT_POLICY\"') == 0") == "0"


def test_the_user_decides() -> None:
    program = "import octavo.attention"
    assert spin_count(program, OMP_WAIT_POLICY="active") == "30000000000"
    assert spin_count(program, GOMP_SPINCOUNT="77") == "77"
    kept = "import os, octavo.attention; assert os.environ['OMP_WAIT_POLICY'] == 'passive'"
    assert spin_count(kept, OMP_WAIT_POLICY="passive") == "0"


def test_openmp_that_is_there_already_is_left_alone() -> None:
    """As where torch of the same distribution was imported first."""
    try:
        ctypes.CDLL("libgomp.so.1")
    except OSError:
        pytest.skip("GCC's OpenMP has no such name here")
    assert int(spin_count("import ctypes; ctypes.CDLL('libgomp.so.1'); import octavo.attention")) > 0
