"""What the commands read: texts and prompts, of files or of standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from .errors import OctavoError


def read_prompts(source: str | None) -> list[str]:
    """One prompt a line, ended by \\n or \\r\\n; empty lines are skipped. None has none."""
    if source is None:
        return []
    prompts = [line.strip() for line in read_text(source).split("\n") if line.strip()]
    if not prompts:
        raise OctavoError(f"{_source_name(source)} holds no prompts.")
    return prompts


def read_text(source: str) -> str:
    """A file's text, or standard input's for "-"."""
    name = _source_name(source)
    if source == "-" and sys.stdin is None:  # closed by the shell
        raise OctavoError(f"{name} is closed; give it a text, or name a file.")
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise OctavoError(f"{name} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise OctavoError(f"{name} is not UTF-8 text (byte {error.start}).") from None


def _source_name(source: str) -> str:
    return "standard input" if source == "-" else source
