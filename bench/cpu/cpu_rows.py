"""The rows of the CPU table, their bars, and the table: pure functions of what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rows import Bar
from table import bar_us

STOCK = "onnxruntime GroupQueryAttention"
BITS = {"fp32": 32, "fp16": 16, "int8": 8, "fp8": 8, "int4": 4}  # of a cache element
GEOMETRIES = ((32, 8, 128), (9, 3, 64))
NOTED_PERCENT = 3  # of the machine, taken by others: the table says so
LONG_CONTEXT = 16384
PAGE = 16  # what `octavo convert` makes


@dataclass(frozen=True)
class Work:
    """One call: `new_tokens` of each sequence are new, the last of its `context`.

    cache: fp32 and fp16 are the type of Q, of the new K and V and of the output as well; the others have fp32 there.
    """

    cache: str
    num_heads: int
    kv_num_heads: int
    head_size: int
    context: int
    batch: int
    new_tokens: int = 1

    @property
    def name(self) -> str:
        """As in bench/results/*.json; prefill where no token is in the cache yet."""
        geometry = f"{self.num_heads}/{self.kv_num_heads}x{self.head_size}"
        variant = "" if self.type == self.cache else " fp32 Q"
        if self.is_decode:
            return f"{self.cache} {geometry} {self.context}x{self.batch}{variant}"
        past = self.context - self.new_tokens
        return f"{self.cache} {geometry} {self.batch}x{self.new_tokens}+{past} page {PAGE}{variant}"

    @property
    def type(self) -> str:
        """Of Q, the new K and V, and the output."""
        return self.cache if self.cache in ("fp32", "fp16") else "fp32"

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token."""
        return self.new_tokens == 1

    @property
    def bytes(self) -> int:
        """Of K and V that attention reads once."""
        return self.batch * self.context * self.kv_num_heads * 2 * (self.head_size * BITS[self.cache] // 8)

    @property
    def flops(self) -> int:
        """Of both products over what the causal mask leaves."""
        past = self.context - self.new_tokens
        pairs = self.batch * (self.new_tokens * past + self.new_tokens * (self.new_tokens + 1) // 2)
        return 4 * self.num_heads * self.head_size * pairs


@dataclass(frozen=True)
class Row:
    """A work and all that is asked of it. A bar's `of` is a work's name, or stock_name() of one."""

    work: Work
    bars: tuple[Bar, ...]


def stock_name(work: Work) -> str:
    """What a bar calls stock's time of this work."""
    return f"stock {work.name}"


def all_rows() -> list[Row]:
    """Every row, in the order of the table."""
    rows: list[Row] = []
    for geometry in GEOMETRIES:
        for cache in ("fp32", "fp16"):
            for context in (1024, 4096, LONG_CONTEXT):
                for batch in (1, 8):
                    work = Work(cache, *geometry, context, batch)
                    bars = [Bar("ratio", 0.5, stock_name(work))]
                    if context == LONG_CONTEXT:
                        bars.append(Bar("percent", 80))
                    rows.append(Row(work, tuple(bars)))
        for cache in ("int8", "fp8", "int4"):
            for batch in (1, 8):
                work = Work(cache, *geometry, LONG_CONTEXT, batch)
                if cache == "int8":
                    float_work = Work("fp32", *geometry, LONG_CONTEXT, batch)
                    stock = Bar("ratio", 0.4, stock_name(work))
                    bars = [Bar("ratio", 0.6, float_work.name), stock, Bar("percent", 80)]
                else:
                    bars = [Bar("percent", 50)]
                rows.append(Row(work, tuple(bars)))
        for cache in ("fp32", "fp16"):
            for tokens in (512, 2048):
                work = Work(cache, *geometry, tokens, 1, tokens)
                rows.append(Row(work, (Bar("ratio", 0.7, stock_name(work)),)))
    return rows


def select(rows: list[Row], words: list[str]) -> list[Row]:
    """The rows whose name contains one of `words`, and those that their bars refer to; all of them without words."""
    if not words:
        return rows
    chosen = [row for row in rows if any(word in row.work.name for word in words)]
    wanted = {row.work.name for row in chosen} | {bar.of for row in chosen for bar in row.bars}
    return [row for row in rows if row.work.name in wanted]


def describe(bar: Bar) -> str:
    """What a bar asks, in a few words."""
    if bar.kind == "percent":
        return f"{bar.value:g}% of read rate"
    return f"{bar.value:g} of stock" if bar.of.startswith("stock ") else f"{bar.value:g} of fp32"


def evaluate(rows: list[Row], measured: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One record per measured row, as the result file has it.

    measured: by the work's name {"ours_us", "floor_us", "stock_us" or None, "error", "stock_error" or None,
    "others_percent"}, or {"failure"}. A row's bar_us is the tightest of its bars. A bar without the time that it refers
    to does not hold.
    """
    times: dict[str, float] = {}
    for name, record in measured.items():
        if "failure" not in record:
            times[name] = record["ours_us"]
            if record["stock_us"] is not None:
                times[f"stock {name}"] = record["stock_us"]
    results = []
    for row in rows:
        record = measured.get(row.work.name)
        if record is None:
            continue
        result: dict[str, Any] = {"work": row.work.name, "peers": {}, "peer_errors": {}}
        results.append(result)
        if "failure" in record:
            result["failure"] = record["failure"]
            continue
        ours, floor = record["ours_us"], record["floor_us"]
        if record["stock_us"] is not None:
            result["peers"][STOCK] = round(record["stock_us"], 1)
            result["peer_errors"][STOCK] = record["stock_error"]
            result["of_stock"] = round(ours / record["stock_us"], 3)
        bars = []
        for bar in row.bars:
            us = bar_us(bar, floor, times)
            bars.append({"asks": describe(bar), "us": us and round(us, 1), "holds": us is not None and ours <= us})
        known = [bar["us"] for bar in bars if bar["us"] is not None]
        result |= {
            "ours_us": round(ours, 1),
            "floor_us": round(floor, 1),
            "floor": "read" if row.work.is_decode else "product",
            "percent_of_limit": round(100 * floor / ours, 1),
            "bars": bars,
            "bar_us": min(known) if known else None,
            "holds": all(bar["holds"] for bar in bars),
            "error": record["error"],
            "others_percent": record["others_percent"],
            "bytes": row.work.bytes,
        }
        if row.work.is_decode:
            result["gb_per_s"] = round(row.work.bytes / ours / 1e3, 2)
        else:
            result["tflops"] = round(row.work.flops / ours / 1e6, 4)
    return results


def measured_before(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What evaluate() takes of those rows of a result file that ran on a quiet machine."""
    return {
        row["work"]: {
            "ours_us": row["ours_us"],
            "stock_us": row["peers"].get(STOCK),
            "floor_us": row["floor_us"],
            "error": row["error"],
            "stock_error": row["peer_errors"].get(STOCK),
            "others_percent": row["others_percent"],
        }
        for row in report["rows"]
        if "failure" not in row and row["others_percent"] <= NOTED_PERCENT
    }


def format_table(results: list[dict[str, Any]]) -> str:
    """The table as text: us of floor, ours and stock; ours of stock; % of the floor's rate; every bar."""
    width = max((len(result["work"]) for result in results), default=4)
    lines = [f"{'work':<{width}}  {'floor us':>9} {'ours us':>9} {'stock us':>9} {'of stock':>8} {'limit':>5}  bars"]
    for result in results:
        if "failure" in result:
            lines.append(f"{result['work']:<{width}}  FAILED: {result['failure']}")
            continue
        stock = result["peers"].get(STOCK)
        line = f"{result['work']:<{width}}  {result['floor_us']:9.0f} {result['ours_us']:9.0f}"
        line += f" {'-' if stock is None else f'{stock:.0f}':>9} {result.get('of_stock', '-'):>8}"
        verdicts = (f"{bar['asks']}: {'holds' if bar['holds'] else 'MISSES'}" for bar in result["bars"])
        others = result["others_percent"]
        busy = f"  (others took {others:.0f} % of the machine)" if others > NOTED_PERCENT else ""
        lines.append(f"{line} {result['percent_of_limit']:4.0f}%  {', '.join(verdicts)}{busy}")
    bars = [bar for result in results for bar in result.get("bars", [])]
    held = sum(bar["holds"] for bar in bars)
    lines.append(f"{held} of {len(bars)} bars hold; limit = floor / ours; floor of decode: a plain read of K and V,")
    lines.append("of prefill: a float32 matrix product of as many operations")
    return "\n".join(lines)
