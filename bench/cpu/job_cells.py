"""The cells of the main job, their bars and the table: pure functions of what was measured.

A cell is prefill or decode of `batch` sequences with prompts of `prompt` tokens; rates are tokens a CPU-second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

STOCK = "onnxruntime GroupQueryAttention"
LLAMA = "llama.cpp"
PROMPTS = (128, 1024)
BATCHES = (1, 4, 16)
PHASES = ("prefill", "decode")
LONG_PROMPT, LARGE_BATCH, LONG_FACTOR = 1024, 4, 1.5  # where decode has to beat stock by so much
OUTSIDE_PERCENT = 7.0  # of octavo generate's time, neither in ONNX Runtime nor in the operator
NOTED_PERCENT = 3  # of the machine, taken by others: the table says so


@dataclass(frozen=True)
class Cell:
    """Prompts of so many tokens, so many of them at once."""

    prompt: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.prompt}x{self.batch}"


def all_cells() -> list[Cell]:
    return [Cell(prompt, batch) for prompt in PROMPTS for batch in BATCHES]


def bars(cell: Cell, phase: str, rates: dict[str, float]) -> list[dict[str, Any]]:
    """What ours has to reach against each peer that was measured. rates: by contender, "ours" among them."""
    asked = []
    for peer in (STOCK, LLAMA):
        if peer not in rates:
            continue
        long = peer == STOCK and phase == "decode" and cell.prompt >= LONG_PROMPT and cell.batch >= LARGE_BATCH
        factor = LONG_FACTOR if long else 1.0
        wanted = factor * rates[peer]
        asked.append({"asks": f"{factor:g} of {peer}", "rate": round(wanted, 1), "holds": rates["ours"] >= wanted})
    return asked


def evaluate(cell: Cell, phase: str, rates: dict[str, float], facts: dict[str, Any]) -> dict[str, Any]:
    """One row of the result file."""
    asked = bars(cell, phase, rates)
    return {
        "work": f"{phase} {cell.name}",
        "ours_tokens_per_cpu_s": round(rates["ours"], 1),
        "peers": {name: round(rate, 1) for name, rate in rates.items() if name != "ours"},
        "ratios": {name: round(rates["ours"] / rate, 3) for name, rate in rates.items() if name != "ours"},
        "bars": asked,
        "holds": all(bar["holds"] for bar in asked),
        **facts,
    }


def outside_row(batch: int, percent: float, facts: dict[str, Any]) -> dict[str, Any]:
    """How much of octavo generate's time with `batch` prompts is outside ONNX Runtime and the operator."""
    return {
        "work": f"outside {PROMPTS[0]}x{batch}",
        "percent": round(percent, 2),
        "bar_percent": OUTSIDE_PERCENT,
        "holds": percent <= OUTSIDE_PERCENT,
        **facts,
    }


def format_table(report: dict[str, Any]) -> str:
    """The result file's rows as text."""
    names = [name for name in (STOCK, LLAMA) if any(name in row["peers"] for row in report["rows"])]
    lines = [
        f"{'tokens a CPU-second':<20} {'ours':>8}" + "".join(f"  {name:>31} {'ratio':>6}" for name in names) + "  bars"
    ]
    for row in report["rows"]:
        line = f"{row['work']:<20} {row['ours_tokens_per_cpu_s']:8.1f}"
        for name in names:
            line += f"  {row['peers'][name]:31.1f} {row['ratios'][name]:6.2f}" if name in row["peers"] else " " * 40
        line += "  " + ", ".join(f"{bar['asks']}: {'holds' if bar['holds'] else 'MISSES'}" for bar in row["bars"])
        lines.append(line + _noted(row))
    for row in report["outside"]:
        lines.append(
            f"{row['work']:<20} {row['percent']:7.2f}% of octavo generate, bar {row['bar_percent']:g}%: "
            f"{'holds' if row['holds'] else 'MISSES'}{_noted(row)}"
        )
    asked = [bar for row in report["rows"] for bar in row["bars"]] + report["outside"]
    lines.append(f"{sum(bar['holds'] for bar in asked)} of {len(asked)} bars hold")
    return "\n".join(lines)


def _noted(row: dict[str, Any]) -> str:
    return f"  [others took {row['others_percent']} %]" if row["others_percent"] > NOTED_PERCENT else ""
