"""Does the engine take a model folder? Tried in a process of its own, since what is wrong may kill that process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

TIMEOUT_SECONDS = 180
PROMPT = "Hello"
NO_ANSWER = "no answer"
NO_TEMPLATE = "the chat template fails"
TOKENS = 2  # the prompt's step and one that continues from the cache
_MARK = "octavo-trial:"  # runtimes print what they like; this line is ours


def try_engine(model_dir: str | os.PathLike[str], timeout: float = TIMEOUT_SECONDS) -> str:
    """Makes onnxruntime-genai's Model and Engine and generates TOKENS tokens. Returns "", or why that failed."""
    command = [sys.executable, "-m", "octavo.trial", os.fspath(model_dir)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return f"{NO_ANSWER} within {timeout:g} seconds."
    except OSError as error:
        return f"no process could be started for it: {error.strerror or error}."
    if done.returncode < 0:
        number = -done.returncode
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return f"the process was ended by {name}" + (", for want of memory." if name == "SIGKILL" else ".")
    for line in done.stdout.decode(errors="replace").splitlines():
        if line.startswith(_MARK):
            return str(json.loads(line.removeprefix(_MARK)))
    return f"the process ended with code {done.returncode} and no reason."


def _main(model_dir: str) -> str:
    from .engine import Sampling, TextEngine, reason
    from .errors import OctavoError
    from .model_folder import chat_template_file

    try:
        engine = TextEngine(model_dir)
        if chat_template_file(model_dir):
            try:
                engine.encode(PROMPT)
            except OctavoError as error:
                return f"{NO_TEMPLATE}: {reason(error.__cause__ or error)}"
        for answer in engine.generate([PROMPT], Sampling(max_tokens=TOKENS), raw=True):
            if answer.problem and not answer.finish_reason:  # an answer that ends by itself is the model's affair
                return answer.problem
    except OctavoError as error:
        # Its own text would send the reader here again.
        return reason(error.__cause__) if isinstance(error.__cause__, Exception) else str(error)
    return ""


if __name__ == "__main__":
    print(_MARK + json.dumps(_main(sys.argv[1])), flush=True)
