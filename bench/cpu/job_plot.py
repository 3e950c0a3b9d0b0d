"""The main job as a picture: tokens a CPU-second of every contender, a panel for prefill and one for decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from job_cells import LLAMA, PHASES, STOCK

from octavo.errors import counted

COLORS = {"octavo": "#3b6ea8", STOCK: "#c9a227", LLAMA: "#b8432f"}


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the rows of a result file as PNG. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(PHASES), figsize=(11, 4))
    for axes, phase in zip(panels, PHASES, strict=True):
        rows = [row for row in report["rows"] if row["work"].startswith(phase)]
        names = [name for name in COLORS if name == "octavo" or any(name in row["peers"] for row in rows)]
        for i, name in enumerate(names):
            rates = [row["ours_tokens_per_cpu_s"] if name == "octavo" else row["peers"].get(name, 0) for row in rows]
            at = [x + 0.26 * (i - (len(names) - 1) / 2) for x in range(len(rows))]
            axes.bar(at, rates, width=0.24, color=COLORS[name], label=name, zorder=2)
        axes.set_xticks(range(len(rows)), [row["work"].split()[1] for row in rows], fontsize=8)
        axes.set_title(f"{phase}, prompt x sequences", fontsize=9, loc="left")
        axes.grid(axis="y", color="#dddddd", zorder=0)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0].set_ylabel("tokens a CPU-second", fontsize=9)
    panels[-1].legend(fontsize=8, frameon=False)
    figure.suptitle(
        f"SmolLM2-135M, 4-bit weights, {counted(report['threads'], 'thread')} on {report['device']}, "
        f"{report['date']}, {report['commit']}",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
