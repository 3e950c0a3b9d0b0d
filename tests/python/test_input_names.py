"""The operator's inputs stand in several tables. Risk: an input added to some of them only, or at another index."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from octavo import onnx_model

attention = pytest.importorskip("octavo.attention", reason="octavo's compiled extension is not installed")

ROOT = Path(__file__).resolve().parents[2]


def documented_names() -> list[str]:
    """Of docs/contract.md's table: "| 8, 9 | cos_cache, sin_cache | T | ..." """
    table = (ROOT / "docs/contract.md").read_text(encoding="utf-8").split("## Inputs")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+(?:, \d+)*) \| ([a-z_, ]+) \|", table, re.MULTILINE)
    numbered = [pair for row in rows for pair in zip(row[0].split(", "), row[1].split(", "), strict=True)]
    assert [int(number) for number, _ in numbered] == list(range(len(numbered)))
    return [name for _, name in numbered]


def contract_names() -> list[str]:
    """Of the C++ table of the rules; the outputs follow the inputs there."""
    text = (ROOT / "src/contract/tensors.cc").read_text(encoding="utf-8")
    return re.findall(r'Tensor\{k\w+,\s*"(\w+)"', text)


def onnx_runtime_names() -> list[str]:
    """Of ort/api.h: kQNormWeight is q_norm_weight."""
    listed = re.search(r"enum Input [^{]*\{([^}]*)kInputCount", (ROOT / "ort/api.h").read_text(encoding="utf-8"))
    assert listed
    return [re.sub(r"(?<!^)([A-Z])", r"_\1", name[1:]).lower() for name in re.findall(r"k\w+", listed[1])]


def names_in_ort_tests() -> list[str]:
    """Of the tests of the ONNX Runtime library, which are not importable from here."""
    listed = re.search(r"INPUT_NAMES = \(([^)]*)\)", (ROOT / "tests/ort/support.py").read_text(encoding="utf-8"))
    assert listed
    return re.findall(r'"(\w+)"', listed[1])


def test_every_table_has_the_same_inputs_in_the_same_order() -> None:
    expected = documented_names()
    outputs = ["output", "output_qk", "lse"]
    assert list(attention._INPUTS) == expected
    assert list(onnx_model.INPUT_NAMES) == expected
    assert contract_names() == expected + outputs
    assert onnx_runtime_names() == expected
    assert names_in_ort_tests() == expected


def test_paged_attention_has_a_parameter_for_every_input_and_attribute() -> None:
    parameters = inspect.signature(attention.paged_attention).parameters
    assert set(attention._INPUTS) | set(attention._ATTRIBUTES) <= set(parameters)
    for name in attention._INPUTS:  # the bindings know the name: what they refuse is its value
        with pytest.raises(ValueError, match=f"^{name}: must be a (readable|writable) array"):
            attention._core.run({name: (None, "")}, {}, 1, "", 0)
