"""Floors, bars, and the table of floor, peers and ours: pure functions of what was measured."""

from __future__ import annotations

import itertools
from typing import Any

from rows import Bar, Row

MIB = 1 << 20
WHOLE_CALL = " (call)"  # a peer of this suffix is timed with its append
Peers = dict[str, dict[str, dict[str, float]]]  # work -> peer -> {"us", "error"}


def floor_us(limit: dict[str, float], size: int) -> float:
    """The time of the best read of `size` bytes, us: between the measured sizes ("32 MiB": us) by straight lines.

    Beyond the largest size its rate holds, and below the smallest one its time does, in proportion. Raises ValueError
    without a measured size.
    """
    points = sorted((int(name.removesuffix(" MiB")) * MIB, us) for name, us in limit.items())
    if not points:
        raise ValueError("the read limit was not measured")
    if size <= points[0][0]:
        return points[0][1] * size / points[0][0]
    for (low, low_us), (high, high_us) in itertools.pairwise(points):
        if size <= high:
            return low_us + (high_us - low_us) * (size - low) / (high - low)
    return points[-1][1] * size / points[-1][0]


def bar_us(bar: Bar, floor: float, ours: dict[str, float]) -> float | None:
    """The bar as a time, us; None while the row that it refers to has no time.

    ours: us of the works measured so far.
    """
    if bar.kind == "us":
        return bar.value
    if bar.kind == "percent":
        return floor / (bar.value / 100)
    if bar.of not in ours:
        return None
    return ours[bar.of] * bar.value if bar.kind == "ratio" else ours[bar.of] + bar.value


def evaluate(
    rows: list[Row],
    limit: dict[str, float],
    measured: list[dict[str, Any]],
    peers: Peers,
) -> list[dict[str, Any]]:
    """One record per row, as the result file has it.

    measured: the rows of octavo_gpu_bench. A failed row keeps its "failure" and has no time.
    """
    by_work = {record["work"]: record for record in measured}
    ours = {work: record["ours_us"] for work, record in by_work.items() if "ours_us" in record}
    results = []
    for row in rows:
        record = by_work.get(row.measured)
        if record is None:
            continue
        own_peers = {
            name.removesuffix(WHOLE_CALL): peer
            for name, peer in peers.get(row.measured, {}).items()
            if name.endswith(WHOLE_CALL) == row.whole_call
        }
        result: dict[str, Any] = {
            "work": row.work,
            "peers": {name: peer["us"] for name, peer in own_peers.items()},
            "peer_errors": {name: peer["error"] for name, peer in own_peers.items()},
        }
        results.append(result)
        if "failure" in record:
            result["failure"] = record["failure"]
            continue
        floor = floor_us(limit, record["bytes"])
        time = record["call_us"] if row.whole_call else record["ours_us"]
        bar = bar_us(row.bar, floor, ours)
        result |= {
            "ours_us": time,
            "floor_us": round(floor, 2),
            "percent_of_limit": round(100 * floor / time, 1),
            "bar_us": None if bar is None else round(bar, 2),
            "holds": bar is not None and time <= bar,
            "error": record["error"],
            "backend": record["backend"],
            "bytes": record["bytes"],
        }
        if not row.whole_call:
            result["call_us"] = record["call_us"]
    return results


def best_peer(result: dict[str, Any]) -> tuple[str, float] | None:
    """Name and us of the fastest peer of a row."""
    return min(result["peers"].items(), key=lambda item: item[1]) if result["peers"] else None


def format_table(results: list[dict[str, Any]]) -> str:
    """The table as text: us of floor, bar, ours and every peer; % of the read limit; what holds."""
    width = max((len(result["work"]) for result in results), default=4)
    names = sorted({name for result in results for name in result["peers"]})
    head = f"{'work':<{width}}  {'floor':>8} {'bar':>8} {'ours':>9} {'limit':>6}  {'bar':<5}"
    lines = [head + "".join(f"  {name:>{max(9, len(name))}}" for name in names)]
    for result in results:
        if "failure" in result:
            lines.append(f"{result['work']:<{width}}  FAILED: {result['failure']}")
            continue
        bar = "-" if result["bar_us"] is None else f"{result['bar_us']:.1f}"
        line = f"{result['work']:<{width}}  {result['floor_us']:8.1f} {bar:>8} {result['ours_us']:9.1f}"
        line += f" {result['percent_of_limit']:5.0f}%  {'holds' if result['holds'] else 'MISS':<5}"
        for name in names:
            us = result["peers"].get(name)
            line += f"  {'-' if us is None else f'{us:.1f}':>{max(9, len(name))}}"
        lines.append(line)
    held = sum(result.get("holds", False) for result in results)
    lines.append(f"{held} of {len(results)} bars hold; times in us, limit = floor / ours")
    return "\n".join(lines)


def take_over(peers: Peers, earlier: list[dict[str, Any]]) -> None:
    """Add to `peers` those that the rows of an earlier result file have and that were measured in no row now."""
    now = {name for of_work in peers.values() for name in of_work}
    for row in earlier:
        whole_call = row["work"].endswith(" call")
        for name, us in row["peers"].items():
            full = name + WHOLE_CALL if whole_call else name
            if full not in now:
                of_work = peers.setdefault(row["work"].removesuffix(" call"), {})
                of_work[full] = {"us": us, "error": row["peer_errors"][name]}
