"""The octavo command run as a program, for the tests of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

SECONDS = 120  # for a command, on a machine that is busy with other things

Run = Callable[..., subprocess.CompletedProcess[str]]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "octavo", *map(str, arguments)]


def sentence(done: subprocess.CompletedProcess[str], code: int = 1) -> str:
    """The one line on stderr of a failed command."""
    assert done.returncode == code, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("octavo: ") and lines[0].endswith("."), done.stderr
    return lines[0]
