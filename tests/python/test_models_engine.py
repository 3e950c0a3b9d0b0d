"""TextEngine on the stock onnxruntime-genai engine. Risks: a full cache spins for ever, a failed engine loses requests,
batching changes answers, one bad prompt takes the others with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from models_support import TinyShape, require_library, write_tiny_gguf

import octavo.engine
from octavo import calibration
from octavo.convert import convert
from octavo.doctor import examine
from octavo.engine import Answer, Sampling, TextEngine
from octavo.errors import OctavoError
from octavo.graph import GraphOptions
from octavo.trial import try_engine

PROMPTS = ["the cat", "she", "over the hills and far away, the end of the tale is near", "he", "this", "another one"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_library()
    folder = tmp_path_factory.mktemp("engine")
    write_tiny_gguf(folder / "tiny.gguf", TinyShape())
    convert(folder / "tiny.gguf", folder / "model", GraphOptions(weight_form="float32"))
    return folder / "model"


def blocks(count: int) -> dict[str, Any]:
    return {"engine": {"dynamic_batching": {"num_blocks": count}}}


def answers(engine: TextEngine, prompts: list[str], sampling: Sampling) -> list[Answer]:
    final: dict[int, Answer] = {}
    for answer in engine.generate(prompts, sampling, raw=True):
        final[answer.index] = answer
    return [final[index] for index in range(len(prompts))]


def tokens(engine: TextEngine, prompts: list[str], count: int = 24) -> list[list[int]]:
    found = answers(engine, prompts, Sampling(max_tokens=count))
    assert all(answer.state == "done" for answer in found), [answer.problem for answer in found]
    return [answer.token_ids for answer in found]


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> list[list[int]]:
    """What each prompt gets when it has the engine to itself."""
    engine = TextEngine(model_dir)
    return [tokens(engine, [prompt])[0] for prompt in PROMPTS]


def test_a_batch_gets_what_each_gets_alone(model_dir: Path, alone: list[list[int]]) -> None:
    assert tokens(TextEngine(model_dir), PROMPTS) == alone
    assert len({tuple(ids) for ids in alone}) > 3  # the prompts do matter


def test_a_small_cache_queues(model_dir: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for one or two requests at a time: all finish, none is ever put back."""
    monkeypatch.setattr(octavo.engine._Batch, "_put_back_the_last", lambda *_: pytest.fail("a request was blocked"))
    assert tokens(TextEngine(model_dir, overrides=blocks(6)), PROMPTS) == alone


def test_blocked_requests_are_put_back(
    model_dir: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given more than fits, the engine blocks for ever; putting one back at a time resolves it."""
    put_back: list[int] = []
    original = octavo.engine._Batch._put_back_the_last

    def spy(batch: Any) -> Answer:
        put_back.append(len(batch._open))
        return original(batch)

    monkeypatch.setattr(octavo.engine._Batch, "_put_back_the_last", spy)
    monkeypatch.setattr(octavo.engine._Batch, "_blocks_needed", lambda batch, running: 0)
    assert tokens(TextEngine(model_dir, overrides=blocks(6)), PROMPTS) == alone
    assert put_back


def test_a_request_that_fills_the_cache_alone_ends(model_dir: Path) -> None:
    """5 blocks of 16 hold 80 tokens; the answer stops there instead of waiting for ever."""
    (answer,) = answers(TextEngine(model_dir, overrides=blocks(5)), ["the cat"], Sampling(max_tokens=500))
    assert answer.finished and 60 < len(answer.token_ids) <= 81


def test_a_prompt_longer_than_the_cache_is_refused_alone(model_dir: Path, alone: list[list[int]]) -> None:
    prompts = [PROMPTS[0], "x" * 500, PROMPTS[1]]
    first, refused, last = answers(TextEngine(model_dir, overrides=blocks(8)), prompts, Sampling(max_tokens=24))
    assert refused.state == "refused" and "500 tokens" in refused.problem and "128" in refused.problem
    assert [first.token_ids, last.token_ids] == alone[:2]


def test_an_empty_prompt_is_refused(model_dir: Path) -> None:
    (answer,) = answers(TextEngine(model_dir), [""], Sampling())
    assert answer.state == "refused" and "empty" in answer.problem


class _FailsOnce:
    """An engine whose run() raises on the given calls, as the wheel's does after an operator failed."""

    def __init__(self, engine: Any, failing_calls: set[int], calls: list[int]) -> None:
        self._engine, self._failing, self._calls = engine, failing_calls, calls

    def run(self, events: Any) -> Any:
        self._calls.append(len(self._calls))
        if self._calls[-1] in self._failing:
            raise RuntimeError("Engine is no longer healthy. Cause: test")
        return self._engine.run(events)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _fail_on(engine: TextEngine, failing_calls: set[int]) -> None:
    calls: list[int] = []
    start = engine._start_engine

    def restart() -> None:
        start()
        engine.engine = _FailsOnce(engine.engine, failing_calls, calls)

    engine._start_engine = restart  # type: ignore[method-assign]
    restart()


def test_a_failed_engine_is_rebuilt(model_dir: Path, alone: list[list[int]]) -> None:
    engine = TextEngine(model_dir)
    _fail_on(engine, {3, 9, 15})
    assert tokens(engine, PROMPTS) == alone


def test_an_engine_that_fails_again_is_reported(model_dir: Path) -> None:
    engine = TextEngine(model_dir)
    _fail_on(engine, {4, 5})
    with pytest.raises(OctavoError, match=r"failed again right after it was rebuilt: test\. .*octavo doctor"):
        tokens(engine, PROMPTS)


def test_a_real_failure_of_the_engine_is_reported(model_dir: Path) -> None:
    """A block_size unlike the graph's makes every step fail inside onnxruntime: its reason is told, at once."""
    engine = TextEngine(model_dir, overrides={"engine": {"dynamic_batching": {"block_size": 32}}})
    first = engine.engine
    with pytest.raises(OctavoError, match=r"before the first token: .*Got: 32 Expected: 16.*octavo doctor"):
        tokens(engine, PROMPTS)
    assert engine.engine is first  # not rebuilt in vain


def test_an_engine_is_usable_after_a_failure(model_dir: Path, alone: list[list[int]]) -> None:
    engine = TextEngine(model_dir)
    _fail_on(engine, {0})
    with pytest.raises(OctavoError, match="before the first token"):
        tokens(engine, PROMPTS)
    assert tokens(engine, PROMPTS) == alone


def test_closing_early_frees_everything(model_dir: Path, alone: list[list[int]]) -> None:
    engine = TextEngine(model_dir, overrides=blocks(6))
    stream: Iterator[Answer] = engine.generate(PROMPTS, Sampling(max_tokens=24), raw=True)
    for answer in stream:
        if len(answer.token_ids) == 5:
            break
    stream.close()  # type: ignore[attr-defined]
    assert not engine.engine.has_pending_requests()
    assert tokens(engine, PROMPTS) == alone


def test_sampling_repeats_with_a_seed(model_dir: Path) -> None:
    engine = TextEngine(model_dir)
    draw = [
        [answer.token_ids for answer in answers(engine, PROMPTS[:1], Sampling(20, temperature=50.0, seed=seed))]
        for seed in (1, 1, 2)
    ]
    assert draw[0] == draw[1] != draw[2]


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(289, 1.0), (2**31 - 1, 1.0), (288, 1.0), (2**31 - 1, 0.9)],
)
def test_a_top_k_beyond_the_vocabulary_is_no_limit(model_dir: Path, top_k: int, top_p: float) -> None:
    """The engine refuses more than the 288 tokens that there are."""
    engine = TextEngine(model_dir)
    found = []
    for limit in (0, top_k):
        sampling = Sampling(max_tokens=8, temperature=2.0, top_k=limit, top_p=top_p, seed=3)
        (answer,) = answers(engine, ["the cat"], sampling)
        assert answer.state == "done", answer.problem
        found.append(answer.token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1e-300), (1.0, 1, 0.5), (0.5, 1, 1.0), (1e-300, 0, 0.9), (1e-300, 5, 1)],
)
def test_limits_that_leave_one_token(
    model_dir: Path, alone: list[list[int]], temperature: float, top_k: int, top_p: float
) -> None:
    """The engine refuses a top_p that float32 rounds to 0, and top_k 1 beside other limits."""
    sampling = Sampling(max_tokens=24, temperature=temperature, top_k=top_k, top_p=top_p, seed=1)
    (answer,) = answers(TextEngine(model_dir), PROMPTS[:1], sampling)
    assert (answer.state, answer.token_ids) == ("done", alone[0])


def test_the_reading_of_prompts_is_told(tmp_path: Path) -> None:
    require_library()
    write_tiny_gguf(tmp_path / "tiny.gguf", TinyShape(context=6000))
    convert(tmp_path / "tiny.gguf", tmp_path / "model", GraphOptions(weight_form="float32"))
    told: list[tuple[str, int, int]] = []
    engine = TextEngine(tmp_path / "model")
    sampling = Sampling(max_tokens=3)
    *_, last = engine.generate(["the " * 5000], sampling, raw=True, progress=lambda *step: told.append(step))
    assert last.state == "done"
    assert told == [("reading the prompt", done, last.prompt_tokens) for done in (0, 2048, 4096)]


def test_an_arriving_request_leaves_running_ones_alone(model_dir: Path, alone: list[list[int]]) -> None:
    """One request more every third step, straight through TextEngine.begin."""
    engine = TextEngine(model_dir)
    flags = engine._og.EngineEventFlags
    requests: dict[Any, int] = {}
    got: dict[int, list[int]] = {index: [] for index in range(len(PROMPTS))}
    step = 0
    while len(requests) < len(PROMPTS) or engine.engine.has_pending_requests():
        if step % 3 == 0 and len(requests) < len(PROMPTS):
            ids = np.asarray(engine.encode(PROMPTS[len(requests)], raw=True))
            requests[engine.begin(ids, Sampling(), 24)] = len(requests)
        for event in engine.engine.run(engine.events):
            if event.flags & flags.TOKEN:
                got[requests[event.request]].append(int(event.token))
        step += 1
    assert [got[index] for index in range(len(PROMPTS))] == alone


def test_an_engine_that_only_says_try_again_does_not_spin(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that never gets on, alone, fails with a reason."""
    engine = TextEngine(model_dir)
    blocked = SimpleNamespace(request=None, flags=engine._og.EngineEventFlags.CAPACITY_BLOCKED)
    monkeypatch.setattr(engine, "engine", _Replaced(engine.engine, run=lambda events: [blocked]))
    (answer,) = answers(engine, ["the"], Sampling(max_tokens=5))
    assert answer.state == "failed" and "num_blocks" in answer.problem


def test_a_complete_answer_that_is_put_back_is_done(model_dir: Path, alone: list[list[int]]) -> None:
    """The engine dies between the last token and its end event."""
    engine = TextEngine(model_dir)
    original, last = engine.engine, []

    def run(events: Any) -> list[Any]:
        if len(last) == 4:
            raise RuntimeError("gone")
        found = list(original.run(events))
        last.extend(event for event in found if event.flags & engine._og.EngineEventFlags.TOKEN)
        return [_TokenOnly(event, engine._og.EngineEventFlags.TOKEN) for event in found]

    engine.engine = _Replaced(original, run=run, has_pending_requests=lambda: True)
    (answer,) = answers(engine, PROMPTS[:1], Sampling(max_tokens=4))
    assert answer.state == "done" and answer.token_ids == alone[0][:4]


class _Replaced:
    """An object with some attributes replaced."""

    def __init__(self, original: Any, **replaced: Any) -> None:
        self._original = original
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _TokenOnly(_Replaced):
    """An event without its end."""

    def __init__(self, event: Any, flag: Any) -> None:
        super().__init__(event, flags=type(flag)(event.flags & flag))


def test_a_nul_character_is_refused(model_dir: Path) -> None:
    """Risk: the tokenizer ends the prompt there, and the rest goes missing without a word."""
    engine = TextEngine(model_dir)
    first, second = answers(engine, ["the\0cat", "the"], Sampling(max_tokens=2))
    assert first.state == "refused" and "NUL" in first.problem
    assert second.state == "done"
    with pytest.raises(OctavoError, match="NUL"):
        calibration.encode(model_dir, "a\0b")


def test_a_template_that_writes_nothing_is_named(model_dir: Path, tmp_path: Path) -> None:
    silent = Path(shutil.copytree(model_dir, tmp_path / "silent"))
    settings = json.loads((silent / "tokenizer_config.json").read_text())
    (silent / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "{# nothing #}"}))
    (answer,) = TextEngine(silent).generate(["the"], Sampling(max_tokens=2))
    assert answer.problem.startswith("the prompt cannot be tokenized: the chat template writes nothing. Give --raw")


def test_damaged_weights_are_no_empty_answer(model_dir: Path, tmp_path: Path) -> None:
    """Risk: NaN logits choose token 0, and the run looks like a success."""
    damaged = Path(shutil.copytree(model_dir, tmp_path / "damaged"))
    data = damaged / "model.onnx.data"
    data.write_bytes(np.full(data.stat().st_size // 4, np.nan, np.float32).tobytes())
    (answer,) = answers(TextEngine(damaged), ["the"], Sampling(max_tokens=8))
    assert set(answer.token_ids) <= {0} and not answer.text
    assert answer.state == "failed" and "without any text" in answer.problem
    assert "convert again with --kv-cache bfloat16" in answer.problem


def test_numbers_that_fail_later_are_no_whole_answer(model_dir: Path, tmp_path: Path) -> None:
    """Risk: NaN logits after some text look like its end. Here the rotation of all positions from 10 on is NaN."""
    damaged = Path(shutil.copytree(model_dir, tmp_path / "damaged"))
    graph = onnx.load(damaged / "model.onnx", load_external_data=False).graph
    (table,) = (tensor for tensor in graph.initializer if tensor.name == "cos_cache")
    place = {entry.key: int(entry.value) for entry in table.external_data if entry.key != "location"}
    values = np.memmap(damaged / "model.onnx.data", np.float32, "r+", place["offset"], tuple(table.dims))
    values[10:] = np.nan
    values.flush()
    (answer,) = answers(TextEngine(damaged), ["the"], Sampling(max_tokens=40))
    assert answer.text and answer.state == "failed", answer
    assert answer.problem.startswith("the answer ends in 31 times token 0, which NaN logits choose.")
    assert "convert again with --kv-cache bfloat16" in answer.problem
    (answer,) = answers(TextEngine(damaged), ["the"], Sampling(max_tokens=20))
    assert answer.state == "done"  # too few to tell


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([" ", "\n"] * 12, "the model answered with white space alone."),
        (["word", *[""] * 23], "the answer ends in 23 tokens without text."),
        (["word", *[""] * 15, *["word"] * 8], ""),
        ([*[" "] * 23, "word"], ""),
    ],
)
def test_answers_without_sense(model_dir: Path, texts: list[str], words: str) -> None:
    engine = TextEngine(model_dir)
    left = iter(texts)
    spoken = SimpleNamespace(decode=lambda token: next(left))
    engine.tokenizer = _Replaced(engine.tokenizer, create_stream=lambda: spoken)
    (answer,) = answers(engine, ["the"], Sampling(max_tokens=24))
    assert (answer.state, answer.text) == ("failed" if words else "done", "".join(texts))
    assert answer.problem.startswith(words)


@pytest.mark.parametrize(("tokens", "state"), [(3, "done"), (4, "failed")])
def test_only_a_character_cut_short_may_have_no_text(model_dir: Path, tokens: int, state: str) -> None:
    """Risk: a first character of several tokens, cut by --max-tokens, is taken for an answer of nothing."""
    engine = TextEngine(model_dir)
    silent = SimpleNamespace(decode=lambda token: "")
    engine.tokenizer = _Replaced(engine.tokenizer, create_stream=lambda: silent)
    (answer,) = answers(engine, ["the"], Sampling(max_tokens=tokens))
    assert (answer.state, len(answer.token_ids)) == (state, tokens)


def test_a_severity_that_the_configuration_asks_for_stays(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Risk: the backends that a user asks onnxruntime's log for are not told."""
    monkeypatch.setenv("ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO", "1")
    changed = Path(shutil.copytree(model_dir, tmp_path / "changed"))
    config = json.loads((changed / "genai_config.json").read_text())
    for severity, told in ((None, False), (2, True)):
        if severity is not None:
            config["model"]["decoder"]["session_options"]["log_severity_level"] = severity
        (changed / "genai_config.json").write_text(json.dumps(config))
        answers(TextEngine(changed), ["the"], Sampling(max_tokens=2))
        assert ("takes backend cpu_" in capfd.readouterr().err) == told


@pytest.mark.parametrize("value", [-1, 1.5, "9", True, None])
def test_a_wrong_number_of_blocks_is_named(model_dir: Path, tmp_path: Path, value: object) -> None:
    changed = Path(shutil.copytree(model_dir, tmp_path / "changed"))
    config = json.loads((changed / "genai_config.json").read_text())
    config["engine"]["dynamic_batching"]["num_blocks"] = value
    (changed / "genai_config.json").write_text(json.dumps(config))
    with pytest.raises(
        OctavoError, match=r"dynamic_batching.num_blocks in genai_config.json must be a positive whole number; it is "
    ):
        TextEngine(changed)


def test_a_cache_beyond_the_memory_is_named(model_dir: Path) -> None:
    with pytest.raises(OctavoError, match=r"memory .* 2,147,483,647 blocks"):
        TextEngine(model_dir, overrides=blocks(2**31 - 1))


def test_doctor_tries_the_chat_template(model_dir: Path, tmp_path: Path) -> None:
    """Wherever it stands. Risk: the advice is to report a message, where the template is to be corrected."""
    advice = "correct the template in {}, or take it out and use octavo generate --raw"
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        changed = Path(shutil.copytree(model_dir, tmp_path / file))
        _write_template(changed, file, "{% for")
        assert try_engine(changed).startswith("the chat template fails: Invalid or unsupported chat template.")
        finding = examine(changed)[-1]
        assert (finding.check, finding.ok, finding.advice) == ("engine", False, advice.format(file))
        _write_template(changed, file, "{{ messages[0].content }}")
        (finding,) = [finding for finding in examine(changed) if finding.check == "chat template"]
        assert (finding.ok, finding.detail) == (True, f"in {file}")


def _write_template(model_dir: Path, file: str, template: object) -> None:
    settings = json.loads((model_dir / "tokenizer_config.json").read_text())
    if file == "tokenizer_config.json":
        (model_dir / file).write_text(json.dumps(settings | {"chat_template": template}))
    else:
        (model_dir / file).write_text(str(template))


@pytest.mark.parametrize("template", [3, None, [{"name": "default", "template": "x"}]])
def test_a_chat_template_that_is_no_text(model_dir: Path, tmp_path: Path, template: object) -> None:
    """Risk: doctor answers with the words of a JSON library."""
    changed = Path(shutil.copytree(model_dir, tmp_path / "changed"))
    _write_template(changed, "tokenizer_config.json", template)
    finding = examine(changed)[-1]
    assert (finding.check, finding.ok) == ("chat template", False)
    assert finding.detail == f"chat_template in tokenizer_config.json is {template!r}"
    assert finding.advice == "make it a text, or take it out and use octavo generate --raw"
