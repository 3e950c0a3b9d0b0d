"""Our side of the main job: octavo's engine, as `octavo generate` drives it, on prompts of given token ids."""

from __future__ import annotations

import gc
import io
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from job_sessions import NO_SPINNING, PAGE

from octavo.engine import Answer, Sampling, TextEngine
from octavo.render import Tally, show

NEVER = 49151  # SmolLM2's last token: a code point that no text of the benchmark leads to


class EngineJob(TextEngine):
    """An engine for `batch` sequences of `capacity` tokens, whose prompts are token ids and whose answers do not end.

    Nothing else differs from octavo generate but that workers do not spin and prompts are not shared between requests.
    """

    def __init__(self, folder: Path, threads: int, batch: int, capacity: int, profile: Path | None = None) -> None:
        batching = {"num_blocks": batch * -(-capacity // PAGE), "prefix_caching": False, "max_batch_size": batch}
        session = dict(NO_SPINNING) | ({} if profile is None else {"enable_profiling": str(profile)})
        decoder = {"session_options": session}
        overrides = {"engine": {"dynamic_batching": batching}, "model": {"eos_token_id": NEVER, "decoder": decoder}}
        super().__init__(folder, threads, overrides)
        self._prompts: dict[str, np.ndarray] = {}

    def encode(self, prompt: str, raw: bool = False) -> np.ndarray:
        return self._prompts[prompt]

    def answers(self, ids: np.ndarray, new: int) -> Iterator[Answer]:
        """generate() for prompts `ids`, (sequences, tokens), with `new` tokens each."""
        self._prompts = {str(i): row.astype(np.int32) for i, row in enumerate(ids)}
        return self.generate(list(self._prompts), Sampling(max_tokens=new), raw=True)

    def measure(self, ids: np.ndarray, new: int) -> dict[str, Any]:
        """Processor seconds of all threads, and the first token of every sequence.

        prefill_s: until every sequence has a token. The engine takes prompts in pieces, so that some sequences may be
        ahead then: decode_s and decode_tokens are of the later steps in which every sequence gets a token. A step lasts
        until the next begins: handling its tokens in Python is a part of it.
        """
        clock = self.engine = _Clocked(self.engine)
        grown: dict[int, set[int]] = {}  # step -> sequences that got a token in it
        firsts: dict[int, int] = {}
        for answer in self.answers(ids, new + 1):
            if answer.problem or (answer.finished and answer.finish_reason != "max_generated_tokens"):
                raise RuntimeError(f"octavo's engine: {answer.problem or answer.finish_reason}")
            if answer.token_ids:
                firsts.setdefault(answer.index, answer.token_ids[0])
                grown.setdefault(len(clock.times) - 1, set()).add(answer.index)
        times = [*clock.times, time.process_time()]
        self.engine = clock.engine
        seen: set[int] = set()
        started = next(step for step in sorted(grown) if len(seen := seen | grown[step]) == len(ids))
        # Not the last step of all: what follows it is the end of the run.
        full = [step for step in sorted(grown)[:-1] if step > started and len(grown[step]) == len(ids)]
        if not full:
            raise RuntimeError("a sequence was complete before the last had started; ask for more tokens")
        return {
            "prefill_s": times[started + 1] - times[0],
            "decode_s": sum(times[step + 1] - times[step] for step in full),
            "decode_tokens": len(ids) * len(full),
            "first_tokens": [firsts[i] for i in range(len(ids))],
        }


class _Clocked:
    """An engine that notes the processor time at which each of its steps begins."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.times = engine, []

    def run(self, events: Any) -> Any:
        self.times.append(time.process_time())
        return self.engine.run(events)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def outside_seconds(folder: Path, threads: int, ids: np.ndarray, new: int) -> tuple[float, float]:
    """Seconds of octavo generate outside ONNX Runtime's run, which the operator is in, and seconds in all.

    The first is of a run under ONNX Runtime's profiler, which tells how long its runs took; profiling makes those
    longer, so the second is of a run without. Both write the answers to a pipe's stand-in. Loading is in neither.
    """
    with tempfile.TemporaryDirectory() as work:
        profiled = EngineJob(folder, threads, len(ids), ids.shape[1] + new, Path(work) / "profile")
        profiled.use_huge_pages()
        _generate(profiled, ids, new)  # the first run grows ONNX Runtime's arena
        seconds = _generate(profiled, ids, new)
        del profiled
        gc.collect()  # closes the session, which writes the profile
        (file,) = Path(work).glob("profile*")
        runs = [event["dur"] for event in json.loads(file.read_text()) if event["name"] == "model_run"]
    inside = sum(runs[len(runs) // 2 :]) / 1e6  # both runs have the same steps
    plain = EngineJob(folder, threads, len(ids), ids.shape[1] + new)
    plain.use_huge_pages()
    _generate(plain, ids, new)
    return seconds - inside, _generate(plain, ids, new)


def _generate(engine: EngineJob, ids: np.ndarray, new: int) -> float:
    """Seconds of answering as octavo generate does into a pipe."""
    start = time.perf_counter()
    show(engine.answers(ids, new), len(ids), Tally(), io.StringIO())
    return time.perf_counter() - start
