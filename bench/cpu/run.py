"""The CPU table: floors, stock GroupQueryAttention, ours and bars, from one command.

  make build && .venv/bin/python bench/cpu/run.py

Runs every work by turns as our PagedAttention, as stock GroupQueryAttention of the same onnxruntime (where it takes the
work) and as a plain read loop, in one process with equal threads; prints the table, and writes --output (JSON) with a
PNG beside it. Needs a C++ compiler for the read loop. Exit status 1: a row is wrong or did not run. Bars that are
missed are shown, no more.

Where other processes take more than 3 % of the processors during a row, it waits for a quiet machine and measures the
row again, as long as --patience lasts; the share that others had is recorded with the row. With --resume, a later run
measures only the rows that were still disturbed, or failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# The words of result files, and their pictures, are those of the GPU table. Its run.py comes before this file of the
# same name, which is never imported.
sys.path.insert(0, str(ROOT / "bench/cpu"))
sys.path.insert(0, str(ROOT / "bench/gpu"))

import cpu_calls  # noqa: E402
import cpu_plot  # noqa: E402
import cpu_rows  # noqa: E402
import numpy as np  # noqa: E402
import onnxruntime  # noqa: E402
from cpu_rows import Work  # noqa: E402
from machine import QUIET, THREADS, Others, device, wait_until_quiet  # noqa: E402
from read_loop import ReadLoop  # noqa: E402
from run import commit  # noqa: E402

MIN_ROUNDS, MAX_ROUNDS = 7, 400
# Relative error that is allowed against float64: float32 sums; one rounding to fp16; stock's fp16 arithmetic.
OURS_BOUND = {"fp32": 1e-5, "fp16": 2.0**-11 + 1e-5}
STOCK_BOUND = {"fp32": 1e-5, "fp16": 1e-2}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help="liboctavo_ort.so; default: the installed package's")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORDS", help="rows whose name contains one of these")
    parser.add_argument("--list", action="store_true", help="print the rows and their bars, measure nothing")
    parser.add_argument("--backend", default="", help="force this backend of the library")
    parser.add_argument("--threads", type=int, default=THREADS, help=f"of every one alike; default {THREADS}")
    parser.add_argument("--seconds", type=float, default=3.0, help="to measure a row; default 3")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds to lose to others in all; default 120")
    parser.add_argument("--resume", action="store_true", help="keep the rows of --output that ran on a quiet machine")
    parser.add_argument("--commit", default="", help="what to record; default: the checkout's")
    parser.add_argument("--output", type=Path, default=ROOT / "bench/results/cpu.json")
    return parser.parse_args()


def timed(call: Callable[..., Any], *arguments: int) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def measure_product(settings: cpu_calls.Settings) -> float:
    """Floating-point operations a second of a float32 matrix product of 2048 x 2048: the median of 9."""
    call, operations = cpu_calls.product_call(settings, 2048)
    call()
    return operations / statistics.median(timed(call) for _ in range(9))


def verify(calls: cpu_calls.Calls) -> tuple[float, float | None]:
    """Relative errors of ours and of stock against float64. Raises ValueError where a row is wrong.

    Of the first and the last set of caches: every output of ours against stock's, one sequence of both against float64.
    """
    ours_error, stock_error = 0.0, None
    ours_bound, stock_bound = OURS_BOUND[calls.work.type], STOCK_BOUND[calls.work.type]
    for i in {0, calls.count - 1}:
        tokens, exact = calls.exact(i)
        calls.ours_output.fill(np.nan)
        calls.run_ours(i)
        ours_error = max(ours_error, error := cpu_calls.relative_error(calls.ours_output[tokens], exact))
        if not error <= ours_bound:
            raise ValueError(f"ours is off by {error:.2g} from float64, more than {ours_bound:.2g}")
        if calls.run_stock is None:
            continue
        calls.stock_output.fill(np.nan)
        calls.run_stock(i)
        stock = calls.stock_output.reshape(calls.ours_output.shape)
        stock_error = max(stock_error or 0.0, error := cpu_calls.relative_error(stock[tokens], exact))
        if not error <= stock_bound:
            raise ValueError(f"stock is off by {error:.2g} from float64, more than {stock_bound:.2g}")
        if not (apart := cpu_calls.relative_error(calls.ours_output, stock)) <= ours_bound + stock_bound:
            raise ValueError(f"ours and stock are {apart:.2g} apart")
    return ours_error, stock_error


def sample(runners: dict[str, Callable[[int], None]], count: int, seconds: float) -> dict[str, float]:
    """Median us of each of `runners`, called by turns with 0, 1, ..., count - 1 and round again."""
    samples: dict[str, list[float]] = {name: [] for name in runners}
    end = time.perf_counter() + seconds
    done = 0
    while done < MIN_ROUNDS or (done < MAX_ROUNDS and time.perf_counter() < end):
        for name in list(runners)[:: -1 if done % 2 else 1]:
            samples[name].append(timed(runners[name], done % count))
        done += 1
    return {name: 1e6 * statistics.median(times) for name, times in samples.items()}


class Bench:
    """Measures works one after another."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.settings = cpu_calls.Settings(options.threads, library_path(options.library), options.backend)
        self.seconds, self.patience = options.seconds, options.patience
        self.patience -= wait_until_quiet(self.patience)
        self.product = measure_product(self.settings)
        self.loop = ReadLoop(options.threads, folder)

    def measure(self, work: Work) -> dict[str, Any]:
        """What cpu_rows.evaluate() takes of a work."""
        # Stock has no kernel for fp8 on a CPU.
        calls = cpu_calls.Calls(work, self.settings, with_stock=work.cache != "fp8")
        ours_error, stock_error = verify(calls)

        def read(i: int) -> None:
            # Half the ring away from what the others have just read.
            for cache in calls.contiguous:
                self.loop.read(cache[(i + calls.count // 2) % calls.count])

        runners = {"ours": calls.run_ours, "stock": calls.run_stock, "floor": read if work.is_decode else None}
        runners = {name: run for name, run in runners.items() if run is not None}
        while True:
            others = Others()
            us = sample(runners, calls.count, self.seconds)
            share = others.share()
            if share < QUIET or self.patience <= 0:
                break
            self.patience -= self.seconds + wait_until_quiet(self.patience)
        return {
            "ours_us": us["ours"],
            "stock_us": us.get("stock"),
            "floor_us": us["floor"] if work.is_decode else 1e6 * work.flops / self.product,
            "error": float(f"{ours_error:.2g}"),
            "stock_error": stock_error and float(f"{stock_error:.2g}"),
            "others_percent": round(100 * share, 1),
        }


def library_path(given: str | None) -> str:
    """The custom-op library. Raises ImportError without a given one or an installed package."""
    if given:
        return str(Path(given).resolve())
    import octavo

    return str(octavo.get_library_path())


def resume(path: Path, facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What an earlier run left in `path` of rows that ran undisturbed. Raises ValueError where it had other facts."""
    report = json.loads(path.read_text())
    if different := [name for name, fact in facts.items() if report[name] != fact]:
        raise ValueError(f"{path} is of another {' and '.join(different)}; measure all of it again, without --resume")
    return cpu_rows.measured_before(report)


def main() -> int:
    options = parse_arguments()
    rows = cpu_rows.select(cpu_rows.all_rows(), options.only)
    if options.list:
        for row in rows:
            print(f"{row.work.name:<40} " + ", ".join(cpu_rows.describe(bar) for bar in row.bars))
        return 0
    if not rows:
        print(f"no row contains any of {options.only}", file=sys.stderr)
        return 1
    facts = {"commit": options.commit or commit(), "device": device(), "threads": options.threads}
    try:
        measured = resume(options.output, facts) if options.resume else {}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        for i, row in enumerate(rows):
            if row.work.name in measured:
                continue
            if sys.stderr.isatty():
                print(f"\r{i + 1} of {len(rows)}: {row.work.name:<40}", end="", file=sys.stderr, flush=True)
            try:
                measured[row.work.name] = bench.measure(row.work)
            except Exception as error:  # of whatever class of onnxruntime's; it fails the run, not the other rows
                measured[row.work.name] = {"failure": f"{type(error).__name__}: {error}"}
        bench.loop.close()
    if sys.stderr.isatty():
        print("\r" + 60 * " " + "\r", end="", file=sys.stderr)
    results = cpu_rows.evaluate(rows, measured)
    reads = [result["bytes"] / result["floor_us"] / 1e3 for result in results if result.get("floor") == "read"]
    limit = {"float32 product GFLOP/s": round(bench.product / 1e9, 1)}
    if reads:
        limit["read GB/s"] = round(max(reads), 2)
    report = {
        **facts,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "limit": limit,
        "about_peers": {cpu_rows.STOCK: {"version": f"onnxruntime {onnxruntime.__version__}"}},
        "rows": results,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{report['device']}, {options.threads} threads, onnxruntime {onnxruntime.__version__}; {limit}")
    print(cpu_rows.format_table(results))
    try:
        cpu_plot.draw(report, options.output.with_suffix(".png"))
    except ImportError as error:
        print(f"no plot: {error}", file=sys.stderr)
        return 1
    return 1 if any("failure" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
