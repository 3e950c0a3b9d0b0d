"""The main job of bench/cpu: bars, the stock graph, what counts as wrong. Risk: a ratio of two unlike computations."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from models_support import TinyShape, require_library, write_tiny_gguf

from octavo.convert import convert
from octavo.graph import GraphOptions

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench/cpu"))
sys.path.insert(0, str(ROOT / "bench/gpu"))  # before bench/cpu: both have a run.py, and the imported one is the GPU's

import job  # noqa: E402
import job_cells  # noqa: E402
import job_engine  # noqa: E402
import job_plot  # noqa: E402
from job_cells import LLAMA, STOCK, Cell  # noqa: E402
from job_sessions import PagedJob, StockJob, load_graph, to_stock  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_library()
    place = tmp_path_factory.mktemp("job")
    write_tiny_gguf(place / "tiny.gguf", TinyShape(), "Q4_1")
    convert(place / "tiny.gguf", place / "model", GraphOptions(cache_type="float16"))
    return place / "model"


IDS = np.random.default_rng(2).integers(3, 200, (3, 21))


def test_bars_are_of_the_peers_that_ran() -> None:
    rates = {"ours": 145.0, STOCK: 100.0, LLAMA: 150.0}
    asked = job_cells.bars(Cell(1024, 4), "decode", rates)
    assert [(bar["rate"], bar["holds"]) for bar in asked] == [(150.0, False), (150.0, False)]
    for cell, phase in ((Cell(1024, 1), "decode"), (Cell(128, 4), "decode"), (Cell(1024, 4), "prefill")):
        assert [bar["holds"] for bar in job_cells.bars(cell, phase, rates)] == [True, False]
    (only,) = job_cells.bars(Cell(128, 1), "decode", {"ours": 99.0, STOCK: 100.0})
    assert only["asks"].startswith("1 of") and not only["holds"]


def test_table_and_picture_without_a_peer(tmp_path: Path) -> None:
    facts = {"others_percent": 40.0}
    rows = [job_cells.evaluate(Cell(128, 1), phase, {"ours": 50.0, STOCK: 100.0}, facts) for phase in job_cells.PHASES]
    report = {
        "rows": rows, "outside": [job_cells.outside_row(4, 7.5, facts)], "threads": 1, "device": "a CPU",
        "date": "2026-01-01", "commit": "abc",
    }  # fmt: skip
    table = job_cells.format_table(report)
    assert rows[0]["ratios"] == {STOCK: 0.5} and "0 of 3 bars hold" in table and "others took 40.0 %" in table
    assert LLAMA not in table
    pytest.importorskip("matplotlib")
    job_plot.draw(report, tmp_path / "job.png")
    assert (tmp_path / "job.png").read_bytes().startswith(b"\x89PNG")


def test_stock_has_the_same_nodes_but_attention(folder: Path) -> None:
    ours, stock = load_graph(folder), to_stock(load_graph(folder, cache="float32"))
    kinds = [[n.op_type for n in m.graph.node if n.op_type not in ("PagedAttention", "Reshape")] for m in (ours, stock)]
    assert [kind for kind in kinds[1] if kind != "GroupQueryAttention"] == kinds[0]
    weights = [{t.name for t in m.graph.initializer} for m in (ours, stock)]
    assert weights[1] - weights[0] == {"to_tokens"} and weights[0] <= weights[1]


def test_what_stock_lacks_is_no_stock_graph(folder: Path) -> None:
    graph = load_graph(folder)
    next(n for n in graph.graph.node if n.op_type == "PagedAttention").attribute.append(
        onnx.helper.make_attribute("softcap", 3.0)
    )
    with pytest.raises(ValueError, match="more than stock's node"):
        to_stock(graph)


def test_contenders_agree_before_they_are_timed(folder: Path) -> None:
    found = job.verify(folder, 1, IDS, None)
    assert found["exact_relative_error"] <= job.EXACT_BOUND and found["ours KL"] <= job.KL_BOUND


@pytest.mark.parametrize("kind", ["a wrong position", "a wrong token"])
def test_what_differs_is_not_timed(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    feed = PagedJob.feed

    def wrong(self: PagedJob, ids: np.ndarray, past: int, first: int = 0) -> np.ndarray:
        return feed(self, ids, past - 1 if past and "position" in kind else past, first) + ("token" in kind) * IDS[0, 0]

    if "position" in kind:
        monkeypatch.setattr(PagedJob, "feed", wrong)
        with pytest.raises(ValueError, match="apart in exact arithmetic"):
            job.verify(folder, 1, IDS, None)
        return
    bench = job.CellBench(Cell(21, 3), folder, 1, IDS, None)
    bench.expected = np.zeros((3, 288), np.float32)
    bench.expected[:, 7] = 10.0
    bench._check("ours", [7, 7, 7])
    with pytest.raises(ValueError, match="10 logits below"):
        bench._check("ours", [7, 8, 7])


def test_one_sequence_at_a_time_is_as_all_at_once(folder: Path) -> None:
    """Both kinds of caches, float32: rows that are fed apart lie where a step of all of them finds them."""
    for kind, prepare in ((PagedJob, lambda graph: graph), (StockJob, to_stock)):
        graph = prepare(load_graph(folder, 1, "float32"))
        apart, together = (kind(graph, folder, 1, 3, 32) for _ in range(2))
        prompts, last = IDS[:, :-1], IDS[:, -1:]
        rows = np.concatenate([apart.feed(prompts[i : i + 1], 0, i).copy() for i in range(3)])
        assert np.allclose(rows, together.feed(prompts, 0), atol=1e-4)
        assert np.allclose(apart.feed(last, 20), together.feed(last, 20), atol=1e-4)


def test_the_engine_is_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_engine, "NEVER", 287)
    found = job_engine.EngineJob(folder, 1, 3, 48).measure(IDS, 8)
    assert found["prefill_s"] > 0 and found["decode_s"] > 0 and found["decode_tokens"] == 3 * 7
    exact = PagedJob(load_graph(folder), folder, 1, 3, 48).feed(IDS, 0)
    chosen = exact[np.arange(3), found["first_tokens"]]
    assert (exact.max(-1) - chosen <= job.MARGIN).all()


def test_the_share_outside_is_a_share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_engine, "NEVER", 287)
    apart, whole = job_engine.outside_seconds(folder, 1, IDS, 16)
    assert 0 < apart < 10 * whole  # a tiny model is all overhead; the profiled run is the slower one
