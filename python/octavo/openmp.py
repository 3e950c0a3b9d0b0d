"""How the threads of OpenMP wait between two calls of paged_attention."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

POLICY = "OMP_WAIT_POLICY"
_DECIDED_BY = (POLICY, "GOMP_SPINCOUNT")


@contextmanager
def sleeping_threads() -> Iterator[None]:
    """Where the block is what loads OpenMP into the process, its threads will sleep between loops.

    GCC's OpenMP lets them spin for milliseconds, which takes a processor from whatever runs there, and lets a call wait
    for a thread that others keep off its processor. It reads the environment once, when it is loaded; so the
    environment is as before after the block: child processes do not inherit it. What the user has set there stands.
    """
    if any(name in os.environ for name in _DECIDED_BY):
        yield
        return
    os.environ[POLICY] = "passive"
    try:
        yield
    finally:
        os.environ.pop(POLICY, None)
