"""What the peers share: caches in a ring, graph timing, attention in float64, the loop over works."""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from work import Work, parse

from peers import ABSENT

RING_BYTES = 420 << 20  # of distinct caches: octavo_gpu_bench's
MIN_CALLS = 16
TORCH_TYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "int4": torch.uint8,
}
CODE_SCALE = {"int8": 0.025, "fp8": 0.9, "int4": 0.22}  # bring the codes back to a deviation of about 1


class Refusal(Exception):
    """The peer does not take a work, or gets it wrong; the text says why."""


def fill(shape: tuple[int, ...], kind: str) -> torch.Tensor:
    """Random elements of a cache: about normal with deviation 1, int8 codes with deviation 40, uniform 4-bit codes."""
    dtype = TORCH_TYPES[kind]
    if kind in ("fp16", "bf16"):
        return torch.empty(shape, dtype=dtype, device="cuda").normal_()
    out = torch.empty(shape, dtype=dtype, device="cuda")
    flat = out.view(-1)
    for part in flat.split(1 << 27):
        if kind == "int4":
            part.random_(0, 256)
        elif kind == "int8":
            part.copy_((torch.randn(part.shape, device="cuda") * 40).round_().clamp_(-128, 127))
        else:
            part.copy_(torch.randn(part.shape, device="cuda", dtype=torch.float16))
    return out


class Ring:
    """Distinct paged caches, their pages in random order in pools of K and V: (pages, page, kv heads, head size)."""

    def __init__(self, work: Work) -> None:
        pages_of = [-(-length // work.page) for length in work.lengths]
        count = min(32, max(2, -(-RING_BYTES // work.bytes)))
        self.columns = max(pages_of)
        self.pages = count * sum(pages_of)
        stored = (work.head_size + 1) // 2 if work.cache == "int4" else work.head_size
        shape = (self.pages, work.page, work.kv_num_heads, stored)
        self.k, self.v = fill(shape, work.cache), fill(shape, work.cache)
        order = iter(torch.randperm(self.pages, dtype=torch.int32).split(pages_of * count))
        self.tables = []
        for _ in range(count):
            table = torch.zeros(len(pages_of), self.columns, dtype=torch.int32)
            for row, used in enumerate(pages_of):
                table[row, :used] = next(order)
            self.tables.append(table.cuda())
        self.lengths = torch.tensor(work.lengths, dtype=torch.int32, device="cuda")
        self.calls = -(-MIN_CALLS // count) * count


def expected(
    work: Work, ring: Ring, query: torch.Tensor, cache: int, sequence: int, scales: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Attention of one sequence of one cache in float64, (new tokens, heads, head size).

    query: (tokens, heads, head size). scales: of K and V, () or (kv heads, head size).
    """
    length, group = work.lengths[sequence], work.num_heads // work.kv_num_heads

    def gather(pool: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        used = ring.tables[cache][sequence, : -(-length // work.page)].long()
        rows = pool[used].flatten(0, 1)[:length]
        if work.cache == "int4":
            rows = torch.stack((rows & 15, rows >> 4), -1).flatten(-2).double() - 8
        return rows.to(torch.float32).double() * scale.double()

    k, v = gather(ring.k, scales[0]), gather(ring.v, scales[1])
    new = work.new_tokens
    q = query[sequence * new : (sequence + 1) * new].to(torch.float32).double()
    position = torch.arange(length - new, length, device="cuda")[:, None]
    key = torch.arange(length, device="cuda")[None]
    hidden = key > position
    if work.window > 0:
        hidden |= key <= position - work.window
    outputs = []
    for head in range(work.num_heads):
        scores = q[:, head] @ k[:, head // group].T * work.head_size**-0.5
        if work.softcap:
            scores = work.softcap * torch.tanh(scores / work.softcap)
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        outputs.append(weights @ v[:, head // group])
    return torch.stack(outputs, 1)


def check(
    work: Work,
    ring: Ring,
    query: torch.Tensor,
    output: torch.Tensor,
    run: Callable[[int], object],
    scales: tuple[torch.Tensor, torch.Tensor],
    bound: float,
) -> float:
    """Run the first and the last cache; the largest relative error of their first and last sequence. Raises Refusal.

    run(i) computes the i-th cache's attention into `output`, (tokens, heads, head size).
    """
    worst, new = 0.0, work.new_tokens
    for cache in (0, len(ring.tables) - 1):
        output.fill_(float("nan"))
        run(cache)
        torch.cuda.synchronize()
        for sequence in (0, len(work.lengths) - 1):
            right = expected(work, ring, query, cache, sequence, scales)
            got = output[sequence * new : (sequence + 1) * new].double()
            error = ((got - right).norm() / right.norm()).item()
            if not error <= bound:
                raise Refusal(f"wrong output: relative error {error:.2g}, at most {bound:.2g} expected")
            worst = max(worst, error)
    return worst


def median_us(launch: Callable[[], object], calls: int, budget_us: float = 150e3) -> float:
    """Median us of a call: `launch` starts `calls` of them; 5 to 15 launches back to back, and a first, not counted."""
    stream = torch.cuda.current_stream()

    def rounds(count: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record(stream)
        for event in events[1:]:
            launch()
            event.record(stream)
        torch.cuda.synchronize()
        return [1000 * a.elapsed_time(b) for a, b in itertools.pairwise(events)][1:]

    estimate = rounds(2)[-1]
    rounds(min(20, max(2, int(budget_us / 15 / estimate))))
    return statistics.median(rounds(1 + min(15, max(5, int(budget_us / estimate))))) / calls


def time_ring(ring: Ring, run: Callable[[int], object]) -> float:
    """Median us of run(i) over the ring, from replays of a CUDA graph of all of them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(ring.calls):
            run(i % len(ring.tables))
    return median_us(graph.replay, ring.calls)


def absent(reason: str) -> None:
    """End the process as one whose peer is not installed."""
    print(reason)
    sys.exit(ABSENT)


def options() -> argparse.Namespace:
    """The arguments of every peer; `works` is a list of Work."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--works", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--library", type=Path)
    parsed = parser.parse_args()
    parsed.works = [parse(name) for name in parsed.works.read_text().splitlines() if name]
    return parsed


def run_all(
    name: str, version: str, works: Iterable[Work], measure: Callable[[Work], dict[str, Any]], path: Path
) -> None:
    """Measure every work and write {"peer", "version", "date", "rows"}.

    A row is {"work", "us": {name: us}, "error"}, or {"work", "refusal"}. measure(work) returns one without "work".
    Raises whatever leaves the device unusable.
    """
    rows: list[dict[str, Any]] = []
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    for work in works:
        try:
            row = {"work": work.name, **measure(work)}
        except Exception as error:  # peers raise what they like; that they do not take a work is a result
            row = {"work": work.name, "refusal": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        rows.append(row)
        print(json.dumps(row), flush=True)
        path.write_text(json.dumps({"peer": name, "version": version, "date": date, "rows": rows}, indent=1) + "\n")
