"""Ctrl-C while modules are loaded.

A KeyboardInterrupt in the middle of an extension module's initialisation comes out as an ImportError, as a crash, or
not at all. So one that comes while anything is imported waits until that is done.
"""

from __future__ import annotations

import _thread
import os
import signal
import time
from types import FrameType

EXIT_INTERRUPTED = 130
_RETRY_SECONDS = 0.02
_IMPORTERS = (
    "_frozen_importlib",
    "_frozen_importlib_external",
    "importlib._bootstrap",
    "importlib._bootstrap_external",
)


def spare_imports() -> None:
    """From here on a SIGINT during an import raises KeyboardInterrupt after it. For the main thread, which gets it.

    Where SIGINT is ignored or handled by somebody else, nothing changes.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def interrupt(number: int, frame: FrameType | None) -> None:
    """A handler of SIGINT: Python's own, but during imports."""
    if not comes_later(number, frame):
        raise KeyboardInterrupt


def comes_later(number: int, frame: FrameType | None) -> bool:
    """For handlers: whether the signal came during an import. If so, it will come again soon."""
    while frame is not None:
        if frame.f_globals.get("__name__") in _IMPORTERS:
            _thread.start_new_thread(_send_again, (number,))  # not threading's, which takes a lock that may be held
            return True
        frame = frame.f_back
    return False


def _send_again(number: int) -> None:
    time.sleep(_RETRY_SECONDS)
    os.kill(os.getpid(), number)
