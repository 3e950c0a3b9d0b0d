"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # (step, done, total)


def no_progress(step: str, done: int, total: int) -> None:
    pass
