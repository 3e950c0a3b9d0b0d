"""The processors that this process may use, and what other processes took of them during a measurement."""

from __future__ import annotations

import os
import time
from pathlib import Path

from .errors import OctavoError, counted

Sample = tuple[float, float, float]


def processor_count() -> int:
    return len(os.sched_getaffinity(0))


def check_threads(threads: int) -> None:
    """Raises OctavoError for more threads than processors: they wait for each other, and a figure says nothing."""
    count = processor_count()
    if threads > count:
        raise OctavoError(
            f"{counted(threads, 'thread')} on {counted(count, 'processor')} would wait for each other; "
            f"give --threads {count} or fewer."
        )


def processor_seconds() -> Sample | None:
    """Seconds that all processors were busy or stolen by a hypervisor, that they were this process's, and the time."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, line.split()[1:9])
    except (OSError, ValueError):  # not Linux
        return None
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK"), time.process_time(), time.perf_counter()


def others_percent(before: Sample | None, after: Sample | None) -> float | None:
    """Of the processors' time between two samples, what other processes took; None where the system does not tell."""
    if before is None or after is None:
        return None
    busy, own, seconds = (now - then for then, now in zip(before, after, strict=True))
    return round(100 * max(0.0, busy - own) / (seconds * (os.cpu_count() or 1)), 1)
