"""Quantised caches of converted models.

Risks: scales of the wrong channel, a type that the engine refuses, a perplexity that is not one.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from models_support import PagedModel, TinyShape, numpy_llama, require_library, smollm2_path, write_tiny_gguf
from onnx import numpy_helper

from octavo import bench, calibration, cli, cli_options, kv_cache, weights
from octavo.console import print_perplexity
from octavo.convert import convert
from octavo.doctor import examine
from octavo.engine import Sampling, TextEngine
from octavo.errors import OctavoError
from octavo.explain import describe
from octavo.graph import GraphOptions
from octavo.kv_cache import CACHE_TYPES, choose_scale, round_to_e4m3, set_cache_type
from octavo.model_folder import graph_file
from octavo.paged_session import PagedSession, load_graph
from octavo.perplexity import Report, Row, _perplexity, measure
from octavo.trial import try_engine

SHAPE = TinyShape()
TEXT = "he the that the other then he the rhythm of the sea, the hat. " * 7
ENGINE_TYPES = [name for name, (key, value) in CACHE_TYPES.items() if key == value]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A folder with tiny.gguf, and the model's tensors."""
    require_library()
    folder = tmp_path_factory.mktemp("kv_cache")
    return folder, write_tiny_gguf(folder / "tiny.gguf", SHAPE)


@pytest.fixture(scope="module")
def models(stored: tuple[Path, dict[str, np.ndarray]]) -> dict[str, Path]:
    """The tiny model converted with each cache type."""
    folder, _ = stored
    for name in CACHE_TYPES:
        options = GraphOptions(weight_form="float32", cache_type=name)
        convert(folder / "tiny.gguf", folder / name, options, num_blocks=64)
    return {name: folder / name for name in CACHE_TYPES}


def initializers(folder: Path) -> dict[str, np.ndarray]:
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if "_scale" in tensor.name}


def test_the_command_offers_every_type() -> None:
    assert tuple(CACHE_TYPES) == (*cli_options.GENAI_CACHES, cli_options.MIXED_CACHE)
    assert cli_options.DEFAULT_CACHE in CACHE_TYPES and tuple(bench.CACHE_TYPES) == cli_options.BENCH_CACHES
    assert weights.WEIGHT_FORMS == cli_options.WEIGHT_FORMS


def test_scales_of_the_first_layer_follow_from_the_weights(
    stored: tuple[Path, dict[str, np.ndarray]], models: dict[str, Path]
) -> None:
    """K and V of layer 0 by the definition, in GGUF's own order of channels, against the scales in the graph."""
    _, weights = stored
    ids = calibration.encode(models["int8"], calibration.shipped_text("calibration"))[: SHAPE.context]
    assert len(ids) == SHAPE.context
    hidden = weights["token_embd.weight"][ids].astype(np.float64)
    normed = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-5) * weights["blk.0.attn_norm.weight"]
    heads = (len(ids), SHAPE.kv_heads, SHAPE.head_size)
    value = (normed @ weights["blk.0.attn_v.weight"].T).reshape(heads)
    key = (normed @ weights["blk.0.attn_k.weight"].T).reshape(heads)
    rate = SHAPE.rope_base ** (-np.arange(0, SHAPE.rotary_dim, 2) / SHAPE.rotary_dim)
    turned = (key[..., 0::2] + 1j * key[..., 1::2]) * np.exp(1j * np.arange(len(ids))[:, None, None] * rate)
    key = np.concatenate([turned.real, turned.imag], axis=-1)
    for name, largest in (("int8", 101.6), ("int4", 7), ("float8e4m3fn", 224)):
        scales = initializers(models[name])
        for letter, values in (("k", key), ("v", value)):
            got = scales[f"blk.0.{letter}_scale"]
            assert got.shape == (SHAPE.kv_heads, 1, SHAPE.head_size) and got.dtype == np.float32
            ratio = got[:, 0] / (np.abs(values).max(axis=0) / largest)
            if name == "float8e4m3fn":  # aligned between two powers of two
                assert ratio.min() > 0.9999 and ratio.max() < 2 and np.ptp(ratio) > 0.1
            else:
                assert np.allclose(ratio, 1, rtol=1e-4)


def test_float8_rounding_is_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    every = np.sort(every[np.isfinite(every)])
    values = np.concatenate([every, (every[1:] + every[:-1]) / 2, np.random.default_rng(0).normal(0, 60, 2000)])
    values = np.clip(values, -448, 448).astype(np.float32)
    assert np.array_equal(round_to_e4m3(values), values.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert round_to_e4m3(np.array([1e6, -500], np.float32)).tolist() == [448, -448]


def test_a_channel_of_zeros_has_a_scale() -> None:
    values = np.random.default_rng(0).normal(size=(400, 2, 8)).astype(np.float32)
    values[:, 1, 3] = 0
    for name in ("int8", "int4", "float8e4m3fn"):
        scale = choose_scale(values, CACHE_TYPES[name][0])
        assert scale[1, 0, 3] == 1 and (scale > 0).all()


def test_the_alignment_of_float8_has_the_least_error() -> None:
    values = np.random.default_rng(0).normal(size=(400, 1, 8)).astype(np.float32)

    def error(scale: np.ndarray) -> np.ndarray:
        return np.square(round_to_e4m3(values / scale[:, 0]) * scale[:, 0] - values).sum(axis=0)

    largest = np.abs(values).max(axis=0)[:, None]
    chosen = error(choose_scale(values, CACHE_TYPES["float8e4m3fn"][0]))
    others = [error(largest / divisor) for divisor in (448, 224, 112, 160)]
    assert all((chosen <= other * 1.001).all() for other in others[:3]) and chosen.sum() < min(map(np.sum, others))


# Of a channel's range, or of a value just below a power of two for the floats.
HALF_STEPS = {"int8": 1 / 203, "float8e4m3fn": 1 / 32, "int8-int4": 1 / 14, "int4": 1 / 14, "bfloat16": 1 / 512}


@pytest.mark.parametrize("name", HALF_STEPS)
def test_logits_stay_close(models: dict[str, Path], name: str) -> None:
    """Two layers, K and V of each: the relative error of the logits is at most the four half steps together.

    With K's and V's scales exchanged it is half as large again.
    """
    # The calibration text itself: random weights make other keys of other tokens, and clipped ones are another matter.
    ids = calibration.encode(models[name], calibration.shipped_text("calibration"))[:60]
    exact = measure_logits(models["float32"], "float32", ids)

    def error(got: np.ndarray) -> float:
        return float(np.sqrt(np.square(got - exact).mean() / exact.var()))

    right = error(measure_logits(models[name], name, ids))
    assert 1e-5 < right < 4 * HALF_STEPS[name]
    if scales := initializers(models[name]):
        graph = load_graph(models[name] / "model.onnx")
        for tensor in graph.graph.initializer:
            if tensor.name in scales:
                layer, letter = tensor.name.split("_")[0].rsplit(".", 1)
                other = scales[f"{layer}.{'v' if letter == 'k' else 'k'}_scale"]
                tensor.CopyFrom(numpy_helper.from_array(other, tensor.name))
        wrong = error(PagedSession(graph, models[name], len(ids), threads=1).feed(ids, 0))
        assert wrong > 1.5 * right


def measure_logits(folder: Path, name: str, ids: np.ndarray) -> np.ndarray:
    graph = load_graph(folder / "model.onnx")
    assert kv_cache.cache_type_of(graph) == name
    return PagedSession(graph, folder, len(ids), threads=1).feed(ids, 0)


def test_a_type_can_be_taken_back(models: dict[str, Path]) -> None:
    exact = onnx.load(models["float32"] / "model.onnx", load_external_data=False)
    for folder in models.values():
        model = onnx.load(folder / "model.onnx", load_external_data=False)
        kv_cache.set_cache_type(model, "float32")
        assert model.SerializeToString() == exact.SerializeToString()


@pytest.mark.parametrize("name", ENGINE_TYPES)
def test_the_engine_serves_it(models: dict[str, Path], name: str) -> None:
    engine = TextEngine(models[name], threads=1)
    answers = list(engine.generate(["the", "he"], Sampling(max_tokens=40), raw=True))
    assert {answer.state for answer in answers} == {"done"}


def test_the_engine_refuses_mixed_caches_with_a_reason(models: dict[str, Path]) -> None:
    """When this fails, the engine has learnt it: drop the note in octavo convert and in the documentation."""
    assert "must share one element type" in try_engine(models["int8-int4"])


def test_perplexity_is_the_definition(models: dict[str, Path], stored: tuple[Path, dict[str, np.ndarray]]) -> None:
    report = measure(models["int8"], TEXT, threads=1)
    ids = calibration.encode(models["int8"], TEXT)
    assert report.tokens == len(ids) > 2 * SHAPE.context  # several contexts, the last one shorter
    loss, scored = 0.0, 0
    for start in range(0, len(ids), SHAPE.context):
        part = ids[start : start + SHAPE.context]
        logits = numpy_llama(stored[1], SHAPE, part)[:-1]
        largest = logits.max(axis=-1, keepdims=True)
        predicted = logits - largest - np.log(np.exp(logits - largest).sum(axis=-1, keepdims=True))
        loss -= predicted[np.arange(len(part) - 1), part[1:]].sum()
        scored += len(part) - 1
    rows = {row.cache_type: row for row in report.rows}
    assert list(rows) == list(CACHE_TYPES) and report.scored == scored
    assert rows["float32"].perplexity == pytest.approx(np.exp(loss / scored), rel=1e-4)
    assert rows["float32"].kl == 0 and all(row.kl > 0 for row in report.rows[1:])
    channels = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_size
    sizes = {name: row.bytes_per_token / channels for name, row in rows.items()}
    assert sizes == {
        "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8e4m3fn": 1, "int4": 0.5, "int8-int4": 0.75,
    }  # fmt: skip
    assert rows["int8"].scales == "model" and rows["int4"].scales == "calibrated" and rows["float16"].scales == "none"


def test_kl_is_the_definition(models: dict[str, Path]) -> None:
    ids = calibration.encode(models["int4"], TEXT)[:100]
    exact, got = (measure_logits(models[name], name, ids)[:-1].astype(np.float64) for name in ("float32", "int4"))
    p, q = (np.exp(x - x.max(-1, keepdims=True)) for x in (exact, got))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    report = measure(models["int4"], TEXT, ["int4"], max_tokens=100, threads=1)
    assert [row.cache_type for row in report.rows] == ["float32", "int4"]
    assert report.rows[1].kl == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-3)


def test_the_paged_driver_agrees(models: dict[str, Path]) -> None:
    """Scattered blocks and chunks give the logits that the tools' own session gives."""
    ids = np.random.default_rng(4).integers(0, SHAPE.vocab, 50)
    whole = measure_logits(models["float16"], "float16", ids)
    paged = PagedModel(models["float16"], num_blocks=8)
    paged.step({0: ids[:21]})
    assert np.abs(paged.step({0: ids[21:]})[0] - whole[-1]).max() < 1e-3 * np.ptp(whole)


def test_damage_is_said(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedSession, "feed", lambda self, ids, past: np.full((len(ids), SHAPE.vocab), np.nan))
    with pytest.raises(OctavoError, match="float32 cache the logits hold NaN"):
        measure(models["float32"], TEXT, ["float16"])
    bad = np.full((4, SHAPE.kv_heads, SHAPE.head_size), np.inf)
    monkeypatch.setattr(PagedSession, "cached", lambda self, count: [(bad, bad)])
    with pytest.raises(OctavoError, match="layer 0 computes NaN or infinite"):
        measure(models["float32"], TEXT, ["int8"])


# --- the command ---


def octavo(*arguments: object, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo", *map(str, arguments)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_table_and_json(models: dict[str, Path]) -> None:
    done = octavo("perplexity", models["int8"], "-", "--kv-cache", "int8", "--threads", "1", text=TEXT)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if "│" in line]
    assert [line[1] for line in lines] == ["float32", "int8"] and "perplexity" in done.stdout
    done = octavo("perplexity", models["int8"], "--json", "--kv-cache", "int8", "--max-tokens", "40")
    content = json.loads(done.stdout)
    assert content["tokens"] == 40 and [row["cache_type"] for row in content["cache_types"]] == ["float32", "int8"]
    assert content["cache_types"][1]["scales"] == "model"


def with_config(source: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a model folder with a changed configuration."""
    shutil.copytree(source, folder)
    config = json.loads((source / "genai_config.json").read_text())
    change(config)
    (folder / "genai_config.json").write_text(json.dumps(config))
    return folder


MUST = "in genai_config.json must be a positive whole number; it is"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.pop("model"), f"model.context_length {MUST} missing."),
        (lambda c: c.update(model=3), f"model.context_length {MUST} missing."),
        (lambda c: c["model"].update(context_length="x"), f"model.context_length {MUST} 'x'."),
        (lambda c: c["model"].update(context_length=float("inf")), f"model.context_length {MUST} inf."),
        (lambda c: c["model"].update(context_length=True), f"model.context_length {MUST} True."),
        (lambda c: c["model"].update(context_length=1), "the model's context holds one token"),
        (lambda c: c["model"].update(vocab_size=0), f"model.vocab_size {MUST} 0."),
        (
            lambda c: c["model"].update(vocab_size=2**40),
            f"model.vocab_size in genai_config.json is {2**40}, but the graph's logits have 288.",
        ),
        (lambda c: c["model"].pop("decoder"), f"model.decoder.num_hidden_layers {MUST} missing."),
        (lambda c: c["model"]["decoder"].pop("num_hidden_layers"), f"model.decoder.num_hidden_layers {MUST} missing."),
        (lambda c: c["model"]["decoder"].update(head_size=[]), f"model.decoder.head_size {MUST} []."),
    ],
)
def test_a_wrong_configuration_is_a_sentence(
    models: dict[str, Path], tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    folder = with_config(models["int8"], tmp_path / "model", change)
    with pytest.raises(OctavoError) as error:
        measure(folder, TEXT, ["int8"], threads=1)
    assert str(error.value).startswith(words)
    if "context_length" in words:
        with pytest.raises(OctavoError, match=r"model\.context_length in genai_config\.json must be"):
            calibration.float32_caches(load_graph(folder / "model.onnx"), folder)


def test_a_context_of_two_tokens_is_enough(models: dict[str, Path], tmp_path: Path) -> None:
    folder = with_config(models["float32"], tmp_path / "model", lambda c: c["model"].update(context_length=2))
    report = measure(folder, TEXT, ["float32"], max_tokens=7, threads=1)
    assert (report.tokens, report.scored, report.window) == (6, 3, 2)  # the seventh, alone in a window, is not fed


def test_more_threads_than_processors_are_refused(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.processors.processor_count", lambda: 2)
    with pytest.raises(OctavoError, match="3 threads on 2 processors would wait for each other; give --threads 2"):
        measure(models["float32"], TEXT, threads=3)


def test_a_window_of_one_token_is_not_fed(models: dict[str, Path]) -> None:
    """Three contexts of the text and a token: no token comes after that one."""
    report = measure(models["float32"], TEXT, ["float32"], max_tokens=2 * SHAPE.context + 1, threads=1)
    assert (report.tokens, report.scored) == (2 * SHAPE.context, 2 * SHAPE.context - 2)


def test_speeds_are_of_all_windows(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Risk: the last window, which may have two tokens, tells the speed. By this clock a step takes 2 s, there 1 s."""
    now, feed = 0.0, PagedSession.feed

    def slow_feed(session: PagedSession, ids: np.ndarray, past: int) -> np.ndarray:
        nonlocal now
        now += 2.0 if past > 1 else 1.0
        return feed(session, ids, past)

    monkeypatch.setattr(PagedSession, "feed", slow_feed)
    monkeypatch.setattr("octavo.perplexity.time", SimpleNamespace(perf_counter=lambda: now))
    (row,) = measure(models["float32"], TEXT, ["float32"], max_tokens=2 * SHAPE.context + 2, threads=1).rows
    assert row.decode_tokens_per_second == (32 + 32 + 1) / (2 * 64 + 1)
    assert row.prefill_tokens_per_second == (2 * SHAPE.context + 2) / 3


def test_bytes_come_from_the_graph(models: dict[str, Path], tmp_path: Path) -> None:
    """Risk: a configuration that does not fit the graph, which only doctor compares, gives a wrong size."""
    wrong = {"num_hidden_layers": 1, "num_key_value_heads": 7, "head_size": 8}
    folder = with_config(models["float32"], tmp_path / "model", lambda c: c["model"]["decoder"].update(wrong))
    report = measure(folder, TEXT, ["int8-int4"], max_tokens=20, threads=1)
    channels = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_size
    assert [row.bytes_per_token for row in report.rows] == [4 * channels, 3 * channels // 4]


def test_a_graph_of_another_name(models: dict[str, Path], tmp_path: Path) -> None:
    """model.decoder.filename names it; a model.onnx beside it is another."""
    folder = with_config(
        models["float32"], tmp_path / "model", lambda c: c["model"]["decoder"].update(filename="other.onnx")
    )
    (folder / "model.onnx").rename(folder / "other.onnx")
    for decoy in (False, True):
        if decoy:
            (folder / "model.onnx").write_bytes(b"not ONNX")
        assert measure(folder, TEXT, ["int8"], max_tokens=20, threads=1).rows[1].scales == "calibrated"
        assert describe(folder).path == folder / "other.onnx"
    (folder / "other.onnx").unlink()
    for read in (lambda: measure(folder, TEXT), lambda: describe(folder)):
        with pytest.raises(OctavoError, match=r"other\.onnx cannot be read: No such file"):
            read()
    for name in (3, "", ["model.onnx"]):
        with pytest.raises(OctavoError, match=r"model\.decoder\.filename in genai_config\.json must be a file's name"):
            graph_file(folder, {"model": {"decoder": {"filename": name}}})


def test_weights_that_may_not_be_read(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime says "SystemError : 13" of them. Root may read everything, so that opening is made to fail."""
    folder = with_config(models["float32"], tmp_path / "model", lambda c: None)
    data = folder / "model.onnx.data"
    whole = data.read_bytes()
    may_open = Path.open

    def refuse(file: Path, *arguments: Any, **options: Any) -> Any:
        if file.name == data.name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return may_open(file, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        with pytest.raises(OctavoError, match=r"model\.onnx\.data cannot be read: Permission denied\."):
            measure(folder, TEXT)
        (finding,) = [finding for finding in examine(folder) if finding.check == "weights"]
    assert not finding.ok and finding.detail == "model.onnx.data cannot be read: Permission denied"
    assert finding.advice == "give yourself the right to read it"
    data.unlink()
    with pytest.raises(OctavoError, match=r"model\.onnx\.data cannot be read: No such file or directory\."):
        measure(folder, TEXT)
    (finding,) = [finding for finding in examine(folder) if finding.check == "weights"]
    assert not finding.ok and finding.advice.startswith(f"it needs {len(whole):,} bytes")
    os.mkfifo(data)
    with pytest.raises(OctavoError, match="cannot be read: it is not a file"):
        measure(folder, TEXT)


def with_weights_at(source: Path, target: Path, graph: str, location: str, place: str) -> Path:
    """A copy whose graph is the file `graph` and names `location`, with the weights at `place` in the folder."""
    folder = with_config(source, target, lambda c: c["model"]["decoder"].update(filename=graph))
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    (folder / "model.onnx").unlink()
    for file in (folder / graph, folder / place):
        file.parent.mkdir(exist_ok=True)
    (folder / graph).write_bytes(model.SerializeToString())
    (folder / "model.onnx.data").rename(folder / place)
    return folder


@pytest.mark.parametrize(
    ("graph", "location", "place"),
    [
        ("sub/model.onnx", "model.onnx.data", "sub/model.onnx.data"),
        ("model.onnx", "data/weights", "data/weights"),
        ("sub/other.onnx", "./weights", "sub/weights"),
    ],
)
def test_weights_lie_where_the_graph_says(
    models: dict[str, Path], tmp_path: Path, graph: str, location: str, place: str
) -> None:
    """Relative to the graph's file. Risk: doctor finds a sound model broken, and calibration fails."""
    folder = with_weights_at(models["float32"], tmp_path / "model", graph, location, place)
    assert measure(folder, TEXT, ["int8"], max_tokens=20, threads=1).rows[1].scales == "calibrated"
    size = (folder / place).stat().st_size
    findings = {finding.check: finding for finding in examine(folder)}
    assert findings["weights"].detail == f"{place}: {size:,} bytes" and findings["engine"].ok
    (folder / place).unlink()
    with pytest.raises(OctavoError, match=rf"{place} cannot be read: No such file or directory\.$"):
        measure(folder, TEXT)
    (finding,) = [finding for finding in examine(folder) if finding.check == "weights"]
    assert finding.detail == f"{place} cannot be read: No such file or directory"
    assert finding.advice == f"it needs {size:,} bytes: copy it again, or convert again"


@pytest.mark.parametrize("kind", ["parent", "absolute"])
def test_weights_outside_the_folder_of_the_graph(models: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """onnx and onnxruntime refuse them."""
    location = {"parent": "../weights", "absolute": str(tmp_path / "model/weights")}[kind]
    folder = with_weights_at(models["float32"], tmp_path / "model", "sub/model.onnx", location, "weights")
    words = "the graph names it by an absolute path" if kind == "absolute" else "it is outside the graph's folder"
    with pytest.raises(OctavoError, match=f"cannot be read: {words}, which onnx and onnxruntime refuse"):
        measure(folder, TEXT)
    (finding,) = [finding for finding in examine(folder) if finding.check == "weights"]
    assert not finding.ok and words in finding.detail
    assert finding.advice == "save the graph again with its weights in one file beside it"
    with pytest.raises(onnx.checker.ValidationError):
        onnx.load(folder / "sub/model.onnx")


def test_a_type_that_fails_leaves_the_others(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Risk: an hour's rows are lost because the last type's session fails."""

    def change(model: onnx.ModelProto, cache_type: str, scales: object = ()) -> None:
        if cache_type == "float16":
            raise OctavoError("float16 is broken.")
        set_cache_type(model, cache_type, scales)

    monkeypatch.setattr("octavo.perplexity.set_cache_type", change)
    arguments = ["perplexity", str(models["float32"]), "--max-tokens", "20", "--threads", "1", "--json"]
    arguments += [part for name in ("float16", "bfloat16") for part in ("--kv-cache", name)]
    assert cli.main(arguments) == 1
    out, err = capsys.readouterr()
    content = json.loads(out)
    assert [row["cache_type"] for row in content["cache_types"]] == ["float32", "bfloat16"]
    assert content["failed"] == {"float16": "float16 is broken."}
    assert "octavo: float16 was not measured: float16 is broken." in err
    assert cli.main([argument for argument in arguments if argument != "--json"]) == 1
    assert "bfloat16" in capsys.readouterr().out


def test_others_on_the_machine_and_single_tokens_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row("float32", "none", 2.0, 0.0, 8, 1.0, 1.0)
    print_perplexity(Report(2, 1, 2, [row], {}, 40.0), threads=0)
    out = capsys.readouterr().out
    assert "\n1 token predicted, in contexts" in out
    assert "up to 40 % of the processors meanwhile: the speeds are no measure" in out and "--threads 1." in out
    print_perplexity(Report(3, 2, 2, [row], {}, None), threads=1)
    out = capsys.readouterr().out
    assert "\n2 tokens predicted" in out and "Other processes" not in out


def test_a_perplexity_beyond_float64_is_a_sentence() -> None:
    assert _perplexity("int8", 709.0) == np.exp(709.0)
    with pytest.raises(OctavoError, match=r"with a int8 cache the perplexity is e to the power of 710"):
        _perplexity("int8", 710.0)


def test_convert_refuses_what_generate_cannot_run(
    stored: tuple[Path, dict[str, np.ndarray]], models: dict[str, Path], tmp_path: Path
) -> None:
    """Mixed caches come from Python only (`models` has one), for programs that bind the caches themselves."""
    done = octavo("convert", stored[0] / "tiny.gguf", tmp_path / "out", "--kv-cache", "int8-int4")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert "onnxruntime-genai" in done.stderr and "choose int8" in done.stderr and "octavo.convert" in done.stderr
    assert "--kv-cache int8" in " ".join(octavo("doctor", models["int8-int4"]).stdout.split())
    done = octavo("convert", stored[0] / "tiny.gguf", tmp_path / "int8", "--kv-cache", "int8")
    assert done.returncode == 0 and "Next:" in done.stdout
    assert octavo("doctor", tmp_path / "int8").returncode == 0
    assert "int8 (PER_CHANNEL)" in octavo("explain", tmp_path / "int8/model.onnx").stdout


def test_errors_are_sentences(models: dict[str, Path], tmp_path: Path) -> None:
    folder = models["float32"]
    for arguments in (["--kv-cache", "int3"], ["--max-tokens", "1"], ["text", "more"]):
        done = octavo("perplexity", folder, *arguments)
        assert done.returncode == 2 and "Usage:" in done.stderr
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for file in folder.iterdir():
        (foreign / file.name).symlink_to(file)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for node in model.graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                names[index] = name.replace("last_hidden", "pooled")
    (foreign / "model.onnx").unlink()
    (foreign / "model.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "empty.txt").write_text("")
    for arguments, words in (
        ([tmp_path / "absent"], "does not exist"),
        ([folder, tmp_path / "absent.txt"], "cannot be read"),
        ([folder, tmp_path / "empty.txt"], "fewer than two tokens"),
        ([foreign], "octavo convert wrote"),
    ):
        done = octavo("perplexity", *arguments)
        assert done.returncode == 1 and done.stderr.strip().startswith("octavo: ") and words in done.stderr, done.stderr
    with pytest.raises(OctavoError, match="choose one of"):
        convert(folder / "absent.gguf", tmp_path / "out", GraphOptions(cache_type="int3"))


def test_the_bars_hold_on_the_real_model(tmp_path: Path) -> None:
    """SmolLM2-135M-Instruct, exact weights: int8 within 0.5 % of float32's perplexity, float8 within 1 %."""
    require_library()
    convert(smollm2_path(), tmp_path / "model", GraphOptions(weight_form="float32"))
    rows = {row.cache_type: row for row in measure(tmp_path / "model", None, ["int8", "float8e4m3fn"]).rows}
    exact = rows["float32"].perplexity
    assert abs(rows["int8"].perplexity / exact - 1) < 0.005
    assert abs(rows["float8e4m3fn"].perplexity / exact - 1) < 0.01
