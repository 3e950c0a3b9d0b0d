"""The CPU table as a picture: per row the share of its floor's rate that ours, stock and the tightest bar reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plot import draw_rows

PANELS = {
    "read": "decode: % of the rate of a plain read of K and V",
    "product": "prefill: % of the rate of a float32 matrix product",
}


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the rows of a result file as PNG. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in report["rows"] if "failure" not in row]
    panels = {floor: chosen for floor in PANELS if (chosen := [row for row in rows if row["floor"] == floor])}
    if not panels:
        raise ValueError("no row to draw")
    heights = [len(chosen) + 3 for chosen in panels.values()]
    figure, drawn = pyplot.subplots(
        len(panels), 1, figsize=(9, 1.2 + 0.22 * sum(heights)), squeeze=False, height_ratios=heights
    )
    for axes, (floor, chosen) in zip(drawn[:, 0], panels.items(), strict=True):
        draw_rows(axes, chosen)
        axes.set_xlabel(PANELS[floor], fontsize=9)
        # A bar of half of stock's time can lie beyond the floor.
        shares = [100 * row["floor_us"] / row["bar_us"] for row in chosen if row["bar_us"]]
        axes.set_xlim(0, max(105.0, *(1.03 * share for share in shares)) if shares else 105.0)
    drawn[0][0].legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, fontsize=8, frameon=False)
    title = f"{report['device']}, {report['threads']} threads, {report['date']}, {report['commit']}"
    drawn[0][0].set_title(title, fontsize=9, loc="right")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
