"""Keys and values beyond float16. Risks: a bound that a text exceeds, answers of NaN, a good model refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_architectures
from cli_support import Run, sentence
from models_support import TinyShape, require_library, smollm2_path, write_tiny_gguf

from octavo import cache_range, calibration
from octavo.architectures import read_config
from octavo.cache_range import LIMIT, bounds
from octavo.convert import convert
from octavo.errors import OctavoError
from octavo.gguf_reader import GGUFFile
from octavo.graph import GraphOptions
from octavo.paged_session import load_graph
from octavo.perplexity import measure

SHAPE = TinyShape()
KEYS, VALUES = "blk.1.attn_k.weight", "blk.1.attn_v.weight"


def float32_maxima(source: Path, folder: Path, form: str = "float32") -> np.ndarray:
    """(layers, 2): the largest |K| and |V| of the calibration text."""
    convert(source, folder, GraphOptions(weight_form=form))
    caches = calibration.float32_caches(load_graph(folder / "model.onnx"), folder)
    return np.array([[np.abs(values).max() for values in pair] for pair in caches])


def bounds_of(source: Path) -> np.ndarray:
    with GGUFFile(source) as file:
        return np.array(bounds(file, read_config(file)))


class TestBounds:
    """No text exceeds them, and they are near enough to clear real models."""

    @pytest.mark.parametrize("name", tiny_architectures.CASES)
    def test_every_architecture(self, tmp_path: Path, name: str) -> None:
        """Biases, QK-norm, fused matrices, and cos and sin that YaRN and LongRoPE enlarge."""
        require_library()
        source = tmp_path / "tiny.gguf"
        tiny_architectures.write_gguf(source, tiny_architectures.CASES[name])
        ratio = bounds_of(source) / float32_maxima(source, tmp_path / "model")
        assert ratio.min() > 1 and ratio.max() < 8

    def test_a_text_can_reach_them(self, tmp_path: Path) -> None:
        """Of a token whose normed embedding is a row of the projection, turned by the worst angle: none may be less."""
        source = tmp_path / "tiny.gguf"
        stored = write_tiny_gguf(source, TinyShape(layers=1, biases=True))
        norm = stored["blk.0.attn_norm.weight"].astype(np.float64)
        for name, turned, bound in (("attn_k", 2**0.5, 0), ("attn_v", 1, 1)):
            weight, bias = stored[f"blk.0.{name}.weight"] * norm, stored[f"blk.0.{name}.bias"]
            units = np.sign(bias)[:, None] * weight / np.linalg.norm(weight, axis=1, keepdims=True)
            reached = np.abs((units * np.sqrt(norm.size) * weight).sum(axis=1) + bias).max() * turned
            assert bounds_of(source)[0, bound] == pytest.approx(reached, rel=1e-6)

    def test_yarn_enlarges_keys(self, tmp_path: Path) -> None:
        """By 0.1 ln 4 + 1, of the same weights."""
        found = []
        for name in ("qwen2", "qwen2, YaRN"):
            tiny_architectures.write_gguf(tmp_path / name, tiny_architectures.CASES[name])
            found.append(bounds_of(tmp_path / name))
        assert found[1] / found[0] == pytest.approx(np.array([[0.1 * np.log(4) + 1, 1.0]] * 2), rel=1e-6)

    def test_smollm2(self, tmp_path: Path) -> None:
        """The real model is cleared without a run, even in 4 bits."""
        require_library()
        found = bounds_of(smollm2_path())
        assert found.max() < LIMIT / 100
        ratio = found / float32_maxima(smollm2_path(), tmp_path / "model", "int4")
        assert ratio.min() > 2 and ratio.max() < 20


def test_what_the_bound_clears_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Risk: seconds for every conversion, and octavo's library needed for it."""
    monkeypatch.setattr(cache_range, "float32_caches", None)
    write_tiny_gguf(tmp_path / "tiny.gguf", SHAPE)
    convert(tmp_path / "tiny.gguf", tmp_path / "model", GraphOptions(cache_type="float16"))


@pytest.mark.parametrize(("tensor", "name", "column"), [(KEYS, "keys", 0), (VALUES, "values", 1)])
def test_what_overflows_is_refused(tmp_path: Path, tensor: str, name: str, column: int) -> None:
    require_library()
    source = tmp_path / "tiny.gguf"
    write_tiny_gguf(source, SHAPE, factors={tensor: 5e4})
    largest = float32_maxima(source, tmp_path / "exact")[1, column]
    assert largest > cache_range.FLOAT16_LARGEST
    with pytest.raises(OctavoError) as error:
        convert(source, tmp_path / "out", GraphOptions(weight_form="float32", cache_type="float16"))
    assert str(error.value) == (
        f"layer 1 computes {name} of up to {largest:,.0f}; a float16 cache holds at most 65,504, half of which is kept "
        "free for other texts. Add --kv-cache bfloat16, or float32."
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exact", "tiny.gguf"]


def test_what_the_run_clears_is_converted(tmp_path: Path) -> None:
    """Between the largest key of the text and the bound, which says nothing here."""
    require_library()
    source = tmp_path / "tiny.gguf"
    write_tiny_gguf(source, SHAPE, factors={KEYS: 1500})
    assert bounds_of(source)[1, 0] > LIMIT
    assert float32_maxima(source, tmp_path / "exact").max() < LIMIT
    convert(source, tmp_path / "out", GraphOptions(weight_form="float32", cache_type="float16"))


def test_the_command_and_its_remedy(library: None, run: Run, tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    write_tiny_gguf(source, SHAPE, factors={KEYS: 5e4})
    error = sentence(run("convert", source, "out", "--weights", "float32"))
    assert error.startswith("octavo: layer 1 computes keys of up to") and "--kv-cache bfloat16, or float32" in error
    assert not (tmp_path / "out").exists()
    done = run("convert", source, "out", "--weights", "float32", "--kv-cache", "bfloat16")
    assert done.returncode == 0, done.stderr
    rows = {row.cache_type: row for row in measure(tmp_path / "out", "the sea " * 20, ["bfloat16"]).rows}
    assert rows["bfloat16"].perplexity == pytest.approx(rows["float32"].perplexity, rel=0.2)
    report = measure(tmp_path / "out", "the sea " * 20, ["float16"])
    assert [row.cache_type for row in report.rows] == ["float32"]
    assert report.failed["float16"].endswith("the logits hold NaN or infinite values: keys or values exceed 65,504.")


def test_without_the_library_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_ORT_LIBRARY", str(tmp_path / "absent.so"))
    monkeypatch.setattr("octavo.convert.write_graph", None)
    write_tiny_gguf(tmp_path / "tiny.gguf", SHAPE, factors={KEYS: 5e4})
    with pytest.raises(OctavoError, match="OCTAVO_ORT_LIBRARY names"):
        convert(tmp_path / "tiny.gguf", tmp_path / "out", GraphOptions(cache_type="float16"))
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
