"""The C++ oracle (tests/reference) against implementations that others wrote.

Every backend is held against the oracle; what the oracle misreads of the contract, no other test can find.
The oracle is run by octavo_export_cases, which the dev preset builds; OCTAVO_EXPORT_CASES names another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import external
import numpy as np
import onnx
import onnxruntime
import pytest
from exported import ExportedCase, export_cases, find_executable

EXECUTABLE = find_executable()
if EXECUTABLE is None:
    pytest.skip("octavo_export_cases is not built: cmake --build --preset dev", allow_module_level=True)
CASES = {case.name: case for case in export_cases(EXECUTABLE)}

FLOAT32_BOUND = 2e-6  # of the largest number of the tensor
FRACTION_BITS = {"float16": 10, "bfloat16": 7}

has_group_query_attention = pytest.mark.skipif(
    tuple(map(int, onnxruntime.__version__.split(".")[:2])) < external.ONNX_RUNTIME_NEEDED,
    reason=f"GroupQueryAttention of onnxruntime {onnxruntime.__version__} lacks features of the Cases",
)
has_onnx_operators = pytest.mark.skipif(
    onnx.defs.onnx_opset_version() < external.OPSET_NEEDED,
    reason=f"Attention of onnx {onnx.__version__} has no window, and softcap after the mask",
)


def cases_against(implementation: str) -> list[str]:
    """The names of the Cases that have only features that the implementation has."""
    return [name for name, case in CASES.items() if implementation in case.against]


def bound(expected: np.ndarray, element_type: np.dtype) -> np.ndarray:
    """The largest difference that arithmetic in float32 and one rounding to the type explain."""
    size = np.abs(np.where(np.isfinite(expected), expected, 0.0))
    in_float32 = FLOAT32_BOUND * size.max(initial=0.0)
    if element_type.name not in FRACTION_BITS:
        return np.full(expected.shape, in_float32)
    _, exponent = np.frexp(np.maximum(size, 2.0**-14))
    return np.ldexp(1.0, exponent - 1 - FRACTION_BITS[element_type.name]) + in_float32


def assert_equal(actual: np.ndarray, expected: np.ndarray, element_type: np.dtype, what: str) -> None:
    """`actual`, numbers of the given type, against float64; codes of a quantised cache have no tolerance."""
    actual = actual.astype(np.float64)
    assert actual.shape == expected.shape, f"{what} differs in shape: {actual.shape}, expected {expected.shape}"
    is_code = element_type.name not in ("float32", *FRACTION_BITS)
    limit = np.zeros(expected.shape) if is_code else bound(expected, element_type)
    with np.errstate(invalid="ignore"):  # -inf - -inf
        wrong = ~((np.abs(actual - expected) <= limit) | (actual == expected))
    if wrong.any():
        at = tuple(int(n) for n in np.argwhere(wrong)[0])
        first = f"at {at}: {actual[at]}, expected {expected[at]} within {limit[at]:.3g}"
        raise AssertionError(f"{what} differs in {wrong.sum()} of {wrong.size} numbers, first {first}")


def log_sum_exp(scores: np.ndarray) -> np.ndarray:
    """Over the last axis; -inf of nothing but -inf."""
    largest = scores.max(axis=-1, keepdims=True)
    shift = np.where(np.isneginf(largest), 0.0, largest)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(scores - shift).sum(axis=-1)) + shift[..., 0]


def check(case: ExportedCase, implementation: Callable[[ExportedCase, int], external.Attended]) -> None:
    """Raises AssertionError where the oracle and the implementation differ."""
    for b in range(case.batch_size):
        expected = implementation(case, b)
        rows, total = case.tokens(b), case.total(b)
        new = range(case.past(b), total)
        for which, numbers in (("key", expected.keys), ("value", expected.values)):
            codes = external.cache_codes(case, case.results, which, b, new)
            assert_equal(codes, numbers, codes.dtype, f"{which} cache of sequence {b}")
        output = case.results["output"][rows].reshape(expected.output.shape)
        assert_equal(output, expected.output, case.type, f"output of sequence {b}")

        visible = np.broadcast_to(case.visible(b), (case.attributes["num_heads"], len(new), total))
        if expected.scores is not None:
            lse = log_sum_exp(np.where(visible, expected.scores, -np.inf))
            assert_equal(case.results["lse"][:, rows], lse, np.dtype(np.float32), f"lse of sequence {b}")
        qk_kind = case.attributes["qk_output"]
        if qk_kind:
            scores = expected.scores if qk_kind == 1 else expected.probabilities
            ours = case.results["output_qk"][:, rows]
            assert not ours[..., total:].any(), f"output_qk of sequence {b} differs from 0 past its end"
            wanted = np.where(visible, scores, 0.0)
            assert_equal(ours[..., :total], wanted, ours.dtype, f"output_qk of sequence {b}")


@has_group_query_attention
@pytest.mark.parametrize("name", cases_against("GroupQueryAttention"))
def test_oracle_equals_group_query_attention(name: str) -> None:
    """Risk: the oracle misreads the contract, whose rule is to match GroupQueryAttention."""
    check(CASES[name], external.group_query_attention)


@has_onnx_operators
@pytest.mark.parametrize("name", cases_against("ONNX"))
def test_oracle_equals_onnx_operators(name: str) -> None:
    """Risk: the oracle and GroupQueryAttention agree on what the ONNX standard does otherwise."""
    check(CASES[name], external.onnx_operators)


@dataclass(frozen=True)
class Mistake:
    """What the other implementation gets that the oracle did not."""

    case: str
    attributes: dict = field(default_factory=dict)
    inputs: dict[str, str | None] = field(default_factory=dict)  # the name of the one that it gets; None: absent

    def apply(self) -> ExportedCase:
        """The Case that the other implementation gets."""
        case = CASES[self.case]
        inputs = case.inputs | {to: case.inputs[origin] for to, origin in self.inputs.items() if origin}
        kept = {name: x for name, x in inputs.items() if self.inputs.get(name, name) is not None}
        return replace(case, attributes=case.attributes | self.attributes, inputs=kept)


MISTAKES = {
    "window off by one": Mistake("window_4", {"local_window_size": 5}),
    "window ignored": Mistake("window_17_masking_bias_softcap", {"local_window_size": -1}),
    "other scale": Mistake("scale", {"scale": 0.60001}),
    "softcap ignored": Mistake("softcap", {"softcap": 0.0}),
    "bias ignored": Mistake("bias", inputs={"attention_bias": None}),
    "other pairs of channels": Mistake("rope", {"rotary_interleaved": 1}),
    "no causal mask": Mistake("plain", {"is_causal": 0}),
    "no causal mask in float16": Mistake("float16", {"is_causal": 0}),
    "K for V": Mistake("plain", inputs={"value": "key"}),
    "sine for cosine": Mistake("rope_interleaved", inputs={"cos_cache": "sin_cache"}),
    "norm weights swapped": Mistake(
        "qk_norm", inputs={"q_norm_weight": "k_norm_weight", "k_norm_weight": "q_norm_weight"}
    ),
    "scales swapped": Mistake("int8_cache_per_channel", inputs={"k_scale": "v_scale", "v_scale": "k_scale"}),
    "no sink": Mistake("sink", inputs={"head_sink": None}),
    "no sink in float16": Mistake("float16_sink_window", inputs={"head_sink": None}),
}


def mistakes_against(implementation: str) -> list[str]:
    """The mistakes in Cases that the implementation is compared on."""
    return [name for name, mistake in MISTAKES.items() if implementation in CASES[mistake.case].against]


@has_group_query_attention
@pytest.mark.parametrize("name", mistakes_against("GroupQueryAttention"))
def test_group_query_attention_refuses_a_mistake(name: str) -> None:
    """Risk: a comparison that passes whatever it is given."""
    case = MISTAKES[name].apply()
    with pytest.raises(AssertionError, match="differs"):
        check(CASES[case.name], lambda _, sequence: external.group_query_attention(case, sequence))


@has_onnx_operators
@pytest.mark.parametrize("name", mistakes_against("ONNX"))
def test_onnx_operators_refuse_a_mistake(name: str) -> None:
    """Risk: a comparison that passes whatever it is given."""
    case = MISTAKES[name].apply()
    with pytest.raises(AssertionError, match="differs"):
        check(CASES[case.name], lambda _, sequence: external.onnx_operators(case, sequence))
