"""The one exception that octavo's Python tools raise on purpose."""

from __future__ import annotations

import os
import shlex

MAX_QUOTED = 80


class OctavoError(Exception):
    """Something the user can act on. The message is one sentence or two: what is wrong, with what, and what to do."""


def quoted(text: object) -> str:
    """Something out of a file, for a message: escaped, so that it cannot steer a terminal, and short."""
    shown = repr(text)
    return shown if len(shown) <= MAX_QUOTED else shown[: MAX_QUOTED - 1] + "…"


def shown(name: str) -> str:
    """A name or sentence out of a file, for a terminal: as it is, but for control characters, which are escaped."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in name)


def first_line(error: Exception) -> str:
    """The first line of a runtime's message, ended like a sentence."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if text.endswith((".", "!")) else text + "."


def counted(count: int, noun: str) -> str:
    """ "1 token", "1,234 tokens"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def as_argument(path: str | os.PathLike[str]) -> str:
    """A path to paste behind a command: quoted for the shell, and never taken for an option."""
    text = os.fspath(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)
