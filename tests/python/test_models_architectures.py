"""octavo convert on every architecture, against the logits of transformers with the same random weights.

Risks: a norm, scale, softcap, window, bias or sink that is left out or in the wrong place, a wrong order of rows.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tiny_architectures
from models_support import PagedModel, require_library
from tiny_architectures import CASES, CONTEXT, KEPT_ROWS, WINDOW, token_ids, write_gguf

from octavo.architectures import ARCHITECTURES
from octavo.convert import convert
from octavo.errors import OctavoError
from octavo.graph import GraphOptions
from octavo.trial import try_engine

TOLERANCE = 1e-5  # of the range of the logits; float32 sums of these sizes err by 1e-6
PREFILLED = 20


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    with np.load(tiny_architectures.LOGITS) as file:
        return dict(file)


def paged_logits(folder: Path) -> np.ndarray:
    """Logits, KEPT_ROWS, of a sequence that is prefilled beside another one and then fed token by token."""
    model = PagedModel(folder, num_blocks=8, every_row=True)
    ids = token_ids()
    rows = [model.step({1: ids[::-1][:5], 0: ids[:PREFILLED]})[0]]
    for position in range(PREFILLED, len(ids)):
        rows.append(model.step({0: ids[position : position + 1]})[0])
    return np.concatenate(rows)[KEPT_ROWS]


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.ptp(expected))


def test_every_architecture_has_a_case() -> None:
    assert {case.architecture for case in CASES.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, expected: dict[str, np.ndarray], name: str) -> None:
    require_library()
    write_gguf(tmp_path / "tiny.gguf", CASES[name])
    convert(tmp_path / "tiny.gguf", tmp_path / "model", GraphOptions(weight_form="float32"))
    assert relative_error(paged_logits(tmp_path / "model"), expected[name]) < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_exact_eight_bit_weights(tmp_path: Path, name: str) -> None:
    """Codes kept and codes dequantised make the same logits: rows are split and stacked alike in both forms."""
    require_library()
    write_gguf(tmp_path / "tiny.gguf", CASES[name], "Q8_0")
    got = []
    for form in ("float32", "int4"):
        convert(tmp_path / "tiny.gguf", tmp_path / form, GraphOptions(weight_form=form, accuracy_level=1))
        got.append(paged_logits(tmp_path / form))
    assert relative_error(*got) < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_an_int8_cache(tmp_path: Path, expected: dict[str, np.ndarray], name: str) -> None:
    """Scales are of K after norm and rotation, whatever else the architecture has.

    Of random weights, 8 bits change a few percent, and much more of a token that then goes to other experts.
    """
    require_library()
    write_gguf(tmp_path / "tiny.gguf", CASES[name])
    convert(tmp_path / "tiny.gguf", tmp_path / "model", GraphOptions(weight_form="float32", cache_type="int8"))
    errors = np.linalg.norm(paged_logits(tmp_path / "model") - expected[name], axis=1)
    assert 1e-3 < np.median(errors / np.linalg.norm(expected[name], axis=1)) < 0.15


@pytest.mark.parametrize(("kind", "block"), [("Q8_0", 32), ("MXFP4", 32), ("Q6_K", 16)])
def test_quantised_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, block: int) -> None:
    """The same codes, with 8-bit activations as QMoE has them. A wrong order of rows is off by the whole range."""
    require_library()
    case, more = CASES["gpt-oss"], {}
    if kind == "Q6_K":  # super-blocks of 256 columns
        case, more = dataclasses.replace(case, head_size=64), {"expert_feed_forward_length": ("add_uint32", 256)}
        for name in ("HIDDEN", "FEED"):
            monkeypatch.setattr(tiny_architectures, name, 256)
    write_gguf(tmp_path / "tiny.gguf", case, kind, more=more)
    got = []
    for form in ("float32", "int4"):
        convert(tmp_path / "tiny.gguf", tmp_path / form, GraphOptions(weight_form=form))
        got.append(paged_logits(tmp_path / form))
    model = onnx.load(tmp_path / "int4/model.onnx", load_external_data=False)
    mixtures = [node for node in model.graph.node if node.op_type == "QMoE"]
    assert [a.i for node in mixtures for a in node.attribute if a.name == "block_size"] == [block] * 2
    assert relative_error(*got) < 0.03


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt-oss"])
def test_the_engine_runs_it(tmp_path: Path, name: str) -> None:
    require_library()
    write_gguf(tmp_path / "tiny.gguf", CASES[name], "Q8_0")
    convert(tmp_path / "tiny.gguf", tmp_path / "model")
    assert try_engine(tmp_path / "model") == ""


def test_a_shorter_context_takes_longropes_short_factors(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", CASES["phi3, LongRoPE"])
    tables = []
    for context in (16, CONTEXT):
        folder = tmp_path / str(context)
        convert(tmp_path / "tiny.gguf", folder, GraphOptions(weight_form="float32"), context_length=context)
        model = onnx.load(folder / "model.onnx")
        tables += [onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "cos_cache"]
    factor = np.float64(tables[0][0, 0])
    assert np.allclose(tables[0][1] / factor, np.cos(500.0 ** -np.linspace(0, 14 / 16, 8) / np.linspace(1, 1.5, 8)))
    assert np.allclose(tables[1][1] / factor, np.cos(500.0 ** -np.linspace(0, 14 / 16, 8) / np.linspace(1, 6, 8)))


@pytest.mark.parametrize(
    ("name", "windows"),
    [("gemma2", [WINDOW, -1]), ("gemma3", [WINDOW] * 5 + [-1]), ("phi3", [WINDOW] * 2), ("gpt-oss", [WINDOW, -1])],
)
def test_windows_of_layers(tmp_path: Path, name: str, windows: list[int]) -> None:
    write_gguf(tmp_path / "tiny.gguf", CASES[name])
    convert(tmp_path / "tiny.gguf", tmp_path / "model")
    found = []
    for node in onnx.load(tmp_path / "model/model.onnx", load_external_data=False).graph.node:
        if node.op_type == "PagedAttention":
            found.append(next((a.i for a in node.attribute if a.name == "local_window_size"), -1))
    assert found == windows


@pytest.mark.parametrize(
    ("name", "key", "words"),
    [
        ("gpt-oss", "attention.sliding_window", "no metadata 'gpt-oss.attention.sliding_window'"),
        ("gemma3", "attention.sliding_window", "no metadata 'gemma3.attention.sliding_window'"),
        ("gpt-oss", "expert_count", "no metadata 'gpt-oss.expert_count'"),
        ("gpt-oss", "expert_used_count", "no metadata 'gpt-oss.expert_used_count'"),
        ("qwen3", "attention.key_length", "keys of 16 and values of 32"),
    ],
)
def test_absent_keys_are_named(tmp_path: Path, name: str, key: str, words: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", CASES[name], without=(key,))
    with pytest.raises(OctavoError, match=words):
        convert(tmp_path / "tiny.gguf", tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gemma2", "rope.freq_base_swa", ("add_float32", 10_000.0)),
        ("gpt-oss", "rope.freq_base_swa", ("add_float32", 10_000.0)),
        ("gpt-oss", "expert_gating_func", ("add_uint32", 2)),
        ("gpt-oss", "expert_weights_scale", ("add_float32", 2.5)),
        ("gpt-oss", "expert_group_count", ("add_uint32", 2)),
        ("gpt-oss", "expert_shared_count", ("add_uint32", 1)),
        ("gemma3", "rope.dimension_count_swa", ("add_uint32", 16)),
        ("gemma3", "attention.key_length_swa", ("add_uint32", 16)),
        ("gemma3", "attention.value_length_swa", ("add_uint32", 16)),
        ("qwen3", "attention.sliding_window_pattern", ("add_uint32", 2)),
        ("qwen3", "expert_count", ("add_uint32", 4)),
    ],
)
def test_keys_that_change_the_answers_are_refused(tmp_path: Path, name: str, key: str, value: tuple[str, Any]) -> None:
    write_gguf(tmp_path / "tiny.gguf", CASES[name], more={key: value})
    with pytest.raises(OctavoError, match=rf"{name}\.{key} = .* is not supported"):
        convert(tmp_path / "tiny.gguf", tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("gemma2", {"rope.freq_base_swa": ("add_float32", 500.0)}),
        ("gemma3", {"rope.dimension_count_swa": ("add_uint32", 32), "rope.freq_base_swa": ("add_float32", 1e4)}),
        ("qwen3", {"attention.sliding_window_pattern": ("add_uint32", 0)}),
        ("phi3, LongRoPE", {"rope.scaling.type": ("add_string", "longrope")}),
        ("gpt-oss", {"expert_weights_norm": ("add_bool", False)}),
        ("gpt-oss", {"expert_gating_func": ("add_uint32", 3), "expert_weights_scale": ("add_float32", 1.0)}),
    ],
)
def test_keys_that_change_nothing_are_taken(tmp_path: Path, name: str, more: dict[str, tuple[str, Any]]) -> None:
    written = []
    for folder, keys in (("without", {}), ("with", more)):
        write_gguf(tmp_path / "tiny.gguf", CASES[name], more=keys)
        convert(tmp_path / "tiny.gguf", tmp_path / folder)
        written.append([(tmp_path / folder / file).read_bytes() for file in ("model.onnx", "model.onnx.data")])
    assert written[0] == written[1]


def test_a_written_window_of_zero_is_none(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", CASES["gpt-oss"], more={"attention.sliding_window": ("add_uint32", 0)})
    convert(tmp_path / "tiny.gguf", tmp_path / "model")
    graph = onnx.load(tmp_path / "model/model.onnx", load_external_data=False).graph
    assert not any(a.name == "local_window_size" for node in graph.node for a in node.attribute)


def test_longrope_needs_its_factors(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", CASES["phi3"], more={"rope.scaling.type": ("add_string", "longrope")})
    with pytest.raises(OctavoError, match=r"'longrope' needs the tensor 'rope_factors_long\.weight'"):
        convert(tmp_path / "tiny.gguf", tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "activation", "words"),
    [("gpt-oss", "silu", "no 'silu' in a mixture"), ("qwen3", "swiglu_oai", "no 'swiglu_oai' in a dense")],
)
def test_an_activation_without_a_graph_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, activation: str, words: str
) -> None:
    monkeypatch.setitem(ARCHITECTURES, name, dataclasses.replace(ARCHITECTURES[name], activation=activation))
    write_gguf(tmp_path / "tiny.gguf", CASES[name])
    with pytest.raises(OctavoError, match=words):
        convert(tmp_path / "tiny.gguf", tmp_path / "model")
