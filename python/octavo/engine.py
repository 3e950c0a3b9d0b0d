"""Many prompts at once through the stock onnxruntime-genai engine (continuous batching), with its traps handled.

The engine admits a request as soon as its prompt fits the pool of cache blocks, lets it grow, and never takes blocks
back: when the pool is full, all requests wait for each other for ever. So this module gives the engine only as many
requests as fit at their longest, puts one back if the engine blocks all the same, and rebuilds an engine that failed.
An engine that fails before it made any token would only fail again: that is reported, with onnxruntime's reason.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from . import huge_pages
from .errors import OctavoError, as_argument, first_line
from .model_folder import CONFIG_FILE, config_number, dig, read_config
from .progress import Progress, no_progress
from .runtime import genai_config, require_no_nul

if TYPE_CHECKING:
    import onnxruntime_genai as og

EVENTS_PER_STEP = 64
CHARACTER_BYTES = 4  # of a UTF-8 character, and so the most tokens that one may take
NAN_TOKENS = 16  # of token 0, or without text, at an answer's end: so many are no coincidence
FATAL = 4  # severity of what onnxruntime logs; errors reach the caller
STUCK_STEPS = 50  # steps with nothing but "blocked" or "try again" after which a request is put back
SILENT_STEPS = 10_000  # steps without any event: a chunked prefill of the longest prompt takes far fewer
LONG_ANSWER = 192  # tokens from which large pages save more time than they cost (docs/performance.md)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. temperature 0 = the likeliest token; top_k 0 and top_p 1 switch those limits off.

    A top_k of more tokens than the model has is no limit either.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    @property
    def takes_the_likeliest(self) -> bool:
        """Whether nothing is left to chance. The engine refuses limits that leave one token, and reads float32."""
        return self.top_k == 1 or np.float32(self.temperature) <= 0 or np.float32(self.top_p) == 0


@dataclass
class Answer:
    """One prompt's answer while it grows.

    state: "waiting", "running", then "done", "refused" (never ran; `problem` says why), or "failed" (likewise;
    `text` holds what there was).
    """

    index: int
    prompt: str
    text: str = ""
    state: str = "waiting"
    problem: str = ""
    finish_reason: str = ""  # "eos", "max_generated_tokens", "max_session_tokens", ...
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.state in ("done", "refused", "failed")

    def as_json(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "prompt": self.prompt,
            "text": self.text,
            "state": self.state,
            "problem": self.problem,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "cached_prompt_tokens": self.cached_prompt_tokens,
            "generated_tokens": len(self.token_ids),
        }


class _Running:
    """An Answer with what the engine holds for it."""

    def __init__(self, answer: Answer, prompt_ids: np.ndarray, stream: Any) -> None:
        self.answer = answer
        self.prompt_ids = prompt_ids
        self.stream = stream
        self.request: Any = None
        self.reserved_blocks = 0
        self.tokens_shown = 0  # up to the last one that added text

    def tokens_so_far(self) -> np.ndarray:
        return np.concatenate([self.prompt_ids, np.array(self.answer.token_ids, np.int32)])


class TextEngine:
    """A model folder, ready to generate. Not thread-safe: use it on the thread that made it.

    Args:
        model_dir: folder written by `octavo convert`.
        threads: threads of onnxruntime; 0 = its default.
        overrides: merged over genai_config.json, e.g. {"engine": {"dynamic_batching": {"num_blocks": 64}}}.

    Raises OctavoError where the model does not load.
    """

    def __init__(
        self, model_dir: str | os.PathLike[str], threads: int = 0, overrides: dict[str, Any] | None = None
    ) -> None:
        self.folder = os.fspath(model_dir)
        self.doctor = f"octavo doctor {as_argument(model_dir)}"
        written = read_config(model_dir)
        self._block_size, self._num_blocks = _pool(written, overrides or {})
        self._vocabulary = config_number(written, "model", "vocab_size")
        config = genai_config(model_dir, **(overrides or {}))
        import onnxruntime_genai as og

        self._og = og
        self._is_dead = False
        self._has_huge_pages = False
        if hasattr(og, "disable_telemetry_events"):
            og.disable_telemetry_events()
        options = {"intra_op_num_threads": threads} if threads else {}
        if dig(written, "model", "decoder", "session_options", "log_severity_level") is None:
            options["log_severity_level"] = FATAL
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        try:
            self._model = og.Model(config)
            self.tokenizer = og.Tokenizer(self._model)
            self._start_engine()
        except Exception as error:  # the wheel raises RuntimeError and its kin
            if "bad_alloc" in str(error):
                raise OctavoError(
                    f"there is not enough memory for {self.folder} with a cache of {self._num_blocks:,} blocks of "
                    f"{self._block_size} tokens (num_blocks of {CONFIG_FILE}, or --num-blocks)."
                ) from error
            raise OctavoError(
                f"{self.folder} does not load: {first_line(error)} Run `{self.doctor}` for the reason."
            ) from error

    @property
    def max_request_tokens(self) -> int:
        """Prompt and answer of one request together, as the cache and the model's context allow."""
        return self._limit

    def encode(self, prompt: str, raw: bool = False) -> np.ndarray:
        """Token ids, int32. Without `raw`, the prompt is one user message in the model's chat template.

        Raises OctavoError where the prompt cannot be tokenized.
        """
        require_no_nul(prompt, "the prompt")
        try:
            # A chat template writes the begin token itself; a raw prompt gets the one the model was trained with.
            self.tokenizer.update_options(add_special_tokens="true" if raw else "false")
            if not raw:
                messages = json.dumps([{"role": "user", "content": prompt}])
                written = self.tokenizer.apply_chat_template(messages=messages, add_generation_prompt=True)
                if prompt and not written:
                    raise OctavoError("the chat template writes nothing.")
                prompt = written
            return np.asarray(self.tokenizer.encode(prompt), np.int32)
        except Exception as error:
            hint = "" if raw else " Give --raw to do without the chat template."
            raise OctavoError(f"the prompt cannot be tokenized: {first_line(error)}{hint}") from error

    def generate(
        self,
        prompts: Sequence[str],
        sampling: Sampling | None = None,
        raw: bool = False,
        progress: Progress = no_progress,
    ) -> Generator[Answer, None, None]:
        """Answers all prompts, batched as the engine sees fit; yields an Answer whenever it grew or changed state.

        progress: called as (step, tokens done, tokens in all) while prompts are read and no answer has begun, where
        they take the engine several steps.

        A prompt that cannot run is refused alone. Closing the iterator (or an exception in the caller) frees all.
        Raises OctavoError where the engine fails before the first token, or again without a token in between; its
        __cause__ is the runtime's own error.
        """
        if self._is_dead:
            self._start_engine()
        sampling = sampling or Sampling()
        if sampling.max_tokens >= LONG_ANSWER:
            self.use_huge_pages()
        batch = _Batch(self, sampling, raw, progress)
        try:
            yield from batch.run(prompts)
        finally:
            batch.close()

    def use_huge_pages(self) -> None:
        """Moves the weights to large pages of memory, once; a decode step is then up to a fifth shorter.

        generate() does it itself before answers of LONG_ANSWER tokens or more. Call it where many short ones will come.
        """
        if not self._has_huge_pages:
            self._has_huge_pages = True
            huge_pages.collapse()

    # --- for _Batch ---

    def _start_engine(self) -> None:
        self.engine = self._og.Engine(self._model)
        self._is_dead = False
        self.events = self.engine.create_event_buffer(EVENTS_PER_STEP)
        capabilities = self.engine.get_capabilities()
        self._limit = int(capabilities.max_request_length)
        self.batch_size = int(capabilities.configured_max_batch_size)
        self.tokens_per_step = int(capabilities.max_scheduled_tokens)

    def blocks_for(self, token_count: int) -> int:
        """Cache blocks of a request of so many tokens in all, at most the whole pool."""
        return min(-(-min(token_count, self._limit) // self._block_size), self._num_blocks)

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def begin(self, tokens: np.ndarray, sampling: Sampling, left: int) -> og.Request:
        """Gives the engine a request of `tokens` that may generate `left` more."""
        options = self._og.RequestOptions()
        options.set_max_session_tokens(min(len(tokens) + left, self._limit))
        request = self.engine.create_request(options=options)
        turn = self._og.TurnOptions(request)
        turn.set_max_generated_tokens(left)
        turn.set_do_sample(not sampling.takes_the_likeliest)
        if not sampling.takes_the_likeliest:
            turn.set_temperature(sampling.temperature)
            turn.set_top_p(sampling.top_p)
            turn.set_top_k(sampling.top_k if sampling.top_k < self._vocabulary else 0)  # more is refused
            if sampling.seed is not None:
                turn.set_seed(sampling.seed)
        try:
            request.begin_turn(tokens, turn)
        except Exception:
            request.close()
            raise
        return request


class _Batch:
    """One call of TextEngine.generate."""

    def __init__(self, engine: TextEngine, sampling: Sampling, raw: bool, progress: Progress) -> None:
        self._engine = engine
        self._sampling = sampling
        self._raw = raw
        self._progress = progress
        self._prompt_tokens_read = 0
        self._has_begun = False
        self._waiting: deque[_Running] = deque()
        # The engine drops a request whose Python object dies, without an event: this dictionary keeps them.
        self._open: dict[Any, _Running] = {}
        self._stuck_steps = 0
        self._silent_steps = 0
        self._closed_until_one_ends = False
        self._tokens_since_failure = 0
        self._was_rebuilt = False

    def run(self, prompts: Sequence[str]) -> Iterator[Answer]:
        for index, prompt in enumerate(prompts):
            answer = Answer(index, prompt)
            running = self._prepare(answer)
            if running is not None:
                self._waiting.append(running)
            yield answer
        while self._waiting or self._open:
            yield from self._admit()
            if self._open:
                yield from self._step()

    def close(self) -> None:
        for running in self._open.values():
            running.request.close()
        self._open.clear()

    def _prepare(self, answer: Answer) -> _Running | None:
        try:
            ids = self._engine.encode(answer.prompt, self._raw)
        except OctavoError as error:
            return _refuse(answer, str(error))
        answer.prompt_tokens = len(ids)
        limit = self._engine.max_request_tokens
        if not len(ids):
            return _refuse(answer, "the prompt is empty.")
        if len(ids) >= limit:
            return _refuse(
                answer,
                f"the prompt has {len(ids):,} tokens, but prompt and answer together may have {limit:,} "
                "(context_length, and num_blocks * block_size of the cache, in genai_config.json); "
                "shorten it or raise them.",
            )
        return _Running(answer, ids, self._engine.tokenizer.create_stream())

    def _admit(self) -> Iterator[Answer]:
        """Gives the engine waiting requests, in order, while they fit at their longest."""
        while self._waiting and self._fits(self._waiting[0]):
            running = self._waiting.popleft()
            answer, tokens = running.answer, running.tokens_so_far()
            left = self._sampling.max_tokens - len(answer.token_ids)
            if (
                left <= 0 or len(tokens) >= self._engine.max_request_tokens
            ):  # put back when it was complete but for the event
                answer.state, answer.finish_reason = "done", "max_generated_tokens"
                yield answer
                continue
            running.reserved_blocks = self._blocks_needed(running)
            try:
                running.request = self._engine.begin(tokens, self._sampling, left)
            except Exception as error:
                _fail(answer, first_line(error), state="failed" if answer.token_ids else "refused")
                yield answer
                continue
            self._open[running.request] = running

    def _fits(self, running: _Running) -> bool:
        if not self._open:
            return True
        if self._closed_until_one_ends or len(self._open) >= self._engine.batch_size:
            return False
        taken = sum(other.reserved_blocks for other in self._open.values())
        return taken + self._blocks_needed(running) <= self._engine.num_blocks

    def _blocks_needed(self, running: _Running) -> int:
        return self._engine.blocks_for(len(running.prompt_ids) + self._sampling.max_tokens)

    def _step(self) -> Iterator[Answer]:
        engine = self._engine
        flags = engine._og.EngineEventFlags
        self._tell_progress()
        try:
            found = engine.engine.run(engine.events)
            events = [found[index] for index in range(len(found))]  # its iterator ends with a costly C++ exception
        except RuntimeError as error:
            self._recover(error)
            return
        progress = False
        for event in events:
            running = self._open.get(event.request)
            if running is None:  # the engine speaks for all requests, e.g. CAPACITY_BLOCKED
                if event.flags & flags.FAILED and not event.flags & flags.RETRYABLE:
                    self._recover(self._failure_of(event))
                    return
                continue
            answer = running.answer
            if event.flags & flags.TOKEN:
                progress = True
                self._tokens_since_failure += 1
                self._has_begun = True
                answer.state = "running"
                answer.token_ids.append(int(event.token))
                text = running.stream.decode(event.token)
                if text:
                    answer.text += text
                    running.tokens_shown = len(answer.token_ids)
            if event.flags & flags.FAILED and not event.flags & flags.RETRYABLE:
                if event.error_code == engine._og.EngineErrorCode.REQUEST_UNSERVICEABLE:
                    progress = True
                    self._forget(running)
                    _fail(answer, "the engine cannot serve this request: it needs more cache than there is.")
                else:
                    self._recover(self._failure_of(event))
                    return
            elif event.flags & flags.TURN_FINISHED:
                progress = True
                self._finish(running, event)
            yield answer
        yield from self._watch(progress, silent=not events)

    def _tell_progress(self) -> None:
        """A step reads tokens_per_step of the prompts, and no event speaks of that."""
        if self._has_begun:
            return
        total = sum(len(running.prompt_ids) for running in self._open.values())
        if total > self._engine.tokens_per_step:
            self._progress("reading the prompt", min(self._prompt_tokens_read, total), total)
        self._prompt_tokens_read += self._engine.tokens_per_step

    def _finish(self, running: _Running, event: Any) -> None:
        answer = running.answer
        answer.state = "done"
        answer.finish_reason = event.finish_reason.name.lower()
        answer.cached_prompt_tokens = int(event.usage.cached_prompt_tokens)
        oddity = _oddity(running)
        if oddity:
            _fail(
                answer,
                f"{oddity}. If its cache is float16, keys or values may overflow it: convert again with --kv-cache "
                f"bfloat16. `{self._engine.doctor}` tells whether the weights are sound.",
            )
        self._forget(running)

    def _forget(self, running: _Running) -> None:
        self._open.pop(running.request)
        running.request.close()
        self._closed_until_one_ends = False

    def _watch(self, progress: bool, silent: bool) -> Iterator[Answer]:
        """Ends what would go on for ever: all requests blocked by each other, or an engine that says nothing."""
        self._stuck_steps = 0 if progress or silent else self._stuck_steps + 1
        self._silent_steps = self._silent_steps + 1 if silent else 0
        if self._stuck_steps >= STUCK_STEPS:
            self._stuck_steps = 0
            yield self._put_back_the_last()
        if self._silent_steps >= SILENT_STEPS or (self._open and not self._engine.engine.has_pending_requests()):
            raise OctavoError(
                f"the engine stopped answering with {len(self._open)} requests unfinished; run `{self._engine.doctor}`."
            )

    def _put_back_the_last(self) -> Answer:
        """Frees the blocks of the request that came last; it continues from its tokens when another has ended."""
        last = list(self._open.values())[-1]
        self._forget(last)
        if not self._open:
            _fail(last.answer, "the cache is too small for this request; raise num_blocks in genai_config.json.")
            return last.answer
        self._closed_until_one_ends = True
        self._waiting.appendleft(last)
        return last.answer

    def _failure_of(self, event: Any) -> Exception:
        """What failed. The event has a code only; the failed engine tells the rest when it is asked to run again."""
        try:
            self._engine.engine.run(self._engine.events)
        except RuntimeError as error:
            return error
        return RuntimeError(event.error_code.name)

    def _recover(self, error: Exception) -> None:
        """A new engine for all unfinished requests; they continue from the tokens they have."""
        unfinished = list(self._open.values())
        self._open.clear()
        for running in unfinished:
            running.request = None
        if not self._tokens_since_failure:
            self._engine._is_dead = True
            when = "again right after it was rebuilt" if self._was_rebuilt else "before the first token"
            raise OctavoError(
                f"the engine failed {when}: {reason(error)} Run `{self._engine.doctor}` to find out more."
            ) from error
        self._tokens_since_failure = 0
        self._was_rebuilt = True
        self._waiting.extendleft(reversed(unfinished))
        try:
            self._engine._start_engine()
        except Exception as second:
            self._engine._is_dead = True
            raise OctavoError(
                f"the engine failed ({reason(error)}) and cannot be rebuilt: {first_line(second)}"
            ) from second


def _oddity(running: _Running) -> str:
    """What NaN logits, which the engine does not report, make of a finished answer; empty for one that looks sound.

    They choose token 0, step after step, or when sampling some other one. Where that ends answers, or shows text, the
    answer looks like any other.
    """
    answer, ids = running.answer, running.answer.token_ids
    was_cut = answer.finish_reason.startswith("max_")
    # A first character, or a first word after white space, may have been cut off.
    if not answer.text and not (was_cut and len(ids) < CHARACTER_BYTES):
        return f"the model answered without any text{'' if was_cut else ', and may have nothing to say'}"
    if answer.text.isspace() and was_cut and len(ids) >= NAN_TOKENS:
        return "the model answered with white space alone"
    zeros = len(list(takewhile(lambda token: token == 0, reversed(ids))))
    silent = len(ids) - running.tokens_shown
    if zeros >= NAN_TOKENS:
        return f"the answer ends in {zeros:,} times token 0, which NaN logits choose"
    if silent >= NAN_TOKENS:
        return f"the answer ends in {silent:,} tokens without text"
    return ""


def reason(error: BaseException) -> str:
    """What onnxruntime said, in one line ended like a sentence: onnxruntime-genai writes it behind "Cause:"."""
    text = " ".join(str(error).split())
    return first_line(RuntimeError(text.rpartition(" Cause: ")[2] or type(error).__name__))


def _pool(config: dict[str, Any], overrides: dict[str, Any]) -> tuple[int, int]:
    """block_size and num_blocks. Raises OctavoError where the configuration does not say them."""
    keys = ("engine", "dynamic_batching")
    batching: dict[str, Any] = {}
    for source in (config, overrides):
        section = dig(source, *keys)
        batching |= section if isinstance(section, dict) else {}
    merged = {keys[0]: {keys[1]: batching}}
    return config_number(merged, *keys, "block_size"), config_number(merged, *keys, "num_blocks")


def _refuse(answer: Answer, problem: str) -> None:
    _fail(answer, problem, state="refused")


def _fail(answer: Answer, problem: str, state: str = "failed") -> None:
    answer.state = state
    answer.problem = problem
