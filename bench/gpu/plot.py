"""The table as a picture: per row the share of the read limit that ours, the best peer and the bar reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from table import best_peer

ROWS_OF_A_COLUMN = 70


def draw_rows(axes: Any, rows: list[dict[str, Any]]) -> None:
    """One column: bars of ours, marks for the best peer and the bar."""
    at = range(len(rows))
    share = [row["percent_of_limit"] for row in rows]
    axes.barh(at, share, height=0.62, color="#3b6ea8", label="octavo", zorder=2)
    bars = [(100 * row["floor_us"] / row["bar_us"], i) for i, row in enumerate(rows) if row["bar_us"]]
    peers = [(100 * row["floor_us"] / best[1], i) for i, row in enumerate(rows) if (best := best_peer(row))]
    if bars:
        axes.scatter(*zip(*bars, strict=True), marker="|", s=90, color="black", label="bar", zorder=4)
    if peers:
        colors = {"facecolor": "white", "edgecolor": "#b8432f"}
        axes.scatter(*zip(*peers, strict=True), marker="D", s=18, label="best peer", zorder=3, **colors)
    axes.set_yticks(list(at), [row["work"] for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 105)
    axes.grid(axis="x", color="#dddddd", zorder=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the rows of a result file as PNG. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in report["rows"] if "failure" not in row]
    columns = max(1, -(-len(rows) // ROWS_OF_A_COLUMN))
    height = -(-len(rows) // columns)
    figure, panels = pyplot.subplots(1, columns, figsize=(8 * columns, 1.6 + 0.19 * height), squeeze=False)
    for i, axes in enumerate(panels[0]):
        draw_rows(axes, rows[i * height : (i + 1) * height])
    panels[0][0].legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, fontsize=8, frameon=False)
    panels[0][-1].set_title(
        f"Paged decode on {report['device']}, {report['date']}, {report['commit']}", fontsize=10, loc="right"
    )
    figure.supxlabel("% of the read limit: time of the fastest plain read of the same bytes over the row's", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
