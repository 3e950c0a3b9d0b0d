"""llama.cpp's part of the main job: a worker for a Python that imports llama_cpp, of whatever environment.

One JSON object a line on standard input: {"model", "threads"} first, then {"ids": rows of token ids, "new": steps}.
One a line on standard output: {"version", "system"}, then {"prefill_s", "decode_s", "tokens", "logits", "busy_s"}:
seconds of this process on all its threads, the greedy tokens (sequences, steps + 1), with "want_logits" the logits
after the prompts, and the processor time of the process since it began.
Nothing but llama_cpp and numpy is imported: octavo is not in that environment.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import llama_cpp as lc
import numpy as np

CELL = 256  # llama.cpp rounds a context up to so many tokens for each sequence


@lc.llama_log_callback
def silent(_level: int, _text: bytes, _data: Any) -> None:
    """llama.cpp prints a page about every model."""


def batch_of(rows: list[tuple[int, int, list[int]]]) -> Any:
    """A llama_batch of (sequence, first position, tokens), with logits of every last token."""
    count = sum(len(tokens) for _, _, tokens in rows)
    batch = lc.llama_batch_init(count, 0, 1)
    batch.n_tokens = count
    k = 0
    for sequence, past, tokens in rows:
        for j, token in enumerate(tokens):
            batch.token[k], batch.pos[k] = token, past + j
            batch.n_seq_id[k], batch.seq_id[k][0] = 1, sequence
            batch.logits[k] = j + 1 == len(tokens)
            k += 1
    return batch


def decode(context: Any, rows: list[tuple[int, int, list[int]]], vocabulary: int) -> tuple[float, np.ndarray]:
    """Processor seconds of llama_decode, and logits (rows, vocabulary). Making the batch in Python is not counted."""
    batch = batch_of(rows)
    start = time.process_time()
    status = lc.llama_decode(context, batch)
    ends = np.cumsum([len(tokens) for _, _, tokens in rows]) - 1
    logits = [np.ctypeslib.as_array(lc.llama_get_logits_ith(context, int(end)), (vocabulary,)).copy() for end in ends]
    seconds = time.process_time() - start
    lc.llama_batch_free(batch)
    if status:
        raise RuntimeError(f"llama_decode returned {status}")
    return seconds, np.stack(logits)


def job(model: Any, threads: int, ids: list[list[int]], new: int) -> dict[str, Any]:
    length, count = len(ids[0]), len(ids)
    settings = lc.llama_context_default_params()
    settings.n_ctx = count * (-(-(length + new + 1) // CELL) * CELL)
    settings.n_seq_max = count
    settings.n_threads = settings.n_threads_batch = threads
    settings.no_perf = True
    context = lc.llama_init_from_model(model, settings)
    vocabulary = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(model))
    together = max(1, settings.n_batch // length)  # sequences that one call may take
    prefill_s, first = 0.0, []
    for start in range(0, count, together):
        rows = [(s, 0, ids[s]) for s in range(start, min(count, start + together))]
        seconds, logits = decode(context, rows, vocabulary)
        prefill_s += seconds
        first.append(logits)
    prompt_logits = np.concatenate(first)
    tokens = [prompt_logits.argmax(-1)]
    decode_s = 0.0
    for step in range(new):
        rows = [(s, length + step, [int(tokens[-1][s])]) for s in range(count)]
        seconds, logits = decode(context, rows, vocabulary)
        decode_s += seconds
        tokens.append(logits.argmax(-1))
    lc.llama_free(context)
    return {
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "tokens": np.stack(tokens, 1).tolist(),
        "logits": prompt_logits,
    }


def main() -> int:
    lc.llama_log_set(silent, None)
    lc.llama_backend_init()
    asked = json.loads(sys.stdin.readline())
    model = lc.llama_model_load_from_file(asked["model"].encode(), lc.llama_model_default_params())
    if not model:
        raise RuntimeError("llama.cpp refused the model")
    print(json.dumps({"version": lc.__version__, "system": lc.llama_print_system_info().decode()}), flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        done = job(model, asked["threads"], work["ids"], work["new"])
        done["busy_s"] = time.process_time()
        done["logits"] = done["logits"].tolist() if work.get("want_logits") else None
        print(json.dumps(done), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
