"""The memory that a key-value cache may take here."""

from __future__ import annotations

from pathlib import Path


def available_bytes() -> int | None:
    """Memory that this process may still take: of the machine, or of its container where that is less."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        pass  # not Linux
    try:
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        found.append(max(limit - used, 0))
    except (OSError, ValueError):
        pass  # no container, or "max" for no limit
    return min(found, default=None)


def fitting_blocks(available: int, block_bytes: int) -> int:
    """Blocks of a cache that three quarters of `available` bytes hold, the rest being the weights'; one at least."""
    return max(available * 3 // 4 // block_bytes, 1)
