"""Answers on a terminal or in a pipe while they are generated."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.rule import Rule
from rich.text import Text

from .engine import Answer
from .errors import counted

LIVE_LINES = 2  # of each growing answer
REFRESH_PER_SECOND = 12
STOPS = {  # the engine's reasons that cut an answer short
    "max_generated_tokens": "stopped at --max-tokens",
    "max_session_tokens": "stopped where context or cache was full",
}


def _cut_mark(answer: Answer) -> str:
    """What follows a text that was cut short; empty for others."""
    return f" … [{STOPS[answer.finish_reason]}]" if answer.finish_reason in STOPS else ""


class Tally:
    """Counts what a run did, for the line at its end and the exit code."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._first_token: float | None = None
        self.answers: dict[int, Answer] = {}

    def see(self, answer: Answer) -> None:
        self.answers[answer.index] = answer
        if self._first_token is None and answer.token_ids:
            self._first_token = time.monotonic() - self._start

    @property
    def problems(self) -> int:
        return sum(answer.state in ("refused", "failed") for answer in self.answers.values())

    @property
    def finished(self) -> int:
        return sum(answer.finished for answer in self.answers.values())

    def as_json(self) -> dict[str, Any]:
        """Every answer and the run's figures; first_token_seconds is null where there was none."""
        generated, seconds = self._generated(), self._seconds()
        return {
            "answers": [self.answers[index].as_json() for index in sorted(self.answers)],
            "seconds": seconds,
            "first_token_seconds": self._first_token,
            "generated_tokens": generated,
            "tokens_per_second": generated / seconds,
        }

    def _generated(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers.values())

    def _seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)

    def summary(self) -> str:
        generated, seconds = self._generated(), self._seconds()
        prompt = sum(answer.prompt_tokens for answer in self.answers.values() if answer.state != "refused")
        cached = sum(answer.cached_prompt_tokens for answer in self.answers.values())
        reused = f" ({cached:,} from the prefix cache)" if cached else ""
        stopped = ""
        for reason, words in STOPS.items():
            cut = sum(answer.finish_reason == reason for answer in self.answers.values())
            stopped += f"; {counted(cut, 'answer')} {words}" if cut else ""
        first = "" if self._first_token is None else f", first after {self._first_token:.2f} s"
        return (
            f"{counted(generated, 'token')} in {seconds:.2f} s: {generated / seconds:.1f} tokens/s{first}; "
            f"{counted(prompt, 'prompt token')}{reused}, {counted(len(self.answers), 'prompt')}{stopped}"
        )


def show(answers: Iterable[Answer], count: int, tally: Tally, out: TextIO | None = None) -> None:
    """Shows answers as they come and counts them in `tally`.

    One prompt: its text as it grows. Several, on a terminal: growing answers in a live area, finished ones above it.
    Several, elsewhere: "[number] prompt" and the text below it, for each when it is finished. On a terminal, answers
    that were cut short are marked. Problems go to stderr. When the run is interrupted, unfinished answers are shown as
    far as they got.
    """
    out = out or sys.stdout
    if count == 1:
        _show_one(answers, tally, out)
    elif out.isatty():
        _show_live(answers, tally, Console(file=out))
    else:
        _show_blocks(answers, tally, out)


def _show_one(answers: Iterable[Answer], tally: Tally, out: TextIO) -> None:
    shown = 0
    try:
        for answer in answers:
            tally.see(answer)
            out.write(answer.text[shown:])
            out.flush()
            shown = len(answer.text)
            if out.isatty():
                out.write(_cut_mark(answer))
            _report(answer, numbered=False)
    finally:
        if shown:
            out.write("\n")
            out.flush()


def _show_blocks(answers: Iterable[Answer], tally: Tally, out: TextIO) -> None:
    written: set[int] = set()

    def write(answer: Answer) -> None:
        written.add(answer.index)
        out.write(f"{_title(answer)}\n{answer.text}\n\n")
        out.flush()

    try:
        for answer in answers:
            tally.see(answer)
            _report(answer, numbered=True)
            if answer.finished and answer.state != "refused":
                write(answer)
    finally:
        for answer in tally.answers.values():
            if answer.text and answer.index not in written:
                write(answer)


def _show_live(answers: Iterable[Answer], tally: Tally, console: Console) -> None:
    printed: set[int] = set()

    def finish(answer: Answer) -> None:
        printed.add(answer.index)
        console.print(Rule(Text(_title(answer)), align="left", style="dim"))
        text = Text(answer.text)
        console.print(text.append(_cut_mark(answer), style="dim"))

    # The live area is drawn by a thread of its own, a few times a second, whatever the speed of generation.
    with Live(
        console=console,
        refresh_per_second=REFRESH_PER_SECOND,
        transient=True,
        get_renderable=lambda: _growing(tally, console),
    ):
        try:
            for answer in answers:
                tally.see(answer)
                if answer.finished and answer.state != "refused":
                    finish(answer)
                if answer.finished and answer.problem:
                    console.print(Text(f"prompt {answer.index + 1}: {answer.problem}", style="red"))
        finally:
            for answer in tally.answers.values():
                if answer.text and answer.index not in printed:
                    finish(answer)


def _growing(tally: Tally, console: Console) -> Group:
    """The last lines of the answers that are running, as many as fit."""
    answers = list(tally.answers.values())
    running = [answer for answer in answers if answer.state == "running"]
    waiting = sum(answer.state == "waiting" for answer in answers)
    room = max(1, (console.height - 4) // (LIVE_LINES + 1))
    width = max(console.width - 2, 10)
    parts: list[Text] = []
    for answer in running[:room]:
        lines = Text(answer.text[-4 * LIVE_LINES * width :]).wrap(console, width)
        parts.append(Text(_title(answer), style="bold cyan", overflow="ellipsis", no_wrap=True))
        parts.append(Text("\n".join(line.plain for line in lines[-LIVE_LINES:])))
    hidden = len(running) - room
    if hidden > 0 or waiting:
        parts.append(Text(f"{max(hidden, 0)} more running, {waiting} waiting", style="dim"))
    return Group(*parts)


def _title(answer: Answer) -> str:
    """The number and the prompt, on one line and short."""
    prompt = " ".join(answer.prompt.split())
    return f"[{answer.index + 1}] {prompt if len(prompt) <= 60 else prompt[:59] + '…'}"


def _report(answer: Answer, numbered: bool) -> None:
    if answer.finished and answer.problem:
        prefix = f"prompt {answer.index + 1}: " if numbered else ""
        print(f"octavo: {prefix}{answer.problem}", file=sys.stderr, flush=True)
