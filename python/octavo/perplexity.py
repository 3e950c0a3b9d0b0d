"""`octavo perplexity`: what a cache type costs in accuracy, and what it saves, on a text."""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from . import calibration, processors
from .cache_range import FLOAT16_LARGEST
from .errors import OctavoError
from .kv_cache import CACHE_TYPES, cache_type_of, choose_scales, needs_scales, set_cache_type
from .model_folder import CONFIG_FILE, config_number, graph_file, read_config
from .paged_session import PagedSession, load_graph
from .progress import Progress, no_progress

REFERENCE = "float32"
WINDOW = 1024  # tokens that are read in one context, at most
DECODE_STEPS = 32  # tokens fed one by one at the end of each window, at most, for their speed


@dataclass(frozen=True)
class Row:
    """One cache type's figures.

    scales: "none", "model" (those in the graph) or "calibrated" (found now, as octavo convert would).
    perplexity: exp of the mean negative log-likelihood of the scored tokens.
    kl: mean Kullback-Leibler divergence from the float32 cache's distribution of the next token to this one's, in nats.
    bytes_per_token: of the graph's caches, in all layers. prefill, decode: tokens per second, over all windows.
    """

    cache_type: str
    scales: str
    perplexity: float
    kl: float
    bytes_per_token: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float


@dataclass(frozen=True)
class Report:
    """tokens: fed; scored: those with a prediction, one less than the tokens in each window of `window` tokens.

    failed: cache type -> why it has no row. others_percent: of the processors' time, taken by other processes meanwhile
    (None where the system does not tell).
    """

    tokens: int
    scored: int
    window: int
    rows: list[Row]
    failed: dict[str, str] = field(default_factory=dict)
    others_percent: float | None = None

    def as_json(self) -> dict[str, Any]:
        reference = self.rows[0].perplexity
        rows = [vars(row) | {"change": row.perplexity / reference - 1} for row in self.rows]
        return {
            "tokens": self.tokens,
            "scored": self.scored,
            "window": self.window,
            "cache_types": rows,
            "failed": self.failed,
            "others_percent": self.others_percent,
        }


def measure(
    model_dir: str | os.PathLike[str],
    text: str | None = None,
    cache_types: Sequence[str] = (),
    max_tokens: int | None = None,
    threads: int = 0,
    progress: Progress = no_progress,
) -> Report:
    """Perplexity of a text under several cache types of one model.

    Args:
        model_dir: a folder written by octavo convert, of whatever cache type.
        text: None = the one that comes with the package.
        cache_types: keys of kv_cache.CACHE_TYPES; empty = all. float32 is always measured, and comes first.
        max_tokens: of the text; None = all of it.
        threads: of onnxruntime; 0 = its default.
        progress: called as (step, tokens done, tokens in all).

    Every type but the model's own has its caches changed in memory; scales come from a calibration run where the model
    has none of that type. A type that fails is in the report's `failed`. Raises OctavoError for an unusable folder,
    more threads than processors, a text of fewer than two tokens, or a float32 cache that fails.
    """
    processors.check_threads(threads)
    config = read_config(model_dir)
    context, vocab = (config_number(config, "model", key) for key in ("context_length", "vocab_size"))
    for key in ("num_hidden_layers", "num_key_value_heads", "head_size"):  # onnxruntime-genai's words are worse
        config_number(config, "model", "decoder", key)
    if context < 2:
        raise OctavoError(
            f"the model's context holds one token, after which nothing is predicted (model.context_length in "
            f"{CONFIG_FILE}); convert again with a longer --context-length."
        )
    file = graph_file(model_dir, config)
    graph = load_graph(file)
    _check_vocabulary(graph, vocab)
    content = calibration.shipped_text("perplexity") if text is None else text
    ids = calibration.encode(model_dir, content)[:max_tokens]
    if len(ids) < 2:
        raise OctavoError("the text has fewer than two tokens; there is nothing to predict.")
    window = min(context, WINDOW)
    windows = [part for start in range(0, len(ids), window) if len(part := ids[start : start + window]) > 1]
    chosen = [REFERENCE, *(name for name in dict.fromkeys(cache_types or CACHE_TYPES) if name != REFERENCE)]
    own = cache_type_of(graph)
    caches, uncalibrated = None, ""
    before = processors.processor_seconds()
    if any(needs_scales(name) and name != own for name in chosen):
        try:
            caches = calibration.float32_caches(graph, model_dir, threads, progress)
        except OctavoError as error:
            uncalibrated = str(error)

    rows, failed = [], {}
    scored = sum(len(part) - 1 for part in windows)
    with tempfile.TemporaryFile() as file_of_logits:  # 200 MB for 1,024 tokens of a large vocabulary
        reference = np.memmap(file_of_logits, np.float32, "w+", shape=(scored, vocab))
        for name in chosen:
            variant, origin = graph, "model" if needs_scales(name) else "none"
            try:
                if name != own:
                    if needs_scales(name) and caches is None:
                        raise OctavoError(uncalibrated)
                    variant = copy.deepcopy(graph)
                    scales = choose_scales(caches, name) if needs_scales(name) and caches is not None else ()
                    set_cache_type(variant, name, scales)
                    origin = "calibrated" if scales else "none"
                session = PagedSession(variant, file.parent, window, threads)
                run = _Run(session, reference, name == REFERENCE)
                run.score(windows, lambda done, name=name: progress(name, done, scored))
                rows.append(_row(name, origin, run, scored))
            except OctavoError as error:
                if name == REFERENCE:  # the others are compared with it; a calibration that failed names the layer
                    raise OctavoError(uncalibrated or str(error)) from error
                failed[name] = str(error)
    others = processors.others_percent(before, processors.processor_seconds())
    return Report(sum(map(len, windows)), scored, window, rows, failed, others)


def _row(name: str, scales: str, run: _Run, scored: int) -> Row:
    if not np.isfinite([run.loss, run.divergence]).all():
        # float32's were finite where float16's turn comes.
        cause = f"keys or values exceed {FLOAT16_LARGEST:,}" if name == "float16" else "weights or scales are damaged"
        raise OctavoError(f"with a {name} cache the logits hold NaN or infinite values: {cause}.")
    return Row(
        name,
        scales,
        _perplexity(name, run.loss / scored),
        run.divergence / scored,
        run.token_bytes,
        run.fed / run.seconds,
        run.decoded / run.decode_seconds,
    )


def _perplexity(cache_type: str, loss: float) -> float:
    """exp of a mean loss, in nats. Raises OctavoError where no float64 holds it."""
    if loss > np.log(np.finfo(np.float64).max):
        raise OctavoError(
            f"with a {cache_type} cache the perplexity is e to the power of {loss:.0f}, too large to be told: "
            "weights or scales are damaged."
        )
    return float(np.exp(loss))


def _check_vocabulary(graph: onnx.ModelProto, vocab: int) -> None:
    """The reference's logits take a file of `vocab` columns, so that a wrong number must not get there."""
    for value in graph.graph.output:
        dims = value.type.tensor_type.shape.dim
        if value.name == "logits" and (not dims or dims[-1].dim_value != vocab):
            width = dims[-1].dim_value if dims else 0
            raise OctavoError(f"model.vocab_size in {CONFIG_FILE} is {vocab}, but the graph's logits have {width}.")


class _Run:
    """One session over all windows. loss: sum of -log p(next token); divergence: sum of KL; both in nats.

    fed, seconds: tokens in chunks, and the time that they took; decoded, decode_seconds: the same one by one.
    """

    def __init__(self, session: PagedSession, reference: np.ndarray, is_reference: bool) -> None:
        self._session = session
        self._reference = reference
        self._is_reference = is_reference
        self.loss = 0.0
        self.divergence = 0.0
        self.seconds = 0.0
        self.fed = 0
        self.decode_seconds = 0.0
        self.decoded = 0
        self.token_bytes = session.token_bytes

    def score(self, windows: Sequence[np.ndarray], progress: Any) -> None:
        row = 0
        progress(0)
        for ids in windows:
            for start in range(0, len(ids), calibration.CHUNK):
                part = ids[start : start + calibration.CHUNK]
                logits = self._feed(part, start)
                targets = ids[start + 1 : start + 1 + len(part)]  # the window's last token predicts nothing
                self._compare(logits[: len(targets)], targets, row)
                row += len(targets)
                progress(row)
            self._decode(ids)

    def _decode(self, ids: np.ndarray) -> None:
        """Feeds the last tokens of a window again one by one."""
        count = min(DECODE_STEPS, len(ids) - 1)
        started = time.perf_counter()
        for position in range(len(ids) - count, len(ids)):
            self._session.feed(ids[position : position + 1], position)
        self.decode_seconds += time.perf_counter() - started
        self.decoded += count

    def _feed(self, ids: np.ndarray, past: int) -> np.ndarray:
        started = time.perf_counter()
        logits = self._session.feed(ids, past)
        self.seconds += time.perf_counter() - started
        self.fed += len(ids)
        return logits

    def _compare(self, logits: np.ndarray, targets: np.ndarray, row: int) -> None:
        predicted = log_softmax(logits)
        self.loss -= float(predicted[np.arange(len(targets)), targets].sum())
        kept = self._reference[row : row + len(targets)]
        if self._is_reference:
            kept[:] = logits
        else:
            exact = log_softmax(kept)
            self.divergence += float((np.exp(exact) * (exact - predicted)).sum())


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 (tokens, vocab)."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted
