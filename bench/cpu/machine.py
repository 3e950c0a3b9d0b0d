"""What the machine is, and whether others use it. Linux."""

from __future__ import annotations

import os
import time
from pathlib import Path

THREADS = len(os.sched_getaffinity(0))
QUIET = 0.03  # share of the processors that others may take


def device() -> str:
    """The processor's name and the number of its cores that this process may use."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {THREADS} cores"
    return f"{os.uname().machine} CPU, {THREADS} cores"


class Others:
    """The share of all processors' time that others took since this was made, a hypervisor among them."""

    def __init__(self) -> None:
        self._busy, self._own, self._start = self._read()

    def share(self) -> float:
        """From 0 to 1; the kernel counts in ticks of 10 ms, so ask after a second or so."""
        busy, own, now = self._read()
        return max(0.0, busy - self._busy - (own - self._own)) / ((now - self._start) * (os.cpu_count() or 1))

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """Seconds that all processors were not idle, seconds of them in this process, and the time."""
        user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(
            int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        )
        ticks = user + nice + system + irq + softirq + steal
        return ticks / os.sysconf("SC_CLK_TCK"), time.process_time(), time.perf_counter()


def wait_until_quiet(seconds: float) -> float:
    """Wait until others leave the machine alone for two seconds, or `seconds` are over. Returns the seconds waited."""
    start = time.perf_counter()
    while (waited := time.perf_counter() - start) < seconds:
        others = Others()
        time.sleep(2)
        if others.share() < QUIET:
            break
    return waited
